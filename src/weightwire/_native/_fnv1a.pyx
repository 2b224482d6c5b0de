"""FNV-1a 64 of buffers and file ranges."""

from cpython.buffer cimport PyBuffer_Release
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stddef cimport size_t

from weightwire._native._core cimport (
    WW_DONE, WW_FNV1A_LANES, WW_FNV1A_OFFSET, WW_FNV1A_WINDOW, WW_PAUSED, WW_SHORT,
    take_buffer, take_writable, ww_fnv1a64, ww_fnv1a_choose, ww_fnv1a_chosen, ww_fnv1a_job, ww_fnv1a_many, ww_fnv1a_many_run,
    ww_fnv1a_many_start, ww_fnv1a_read, ww_fnv1a_variant, ww_status,
)

import errno
import os

from weightwire.errors import ModelError
from weightwire.ranges import FileRange, check_open

OFFSET = WW_FNV1A_OFFSET

# Below this much work another thread would not get far before it had to wait for us again.
cdef size_t KEEP_GIL = 2048
# Hashed, or read from slow files, between two looks around: under 0.1 s even for one buffer alone.
cdef size_t STEP = 32 << 20
cdef int64_t SLICE_NS = 100000000


cdef object raise_failure(ww_status status, ww_fnv1a_many *many, object source):
    """The one place where a failed read becomes an exception."""
    cdef object path = source.path
    if status.code == WW_SHORT:
        raise ModelError(
            f"the file is shorter than when opened: the range ends at byte {source.offset + source.nbytes}",
            path=path, offset=many.failed_at, hint="something changed the file; open the model again",
        )
    check_open(source, status.error, many.failed_at)
    raise ModelError(
        f"{(<bytes>status.operation).decode()}: {os.strerror(status.error)}", path=path, offset=many.failed_at,
        hint="the disk cannot read it, or it is mapped and its file was cut short" if status.error == errno.EIO else "",
    )


def variants():
    """The ways of hashing one buffer on this architecture, best first: the name, and whether this CPU can."""
    cdef int offered
    cdef size_t index = 0
    cdef const char *name
    cdef dict found = {}
    while True:
        name = ww_fnv1a_variant(index, &offered)
        if name == NULL:
            return found
        found[(<bytes>name).decode()] = offered != 0
        index += 1


def chosen():
    """The name of the variant in use."""
    return list(variants())[ww_fnv1a_chosen()]


def choose(name):
    """Use the variant ``name`` from now on, in every thread. LookupError: there is none, or this CPU cannot."""
    cdef dict found = variants()
    if not found.get(name):
        raise LookupError(name)
    ww_fnv1a_choose(list(found).index(name))


def fnv1a64(data, uint64_t start=WW_FNV1A_OFFSET):
    """FNV-1a 64 of the bytes of ``data``, continued from ``start``."""
    cdef Py_buffer view
    cdef uint64_t result = start
    cdef const uint8_t *at
    cdef size_t left, n
    take_buffer(data, &view)
    try:
        at = <const uint8_t *>view.buf
        left = <size_t>view.len
        if left < KEEP_GIL:
            return ww_fnv1a64(at, left, result)
        while left:
            n = left if left < STEP else STEP
            with nogil:
                result = ww_fnv1a64(at, n, result)
            at += n
            left -= n
            if left:
                PyErr_CheckSignals()
        return result
    finally:
        PyBuffer_Release(&view)


def read_fnv1a64(int fd, target, uint64_t offset, uint64_t start=WW_FNV1A_OFFSET):
    """Fills ``target`` from byte ``offset`` of the file: how many bytes there were, and their FNV-1a 64."""
    cdef Py_buffer view
    cdef size_t got = 0
    cdef uint64_t result = start
    cdef ww_status status
    take_writable(target, &view)
    try:
        with nogil:
            status = ww_fnv1a_read(fd, offset, view.buf, <size_t>view.len, &got, &result)
    finally:
        PyBuffer_Release(&view)
    if status.code != WW_DONE and status.code != WW_SHORT:
        raise OSError(status.error, os.strerror(status.error))
    return got, result


def fnv1a64_payloads(payloads, check=None, bint plain=False, starts=None):
    """FNV-1a 64 of each payload (a buffer or a ``FileRange``), in this thread; with ``plain`` by the plain loop alone.

    ``check()`` is called between slices; what it raises ends the work. ``starts`` continues earlier hashes.
    """
    cdef list sources = list(payloads)
    cdef Py_ssize_t count = len(sources), taken = 0, i
    cdef ww_fnv1a_job *jobs = NULL
    cdef Py_buffer *views = NULL
    cdef uint8_t *windows = NULL
    cdef ww_fnv1a_many many
    cdef ww_status status
    cdef uint64_t total = 0
    if count == 0:
        return []
    jobs = <ww_fnv1a_job *>PyMem_Calloc(count, sizeof(ww_fnv1a_job))
    views = <Py_buffer *>PyMem_Calloc(count, sizeof(Py_buffer))
    try:
        if jobs == NULL or views == NULL:
            raise MemoryError
        for i in range(count):
            source = sources[i]
            jobs[i].hash = WW_FNV1A_OFFSET if starts is None else <uint64_t>starts[i]
            if isinstance(source, FileRange):
                if source.offset < 0 or source.nbytes < 0:
                    raise ValueError(f"a file range has no negative offset or size: {source!r}")
                jobs[i].fd = source.fd
                jobs[i].offset = source.offset
                jobs[i].nbytes = source.nbytes
                if windows == NULL:
                    windows = <uint8_t *>PyMem_Malloc(WW_FNV1A_LANES * WW_FNV1A_WINDOW)
                    if windows == NULL:
                        raise MemoryError
            else:
                take_buffer(source, &views[taken])
                jobs[i].data = <const uint8_t *>views[taken].buf
                jobs[i].nbytes = <uint64_t>views[taken].len
                taken += 1
            total += jobs[i].nbytes
        ww_fnv1a_many_start(&many, jobs, count, windows)
        many.plain = plain
        if total < KEEP_GIL and windows == NULL:
            status = ww_fnv1a_many_run(&many, KEEP_GIL, SLICE_NS)
        else:
            while True:
                with nogil:
                    status = ww_fnv1a_many_run(&many, STEP, SLICE_NS)
                if status.code != WW_PAUSED:
                    break
                PyErr_CheckSignals()
                if check is not None:
                    check()
        if status.code != WW_DONE:
            raise_failure(status, &many, sources[many.failed])
        return [jobs[i].hash for i in range(count)]
    finally:
        for i in range(taken):
            PyBuffer_Release(&views[i])
        PyMem_Free(views)
        PyMem_Free(jobs)
        PyMem_Free(windows)
