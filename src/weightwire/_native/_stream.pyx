"""Whole messages over a connected socket."""

from cpython.buffer cimport PyBuffer_Release
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from weightwire._native._core cimport (
    WW_CLOSED, WW_DONE, WW_FAILED, WW_PAUSED, WW_SHORT, iovec, take_writable, ww_file_pace, ww_file_part,
    ww_file_part_close, ww_flow, ww_flow_start, ww_parts, ww_read_file, ww_recv_exact, ww_send_file, ww_send_parts,
    ww_socket_ended, ww_socket_prepare, ww_status, ww_write_back,
)
from weightwire._native._profile cimport WW_STAGE_READ, Profile, tcp_limits, ww_limits, ww_profile_aside, ww_profile_back
from weightwire._native._shared cimport (
    FEW, Views, check_process, clock_of, failed, getpid, hold, let_go, look_around, nanoseconds, room, shortened, unreadable,
    vacate, watched_by,
)

import errno
import os

from weightwire._native._sentinel import UNSET
from weightwire.errors import TransportError

cdef extern from "<unistd.h>" nogil:
    int close_fd "close"(int fd)

cdef extern from "<sys/socket.h>" nogil:
    int shutdown_fd "shutdown"(int fd, int how)
    int SHUT_RDWR
    Py_ssize_t recv_from "recv"(int fd, void *data, size_t nbytes, int flags)
    int MSG_PEEK, MSG_DONTWAIT

cdef object _UNSET = UNSET

# Up to this many bytes the kernel is asked once without giving up the GIL: taking it back can cost more than the call.
cdef size_t KEEP_GIL = 2048
# File ranges up to this size are read and gathered into one packet with their header; above it sendfile wins.
cdef size_t SMALL_RANGE = 64 << 10


def write_back(int fd, uint64_t offset, uint64_t nbytes, bint wait):
    """Has the kernel write that part of a file to the disk now, and waits for it if asked to. Never raises."""
    with nogil:
        ww_write_back(fd, offset, nbytes, wait)


cdef class Stream:
    """``Stream(fd, endpoint, timeout)``: owns the connected stream socket ``fd`` and closes it.

    One thread may send while another receives; two may not do the same thing at once. ``shutdown`` and ``close`` may be
    called from any thread at any time. In a process that was forked meanwhile, ``close`` gives up that process's descriptor,
    ``shutdown`` does nothing, and everything else is refused: the connection is the parent's.
    """

    cdef int fd
    cdef int process
    cdef int users
    cdef bint stopped
    cdef bint gone
    cdef int64_t timeout_ns
    cdef object given_timeout
    cdef object name
    cdef uint64_t sent
    cdef uint64_t received
    cdef ww_file_pace pace
    cdef Profile clock

    def __cinit__(self, *args, **kwargs):
        self.fd = -1
        self.process = getpid()
        self.name = ""

    def __init__(self, int fd, str endpoint, timeout=None):
        cdef int64_t timeout_ns = nanoseconds(timeout)
        cdef ww_status status
        if self.fd >= 0 or self.gone:
            raise TypeError("a stream takes one socket, once")
        self.name = endpoint
        status = ww_socket_prepare(fd)
        if status.code != WW_DONE:
            self.refused(status, 0)
        self.fd = fd
        self.timeout_ns = timeout_ns
        self.given_timeout = timeout

    def __dealloc__(self):
        if self.fd >= 0:
            close_fd(self.fd)
            self.fd = -1

    def __repr__(self):
        return f"<{type(self).__name__} {self.name}{' closed' if self.gone else ''}>"

    @property
    def endpoint(self):
        """The peer, as text: ``host:port``."""
        return self.name

    @property
    def timeout(self):
        """Longest time without progress in seconds, or None for ever."""
        return self.given_timeout

    @timeout.setter
    def timeout(self, value):
        self.timeout_ns = nanoseconds(value)
        self.given_timeout = value

    @property
    def profile(self):
        """The `Profile` that is told when the stream waits, or None; assigned once."""
        return self.clock

    @profile.setter
    def profile(self, Profile value not None):
        self.clock = watched_by(self.clock, value)

    def send_limits(self):
        """How long, in nanoseconds so far, there was data to send, the peer's window was closed and the send buffer full; None
        where the kernel does not say (no TCP, closed). Never raises."""
        cdef ww_limits limits
        if self.gone or self.fd < 0 or tcp_limits(self.fd, &limits) != 0:
            return None
        return limits.busy_ns, limits.window_ns, limits.buffer_ns

    @property
    def bytes_sent(self):
        """Bytes handed to the kernel so far."""
        return self.sent

    @property
    def bytes_received(self):
        """Bytes taken from the kernel so far."""
        return self.received

    @property
    def closed(self):
        """Has ``close`` been called?"""
        return bool(self.gone)

    def fileno(self):
        """The descriptor, -1 once closed."""
        return -1 if self.gone else self.fd

    def peer_gone(self):
        """Has the peer closed or reset the connection, or this side ended it? Takes no bytes, never waits or raises."""
        # With the GIL held and no wait, so that close() in another thread cannot come between.
        return bool(self.gone or self.stopped or self.fd < 0 or ww_socket_ended(self.fd))

    def peek(self, Py_ssize_t nbytes):
        """Up to ``nbytes`` bytes that have arrived, without taking them; ``b""`` if none has. Never waits or raises for the socket."""
        if nbytes < 0:
            raise ValueError(f"cannot look at {nbytes} bytes")
        if self.gone or self.fd < 0 or nbytes == 0:
            return b""
        cdef bytes data = PyBytes_FromStringAndSize(NULL, nbytes)
        # With the GIL held and no wait, so that close() in another thread cannot come between.
        cdef Py_ssize_t got = recv_from(self.fd, PyBytes_AsString(data), <size_t>nbytes, MSG_PEEK | MSG_DONTWAIT)
        return data[:got] if got > 0 else b""

    def shutdown(self):
        """Ends the connection both ways: a call blocked in another thread comes back with PeerClosed. Never raises."""
        self.stopped = True
        if self.fd >= 0 and self.process == getpid():
            shutdown_fd(self.fd, SHUT_RDWR)

    def close(self):
        """Gives the socket back, once calls running in other threads have been woken and left it. Never blocks or raises."""
        if self.gone:
            return
        self.gone = True
        # The threads that were inside when the process was forked are not in the child.
        if self.users and self.process == getpid():
            self.shutdown()
        else:
            self.release()

    cdef void release(self) noexcept:
        cdef int fd = self.fd
        self.fd = -1
        self.stopped = True
        if fd >= 0:
            close_fd(fd)

    cdef int enter(self, str operation) except -1:
        if self.gone or self.fd < 0:
            raise TransportError(
                f"the connection with {self.name} is closed", endpoint=self.name, operation=operation, errno=errno.EBADF
            )
        check_process(self.process, self.name, operation)
        self.users += 1
        return 0

    cdef void leave(self) noexcept:
        # While another thread is inside, its descriptor must not become somebody else's file.
        self.users -= 1
        if self.gone and self.users == 0:
            self.release()

    cdef object refused(self, ww_status status, uint64_t done):
        raise TransportError(
            f"{(<bytes>status.operation).decode()} on the connection with {self.name}: {os.strerror(status.error)}"
            f" after {done} bytes",
            endpoint=self.name, operation=(<bytes>status.operation).decode(), errno=status.error,
        )

    cdef object fail(self, ww_status status, ww_flow *flow, uint64_t nbytes, bint sending):
        """The one place where a status of the core becomes an exception."""
        failed(status, flow, nbytes, sending, self.name, self.stopped)
        self.refused(status, flow.done)

    # Receiving

    cdef int pull(self, char *data, size_t nbytes, ww_flow *flow, ww_status *status) except -1:
        cdef uint64_t before = flow.done
        try:
            if nbytes <= KEEP_GIL:
                flow.impatient = 1
                status[0] = ww_recv_exact(self.fd, data, nbytes, flow)
                flow.impatient = 0
                if status.code != WW_PAUSED:
                    return 0
            while True:
                with nogil:
                    status[0] = ww_recv_exact(self.fd, data, nbytes, flow)
                if status.code != WW_PAUSED:
                    return 0
                look_around(flow, self.process, self.name, "recv")
        finally:
            self.received += flow.done - before

    def recv_into(self, view, *, timeout=UNSET):
        """Fills ``view``, a writable contiguous buffer, to its last byte."""
        cdef Py_buffer target
        cdef ww_flow flow
        cdef ww_status status
        cdef int64_t limit = self.timeout_ns if timeout is _UNSET else nanoseconds(timeout)
        take_writable(view, &target)
        try:
            self.enter("recv")
            try:
                ww_flow_start(&flow, limit)
                flow.profile = clock_of(self.clock)
                self.pull(<char *>target.buf, <size_t>target.len, &flow, &status)
                if status.code != WW_DONE:
                    self.fail(status, &flow, <uint64_t>target.len, False)
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&target)

    cdef object take(self, Py_ssize_t nbytes, int64_t limit, bint end_is_none):
        cdef ww_flow flow
        cdef ww_status status
        if nbytes < 0:
            raise ValueError(f"cannot receive {nbytes} bytes")
        cdef bytes data = PyBytes_FromStringAndSize(NULL, nbytes)
        self.enter("recv")
        try:
            ww_flow_start(&flow, limit)
            flow.profile = clock_of(self.clock)
            self.pull(PyBytes_AsString(data), <size_t>nbytes, &flow, &status)
            if status.code != WW_DONE:
                if end_is_none and status.code == WW_CLOSED and status.error == 0 and flow.done == 0:
                    return None
                self.fail(status, &flow, <uint64_t>nbytes, False)
        finally:
            self.leave()
        return data

    def recv(self, Py_ssize_t nbytes, *, timeout=UNSET):
        """Exactly ``nbytes`` bytes."""
        return self.take(nbytes, self.timeout_ns if timeout is _UNSET else nanoseconds(timeout), False)

    def recv_or_eof(self, Py_ssize_t nbytes, *, timeout=UNSET):
        """Exactly ``nbytes`` bytes, or None where the connection ended in good order before the first."""
        return self.take(nbytes, self.timeout_ns if timeout is _UNSET else nanoseconds(timeout), True)

    # Sending

    cdef int push(self, ww_parts *parts, uint64_t nbytes, bint more, ww_flow *flow) except -1:
        cdef ww_status status
        cdef uint64_t before = flow.done
        try:
            status.code = WW_PAUSED
            if nbytes <= KEEP_GIL:
                flow.impatient = 1
                status = ww_send_parts(self.fd, parts, more, flow)
                flow.impatient = 0
            while status.code == WW_PAUSED:
                with nogil:
                    status = ww_send_parts(self.fd, parts, more, flow)
                if status.code == WW_PAUSED:
                    look_around(flow, self.process, self.name, "send")
        finally:
            self.sent += flow.done - before
        if status.code != WW_DONE:
            self.fail(status, flow, nbytes, True)
        return 0

    cdef int push_file(self, ww_file_part *part, object source, uint64_t nbytes, ww_flow *flow) except -1:
        cdef ww_status status
        cdef uint64_t before = flow.done
        try:
            while True:
                with nogil:
                    status = ww_send_file(self.fd, part, &self.pace, flow)
                if status.code != WW_PAUSED:
                    break
                look_around(flow, self.process, self.name, "send")
        finally:
            ww_file_part_close(part)
            self.sent += flow.done - before
        if status.code == WW_SHORT:
            shortened(source, part.offset)
        if status.code == WW_FAILED and <bytes>status.operation == b"pread":
            unreadable(source, status, part.offset)
        if status.code != WW_DONE:
            self.fail(status, flow, nbytes, True)
        return 0

    cdef int gather(self, object parts, ww_file_part *part, object source) except -1:
        """Sends ``parts`` and, where ``part`` is not NULL, that much of a file after them."""
        cdef Py_ssize_t count = len(parts), i
        cdef Views views
        cdef iovec few[FEW + 1]
        cdef iovec *vectors = few
        cdef void *window = NULL
        cdef ww_parts left
        cdef ww_flow flow
        cdef uint64_t nbytes = 0
        cdef size_t got = 0
        cdef int aside
        cdef ww_status status
        try:
            hold(&views, parts)
            vectors = <iovec *>room(few, count + 1, FEW + 1, sizeof(iovec))
            for i in range(count):
                vectors[i].iov_base = views.all[i].buf
                vectors[i].iov_len = <size_t>views.all[i].len
                nbytes += <uint64_t>views.all[i].len
            self.enter("send")
            try:
                left.next = vectors
                left.count = <size_t>count
                if part != NULL and part.nbytes <= SMALL_RANGE:
                    window = PyMem_Malloc(SMALL_RANGE)
                    if window == NULL:
                        raise MemoryError
                    aside = ww_profile_aside(clock_of(self.clock), WW_STAGE_READ)
                    with nogil:
                        status = ww_read_file(part.fd, part.offset, window, part.nbytes, &got)
                    ww_profile_back(clock_of(self.clock), aside)
                    if status.code == WW_SHORT:
                        shortened(source, part.offset + got)
                    if status.code != WW_DONE:
                        unreadable(source, status, part.offset + got)
                    vectors[count].iov_base = window
                    vectors[count].iov_len = part.nbytes
                    left.count += 1
                    nbytes += part.nbytes
                    part = NULL
                ww_flow_start(&flow, self.timeout_ns)
                flow.profile = clock_of(self.clock)
                if part != NULL:
                    nbytes += part.nbytes
                self.push(&left, nbytes, part != NULL, &flow)
                if part != NULL:
                    self.push_file(part, source, nbytes, &flow)
            finally:
                self.leave()
        finally:
            let_go(&views)
            vacate(vectors, few)
            PyMem_Free(window)
        return 0

    def send(self, *parts):
        """Sends the bytes of all parts, one after the other, without copying them together."""
        self.gather(parts, NULL, None)

    def send_range(self, head, source):
        """Sends the parts of ``head``, then the bytes of the ``FileRange`` ``source``, which no user-space copy is made of."""
        cdef ww_file_part part
        if source.offset < 0 or source.nbytes < 0:
            raise ValueError(f"a file range has no negative offset or size: {source!r}")
        memset(&part, 0, sizeof(part))
        part.fd = source.fd
        part.offset = source.offset
        part.nbytes = source.nbytes
        self.gather(head, &part, source)
