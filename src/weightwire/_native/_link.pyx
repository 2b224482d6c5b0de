"""A stream of bytes over a connected RC queue pair."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from posix.unistd cimport getpid

from weightwire._native._base cimport FEW, BaseStream, Views, room, vacate
from weightwire._native._core cimport WW_DONE, ww_flow, ww_status
from weightwire._native._verbs cimport WW_FAULT, Handle, MemoryRegion, QueuePair, ww_completion_text

import errno
import os

from weightwire.errors import CompletionError, RdmaUnavailable, TransportError, VerbsError

CHUNK = WW_CHUNK
SEND_SLOTS = WW_SEND_SLOTS
RECEIVE_SLOTS = WW_RECEIVE_SLOTS

cdef dict _FRAMINGS = {"free": WW_FRAME_FREE, "requests": WW_FRAME_REQUESTS, "responses": WW_FRAME_RESPONSES}

cdef class Link(BaseStream):
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
    cdef bint attached
    cdef ww_link_counts_t last

    def __cinit__(self, *args, **kwargs):
        self.regions = []
        self.owned = ()

    def __init__(
        self, QueuePair pair not None, MemoryRegion send_ring not None, MemoryRegion receive_ring not None, str endpoint,
        tuple owned=()
    ):
        cdef ww_link_config config
        cdef ww_status status
        if self.opened or self.gone:
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
            self.refuse(status, 0, 0, False)
        self.process = pair.process
        self.pair = pair
        self.send_ring = send_ring
        self.receive_ring = receive_ring
        # While the link lives, so does what it posts to.
        pair.keep()
        send_ring.keep()
        receive_ring.keep()
        self.owned = owned
        self.opened = True

    def __dealloc__(self):
        ww_link_free(self.link)
        self.link = NULL

    def send_limits(self):
        """None: nobody knows what keeps a queue pair from sending. Never raises."""
        return None

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
        if self.gone or not self.opened or self.attached:
            raise ValueError("a link is attached once, while it is open")
        cdef int kind = _FRAMINGS[framing]
        cdef int fd = tcp.fileno()
        # Without it nothing would tell that the peer has gone.
        if fd < 0:
            raise TransportError(
                f"the connection with {self.name} is closed", endpoint=self.name, operation="attach", errno=errno.EBADF
            )
        ww_link_attach(self.link, fd, kind)
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

    def peer_gone(self):
        """Has the peer closed or reset the connection, or this side ended it? Never waits or raises."""
        # A queue pair that broke says so at the next call.
        return bool(self.gone or self.stopped or self.tcp is None or self.tcp.peer_gone())

    cdef size_t look(self, void *data, size_t nbytes) noexcept:
        return 0 if self.stopped or self.process != getpid() else ww_link_peek(self.link, data, nbytes)

    cdef int wake(self) except -1:
        if self.opened and self.process == getpid():
            ww_link_stop(self.link)
        if self.tcp is not None:
            self.tcp.shutdown()
        return 0

    cdef int release(self) except -1:
        cdef ww_link *link = self.link
        self.link = NULL
        self.opened = False
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
        if self.opened and not self.gone and not self.attached:
            raise TransportError(
                f"the connection with {self.name} is not active yet", endpoint=self.name, operation=operation,
                errno=errno.ENOTCONN,
            )
        return BaseStream.enter(self, operation)

    cdef int refuse(self, ww_status status, uint64_t done, uint64_t nbytes, bint sending) except -1:
        cdef str operation = (<bytes>status.operation).decode()
        if status.code == WW_FAULT:
            self.faulty(operation, done, nbytes)
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

    cdef void receive_step(self, char *data, size_t nbytes, ww_flow *flow, ww_status *status) noexcept nogil:
        status[0] = ww_link_recv(self.link, data, nbytes, flow)

    cdef void send_step(self, void *message, ww_flow *flow, ww_status *status) noexcept nogil:
        status[0] = ww_link_send(self.link, <ww_link_parts *>message, flow)

    def add_region(self, MemoryRegion region not None):
        """From here on, what is sent out of this region is sent without a copy. Closed with the link, or by its owner."""
        region.check()
        if self.gone or not self.opened:
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

    cdef int deliver(self, Views *views, object source) except -1:
        cdef Py_ssize_t count = views.held, i
        cdef ww_link_part few[FEW + 1]
        cdef ww_link_part *parts = few
        cdef ww_link_part *file
        cdef ww_link_parts left
        cdef uint64_t nbytes = 0
        cdef MemoryRegion region
        cdef list used = []
        try:
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
            file = &parts[count]
            if source is not None:
                file.data = NULL
                file.registered = 0
                file.fd = source.fd
                file.offset = source.offset
                file.nbytes = source.nbytes
                left.count += 1
                nbytes += file.nbytes
            self.enter("send")
            try:
                self.push(&left, nbytes, source is None, source, &file.offset)
            finally:
                self.leave()
        finally:
            for region in used:
                region.leave()
            vacate(parts, few)
        return 0
