"""Host memory for tensors, comparing it, and what of a file is in memory."""

from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release
from cpython.exc cimport PyErr_CheckSignals
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.string cimport memset

from weightwire._native._core cimport (
    WW_DONE, take_buffer, ww_first_difference, ww_region, ww_region_map, ww_region_populate, ww_region_unmap, ww_resident,
    ww_status,
)

import os

from weightwire.errors import AllocationError

# Touched, filled or compared between two looks at pending signals.
cdef size_t STEP = 64 << 20
cdef size_t KEEP_GIL = 2048


cdef object raise_failure(ww_status status, size_t nbytes):
    """The one place where a refused mapping becomes an exception."""
    raise AllocationError(
        f"{(<bytes>status.operation).decode()} of {nbytes} bytes: {os.strerror(status.error)}",
        nbytes=nbytes, hint="less memory is free, or allowed to this process, than was asked for",
    )


cdef class HostRegion:
    """``HostRegion(nbytes)``: ``nbytes`` zero bytes of anonymous memory in huge pages, aligned to 2 MiB.

    Supports the writable buffer protocol; views keep the memory. It goes back to the system with the last of them.
    Raises ``ValueError`` for a negative size, ``AllocationError`` where the system has not that much.
    """

    cdef ww_region region

    def __cinit__(self, nbytes):
        cdef ww_status status
        if nbytes < 0:
            raise ValueError(f"a region has no negative size: {nbytes}")
        if nbytes > <object>(<size_t>-1 >> 1):
            raise AllocationError(f"{nbytes} bytes are more than this machine can address", nbytes=nbytes)
        cdef size_t wanted = nbytes
        status = ww_region_map(&self.region, wanted)
        if status.code != WW_DONE:
            raise_failure(status, wanted)

    def __dealloc__(self):
        with nogil:
            ww_region_unmap(&self.region)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.region.base, <Py_ssize_t>self.region.nbytes, 0, flags)

    def __len__(self):
        return self.region.nbytes

    def __repr__(self):
        return f"HostRegion({self.region.nbytes})"

    @property
    def nbytes(self):
        """Size in bytes, as asked for."""
        return self.region.nbytes

    cdef int check(self, object offset, object nbytes) except -1:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.region.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside a region of {self.region.nbytes}")
        return 0

    def populate(self, offset, nbytes):
        """Makes the pages of the range present, without changing a byte, while others may write there (MADV_POPULATE_WRITE).

        A hint: does nothing where the system cannot. Raises ``ValueError`` for a range outside the region.
        """
        self.check(offset, nbytes)
        cdef size_t at = offset, left = nbytes, n
        cdef int going = 1
        while left and going:
            n = left if left < STEP else STEP
            with nogil:
                going = ww_region_populate(&self.region, at, n)
            at += n
            left -= n
            PyErr_CheckSignals()

    def fill(self, offset, nbytes, value):
        """Sets the range to the byte ``value`` (0 to 255). Raises ``ValueError`` outside the region or of the byte."""
        self.check(offset, nbytes)
        if not 0 <= value <= 255:
            raise ValueError(f"a byte is 0 to 255, not {value}")
        cdef size_t at = offset, left = nbytes, n
        cdef int byte = value
        while left:
            n = left if left < STEP else STEP
            with nogil:
                memset(self.region.base + at, byte, n)
            at += n
            left -= n
            PyErr_CheckSignals()


def first_difference(a, b):
    """Index of the first byte that differs between two buffers of one length, -1 if none does."""
    cdef Py_buffer x, y
    cdef size_t n, at = 0, step, found
    take_buffer(a, &x)
    try:
        take_buffer(b, &y)
        try:
            if x.len != y.len:
                raise ValueError(f"buffers of {x.len} and {y.len} bytes cannot be compared")
            n = <size_t>x.len
            while at < n:
                step = n - at if n - at < STEP else STEP
                if step < KEEP_GIL:
                    found = ww_first_difference(<char *>x.buf + at, <char *>y.buf + at, step)
                else:
                    with nogil:
                        found = ww_first_difference(<char *>x.buf + at, <char *>y.buf + at, step)
                at += found
                if found < step:
                    return at
                if at < n:
                    PyErr_CheckSignals()
            return -1
        finally:
            PyBuffer_Release(&y)
    finally:
        PyBuffer_Release(&x)


def resident_bytes(int fd, uint64_t offset, uint64_t nbytes):
    """How many of ``nbytes`` bytes from byte ``offset`` of a file the page cache holds, counting pages that lie wholly
    among them, and reading none. All, where this process may not be told. Raises ``OSError`` for what has no pages.
    """
    cdef uint64_t found = 0
    cdef ww_status status
    if nbytes > <uint64_t>-1 - offset:
        raise ValueError(f"no file has {nbytes} bytes from byte {offset}")
    with nogil:
        status = ww_resident(fd, offset, nbytes, &found)
    if status.code != WW_DONE:
        raise OSError(status.error, f"{(<bytes>status.operation).decode()}: {os.strerror(status.error)}")
    return found
