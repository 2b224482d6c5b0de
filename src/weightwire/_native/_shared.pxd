"""What every stream does alike: the buffers of a message, timeouts, waiting, and what can go wrong in it."""

from cpython.buffer cimport PyBuffer_Release
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stddef cimport size_t
from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from weightwire._native._core cimport WW_CLOSED, WW_TIMEOUT, take_buffer, ww_flow, ww_flow_idle, ww_status
from weightwire._native._profile cimport Profile, ww_profile

cdef extern from "<unistd.h>" nogil:
    int getpid()

# Buffers of one message held without an allocation.
cdef enum:
    FEW = 8


# The buffers of one message, for as long as it takes to send it.

cdef struct Views:
    Py_buffer few[FEW]
    Py_buffer *all
    Py_ssize_t held


cdef inline int hold(Views *views, object buffers) except -1:
    """Takes the buffers. Followed by ``let_go`` whatever happens."""
    cdef Py_ssize_t count = len(buffers), i
    views.held = 0
    views.all = <Py_buffer *>room(views.few, count, FEW, sizeof(Py_buffer))
    for i in range(count):
        take_buffer(buffers[i], &views.all[i])
        views.held += 1
    return 0


cdef inline void let_go(Views *views) noexcept:
    cdef Py_ssize_t i
    for i in range(views.held):
        PyBuffer_Release(&views.all[i])
    vacate(views.all, views.few)


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


# Waiting.

cdef inline int check_process(int owner, str name, str operation) except -1:
    """A forked child has the parent's connection in hand: what it sends or takes would be missing there."""
    if owner == getpid():
        return 0
    import errno

    from weightwire.errors import TransportError
    raise TransportError(
        f"the connection with {name} belongs to the process that was forked", endpoint=name, operation=operation,
        errno=errno.EBADF, hint="connect again in this process",
    )


cdef inline int look_around(ww_flow *flow, int owner, str name, str operation) except -1:
    """After WW_PAUSED: raises what a signal asks for."""
    import threading

    PyErr_CheckSignals()
    # A handler of the program's may have forked.
    check_process(owner, name, operation)
    # Python runs its handlers in the main thread alone. Any other need not come back from a wait to look for them.
    flow.patient = threading.get_ident() != threading.main_thread().ident
    return 0


cdef inline object failed(ww_status status, ww_flow *flow, uint64_t nbytes, bint sending, str name, bint stopped):
    """Raises what every stream says in the same words; returns for what only one of them knows."""
    import errno

    from weightwire.errors import PeerClosed, TransferTimeout
    cdef str doing = f"sending to {name}" if sending else f"receiving from {name}"
    cdef str progress = f"{flow.done} of {nbytes} bytes done"
    cdef double idle
    if status.code == WW_TIMEOUT:
        idle = ww_flow_idle(flow)
        raise TransferTimeout(
            f"nothing moved for {idle:.1f} s while {doing}, {progress}",
            phase="send" if sending else "receive", elapsed=idle, bytes_done=flow.done,
        )
    if status.code == WW_CLOSED:
        if stopped:
            detail = f"the connection was shut down on this side while {doing}, {progress}"
        elif status.error == errno.ECONNRESET:
            detail = f"the peer reset the connection while {doing}, {progress}"
        else:
            detail = f"the peer closed the connection while {doing}, {progress}"
        raise PeerClosed(
            detail, endpoint=name, operation=(<bytes>status.operation).decode(), errno=status.error or None,
            position="inside" if flow.done else "before", bytes_done=flow.done,
        )
    return None


# Numbers and files.

cdef inline int64_t nanoseconds(object timeout) except? -2:
    """A timeout in seconds, or None for ever, as the core has it."""
    if timeout is None:
        return -1
    cdef double seconds = timeout
    if not seconds >= 0.0:
        raise ValueError(f"a timeout is a number of seconds from 0 up, or None for ever; not {timeout!r}")
    if seconds > 9e9:
        return INT64_MAX
    return <int64_t>(seconds * 1e9)


cdef inline ww_profile *clock_of(Profile profile):
    """What a flow tells of its waiting, or NULL."""
    return NULL if profile is None else &profile.core


cdef inline Profile watched_by(Profile now, Profile given):
    """What ``profile`` of a stream is after ``given`` was assigned to it. Once set it stays: calls may be using it."""
    if given is None or (now is not None and now is not given):
        raise ValueError("a stream is given its profile once")
    return given


cdef inline object shortened(object source, uint64_t end):
    from weightwire.errors import ModelError
    raise ModelError(
        f"the file is shorter than when opened: the range ends at byte {source.offset + source.nbytes}",
        path=source.path, offset=end, hint="something changed the file; open the model again",
    )


cdef inline object unreadable(object source, ww_status status, uint64_t offset):
    import errno
    import os

    from weightwire.errors import ModelError
    raise ModelError(
        f"{(<bytes>status.operation).decode()}: {os.strerror(status.error)}", path=source.path, offset=offset,
        hint="the disk cannot read it, or it is mapped and its file was cut short" if status.error == errno.EIO else "",
    )
