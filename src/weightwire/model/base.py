"""What every model format yields: named ranges of bytes, and the files they lie in."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self

from weightwire.errors import ModelError
from weightwire.ranges import SYSCALL_MAX, FileRange, model_closed

__all__ = ["MAX_ELEMENTS", "Model", "ModelFile", "ModelTensor", "element_count", "refuse", "usable_name"]

# ggml counts elements in a signed 64-bit number.
MAX_ELEMENTS = 2**63 - 1

_HINTS = {
    errno.ENOENT: "check the path",
    errno.EACCES: "check the permissions: ls -l shows who may read it",
    errno.EPERM: "check the permissions: ls -l shows who may read it",
    errno.ELOOP: "a symbolic link leads back to itself",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.EIO: "the disk could not read the file; see dmesg",
    errno.ESTALE: "the network file system lost the file; open the model again",
}


def refuse(error: OSError, path: str, operation: str) -> ModelError:
    """The ModelError for an operating system's refusal to ``operation`` (``"open"``, ``"read"``) ``path``."""
    if error.errno == errno.EBADF:
        return model_closed(path, doing=f"cannot {operation}")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ModelError(f"cannot {operation}: {reason}", path=path, hint=_HINTS.get(error.errno or 0, ""))


def _link(path: str) -> str:
    """Where the symbolic link ``path`` leads; empty if it is none."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def element_count(ne: Iterable[int]) -> int | None:
    """The product of ``ne`` (1 for no dimensions), or None where ggml's 63 bits do not hold it.

    As in ggml a dimension of zero does not excuse the others: the product of the non-zero ones must fit, too.
    """
    total, zero = 1, False
    for extent in ne:
        if extent == 0:
            zero = True
            continue
        total *= extent
        if total > MAX_ELEMENTS:
            return None
    return 0 if zero else total


def usable_name(name: str) -> bool:
    """Whether ``name`` can be a tensor's name on the wire: UTF-8 without a NUL, which would end it there."""
    if "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Changed(NamedTuple):
    """When a file was last changed (ctime, ns), and what may change without its content: names, mode and owner."""

    ctime_ns: int
    about: tuple[int, int, int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_ctime_ns, (status.st_nlink, status.st_mode, status.st_uid, status.st_gid))

    def explained(self, before: _Changed) -> bool:
        """Whether this is ``before``, or differs from it in more than the time.

        Replacing or removing a model that is being loaded is usual and leaves the open file as it was.
        """
        return self.ctime_ns == before.ctime_ns or self.about != before.about


class ModelFile:
    """One file of a model: an open descriptor, and the size (bytes) and times (ns) it had when opened.

    Raises ModelError where the file is missing, unreadable or not a regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # O_NONBLOCK so that a FIFO is refused below rather than waited for; regular files ignore it.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENOENT and (target := _link(path)):
                raise ModelError(
                    f"cannot open: it is a link to {target}, which is not there",
                    path=path,
                    hint="fetch the model again, or correct the link",
                ) from error
            raise refuse(error, path, "open") from error
        except ValueError as error:
            raise ModelError(f"cannot open: {error}", path=path) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise ModelError(f"{kind}, where a model file was expected", path=path)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self._changed = _Changed.of(status)
        self._map: weakref.ref[mmap.mmap] | None = None
        self._closer = weakref.finalize(self, os.close, fd)
        self._closer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the descriptor has been closed."""
        return not self._closer.alive

    def close(self) -> None:
        """Close the descriptor. Idempotent; never raises. Mappings made before stay valid."""
        with contextlib.suppress(OSError):  # the descriptor is gone either way
            self._closer()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from byte ``offset``; ModelError where the file no longer has them."""
        parts: list[bytes] = []
        while nbytes:
            try:
                part = os.pread(self.fd, min(nbytes, SYSCALL_MAX), offset)
            except OSError as error:
                raise refuse(error, self.path, "read") from error
            if not part:
                raise ModelError("file is shorter than when opened", path=self.path, offset=offset)
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def range(self, offset: int, nbytes: int) -> FileRange:
        """``nbytes`` bytes from byte ``offset``, by reference."""
        return FileRange(self.fd, offset, nbytes, self.path)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A read-only mapping of ``nbytes`` bytes from byte ``offset``; it may outlive the file.

        All views of a file share one mapping, so that many tensors cost one descriptor; it goes with the last of them.
        """
        if self.closed:
            raise ModelError("the model is closed", path=self.path, hint="take views before close()")
        if nbytes == 0:
            return memoryview(b"")
        mapping = self._map() if self._map is not None else None
        if mapping is None:
            # A page past the end of a shortened file is a SIGBUS, so the size is looked at again before mapping.
            self.check_unchanged()
            try:
                mapping = mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"cannot map: {error}", path=self.path) from error
            self._map = weakref.ref(mapping)
        return memoryview(mapping)[offset : offset + nbytes]

    def check_unchanged(self) -> None:
        """ModelError if the file was written to since it was opened, as far as stat(2) can tell, or if it is closed.

        That is: its size or its time of modification (mtime) differs, or its time of change (ctime), which a writer
        cannot set back, without a new name, mode or owner that would explain it.
        """
        if self.closed:
            raise model_closed(self.path)
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            raise refuse(error, self.path, "look at") from error
        if status.st_size != self.size:
            verb = "shorter" if status.st_size < self.size else "longer"
            raise ModelError(
                f"file is {verb} than when opened: {status.st_size} bytes, was {self.size}",
                path=self.path,
                hint="something is writing it; open the model again when that is done",
            )
        if status.st_mtime_ns != self.mtime_ns:
            raise ModelError(
                "file was modified since it was opened",
                path=self.path,
                hint="something is writing it; open the model again when that is done",
            )
        changed = _Changed.of(status)
        if not changed.explained(self._changed):
            raise ModelError(
                "file was changed since it was opened, though its date is the same",
                path=self.path,
                hint="something has written to it or renamed it; open the model again when that is done",
            )
        self._changed = changed


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor: what it is called, what it holds and where its bytes lie.

    ``ne`` is in ggml's order (``ne[0]`` varies fastest; numpy's shape reversed), in elements. ``type_code`` is ggml's
    number, or None where ggml has no such type; ``type_name`` says which it is then (``"type 57"``, ``"F8_E4M3"``), and
    ``dtype`` is numpy's string for it where numpy has one (``"|u1"``).
    ``payload`` is where the ``nbytes`` bytes are: a range of a file the Model keeps open, or memory.
    """

    name: str
    type_code: int | None
    type_name: str
    ne: tuple[int, ...]
    nbytes: int
    payload: FileRange | memoryview
    dtype: str | None = None
    _file: ModelFile | None = field(default=None, repr=False, compare=False)
    _memory: memoryview | None = field(default=None, repr=False, compare=False)

    def view(self) -> memoryview:
        """The tensor's bytes, read-only (format ``"B"``), without a copy; a file's are mapped, an array's where it is.

        The view may outlive the Model. If the file is cut short while it is mapped, touching what is gone ends the
        process (SIGBUS, mmap(2)); ``payload`` is the way to read a file that something may be writing. Raises
        ModelError if the model is closed or its file has changed.
        """
        if isinstance(self.payload, memoryview):
            return self.payload
        if self._memory is not None:
            return self._memory
        if self._file is None:
            raise ModelError("this tensor's file is not known", path=self.payload.path)
        return self._file.view(self.payload.offset, self.payload.nbytes)


class Model:
    """An opened model; a context manager that closes its files.

    ``path`` is what was opened (None for arrays), ``format`` is ``"gguf"``, ``"safetensors"`` or ``"arrays"``,
    ``files`` the paths of all files. ``tensors`` maps names to tensors, in file order; ``metadata`` maps keys to
    scalars and strings (arrays are not kept). ``nbytes`` is the sum of the tensors' bytes.
    """

    def __init__(
        self,
        tensors: Mapping[str, ModelTensor],
        *,
        format: str,
        path: str | None = None,
        files: Iterable[ModelFile] = (),
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self._files = tuple(files)
        self.path = path
        self.format = format
        self.files = tuple(file.path for file in self._files)
        self.metadata: Mapping[str, object] = MappingProxyType(dict(metadata or {}))
        self.tensors: Mapping[str, ModelTensor] = MappingProxyType(dict(tensors))
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f" {self.path!r}" if self.path is not None else ""
        return f"<weightwire.Model {self.format}{where}: {len(self.tensors)} tensors, {self.nbytes} bytes>"

    def close(self) -> None:
        """Close the model's files. Idempotent; never raises. Views taken before stay valid."""
        for file in self._files:
            file.close()

    def check_unchanged(self) -> None:
        """ModelError if a file was written to since it was opened (`ModelFile.check_unchanged`), or is closed."""
        for file in self._files:
            file.check_unchanged()
