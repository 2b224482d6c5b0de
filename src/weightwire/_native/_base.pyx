"""What every stream does alike: waiting, timeouts, calls of several threads at once, and what can go wrong in them."""

from cpython.buffer cimport PyBuffer_Release
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport ECONNABORTED, ECONNRESET
from libc.stddef cimport size_t
from libc.stdint cimport INT64_MAX, int64_t, uint64_t
from posix.unistd cimport getpid

from weightwire._native._core cimport (
    WW_CLOSED, WW_DONE, WW_FAILED, WW_PAUSED, WW_SHORT, WW_TIMEOUT, take_buffer, take_writable, ww_flow, ww_flow_idle,
    ww_flow_start, ww_status,
)
from weightwire._native._profile cimport Profile

import errno
import os
import threading

from weightwire._native._sentinel import UNSET
from weightwire.errors import ModelError, PeerClosed, TransferTimeout, TransportError
from weightwire.ranges import check_open

cdef object _UNSET = UNSET
cdef str _CUT_SHORT = "the disk cannot read it, or it is mapped and its file was cut short"

# Up to this many bytes the core is asked once without giving up the GIL: taking it back can cost more than the call.
cdef size_t KEEP_GIL = 2048


cdef int hold(Views *views, object buffers) except -1:
    """Takes the buffers. Followed by ``let_go`` whatever happens."""
    cdef Py_ssize_t count, i
    views.held = 0
    views.all = views.few
    count = len(buffers)
    views.all = <Py_buffer *>room(views.few, count, FEW, sizeof(Py_buffer))
    for i in range(count):
        take_buffer(buffers[i], &views.all[i])
        views.held += 1
    return 0


cdef void let_go(Views *views) noexcept:
    cdef Py_ssize_t i
    for i in range(views.held):
        PyBuffer_Release(&views.all[i])
    vacate(views.all, views.few)


cdef int64_t nanoseconds(object timeout) except? -2:
    """A timeout in seconds, or None for ever, as the core has it."""
    if timeout is None:
        return -1
    cdef double seconds = timeout
    if not seconds >= 0.0:
        raise ValueError(f"a timeout is a number of seconds from 0 up, or None for ever; not {timeout!r}")
    if seconds > 9e9:
        return INT64_MAX
    return <int64_t>(seconds * 1e9)


cdef class BaseStream:
    """A stream of bytes over a connection; what moves them is its subclasses'.

    One thread may send while another receives; two may not do the same thing at once. ``shutdown`` and ``close`` may be
    called from any thread at any time.
    """

    def __cinit__(self, *args, **kwargs):
        self.process = getpid()
        self.name = ""
        self.timeout_ns = -1

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
        self.set_timeout(value)

    @property
    def profile(self):
        """The `Profile` that is told when the stream waits, copies and reads, or None; assigned once."""
        return self.clock

    @profile.setter
    def profile(self, Profile value not None):
        # Once set it stays: calls may be using it.
        if self.clock is not None and self.clock is not value:
            raise ValueError("a stream is given its profile once")
        self.clock = value

    @property
    def watcher(self):
        """What is called ten times a second while a call waits for the peer, or None. What it raises ends the call."""
        return self.watching

    @watcher.setter
    def watcher(self, value):
        self.watching = value

    @property
    def bytes_sent(self):
        """Bytes handed to the kernel, or to the device and its ring, so far."""
        return self.sent

    @property
    def bytes_received(self):
        """Bytes taken from the kernel, or from the device's ring, so far."""
        return self.received

    @property
    def closed(self):
        """Has ``close`` been called?"""
        return bool(self.gone)

    def peek(self, Py_ssize_t nbytes):
        """Up to ``nbytes`` bytes that have arrived, without taking them; ``b""`` if none has. Never waits, nor raises
        for the connection.
        """
        if nbytes < 0:
            raise ValueError(f"cannot look at {nbytes} bytes")
        if self.gone or not self.opened or nbytes == 0:
            return b""
        # With the GIL held and no wait, so that close() in another thread cannot come between.
        cdef bytes data = PyBytes_FromStringAndSize(NULL, nbytes)
        return data[:self.look(PyBytes_AsString(data), <size_t>nbytes)]

    def shutdown(self):
        """Ends the connection both ways: a call blocked in another thread comes back with PeerClosed. Never raises."""
        self.stopped = True
        self.wake()

    def close(self):
        """Gives everything back, once calls running in other threads have been woken and left it. Never blocks or
        raises.
        """
        if self.gone:
            return
        self.gone = True
        # The threads that were inside when the process was forked are not in the child.
        if self.users and self.process == getpid():
            self.shutdown()
        else:
            self.release()

    cdef int set_timeout(self, object seconds) except -1:
        self.timeout_ns = nanoseconds(seconds)
        self.given_timeout = seconds
        return 0

    cdef int enter(self, str operation) except -1:
        if self.gone or not self.opened:
            raise TransportError(
                f"the connection with {self.name} is closed", endpoint=self.name, operation=operation, errno=errno.EBADF
            )
        self.check_process(operation)
        self.users += 1
        return 0

    cdef int leave(self) except -1:
        # While another thread is inside, its descriptor must not become somebody else's file, nor its memory be freed.
        self.users -= 1
        if self.gone and self.users == 0:
            self.release()
        return 0

    cdef void recall(self, ww_status *status) noexcept:
        """A socket tells of an error once, to whichever call comes first: later it has ended in good order."""
        if status.code != WW_CLOSED or self.stopped:
            return
        if status.error in (ECONNRESET, ECONNABORTED):
            self.ended = status.error
        elif self.ended:
            status.error = self.ended
            if self.ended not in (ECONNRESET, ECONNABORTED):
                status.code = WW_FAILED

    cdef int check_process(self, str operation) except -1:
        """A forked child has the parent's connection in hand: what it sends or takes would be missing there."""
        if self.process == getpid():
            return 0
        raise TransportError(
            f"the connection with {self.name} belongs to the process that was forked", endpoint=self.name,
            operation=operation, errno=errno.EBADF, hint="connect again in this process",
        )

    cdef int look_around(self, ww_flow *flow, str operation) except -1:
        """After WW_PAUSED: raises what a signal asks for, or who watches."""
        cdef object watcher = self.watching
        PyErr_CheckSignals()
        # A handler of the program's may have forked.
        self.check_process(operation)
        if watcher is not None:
            watcher()
        # Python runs its handlers in the main thread alone. Any other need not come back from a wait to look for them.
        flow.patient = watcher is None and threading.get_ident() != threading.main_thread().ident
        return 0

    cdef int check_file(self, ww_status status, object source, uint64_t offset) except -1:
        """Raises what was wrong with the ``FileRange`` ``source`` at ``offset``; returns if it was not the file."""
        if status.code == WW_SHORT:
            raise ModelError(
                f"the file is shorter than when opened: the range ends at byte {source.offset + source.nbytes}",
                path=source.path, offset=offset, hint="something changed the file; open the model again",
            )
        # Not of the socket: that is kept open as long as somebody is inside.
        if status.code == WW_FAILED:
            check_open(source, status.error, offset)
        if status.code == WW_FAILED and status.operation != NULL and <bytes>status.operation in (b"pread", b"fstat"):
            raise ModelError(
                f"{(<bytes>status.operation).decode()}: {os.strerror(status.error)}", path=source.path, offset=offset,
                hint=_CUT_SHORT if status.error == errno.EIO else "",
            )
        return 0

    cdef int fail(self, ww_status status, ww_flow *flow, uint64_t nbytes, bint sending) except -1:
        """The one place where a status of the core becomes an exception."""
        cdef str doing = f"sending to {self.name}" if sending else f"receiving from {self.name}"
        cdef str progress = f"{flow.done} of {nbytes} bytes done"
        cdef double idle
        if status.code == WW_TIMEOUT:
            idle = ww_flow_idle(flow)
            raise TransferTimeout(
                f"nothing moved for {idle:.1f} s while {doing}, {progress}",
                phase="send" if sending else "receive", elapsed=idle, bytes_done=flow.done,
            )
        if status.code == WW_CLOSED:
            if self.stopped:
                detail = f"the connection was shut down on this side while {doing}, {progress}"
            elif status.error == errno.ECONNRESET:
                detail = f"the peer reset the connection while {doing}, {progress}"
            else:
                detail = f"the peer closed the connection while {doing}, {progress}"
            raise PeerClosed(
                detail, endpoint=self.name, operation=(<bytes>status.operation).decode(), errno=status.error or None,
                position="inside" if flow.done else "before", bytes_done=flow.done,
            )
        return self.refuse(status, flow.done, nbytes, sending)

    # What a subclass has its own of. A stream that is none of them never opens, and gets no further than `enter`.

    cdef void receive_step(self, char *data, size_t nbytes, ww_flow *flow, ww_status *status) noexcept nogil:
        """Receives for a slice of time, until ``flow.done`` is ``nbytes``."""

    cdef void send_step(self, void *message, ww_flow *flow, ww_status *status) noexcept nogil:
        """Sends for a slice of time from what ``deliver`` made of a message, which moves on."""

    cdef size_t look(self, void *data, size_t nbytes) noexcept:
        """As many bytes as ``peek`` finds, copied to ``data``."""
        return 0

    cdef int deliver(self, Views *views, object source) except -1:
        """Has ``push`` send, between ``enter`` and ``leave``, the views and, unless it is None, a range of a file."""
        return self.enter("send")

    cdef int wake(self) except -1:
        """Ends the connection, so that calls in other threads come back."""
        return 0

    cdef int release(self) except -1:
        """Closes for good what nobody is inside of any more."""
        return 0

    cdef int refuse(self, ww_status status, uint64_t done, uint64_t nbytes, bint sending) except -1:
        """Raises what only this kind of stream knows how to say."""
        return 0

    # Receiving

    cdef int pull(self, char *data, size_t nbytes, int64_t limit, ww_flow *flow, ww_status *status) except -1:
        ww_flow_start(flow, limit)
        flow.profile = clock_of(self.clock)
        try:
            if nbytes <= KEEP_GIL:
                flow.impatient = 1
                self.receive_step(data, nbytes, flow, status)
                flow.impatient = 0
                if status.code != WW_PAUSED:
                    return 0
            while True:
                with nogil:
                    self.receive_step(data, nbytes, flow, status)
                if status.code != WW_PAUSED:
                    return 0
                self.look_around(flow, "recv")
        finally:
            self.received += flow.done

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
                self.pull(<char *>target.buf, <size_t>target.len, limit, &flow, &status)
                if status.code != WW_DONE:
                    self.recall(&status)
                    self.fail(status, &flow, <uint64_t>target.len, False)
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&target)

    cdef object take(self, Py_ssize_t nbytes, object timeout, bint end_is_none):
        cdef ww_flow flow
        cdef ww_status status
        cdef int64_t limit = self.timeout_ns if timeout is _UNSET else nanoseconds(timeout)
        if nbytes < 0:
            raise ValueError(f"cannot receive {nbytes} bytes")
        cdef bytes data = PyBytes_FromStringAndSize(NULL, nbytes)
        self.enter("recv")
        try:
            self.pull(PyBytes_AsString(data), <size_t>nbytes, limit, &flow, &status)
            if status.code != WW_DONE:
                self.recall(&status)
                if end_is_none and status.code == WW_CLOSED and status.error == 0 and flow.done == 0:
                    return None
                self.fail(status, &flow, <uint64_t>nbytes, False)
        finally:
            self.leave()
        return data

    def recv(self, Py_ssize_t nbytes, *, timeout=UNSET):
        """Exactly ``nbytes`` bytes."""
        return self.take(nbytes, timeout, False)

    def recv_or_eof(self, Py_ssize_t nbytes, *, timeout=UNSET):
        """Exactly ``nbytes`` bytes, or None where the connection ended in good order before the first."""
        return self.take(nbytes, timeout, True)

    # Sending

    cdef int gather(self, object buffers, object source) except -1:
        cdef Views views
        try:
            hold(&views, buffers)
            self.deliver(&views, source)
        finally:
            let_go(&views)
        return 0

    cdef int push(self, void *message, uint64_t nbytes, bint in_memory, object source, const uint64_t *offset) except -1:
        """Sends a message of ``nbytes`` bytes; ``offset`` follows how far ``source``, if there is one, has come.

        Unless all of it is ``in_memory``, a disk may be waited for.
        """
        cdef ww_flow flow
        cdef ww_status status
        ww_flow_start(&flow, self.timeout_ns)
        flow.profile = clock_of(self.clock)
        try:
            status.code = WW_PAUSED
            if nbytes <= KEEP_GIL and in_memory:
                flow.impatient = 1
                self.send_step(message, &flow, &status)
                flow.impatient = 0
            while status.code == WW_PAUSED:
                with nogil:
                    self.send_step(message, &flow, &status)
                if status.code == WW_PAUSED:
                    self.look_around(&flow, "send")
        finally:
            self.sent += flow.done
        if status.code != WW_DONE:
            self.recall(&status)
            if source is not None:
                self.check_file(status, source, offset[0])
            self.fail(status, &flow, nbytes, True)
        return 0

    def send(self, *parts):
        """Sends the bytes of all parts, one after the other, without copying them together. Where a message ends, RDMA
        waits for the peer to have it.
        """
        self.gather(parts, None)

    def send_range(self, head, source):
        """Sends the parts of ``head``, then the bytes of the ``FileRange`` ``source``: TCP makes no copy of them in
        user space (but of short ranges), RDMA reads them straight into the ring.
        """
        if source.offset < 0 or source.nbytes < 0:
            raise ValueError(f"a file range has no negative offset or size: {source!r}")
        self.gather(head, source)
