"""``weightwire info``: what a model holds, or what a server offers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from weightwire.cli.failures import USAGE, Failure, as_usage
from weightwire.cli.options import check_protocol, help_, json_output, protocol, timeout, transport
from weightwire.cli.output import counted, human_bytes, line, note, object_, printable
from weightwire.cli.report import carrier, version
from weightwire.config import DEFAULT_PORT, ClientConfig
from weightwire.errors import ConfigError, ModelError

__all__ = ["info"]

_MODEL_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pt")


@click.command(add_help_option=False)
@click.argument("target", metavar="MODEL|HOST:PORT")
@timeout
@protocol
@transport
@json_output
@help_
def info(target: str, timeout: float | None, protocol: str | None, transport: str | None, as_json: bool) -> None:
    """Describe a model file, or the server at an endpoint.

    A path that exists is a model, anything else an endpoint. Where that could be mistaken, stderr says how it was
    taken.
    """
    if _is_model(target):
        _model(target, as_json)
        return
    config = ClientConfig.resolve(
        timeout=timeout, protocol=protocol, transport=transport, settings=("timeout", "protocol", "transport")
    )
    check_protocol(config.protocol, "WEIGHTWIRE_PROTOCOL")
    _server(target, config, as_json)


def _is_model(target: str) -> bool:
    """Decide what ``target`` is, and say so where a reader might have meant the other."""
    from weightwire.transport.address import format_endpoint, parse_endpoint

    try:
        host, port = parse_endpoint(target, DEFAULT_PORT)
    except ConfigError as error:
        if os.path.lexists(target) or _looks_like_path(target):
            return True
        raise ConfigError(
            f"{target!r} is neither an existing file nor an endpoint", hint=error.hint or "give a path, or HOST:PORT"
        ) from error
    names_port = target.rsplit(":", 1)[-1] == str(port)
    if os.path.lexists(target):
        if names_port:
            note(f"weightwire: {printable(target)} exists here: taken as a model, not as an endpoint")
        return True
    if _looks_like_path(target):
        return True
    if not names_port:
        taken = printable(format_endpoint(host, port))
        note(f"weightwire: no file is called {printable(target)}: taken as the server {taken}")
    return False


def _looks_like_path(target: str) -> bool:
    return "/" in target or target.lower().endswith(_MODEL_ENDINGS)


def _model(path: str, as_json: bool) -> None:
    from weightwire.model import open_model
    from weightwire.model.shards import ShardName

    try:
        os.stat(path)
    except FileNotFoundError as error:
        # A link, or a shard of a model, is nothing that could have been meant as an endpoint.
        if not os.path.islink(path) and ShardName.parse(os.path.basename(path)) is None:
            missing = ModelError("no such file", path=path, hint="a server is given as HOST:PORT")
            raise Failure(missing, USAGE) from error
    except (OSError, ValueError):
        pass  # there, in a way: opening it says what is wrong
    with as_usage():
        opened = open_model(path)
    with opened:
        tensors = list(opened.tensors.values())
        types: dict[str, dict[str, int]] = {}
        for tensor in tensors:
            entry = types.setdefault(tensor.type_name, {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += tensor.nbytes
        if as_json:
            object_(
                {
                    "kind": "model",
                    "model": path,
                    "format": opened.format,
                    "files": list(opened.files),
                    "tensors": len(tensors),
                    "bytes": opened.nbytes,
                    "types": types,
                    "metadata": dict(opened.metadata),
                    "table": [
                        {"name": t.name, "type": t.type_name, "ne": list(t.ne), "bytes": t.nbytes} for t in tensors
                    ],
                }
            )
            return
        line(f"model     {printable(path)}")
        line(f"format    {opened.format}, {counted(len(opened.files), 'file', 'files')}")
        line(f"tensors   {len(tensors)}")
        line(f"bytes     {opened.nbytes} ({human_bytes(opened.nbytes)})")
        for name, entry in sorted(types.items(), key=lambda item: -item[1]["bytes"]):
            count = counted(entry["tensors"], "tensor", "tensors")
            line(f"type      {printable(name)}: {count}, {human_bytes(entry['bytes'])}")
        for key, value in opened.metadata.items():
            line(f"metadata  {printable(key)} = {_shortened(value)}")
        _table(
            ("name", "type", "ne", "bytes"),
            [(printable(t.name), printable(t.type_name), "x".join(map(str, t.ne)), str(t.nbytes)) for t in tensors],
        )


def _server(endpoint: str, config: ClientConfig, as_json: bool) -> None:
    from weightwire.client import connect

    with connect(
        endpoint,
        timeout=config.timeout,
        protocol=config.protocol,
        transport=config.transport,
        profile=False,  # nothing is loaded, and so it does not matter how
        optimized=True,
    ) as connection:
        devices: list[dict[str, int]] = []
        for device in range(connection.device_count()):
            free, total = connection.device_memory(device)
            devices.append(
                {
                    "device": device,
                    "free": free,
                    "total": total,
                    "alignment": connection.alignment(device),
                    "max_size": connection.max_size(device),
                }
            )
        if as_json:
            object_(
                {
                    "kind": "server",
                    "endpoint": connection.endpoint,
                    "protocol": connection.protocol,
                    "spoken": connection.dialect.text,
                    "transport": dict(connection.transport),
                    "cache": connection.server_has_cache,
                    "devices": devices,
                }
            )
            return
        line(f"server    {printable(connection.endpoint)}")
        protocol = version(connection.protocol, connection.dialect.text).removeprefix("protocol ")
        line(f"protocol  {protocol}, over {printable(carrier(connection))}")
        line(f"because   {printable(str(connection.transport['reason']))}")
        line(f"cache     {'yes' if connection.server_has_cache else 'none, or a stock server that cannot say'}")
        for entry in devices:
            largest = "any" if entry["max_size"] >= 2**63 else human_bytes(entry["max_size"])
            line(
                f"device {entry['device']}  {human_bytes(entry['free'])} free of {human_bytes(entry['total'])}, "
                f"alignment {entry['alignment']} bytes, largest buffer {largest}"
            )


def _shortened(value: object, limit: int = 100) -> str:
    text = printable(str(value))
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one, a number, to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    line()
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        line("  ".join([*cells, row[-1].rjust(widths[-1])]))
