"""RDMA devices and the objects made of them, over libibverbs, which is opened when first wanted.

Every object gives its resource back with ``close`` (fine twice), as a context manager, or with its last reference; one that
others are made of stays until they are gone. Source: rdma-core's manual pages, ibv_*(3).
"""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from cpython.bytes cimport PyBytes_AsString
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.unistd cimport getpid

from weightwire._native._core cimport WW_DONE, WW_SHORT, take_buffer, take_writable, ww_status

import errno
import os

from weightwire.errors import RdmaUnavailable, VerbsError


cdef object refused(ww_status status, str doing):
    """The one place where a status of the core becomes an exception."""
    cdef str operation = (<bytes>status.operation).decode()
    if status.code == WW_ABSENT:
        raise RdmaUnavailable("weightwire was built without RDMA", operation=operation)
    raise VerbsError(f"{operation}: {os.strerror(status.error)} ({doing})", operation=operation, errno=status.error)


cdef const ww_verbs *library() except NULL:
    cdef const ww_verbs *verbs = NULL
    cdef char why[512]
    cdef ww_status status
    why[0] = 0
    with nogil:
        status = ww_verbs_open(&verbs, why, sizeof(why))
    if status.code != WW_DONE and status.error == errno.ENOSYS:
        raise RdmaUnavailable((<bytes>why).decode(), hint="use a build made where libibverbs-dev is installed")
    if status.code != WW_DONE:
        raise RdmaUnavailable(
            f"libibverbs cannot be used: {(<bytes>why).decode(errors='replace')}", operation="dlopen",
            hint="on Debian: apt-get install libibverbs1 ibverbs-providers",
        )
    return verbs


@cython.no_gc_clear
cdef class Handle:
    """What every verbs object has in common."""

    cdef int adopt(self, tuple parents) except -1:
        cdef Handle parent
        if self.alive or self.gone:
            raise TypeError(f"a {type(self).__name__} is made once")
        for parent in parents:
            parent.check()
        for parent in parents:
            parent.keep()
        self.parents = parents
        self.process = getpid()
        return 0

    cdef int check(self) except -1:
        if self.gone or not self.alive:
            name = type(self).__name__
            raise VerbsError(f"the {name} is closed", operation=name, errno=errno.EBADF)
        # A Device is only a name, and anybody's.
        if self.process and self.process != getpid():
            name = type(self).__name__
            raise VerbsError(
                f"the {name} belongs to the process that was forked", operation=name, errno=errno.EBADF,
                hint="make another in this process",
            )
        return 0

    # Around a call without the GIL too, in which another thread may close.
    cdef void keep(self) noexcept:
        self.children += 1

    cdef void leave(self) noexcept:
        self.children -= 1
        if self.gone and self.children == 0:
            self.finish()

    cdef void finish(self) noexcept:
        cdef Handle parent
        cdef tuple parents = self.parents
        self.parents = None
        if self.alive:
            self.alive = False
            # A fork has the kernel's objects in common with the process that made them, which still needs them.
            if self.process == getpid():
                self.give_back()
        if parents is not None:
            for parent in parents:
                parent.leave()

    cdef void give_back(self) noexcept:
        pass

    def __dealloc__(self):
        self.gone = True
        self.finish()

    def close(self):
        """Gives the resource back, once nothing that was made of it is left. Fine twice, never raises."""
        if not self.gone:
            self.gone = True
            if self.children == 0:
                self.finish()

    @property
    def closed(self):
        """Has ``close`` been called?"""
        return bool(self.gone)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


cdef class Device(Handle):
    """An RDMA device of this machine: see ``devices``."""

    def __init__(self):
        raise TypeError("devices are found with devices()")

    @property
    def name(self):
        """As the kernel calls it: ``"mlx5_0"``, ``"rxe0"``."""
        return (<bytes>self.info.name).decode(errors="replace")

    @property
    def path(self):
        """Its folder in sysfs."""
        return (<bytes>self.info.path).decode(errors="surrogateescape")

    @property
    def guid(self):
        """The node's GUID, 16 hex digits."""
        return (<const char *>&self.info.guid)[:8].hex()

    @property
    def transport(self):
        """``"ib"`` for InfiniBand and RoCE, ``"iwarp"``, or ``"other"``."""
        return {0: "ib", 1: "iwarp"}.get(self.info.transport, "other")

    def __repr__(self):
        return f"Device({self.name!r})"


def devices():
    """The RDMA devices there are; none where the kernel has no RDMA. Raises ``RdmaUnavailable`` without libibverbs."""
    cdef const ww_verbs *verbs = library()
    cdef ww_device_info *infos = NULL
    cdef int count = 16, room = 0, i
    cdef ww_status status
    cdef Device device
    try:
        # Until all of them fit: a device's virtual functions are many.
        while count > room:
            room = count
            PyMem_Free(infos)
            infos = <ww_device_info *>PyMem_Malloc(<size_t>room * sizeof(ww_device_info))
            if infos == NULL:
                raise MemoryError
            with nogil:
                status = ww_devices(verbs, infos, room, &count)
            if status.code != WW_DONE:
                refused(status, "listing devices")
        found = []
        for i in range(count):
            device = Device.__new__(Device)
            device.verbs = verbs
            device.info = infos[i]
            device.alive = True
            found.append(device)
        return found
    finally:
        PyMem_Free(infos)


cdef class Context(Handle):
    """``Context(device)``: the opened device. Raises ``VerbsError`` (ENODEV where it has gone)."""

    def __init__(self, Device device not None):
        cdef ww_status status
        cdef const ww_verbs *verbs = device.verbs
        cdef const char *name = device.info.name
        self.adopt((device,))
        self.device = device
        self.verbs = verbs
        with nogil:
            status = ww_context_open(verbs, name, &self.handle)
        if status.code != WW_DONE:
            refused(status, f"opening {device.name}")
        self.alive = True

    cdef void give_back(self) noexcept:
        cdef ibv_context *handle = self.handle
        cdef const ww_verbs *verbs = self.verbs
        self.handle = NULL
        with nogil:
            ww_context_close(verbs, handle)

    @property
    def port_count(self):
        """Ports of the device, which are numbered from 1."""
        cdef ww_status status
        cdef int count = 0
        self.check()
        self.keep()
        with nogil:
            status = ww_port_count(self.verbs, self.handle, &count)
        self.leave()
        if status.code != WW_DONE:
            refused(status, self.device.name)
        return count

    def port(self, int number):
        """A port as the library has it: state, mtu, max_mtu, link_layer, width, speed (all enum values), gid_count."""
        cdef ww_status status
        cdef ww_port_info info
        self.check()
        self.keep()
        with nogil:
            status = ww_port(self.verbs, self.handle, number, &info)
        self.leave()
        if status.code != WW_DONE:
            refused(status, f"port {number} of {self.device.name}")
        return info.state, info.mtu, info.max_mtu, info.link_layer, info.width, info.speed, info.gid_count

    def gid(self, int port, int index):
        """Entry ``index`` of a port's GID table: its 16 bytes and its type (-1 unknown, 0 IB, 1 RoCE v1, 2 RoCE v2).

        None where the entry is empty.
        """
        cdef ww_status status
        cdef uint8_t raw[16]
        cdef int kind = -1
        self.check()
        self.keep()
        with nogil:
            status = ww_gid(self.verbs, self.handle, port, index, raw, &kind)
        self.leave()
        if status.code == WW_SHORT:
            return None
        if status.code != WW_DONE:
            refused(status, f"GID {index} of port {port} of {self.device.name}")
        return (<char *>raw)[:16], kind


cdef class ProtectionDomain(Handle):
    """``ProtectionDomain(context)``."""

    def __init__(self, Context context not None):
        cdef ww_status status
        self.adopt((context,))
        self.context = context
        self.verbs = context.verbs
        with nogil:
            status = ww_pd_alloc(self.verbs, context.handle, &self.handle)
        if status.code != WW_DONE:
            refused(status, context.device.name)
        self.alive = True

    cdef void give_back(self) noexcept:
        cdef ibv_pd *handle = self.handle
        cdef const ww_verbs *verbs = self.verbs
        self.handle = NULL
        with nogil:
            ww_pd_free(verbs, handle)


cdef class CompletionQueue(Handle):
    """``CompletionQueue(context, entries)``, with a channel that tells when something is in it."""

    def __init__(self, Context context not None, int entries):
        cdef ww_status status
        self.adopt((context,))
        self.context = context
        self.verbs = context.verbs
        with nogil:
            status = ww_cq_create(self.verbs, context.handle, entries, &self.cq)
        if status.code != WW_DONE:
            refused(status, f"{entries} entries on {context.device.name}")
        self.alive = True

    cdef void give_back(self) noexcept:
        cdef const ww_verbs *verbs = self.verbs
        with nogil:
            ww_cq_free(verbs, &self.cq)

    def fileno(self):
        """The channel's descriptor, -1 once closed."""
        return self.cq.fd if self.alive else -1

    def poll(self):
        """What has completed, 16 at most: a list of (id, status, vendor_err, nbytes, received)."""
        cdef ww_completion found[16]
        cdef ww_status status
        cdef int n = 0
        self.check()
        self.keep()
        with nogil:
            status = ww_cq_poll(&self.cq, found, 16, &n)
        self.leave()
        if status.code != WW_DONE:
            refused(status, self.context.device.name)
        return [
            (found[i].id, found[i].status, found[i].vendor, found[i].nbytes, bool(found[i].received)) for i in range(n)
        ]

    def text(self, int status):
        """What a completion's status means, in the library's words."""
        return (<bytes>ww_completion_text(library(), status)).decode(errors="replace")


cdef class MemoryRegion(Handle):
    """``MemoryRegion(domain, buffer, writable=True)``: the buffer's memory pinned for the device, and the buffer kept.

    Raises ``VerbsError`` with ``.errno`` ENOMEM over the limit of locked memory.
    """

    def __init__(self, ProtectionDomain domain not None, buffer, *, bint writable=True):
        cdef ww_status status
        cdef int access = writable
        self.adopt((domain,))
        self.verbs = domain.verbs
        if writable:
            take_writable(buffer, &self.view)
        else:
            take_buffer(buffer, &self.view)
        try:
            if self.view.len == 0:
                raise ValueError("an empty buffer cannot be registered")
            with nogil:
                status = ww_mr_register(
                    self.verbs, domain.handle, self.view.buf, <size_t>self.view.len, access, &self.handle, &self.key
                )
            if status.code != WW_DONE:
                refused(status, f"{self.view.len} bytes on {domain.context.device.name}")
            self.alive = True
        finally:
            if not self.alive:
                PyBuffer_Release(&self.view)

    cdef void give_back(self) noexcept:
        cdef ibv_mr *handle = self.handle
        cdef const ww_verbs *verbs = self.verbs
        self.handle = NULL
        with nogil:
            ww_mr_free(verbs, handle)
        PyBuffer_Release(&self.view)

    @property
    def address(self):
        """Where it begins."""
        return <size_t>self.view.buf if self.alive else 0

    @property
    def nbytes(self):
        """Its size in bytes; 0 once given back."""
        return self.view.len if self.alive else 0

    @property
    def lkey(self):
        """The key the device knows it by."""
        return self.key


cdef class QueuePair(Handle):
    """``QueuePair(domain, send_queue, receive_queue, sends=, receives=, inline=256)``: an RC queue pair in RESET.

    A device that refuses inline data is asked again for none.
    """

    def __init__(
        self, ProtectionDomain domain not None, CompletionQueue send_queue not None,
        CompletionQueue receive_queue not None, *, uint32_t sends, uint32_t receives, uint32_t inline=256
    ):
        cdef ww_status status
        self.adopt((domain, send_queue, receive_queue))
        self.domain = domain
        self.send_queue = send_queue
        self.receive_queue = receive_queue
        self.verbs = domain.verbs
        self.limits.sends = sends
        self.limits.receives = receives
        self.limits.inlined = inline
        with nogil:
            status = ww_qp_create(
                self.verbs, domain.handle, &send_queue.cq, &receive_queue.cq, &self.limits, &self.handle, &self.qpn
            )
        if status.code != WW_DONE:
            refused(status, domain.context.device.name)
        self.alive = True

    cdef void give_back(self) noexcept:
        cdef ibv_qp *handle = self.handle
        cdef const ww_verbs *verbs = self.verbs
        self.handle = NULL
        with nogil:
            ww_qp_free(verbs, handle)

    @property
    def number(self):
        """Its number, by which the peer addresses it."""
        return self.qpn

    @property
    def inline(self):
        """Bytes a SEND may carry inline; 0 where the device refuses any."""
        return self.limits.inlined

    def to_init(self, int port):
        """To INIT: receives may be posted."""
        cdef ww_status status
        self.check()
        self.keep()
        with nogil:
            status = ww_qp_init(self.verbs, self.handle, port)
        self.leave()
        if status.code != WW_DONE:
            refused(status, f"port {port}")

    def to_receive(self, *, int port, int gid_index, int mtu, uint32_t number, uint32_t psn, bytes gid not None):
        """To RTR, connected with the peer's queue pair ``number``. ``mtu`` is an ``enum ibv_mtu`` value."""
        cdef ww_status status
        cdef ww_qp_peer peer
        self.check()
        if len(gid) != 16 or not 0 <= gid_index <= 255:
            raise ValueError("a GID has 16 bytes, and an index from 0 to 255")
        peer.number = number
        peer.psn = psn
        memcpy(peer.gid, PyBytes_AsString(gid), 16)
        self.keep()
        with nogil:
            status = ww_qp_to_receive(self.verbs, self.handle, port, gid_index, mtu, &peer)
        self.leave()
        if status.code != WW_DONE:
            refused(status, f"connecting with queue pair {number}")

    def to_send(self, uint32_t psn):
        """To RTS: sends may be posted."""
        cdef ww_status status
        self.check()
        self.keep()
        with nogil:
            status = ww_qp_to_send(self.verbs, self.handle, psn)
        self.leave()
        if status.code != WW_DONE:
            refused(status, f"queue pair {self.qpn}")

    def to_error(self):
        """To ERR: everything outstanding completes as flushed."""
        cdef ww_status status
        self.check()
        self.keep()
        with nogil:
            status = ww_qp_to_error(self.verbs, self.handle)
        self.leave()
        if status.code != WW_DONE:
            refused(status, f"queue pair {self.qpn}")

    cdef int within(self, MemoryRegion region, size_t offset, size_t nbytes) except -1:
        self.check()
        region.check()
        if offset > <size_t>region.view.len or nbytes > <size_t>region.view.len - offset:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside a region of {region.view.len}")
        return 0

    def post_send(self, MemoryRegion region not None, size_t offset, uint32_t nbytes, *, uint64_t id=0):
        """Posts a SEND of part of a region, which stays untouched until it completes."""
        self.within(region, offset, nbytes)
        cdef ww_status status = ww_qp_post_send(
            self.handle, id, <uint8_t *>region.view.buf + offset, nbytes, region.key, 0
        )
        if status.code != WW_DONE:
            refused(status, f"{nbytes} bytes")

    def post_receive(self, MemoryRegion region not None, size_t offset, uint32_t nbytes, *, uint64_t id=0):
        """Posts part of a writable region for one SEND of the peer to land in."""
        self.within(region, offset, nbytes)
        cdef ww_status status = ww_qp_post_receive(
            self.handle, id, <uint8_t *>region.view.buf + offset, nbytes, region.key
        )
        if status.code != WW_DONE:
            refused(status, f"{nbytes} bytes")
