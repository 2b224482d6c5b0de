import ast
from pathlib import Path

import weightwire.wire

ALLOWED = {
    "__future__",
    "collections.abc",
    "dataclasses",
    "enum",
    "math",
    "re",
    "struct",
    "types",
    "typing",
    "weightwire.errors",
}


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            found.add(node.module or "")
        elif isinstance(node, ast.Name):
            assert node.id not in {"__import__", "open", "exec", "eval"}
    return found


def test_wire_imports_nothing_that_does_io() -> None:
    (folder,) = weightwire.wire.__path__
    files = sorted(Path(folder).rglob("*.py"))
    assert len(files) >= 8
    for path in files:
        names = imported(ast.parse(path.read_text(encoding="utf-8")))
        outside = {name for name in names if not (name == "weightwire.wire" or name.startswith("weightwire.wire."))}
        assert outside <= ALLOWED, path
        # "from weightwire import _native" would hide behind an allowed name.
        assert "weightwire" not in names, path
