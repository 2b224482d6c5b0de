"""Whole messages over a connected socket."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.errno cimport EAGAIN, EINTR, errno as os_errno
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.string cimport memset
from posix.unistd cimport close, getpid

from weightwire._native._base cimport FEW, BaseStream, Views, clock_of, room, vacate
from weightwire._native._core cimport (
    WW_DONE, iovec, ww_file_pace, ww_file_part, ww_file_part_close, ww_flow, ww_parts, ww_read_file, ww_recv_exact,
    ww_send_file, ww_send_parts, ww_socket_ended, ww_socket_prepare, ww_status, ww_write_back,
)
from weightwire._native._profile cimport WW_STAGE_READ, tcp_limits, ww_limits, ww_profile_aside, ww_profile_back

import os

from weightwire.errors import TransportError

cdef extern from "<sys/socket.h>" nogil:
    int shutdown_fd "shutdown"(int fd, int how)
    int SHUT_RDWR
    Py_ssize_t recv_from "recv"(int fd, void *data, size_t nbytes, int flags)
    int MSG_PEEK, MSG_DONTWAIT

# File ranges up to this size are read and gathered into one packet with their header; above it sendfile wins.
cdef size_t SMALL_RANGE = 64 << 10


def write_back(int fd, uint64_t offset, uint64_t nbytes, bint wait):
    """Has the kernel write that part of a file to the disk now, and waits for it if asked to. Never raises."""
    with nogil:
        ww_write_back(fd, offset, nbytes, wait)


# A message on its way: what is left of its parts and, unless it is NULL, of the file after them.
cdef struct Message:
    ww_parts parts
    ww_file_part *file


cdef class Stream(BaseStream):
    """``Stream(fd, endpoint, timeout)``: owns the connected stream socket ``fd`` and closes it.

    One thread may send while another receives; two may not do the same thing at once. ``shutdown`` and ``close`` may be
    called from any thread at any time. In a process that was forked meanwhile, ``close`` gives up that process's
    descriptor, ``shutdown`` does nothing, and everything else is refused: the connection is the parent's.
    """

    cdef int fd
    cdef ww_file_pace pace

    def __cinit__(self, *args, **kwargs):
        self.fd = -1

    def __init__(self, int fd, str endpoint, timeout=None):
        cdef ww_status status
        if self.opened or self.gone:
            raise TypeError("a stream takes one socket, once")
        self.set_timeout(timeout)
        self.name = endpoint
        status = ww_socket_prepare(fd)
        if status.code != WW_DONE:
            self.refuse(status, 0, 0, False)
        self.fd = fd
        self.opened = True

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1

    def send_limits(self):
        """How long, in nanoseconds so far, there was data to send, the peer's window was closed and the send buffer
        full; None where the kernel does not say (no TCP, closed). Never raises.
        """
        cdef ww_limits limits
        if self.gone or not self.opened or tcp_limits(self.fd, &limits) != 0:
            return None
        return limits.busy_ns, limits.window_ns, limits.buffer_ns

    def fileno(self):
        """The descriptor, -1 once closed."""
        return -1 if self.gone else self.fd

    def peer_gone(self):
        """Has the peer closed or reset the connection, or this side ended it? Takes no bytes, never waits or raises."""
        # With the GIL held and no wait, so that close() in another thread cannot come between.
        return bool(self.gone or self.stopped or not self.opened or ww_socket_ended(self.fd))

    cdef size_t look(self, void *data, size_t nbytes) noexcept:
        cdef Py_ssize_t got = recv_from(self.fd, data, nbytes, MSG_PEEK | MSG_DONTWAIT)
        if got < 0 and os_errno not in (EAGAIN, EINTR):
            self.ended = os_errno  # which the call that takes the bytes will not hear of
        return <size_t>got if got > 0 else 0

    cdef int wake(self) except -1:
        if self.opened and self.process == getpid():
            shutdown_fd(self.fd, SHUT_RDWR)
        return 0

    cdef int release(self) except -1:
        cdef int fd = self.fd
        self.fd = -1
        self.opened = False
        self.stopped = True
        if fd >= 0:
            close(fd)
        return 0

    cdef int refuse(self, ww_status status, uint64_t done, uint64_t nbytes, bint sending) except -1:
        cdef str operation = (<bytes>status.operation).decode()
        raise TransportError(
            f"{operation} on the connection with {self.name}: {os.strerror(status.error)} after {done} bytes",
            endpoint=self.name, operation=operation, errno=status.error,
        )

    cdef void receive_step(self, char *data, size_t nbytes, ww_flow *flow, ww_status *status) noexcept nogil:
        status[0] = ww_recv_exact(self.fd, data, nbytes, flow)

    cdef void send_step(self, void *message, ww_flow *flow, ww_status *status) noexcept nogil:
        cdef Message *left = <Message *>message
        # Nothing is left of the parts once the file has begun.
        status[0] = ww_send_parts(self.fd, &left.parts, left.file != NULL, flow)
        if status.code == WW_DONE and left.file != NULL:
            status[0] = ww_send_file(self.fd, left.file, &self.pace, flow)

    cdef int deliver(self, Views *views, object source) except -1:
        cdef Py_ssize_t count = views.held, i
        cdef iovec few[FEW + 1]
        cdef iovec *vectors = few
        cdef ww_file_part file
        cdef Message message
        cdef uint64_t nbytes = 0
        cdef void *window = NULL
        memset(&file, 0, sizeof(file))
        try:
            vectors = <iovec *>room(few, count + 1, FEW + 1, sizeof(iovec))
            for i in range(count):
                vectors[i].iov_base = views.all[i].buf
                vectors[i].iov_len = <size_t>views.all[i].len
                nbytes += <uint64_t>views.all[i].len
            message.parts.next = vectors
            message.parts.count = <size_t>count
            message.file = NULL
            if source is not None:
                file.fd = source.fd
                file.offset = source.offset
                file.nbytes = source.nbytes
                nbytes += file.nbytes
            self.enter("send")
            try:
                if source is not None and file.nbytes <= SMALL_RANGE:
                    window = self.read_small(&file, source)
                    vectors[count].iov_base = window
                    vectors[count].iov_len = file.nbytes
                    message.parts.count += 1
                elif source is not None:
                    message.file = &file
                self.push(&message, nbytes, message.file == NULL, source, &file.offset)
            finally:
                self.leave()
        finally:
            ww_file_part_close(&file)
            vacate(vectors, few)
            PyMem_Free(window)
        return 0

    cdef void *read_small(self, ww_file_part *file, object source) except NULL:
        """The bytes of the range, in memory that the caller frees."""
        cdef size_t got = 0
        cdef int aside
        cdef ww_status status
        cdef void *window = PyMem_Malloc(SMALL_RANGE)
        if window == NULL:
            raise MemoryError
        try:
            aside = ww_profile_aside(clock_of(self.clock), WW_STAGE_READ)
            with nogil:
                status = ww_read_file(file.fd, file.offset, window, file.nbytes, &got)
            ww_profile_back(clock_of(self.clock), aside)
            if status.code != WW_DONE:
                self.check_file(status, source, file.offset + got)
        except BaseException:
            PyMem_Free(window)
            raise
        return window
