"""The documents tell the truth: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from weightwire.cli.root import root
from weightwire.model.synthetic import write_synthetic_gguf

pytestmark = pytest.mark.timeout(120)

TREE = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*TREE.glob("*.md"), *TREE.glob("docs/*.md")])


class Block(NamedTuple):
    """A fenced block: its language, the line its text starts at, and the text."""

    language: str
    line: int
    text: str


def blocks(path: Path) -> Iterator[Block]:
    language, start, lines = None, 0, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if language is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number + 1, []
        elif language is not None and line.startswith("```"):
            yield Block(language, start, "\n".join(lines) + "\n")
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{path}: the block before line {start} does not end"


def identifier(path: Path) -> str:
    return str(path.relative_to(TREE))


def test_the_documents_are_there() -> None:
    names = {identifier(path) for path in DOCUMENTS}
    assert names >= {
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "docs/cache.md",
        "docs/guide.md",
        "docs/configuration.md",
        "docs/embedding.md",
        "docs/performance.md",
        "docs/protocol.md",
        "docs/rdma.md",
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs") / "model.gguf"
    write_synthetic_gguf(path, 8 << 20)
    return path


WITH_PYTHON = [path for path in DOCUMENTS if any(block.language == "python" for block in blocks(path))]


def test_there_is_something_to_run() -> None:
    assert {identifier(path) for path in WITH_PYTHON} >= {"README.md", "docs/guide.md", "docs/embedding.md"}


@pytest.mark.parametrize("path", WITH_PYTHON, ids=identifier)
def test_the_python_of_a_document_runs(
    path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of one document one after the other, in a folder with a model.gguf."""
    shutil.copy(model, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": path.stem}
    for block in blocks(path):
        if block.language == "python":
            # Empty lines ahead, so that a traceback names the document's own line.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)
    assert capsys.readouterr().out


def commands(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The weightwire commands in the shell blocks of a document."""
    for block in blocks(path):
        if block.language not in ("sh", "console"):
            continue
        for number, line in enumerate(block.text.splitlines(), block.line):
            if block.language == "console" and not line.startswith("$ "):
                continue
            for part in re.split(r"\||&&|;", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                if words[:1] == ["weightwire"]:
                    yield number, words[1:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=identifier)
def test_the_commands_of_a_document_can_be_given(path: Path) -> None:
    for number, (verb, *arguments) in commands(path):
        try:
            root.commands[verb].make_context(verb, arguments)
        except Exception as error:
            pytest.fail(f"{identifier(path)}:{number}: weightwire {verb} {shlex.join(arguments)}: {error}")


def test_the_documents_show_every_verb() -> None:
    shown = {verb for path in DOCUMENTS for _, (verb, *_) in commands(path)}
    assert shown == set(root.commands)


def test_the_readme_has_the_two_commands_in_one_block_after_what_they_need() -> None:
    prepare, commands, *_ = blocks(TREE / "README.md")
    assert commands.text == "pip install . && weightwire demo\n./test\n"
    # What a bare Debian needs before them.
    assert re.search(r"^apt-get install .*python3-venv python3-dev gcc", prepare.text, re.MULTILINE)
    assert "python3 -m venv" in prepare.text
    assert "/bin/activate" in prepare.text


@pytest.mark.parametrize("path", DOCUMENTS, ids=identifier)
def test_json_is_json(path: Path) -> None:
    for block in blocks(path):
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=identifier)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target.partition("#")[0]).exists(), target
