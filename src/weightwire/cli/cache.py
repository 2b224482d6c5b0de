"""``weightwire cache``: what lies in a cache directory, whether it is sound, and keeping it small."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from weightwire.cli.caches import cache_dir, cache_path, moment, threads
from weightwire.cli.failures import CONTENT, ENVIRONMENT, FAILED
from weightwire.cli.options import help_, json_output, quiet
from weightwire.cli.output import counted, human_bytes, line, note, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.config import parse_size
from weightwire.errors import ConfigError

if TYPE_CHECKING:
    from weightwire.cache import CacheReport, Entry
    from weightwire.index import Owner

__all__ = ["cache", "parse_age"]

_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])", re.ASCII | re.IGNORECASE)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_age(text: str) -> float:
    """Turn ``"30d"``, ``"12h"``, ``"1.5w"``, ``"90m"`` or ``"45s"`` into seconds. Raises ValueError otherwise."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an age such as 30d, 12h or 2w")
    return float(match[1]) * _SECONDS[match[2].lower()]


def _size(text: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text)


@click.group("cache", add_help_option=False)
@help_
def cache() -> None:
    """List, check and prune a server's tensor cache directory; servers may be running."""


@cache.command("list", add_help_option=False)
@cache_dir
@json_output
@help_
def list_(cache: str | None, as_json: bool) -> None:
    """Print every entry, least recently used first: hash, bytes, last use, and the tensor it is of.

    Whose tensors they are comes from the index of hashes, which seed and push keep.
    """
    from weightwire.cache import list_entries

    listing = list_entries(cache_path(cache))
    if as_json:
        object_(
            {
                "directory": str(listing.directory),
                "bytes": sum(entry.nbytes for entry in listing.entries),
                "entries": [_entry(entry) for entry in listing.entries],
                "misplaced": [{"name": name, "kind": kind} for name, kind in listing.misplaced.items()],
                "temporary": list(listing.temporary),
                "others": list(listing.others),
            }
        )
        return
    for entry in listing.entries:
        used = moment(entry.last_used_ns)
        line(f"{entry.path.name} {entry.nbytes:>12} {used} {printable(_whose(entry.owners))}")
    for name, kind in listing.misplaced.items():
        note(f"weightwire: {name} is a {kind}, not an entry")


@cache.command(add_help_option=False)
@cache_dir
@click.option("--quarantine", is_flag=True, help="Move bad entries to quarantine, where no server finds them.")
@click.option("--remove", is_flag=True, help="Remove bad entries.")
@threads
@json_output
@quiet
@help_
def verify(cache: str | None, quarantine: bool, remove: bool, threads: int | None, as_json: bool, quiet: bool) -> None:
    """Read every entry and see that its content hashes to its name; exit code 4 if one does not, 3 if some could not be
    opened.

    What has an entry's name and is a directory, a link or the like is reported and left alone. Where the index of
    hashes knows an entry's tensor, its BLAKE3 is compared too.
    """
    from weightwire.cache import list_entries, verify_cache

    if quarantine and remove:
        raise ConfigError("--quarantine and --remove exclude each other", hint="give one of them")
    bad: Literal["keep", "quarantine", "remove"] = "quarantine" if quarantine else "remove" if remove else "keep"
    directory = cache_path(cache)
    total = sum(entry.nbytes for entry in list_entries(directory, index=False).entries)
    with Progress("verifying", total, choose_display(quiet)) as progress:
        report = verify_cache(directory, threads=threads, bad=bad, progress=progress.report)
    if as_json:
        unchecked = [{"name": each.name, "reason": each.reason} for each in report.unchecked]
        object_(asdict(report) | {"unchecked": unchecked})
    else:
        for each in report.bad:
            done = "" if each.action == "none" else f"; {each.action}"
            line(f"{each.name} {each.nbytes:>12} {printable(each.reason)}{done}")
        for name in report.changing:
            line(f"{name}: something writes to it; verify again later")
        for left in report.unchecked:
            line(f"{left.name}: not checked: {printable(left.reason)}")
        also = f", {len(report.unchecked)} not checked" if report.unchecked else ""
        line(
            f"{printable(report.directory)}: {counted(report.entries, 'entry', 'entries')}, "
            f"{human_bytes(report.bytes)}, {len(report.bad)} bad{also}; {report.digests} compared by BLAKE3, too"
        )
        if report.others:
            line(f"{counted(len(report.others), 'name that is', 'names that are')} no entry's: {_few(report.others)}")
    _judge(report, bad)


def _judge(report: CacheReport, bad: str) -> None:
    """End with an error, and its exit code, unless every entry was read and found sound."""
    if not report.bad and not report.unchecked:
        return
    wrong = [counted(len(report.bad), "bad entry", "bad entries")] if report.bad else []
    if report.unchecked:
        wrong.append(f"{counted(len(report.unchecked), 'entry', 'entries')} not checked")
    note(f"weightwire: error: {', '.join(wrong)} in {printable(report.directory)}")
    hints = []
    if bad == "keep" and any(each.is_file for each in report.bad):
        hints.append("--quarantine moves bad files away, --remove removes them")
    left = [each.name for each in report.bad if not each.is_file]
    if left:
        hints.append(f"what is no file is left to you to look at and remove: {_few(left)}")
    hints += _let_go(each.reason for each in report.bad if each.action == "failed")
    numbers = {each.errno for each in report.unchecked}
    if numbers & {errno.EACCES, errno.EPERM}:
        hints.append("verify another user's entries as the user that the server runs as")
    if errno.EMFILE in numbers:
        hints.append("raise the limit of open files (ulimit -n)")
    if numbers - {errno.EACCES, errno.EPERM, errno.EMFILE}:
        hints.append("what was not checked may be sound: verify again later")
    if hints:
        note(f"weightwire: hint: {'; '.join(hints)}")
    sys.exit(CONTENT if report.bad else ENVIRONMENT)


@cache.command(add_help_option=False)
@cache_dir
@click.option("--max-size", metavar="SIZE", help="Remove entries until no more than this remains, such as 200GiB.")
@click.option("--max-age", metavar="AGE", help="Remove entries not used for this long, such as 30d, 12h or 2w.")
@click.option("--quarantine", is_flag=True, help="Remove what is in quarantine.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_output
@help_
def prune(
    cache: str | None, max_size: str | None, max_age: str | None, quarantine: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove entries, the least recently used first. Give at least one of --max-size, --max-age and --quarantine.

    Temporary files that a writer left when it died go, too; nothing else is touched. A server that is reading an entry
    reads on.
    """
    from weightwire.cache import prune_cache

    if max_size is None and max_age is None and not quarantine:
        raise ConfigError("nothing says what to remove", hint="give --max-size, --max-age or --quarantine")
    result = prune_cache(
        cache_path(cache),
        max_bytes=_parsed("--max-size", max_size, _size),
        max_age=_parsed("--max-age", max_age, parse_age),
        quarantine=quarantine,
        dry_run=dry_run,
    )
    if as_json:
        facts = asdict(result) | {
            "removed": [_entry(entry) for entry in result.removed],
            "failed": [{"name": name, "reason": reason} for name, reason in result.failed],
        }
        object_(facts)
    else:
        for entry in result.removed:
            used = moment(entry.last_used_ns)
            line(f"{entry.path.name} {entry.nbytes:>12} {used} {printable(_whose(entry.owners))}")
        remain = "would remain" if dry_run else "remains" if result.kept == 1 else "remain"
        verb = "would be removed" if dry_run else "removed"
        rest = f"{counted(result.kept, 'entry', 'entries')}, {human_bytes(result.kept_bytes)}, {remain}"
        line(f"{counted(len(result.removed), 'entry', 'entries')}, {human_bytes(result.removed_bytes)}, {verb}; {rest}")
        if quarantine:
            line(f"{result.quarantined} in quarantine, {human_bytes(result.quarantined_bytes)}, {verb}")
        if result.temporary:
            line(f"{counted(result.temporary, 'temporary file', 'temporary files')} of dead writers removed")
    if result.failed:
        name, reason = result.failed[0]
        note(
            f"weightwire: error: {counted(len(result.failed), 'entry', 'entries')} cannot be removed, "
            f"the first of them {name}: {reason}"
        )
        for hint in _let_go(reason for _, reason in result.failed):
            note(f"weightwire: hint: {hint}")
        sys.exit(FAILED)


@cache.command(add_help_option=False)
@cache_dir
@json_output
@help_
def stat(cache: str | None, as_json: bool) -> None:
    """Print how many entries there are, their bytes, when they were used, and the room that is left."""
    from weightwire.cache import cache_status

    status = cache_status(cache_path(cache))
    if as_json:
        facts = asdict(status)
        facts["oldest"], facts["newest"] = moment(facts.pop("oldest_ns")), moment(facts.pop("newest_ns"))
        object_(facts)
        return
    line(printable(status.directory))
    line(f"entries      {status.entries}, {human_bytes(status.bytes)}")
    if status.oldest_ns is not None:
        line(f"last used    from {moment(status.oldest_ns)} to {moment(status.newest_ns)}")
    line(f"temporary    {status.temporary}, {human_bytes(status.temporary_bytes)}")
    line(f"quarantined  {status.quarantined}, {human_bytes(status.quarantined_bytes)}")
    if status.misplaced or status.others:
        line(f"not entries  {status.misplaced} of an entry's name, {status.others} of other names")
    line(f"free         {human_bytes(status.free_bytes)} of {human_bytes(status.total_bytes)}")


def _let_go(reasons: Iterable[str]) -> list[str]:
    """What to do about entries that the system would not have moved or removed, for ``reasons`` in its own words."""
    from weightwire.cache.quarantine import FOLDER

    text = "\n".join(reasons)
    if os.strerror(errno.EROFS) in text:
        return ["the file system is mounted read-only: do it where it may be written to"]
    if any(os.strerror(number) in text for number in (errno.EACCES, errno.EPERM)):
        return ["do it as the user that the server runs as, or the one whose the directory is"]
    if FOLDER in text:
        return [f"remove what is called {FOLDER} in the directory: bad files are moved to a folder of that name"]
    return []


def _few(names: Sequence[str]) -> str:
    """The first of ``names``, for one line."""
    return ", ".join(map(printable, names[:4])) + (" …" if len(names) > 4 else "")


def _parsed(option: str, text: str | None, parse: Any) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}", hint="see docs/configuration.md") from None


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "hash": entry.path.name,
        "bytes": entry.nbytes,
        "last_used": moment(entry.last_used_ns),
        "tensors": [{"model": owner.path, "tensor": owner.tensor} for owner in entry.owners],
    }


def _whose(owners: Sequence[Owner]) -> str:
    """The tensor an entry is of, for people."""
    if not owners:
        return "unknown"
    more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
    return f"{owners[0].tensor} of {owners[0].path}{more}"
