"""Verbs objects as C sees them: what the stream over a queue pair is made of."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from weightwire._native._core cimport ww_status


cdef extern from "verbs/verbs.h" nogil:
    enum ww_verbs_code:
        WW_ABSENT
        WW_FAULT

    struct ww_verbs:
        pass
    struct ibv_context:
        pass
    struct ibv_pd:
        pass
    struct ibv_mr:
        pass
    struct ibv_qp:
        pass

    struct ww_device_info:
        char name[64]
        char path[256]
        uint64_t guid
        int transport

    struct ww_port_info:
        int state
        int mtu
        int max_mtu
        int link_layer
        int width
        int speed
        int gid_count

    struct ww_cq:
        int fd

    struct ww_completion:
        uint64_t id
        int status
        uint32_t vendor
        uint32_t nbytes
        int received

    struct ww_qp_limits:
        uint32_t sends
        uint32_t receives
        uint32_t inlined

    struct ww_qp_peer:
        uint32_t number
        uint32_t psn
        uint8_t gid[16]

    ww_status ww_verbs_open(const ww_verbs **verbs, char *why, size_t why_size) noexcept
    ww_status ww_devices(const ww_verbs *verbs, ww_device_info *devices, int capacity, int *count) noexcept
    ww_status ww_context_open(const ww_verbs *verbs, const char *name, ibv_context **context) noexcept
    int ww_context_close(const ww_verbs *verbs, ibv_context *context) noexcept
    ww_status ww_port_count(const ww_verbs *verbs, ibv_context *context, int *count) noexcept
    ww_status ww_port(const ww_verbs *verbs, ibv_context *context, int port, ww_port_info *info) noexcept
    ww_status ww_gid(const ww_verbs *verbs, ibv_context *context, int port, int index, uint8_t *raw, int *type) noexcept
    ww_status ww_pd_alloc(const ww_verbs *verbs, ibv_context *context, ibv_pd **pd) noexcept
    int ww_pd_free(const ww_verbs *verbs, ibv_pd *pd) noexcept
    ww_status ww_mr_register(
        const ww_verbs *verbs, ibv_pd *pd, void *data, size_t nbytes, int writable, ibv_mr **mr, uint32_t *key
    ) noexcept
    int ww_mr_free(const ww_verbs *verbs, ibv_mr *mr) noexcept
    ww_status ww_cq_create(const ww_verbs *verbs, ibv_context *context, int entries, ww_cq *cq) noexcept
    int ww_cq_free(const ww_verbs *verbs, ww_cq *cq) noexcept
    ww_status ww_cq_poll(const ww_cq *cq, ww_completion *completions, int capacity, int *count) noexcept
    const char *ww_completion_text(const ww_verbs *verbs, int status) noexcept
    ww_status ww_qp_create(
        const ww_verbs *verbs, ibv_pd *pd, const ww_cq *send_cq, const ww_cq *recv_cq, ww_qp_limits *limits, ibv_qp **qp,
        uint32_t *number
    ) noexcept
    int ww_qp_free(const ww_verbs *verbs, ibv_qp *qp) noexcept
    ww_status ww_qp_init(const ww_verbs *verbs, ibv_qp *qp, int port) noexcept
    ww_status ww_qp_to_receive(
        const ww_verbs *verbs, ibv_qp *qp, int port, int gid_index, int mtu, const ww_qp_peer *peer
    ) noexcept
    ww_status ww_qp_to_send(const ww_verbs *verbs, ibv_qp *qp, uint32_t psn) noexcept
    ww_status ww_qp_to_error(const ww_verbs *verbs, ibv_qp *qp) noexcept
    ww_status ww_qp_post_send(ibv_qp *qp, uint64_t id, const void *data, uint32_t nbytes, uint32_t key, int inlined) noexcept
    ww_status ww_qp_post_receive(ibv_qp *qp, uint64_t id, void *data, uint32_t nbytes, uint32_t key) noexcept


cdef class Handle:
    cdef const ww_verbs *verbs
    cdef tuple parents
    cdef int children
    cdef bint gone
    cdef bint alive
    cdef int process

    cdef int adopt(self, tuple parents) except -1
    cdef int check(self) except -1
    cdef void keep(self) noexcept
    cdef void leave(self) noexcept
    cdef void finish(self) noexcept
    cdef void give_back(self) noexcept


cdef class Device(Handle):
    cdef ww_device_info info


cdef class Context(Handle):
    cdef ibv_context *handle
    cdef readonly Device device


cdef class ProtectionDomain(Handle):
    cdef ibv_pd *handle
    cdef readonly Context context


cdef class CompletionQueue(Handle):
    cdef ww_cq cq
    cdef readonly Context context


cdef class MemoryRegion(Handle):
    cdef ibv_mr *handle
    cdef Py_buffer view
    cdef uint32_t key


cdef class QueuePair(Handle):
    cdef ibv_qp *handle
    cdef ww_qp_limits limits
    cdef uint32_t qpn
    cdef readonly ProtectionDomain domain
    cdef readonly CompletionQueue send_queue
    cdef readonly CompletionQueue receive_queue

    cdef int within(self, MemoryRegion region, size_t offset, size_t nbytes) except -1
