"""What the stream over a socket and the one over a queue pair have in common, for the two of them alone."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t

from weightwire._native._core cimport ww_flow, ww_status
from weightwire._native._profile cimport Profile, ww_profile

# Buffers of one message held without an allocation.
cdef enum:
    FEW = 8


# The buffers of one message, for as long as it takes to send it.
cdef struct Views:
    Py_buffer few[FEW]
    Py_buffer *all
    Py_ssize_t held


cdef inline void *room(void *few, Py_ssize_t count, Py_ssize_t most, size_t each) except NULL:
    """Room for ``count`` things: ``few``, which holds ``most``, or more. Followed by ``vacate``."""
    cdef void *found = few
    if count > most:
        found = PyMem_Malloc(<size_t>count * each)
        if found == NULL:
            raise MemoryError
    return found


cdef inline void vacate(void *taken, void *few) noexcept:
    if taken != few:
        PyMem_Free(taken)


cdef inline ww_profile *clock_of(Profile profile):
    """What a flow tells of its waiting, or NULL."""
    return NULL if profile is None else &profile.core


cdef class BaseStream:
    cdef int process
    cdef int users
    cdef bint opened
    cdef bint stopped
    cdef bint gone
    cdef int ended
    cdef int64_t timeout_ns
    cdef object given_timeout
    cdef object name
    cdef uint64_t sent
    cdef uint64_t received
    cdef Profile clock
    cdef object watching

    # What the core has for each kind of stream. Called while the stream is open, ``step``s without the GIL.
    cdef void receive_step(self, char *data, size_t nbytes, ww_flow *flow, ww_status *status) noexcept nogil
    cdef void send_step(self, void *message, ww_flow *flow, ww_status *status) noexcept nogil
    cdef size_t look(self, void *data, size_t nbytes) noexcept
    cdef int deliver(self, Views *views, object source) except -1
    cdef int wake(self) except -1
    cdef int release(self) except -1
    cdef int refuse(self, ww_status status, uint64_t done, uint64_t nbytes, bint sending) except -1

    cdef int enter(self, str operation) except -1
    cdef int leave(self) except -1
    cdef void recall(self, ww_status *status) noexcept
    cdef int set_timeout(self, object seconds) except -1
    cdef int check_process(self, str operation) except -1
    cdef int check_file(self, ww_status status, object source, uint64_t offset) except -1
    cdef int look_around(self, ww_flow *flow, str operation) except -1
    cdef int fail(self, ww_status status, ww_flow *flow, uint64_t nbytes, bint sending) except -1
    cdef int pull(self, char *data, size_t nbytes, int64_t limit, ww_flow *flow, ww_status *status) except -1
    cdef object take(self, Py_ssize_t nbytes, object timeout, bint end_is_none)
    cdef int gather(self, object buffers, object source) except -1
    cdef int push(self, void *message, uint64_t nbytes, bint in_memory, object source, const uint64_t *offset) except -1
