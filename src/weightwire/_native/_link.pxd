"""The core's stream over a queue pair, for _link.pyx alone."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from weightwire._native._core cimport ww_flow, ww_status
from weightwire._native._verbs cimport ibv_context, ibv_qp, ww_cq, ww_verbs


cdef extern from "verbs/link.h" nogil:
    const size_t WW_CHUNK
    const uint32_t WW_SEND_SLOTS
    const uint32_t WW_RECEIVE_SLOTS

    enum ww_framing:
        WW_FRAME_FREE
        WW_FRAME_REQUESTS
        WW_FRAME_RESPONSES

    enum ww_fault_kind:
        WW_FAULT_STATUS
        WW_FAULT_OVERSIZE
        WW_FAULT_EMPTY
        WW_FAULT_TCP

    struct ww_link:
        pass

    struct ww_link_config:
        const ww_verbs *verbs
        ibv_context *context
        ibv_qp *qp
        const ww_cq *send_cq
        const ww_cq *recv_cq
        uint8_t *tx
        uint8_t *rx
        uint32_t tx_key
        uint32_t rx_key
        uint32_t tx_slots
        uint32_t rx_slots
        uint32_t inlined

    struct ww_link_part:
        const uint8_t *data
        uint64_t nbytes
        int registered
        uint32_t key
        int fd
        uint64_t offset

    struct ww_link_parts:
        ww_link_part *next
        size_t count

    struct ww_link_fault_t "ww_link_fault":
        int kind
        int wc_status
        uint32_t vendor
        uint32_t nbytes
        int sending

    struct ww_link_counts_t "ww_link_counts":
        uint64_t sends
        uint64_t receives
        uint64_t direct_bytes
        uint64_t copied_bytes
        uint64_t copies
        uint64_t window_full
        uint32_t high_water

    ww_status ww_link_new(const ww_link_config *config, ww_link **link) noexcept
    void ww_link_attach(ww_link *link, int tcp_fd, int framing) noexcept
    void ww_link_free(ww_link *link) noexcept
    void ww_link_stop(ww_link *link) noexcept
    ww_status ww_link_send(ww_link *link, ww_link_parts *parts, ww_flow *flow) noexcept
    size_t ww_link_peek(ww_link *link, void *data, size_t nbytes) noexcept
    ww_status ww_link_recv(ww_link *link, void *data, size_t nbytes, ww_flow *flow) noexcept
    ww_link_fault_t fault_of "ww_link_fault"(ww_link *link) noexcept
    ww_link_counts_t counts_of "ww_link_counts"(const ww_link *link) noexcept
