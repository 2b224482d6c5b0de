"""Declarations of the C core, and what every module does with buffers."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyObject_GetBuffer
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint64_t

from weightwire._native._profile cimport ww_profile


cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len


cdef extern from "status.h" nogil:
    enum ww_code:
        WW_DONE
        WW_PAUSED
        WW_TIMEOUT
        WW_CLOSED
        WW_SHORT
        WW_FAILED

    struct ww_status:
        int code
        int error
        const char *operation


cdef extern from "fnv1a/fnv1a.h" nogil:
    const uint64_t WW_FNV1A_OFFSET
    const size_t WW_FNV1A_LANES
    const size_t WW_FNV1A_WINDOW

    struct ww_fnv1a_job:
        const uint8_t *data
        int fd
        uint64_t offset
        uint64_t nbytes
        uint64_t hash

    struct ww_fnv1a_many:
        int plain
        size_t failed
        uint64_t failed_at

    uint64_t ww_fnv1a64(const void *data, size_t n, uint64_t hash) noexcept
    ww_status ww_fnv1a_read(
        int fd, uint64_t offset, void *data, size_t nbytes, size_t *got, uint64_t *hash) noexcept
    const char *ww_fnv1a_variant(size_t index, int *offered) noexcept
    size_t ww_fnv1a_chosen() noexcept
    void ww_fnv1a_choose(size_t index) noexcept
    void ww_fnv1a_many_start(ww_fnv1a_many *many, ww_fnv1a_job *jobs, size_t count, uint8_t *windows) noexcept
    ww_status ww_fnv1a_many_run(ww_fnv1a_many *many, uint64_t budget, int64_t slice_ns) noexcept


cdef extern from "memory/memory.h" nogil:
    struct ww_region:
        uint8_t *base
        size_t nbytes
        size_t mapped

    ww_status ww_region_map(ww_region *region, size_t nbytes) noexcept
    void ww_region_unmap(ww_region *region) noexcept
    int ww_region_populate(const ww_region *region, size_t offset, size_t nbytes) noexcept
    size_t ww_first_difference(const void *a, const void *b, size_t n) noexcept
    ww_status ww_resident(int fd, uint64_t offset, uint64_t nbytes, uint64_t *resident) noexcept


cdef extern from "stream/stream.h" nogil:
    struct ww_flow:
        int impatient
        int patient
        uint64_t done
        ww_profile *profile

    struct ww_parts:
        iovec *next
        size_t count

    struct ww_file_pace:
        pass

    struct ww_file_part:
        int fd
        uint64_t offset
        uint64_t nbytes

    void ww_flow_start(ww_flow *flow, int64_t timeout_ns) noexcept
    double ww_flow_idle(const ww_flow *flow) noexcept
    ww_status ww_recv_exact(int fd, void *data, size_t nbytes, ww_flow *flow) noexcept
    ww_status ww_send_parts(int fd, ww_parts *parts, int more, ww_flow *flow) noexcept
    ww_status ww_send_file(int fd, ww_file_part *part, ww_file_pace *pace, ww_flow *flow) noexcept
    void ww_file_part_close(ww_file_part *part) noexcept
    void ww_write_back(int fd, uint64_t offset, uint64_t nbytes, int wait) noexcept
    ww_status ww_read_file(int fd, uint64_t offset, void *data, size_t nbytes, size_t *got) noexcept
    ww_status ww_socket_prepare(int fd) noexcept
    int ww_socket_ended(int fd) noexcept


cdef inline int take_buffer(object source, Py_buffer *view) except -1:
    """Reads of ``source``: any contiguous buffer. The caller releases ``view``."""
    try:
        PyObject_GetBuffer(source, view, PyBUF_SIMPLE)
    except (BufferError, ValueError) as error:  # numpy raises the latter
        raise ValueError(f"the bytes must be contiguous: {error} (pass numpy.ascontiguousarray(x) or bytes(x))") from None
    return 0


cdef inline int take_writable(object target, Py_buffer *view) except -1:
    """Writes to ``target``: any contiguous writable buffer. The caller releases ``view``."""
    try:
        PyObject_GetBuffer(target, view, PyBUF_WRITABLE)
    except (BufferError, ValueError) as error:  # numpy raises the latter
        raise TypeError(
            f"the destination must be writable and contiguous: {error} (pass a bytearray or a contiguous array)"
        ) from None
    return 0
