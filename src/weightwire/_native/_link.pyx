"""A stream of bytes over a connected RC queue pair."""

from cpython.buffer cimport PyBuffer_Release
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from weightwire._native._core cimport (
    WW_CLOSED, WW_DONE, WW_PAUSED, WW_SHORT, take_writable, ww_flow, ww_flow_start, ww_status,
)
from weightwire._native._profile cimport Profile
from weightwire._native._shared cimport (
    FEW, Views, check_process, clock_of, failed, getpid, hold, let_go, look_around, nanoseconds, room, shortened, unreadable,
    vacate, watched_by,
)
from weightwire._native._verbs cimport WW_FAULT, Handle, MemoryRegion, QueuePair, ww_completion_text

import errno
import os

from weightwire._native._sentinel import UNSET
from weightwire.errors import CompletionError, RdmaUnavailable, TransportError, VerbsError

CHUNK = WW_CHUNK
SEND_SLOTS = WW_SEND_SLOTS
RECEIVE_SLOTS = WW_RECEIVE_SLOTS

cdef object _UNSET = UNSET
cdef dict _FRAMINGS = {"free": WW_FRAME_FREE, "requests": WW_FRAME_REQUESTS, "responses": WW_FRAME_RESPONSES}

# Up to this many bytes the core is asked once without giving up the GIL: taking it back can cost more than the call.
cdef size_t KEEP_GIL = 2048


cdef class Link:
    """``Link(pair, send_ring, receive_ring, endpoint, owned)``: posts every receive slot; ``pair`` stands in INIT.

    The rings are whole numbers of chunks. ``owned`` are objects whose ``close`` is called, in order, when the link has been
    closed and left by every thread. One thread may send while another receives; ``shutdown`` and ``close`` may be called
    from any thread at any time.
    """

    cdef ww_link *link
    cdef QueuePair pair
    cdef MemoryRegion send_ring
    cdef MemoryRegion receive_ring
    cdef object tcp
    cdef list regions
    cdef tuple owned
    cdef int users
    cdef bint stopped
    cdef bint gone
    cdef bint attached
    cdef int64_t timeout_ns
    cdef object given_timeout
    cdef object name
    cdef uint64_t sent
    cdef uint64_t received
    cdef Profile clock
    cdef ww_link_counts_t last

    def __cinit__(self, *args, **kwargs):
        self.name = ""
        self.timeout_ns = -1
        self.regions = []
        self.owned = ()

    def __init__(
        self, QueuePair pair not None, MemoryRegion send_ring not None, MemoryRegion receive_ring not None, str endpoint,
        tuple owned=()
    ):
        cdef ww_link_config config
        cdef ww_status status
        if self.link != NULL or self.gone:
            raise TypeError("a link takes one queue pair, once")
        for handle in (pair, send_ring, receive_ring):
            (<Handle>handle).check()
        if send_ring.view.len % WW_CHUNK or receive_ring.view.len % WW_CHUNK:
            raise ValueError(f"a ring is a whole number of chunks of {WW_CHUNK} bytes")
        config.verbs = pair.verbs
        config.context = pair.domain.context.handle
        config.qp = pair.handle
        config.send_cq = &pair.send_queue.cq
        config.recv_cq = &pair.receive_queue.cq
        config.tx = <uint8_t *>send_ring.view.buf
        config.tx_key = send_ring.key
        config.tx_slots = <uint32_t>(<size_t>send_ring.view.len // WW_CHUNK)
        config.rx = <uint8_t *>receive_ring.view.buf
        config.rx_key = receive_ring.key
        config.rx_slots = <uint32_t>(<size_t>receive_ring.view.len // WW_CHUNK)
        config.inlined = pair.limits.inlined
        if config.tx_slots > pair.limits.sends or config.rx_slots > pair.limits.receives:
            raise ValueError("the queue pair holds fewer work requests than the rings have slots")
        self.name = endpoint
        status = ww_link_new(&config, &self.link)
        if status.code != WW_DONE:
            self.refused(status, 0)
        self.pair = pair
        self.send_ring = send_ring
        self.receive_ring = receive_ring
        # While the link lives, so does what it posts to.
        pair.keep()
        send_ring.keep()
        receive_ring.keep()
        self.owned = owned

    def __dealloc__(self):
        ww_link_free(self.link)
        self.link = NULL

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
        """The `Profile` that is told when the link waits, copies and reads, or None; assigned once."""
        return self.clock

    @profile.setter
    def profile(self, Profile value not None):
        self.clock = watched_by(self.clock, value)

    def send_limits(self):
        """None: nobody knows what keeps a queue pair from sending. Never raises."""
        return None

    @property
    def bytes_sent(self):
        """Bytes handed to the device or its ring so far."""
        return self.sent

    @property
    def bytes_received(self):
        """Bytes taken from the ring so far."""
        return self.received

    @property
    def closed(self):
        """Has ``close`` been called?"""
        return bool(self.gone)

    @property
    def counts(self):
        """What has been done so far, or had been when it was closed: sends, receives (SENDs of the peer), direct_bytes,
        copied_bytes, copies (SENDs out of the ring), window_full (waits for a slot of it), high_water (most SENDs in flight).
        """
        cdef ww_link_counts_t counts = self.last if self.link == NULL else counts_of(self.link)
        return {
            "sends": counts.sends, "receives": counts.receives, "direct_bytes": counts.direct_bytes,
            "copied_bytes": counts.copied_bytes, "copies": counts.copies, "window_full": counts.window_full,
            "high_water": counts.high_water,
        }

    def attach(self, tcp, str framing):
        """The connected TCP stream that tells when the peer has gone (owned from here on), and how messages are framed:
        ``"requests"``, ``"responses"`` or ``"free"``.
        """
        if self.gone or self.link == NULL or self.attached:
            raise ValueError("a link is attached once, while it is open")
        cdef int kind = _FRAMINGS[framing]
        ww_link_attach(self.link, tcp.fileno(), kind)
        self.tcp = tcp
        self.attached = True

    def detach(self):
        """Closes the link and gives its TCP stream back, open as it was. For the only thread that uses the link."""
        tcp, self.tcp = self.tcp, None
        self.close()
        return tcp

    def fileno(self):
        """The descriptor of the TCP socket, -1 once closed."""
        return -1 if self.gone or self.tcp is None else self.tcp.fileno()

    def shutdown(self):
        """Ends the connection both ways: a call blocked in another thread comes back with PeerClosed. Never raises."""
        self.stopped = True
        if self.link != NULL and self.pair.process == getpid():
            ww_link_stop(self.link)
        if self.tcp is not None:
            self.tcp.shutdown()

    def peer_gone(self):
        """Has the peer closed or reset the connection, or this side ended it? Never waits or raises."""
        # A queue pair that broke says so at the next call.
        return bool(self.gone or self.stopped or self.tcp is None or self.tcp.peer_gone())

    def peek(self, Py_ssize_t nbytes):
        """Up to ``nbytes`` bytes that have arrived, without taking them; ``b""`` if none has. Never waits or raises for the link."""
        if nbytes < 0:
            raise ValueError(f"cannot look at {nbytes} bytes")
        if self.gone or self.stopped or self.link == NULL or nbytes == 0 or self.pair.process != getpid():
            return b""
        # With the GIL held and no wait, so that close() in another thread cannot come between.
        cdef bytes data = PyBytes_FromStringAndSize(NULL, nbytes)
        return data[:ww_link_peek(self.link, PyBytes_AsString(data), <size_t>nbytes)]

    def close(self):
        """Gives everything back, once calls running in other threads have been woken and left it. Never blocks or raises."""
        if self.gone:
            return
        self.gone = True
        # The threads that were inside when the process was forked are not in the child.
        if self.users and self.pair.process == getpid():
            self.shutdown()
        else:
            self.release()

    cdef int release(self) except -1:
        cdef ww_link *link = self.link
        self.link = NULL
        self.stopped = True
        if link == NULL:
            return 0
        self.last = counts_of(link)
        ww_link_free(link)
        # First what tells the peer, then what it would write to.
        if self.tcp is not None:
            self.tcp.close()
        self.pair.leave()
        self.send_ring.leave()
        self.receive_ring.leave()
        for region in self.regions:
            region.close()
        self.regions = []
        for thing in self.owned:
            thing.close()
        self.owned = ()
        return 0

    cdef int enter(self, str operation) except -1:
        if self.gone or self.link == NULL:
            raise TransportError(
                f"the connection with {self.name} is closed", endpoint=self.name, operation=operation, errno=errno.EBADF
            )
        if not self.attached:
            raise TransportError(
                f"the connection with {self.name} is not active yet", endpoint=self.name, operation=operation,
                errno=errno.ENOTCONN,
            )
        check_process(self.pair.process, self.name, operation)
        self.users += 1
        return 0

    cdef int leave(self) except -1:
        self.users -= 1
        if self.gone and self.users == 0:
            self.release()
        return 0

    cdef object refused(self, ww_status status, uint64_t done):
        cdef str operation = (<bytes>status.operation).decode()
        hint = "the device was removed, or its driver restarted" if status.error == errno.ENODEV else ""
        raise VerbsError(
            f"{operation} on the connection with {self.name}: {os.strerror(status.error)} after {done} bytes",
            endpoint=self.name, operation=operation, errno=status.error, hint=hint,
        )

    cdef object faulty(self, str operation, uint64_t done, uint64_t nbytes):
        cdef ww_link_fault_t fault = fault_of(self.link)
        cdef str text, doing = "sending to" if fault.sending else "receiving from"
        if fault.kind == WW_FAULT_TCP:
            reason = "the peer announced RDMA and goes on over TCP"
            raise RdmaUnavailable(f"{self.name}: {reason}", reason=reason, endpoint=self.name, operation=operation)
        if fault.kind == WW_FAULT_STATUS:
            text = (<bytes>ww_completion_text(self.pair.verbs, fault.wc_status)).decode(errors="replace")
            what = f"a completion failed: {text} (status {fault.wc_status}, vendor error {fault.vendor:#x})"
        elif fault.kind == WW_FAULT_OVERSIZE:
            what = f"the peer's SEND of {fault.nbytes} bytes does not fit a slot of {WW_CHUNK}"
        elif fault.kind == WW_FAULT_EMPTY:
            what = "the peer sends nothing but empty SENDs"
        else:
            what = "the device reports a completion of nothing that was posted"
        raise CompletionError(
            f"{doing} {self.name}: {what}, {done} of {nbytes} bytes done",
            status=fault.wc_status, vendor_err=fault.vendor, endpoint=self.name, operation=operation, bytes_done=done,
        )

    cdef object fail(self, ww_status status, ww_flow *flow, uint64_t nbytes, bint sending):
        """The one place where a status of the core becomes an exception."""
        failed(status, flow, nbytes, sending, self.name, self.stopped)
        if status.code == WW_FAULT:
            self.faulty((<bytes>status.operation).decode(), flow.done, nbytes)
        self.refused(status, flow.done)

    # Receiving

    cdef int pull(self, char *data, size_t nbytes, ww_flow *flow, ww_status *status) except -1:
        try:
            if nbytes <= KEEP_GIL:
                flow.impatient = 1
                status[0] = ww_link_recv(self.link, data, nbytes, flow)
                flow.impatient = 0
                if status.code != WW_PAUSED:
                    return 0
            while True:
                with nogil:
                    status[0] = ww_link_recv(self.link, data, nbytes, flow)
                if status.code != WW_PAUSED:
                    return 0
                look_around(flow, self.pair.process, self.name, "recv")
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

    def add_region(self, MemoryRegion region not None):
        """From here on, what is sent out of this region is sent without a copy. Closed with the link, or by its owner."""
        region.check()
        if self.gone or self.link == NULL:
            raise TransportError(f"the connection with {self.name} is closed", endpoint=self.name, errno=errno.EBADF)
        if region.parents is None or region.parents[0] is not self.pair.domain:
            raise ValueError("a region of another protection domain cannot be sent from here")
        self.regions = [known for known in self.regions if not known.closed] + [region]

    cdef MemoryRegion region_of(self, const uint8_t *data, size_t nbytes):
        cdef MemoryRegion region
        cdef const uint8_t *start
        for region in self.regions:
            start = <const uint8_t *>region.view.buf
            if region.alive and not region.gone and data >= start and data + nbytes <= start + region.view.len:
                return region
        return None

    cdef int push(self, ww_link_parts *parts, uint64_t nbytes, object source, ww_flow *flow) except -1:
        cdef ww_status status
        try:
            status.code = WW_PAUSED
            if nbytes <= KEEP_GIL:
                flow.impatient = 1
                status = ww_link_send(self.link, parts, flow)
                flow.impatient = 0
            while status.code == WW_PAUSED:
                with nogil:
                    status = ww_link_send(self.link, parts, flow)
                if status.code == WW_PAUSED:
                    look_around(flow, self.pair.process, self.name, "send")
        finally:
            self.sent += flow.done
        if status.code == WW_SHORT:
            shortened(source, parts.next.offset)
        if status.code != WW_DONE and status.operation != NULL and (<bytes>status.operation) == b"pread":
            unreadable(source, status, parts.next.offset)
        if status.code != WW_DONE:
            self.fail(status, flow, nbytes, True)
        return 0

    cdef int gather(self, object buffers, ww_link_part *file, object source) except -1:
        """Sends ``buffers`` and, where ``file`` is not NULL, that much of a file after them."""
        cdef Py_ssize_t count = len(buffers), i
        cdef Views views
        cdef ww_link_part few[FEW + 1]
        cdef ww_link_part *parts = few
        cdef ww_link_parts left
        cdef ww_flow flow
        cdef uint64_t nbytes = 0
        cdef MemoryRegion region
        cdef list used = []
        try:
            hold(&views, buffers)
            parts = <ww_link_part *>room(few, count + 1, FEW + 1, sizeof(ww_link_part))
            for i in range(count):
                parts[i].data = <const uint8_t *>views.all[i].buf
                parts[i].nbytes = <uint64_t>views.all[i].len
                parts[i].registered = 0
                nbytes += parts[i].nbytes
                if self.regions:
                    region = self.region_of(parts[i].data, <size_t>parts[i].nbytes)
                    if region is not None:
                        # Closed meanwhile by another thread, it stays pinned until this call is over.
                        region.keep()
                        used.append(region)
                        parts[i].registered = 1
                        parts[i].key = region.key
            left.next = parts
            left.count = <size_t>count
            if file != NULL:
                parts[count] = file[0]
                left.count += 1
                nbytes += file.nbytes
            self.enter("send")
            try:
                ww_flow_start(&flow, self.timeout_ns)
                flow.profile = clock_of(self.clock)
                self.push(&left, nbytes, source, &flow)
            finally:
                self.leave()
        finally:
            for region in used:
                region.leave()
            let_go(&views)
            vacate(parts, few)
        return 0

    def send(self, *parts):
        """Sends the bytes of all parts, one after the other; waits for the peer to have them where a message ends."""
        self.gather(parts, NULL, None)

    def send_range(self, head, source):
        """Sends the parts of ``head``, then the bytes of the ``FileRange`` ``source``, read straight into the ring."""
        cdef ww_link_part file
        if source.offset < 0 or source.nbytes < 0:
            raise ValueError(f"a file range has no negative offset or size: {source!r}")
        file.data = NULL
        file.fd = source.fd
        file.offset = source.offset
        file.nbytes = source.nbytes
        file.registered = 0
        self.gather(head, &file, source)
