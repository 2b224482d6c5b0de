/* A stream of bytes over a connected RC queue pair, drop-in for stream/stream.h.
 *
 * Sending: up to tx_slots SENDs in flight, from a ring of slots or straight from memory the caller has registered; polled only
 * when the window is full, drained where a message ends. A SEND never crosses a read of a stock peer (docs/protocol.md,
 * section 8): the framing follows the bytes that are sent. Receiving: a ring of posted slots, consumed byte by byte over any
 * number of reads. Waiting: a short spin after the last completion, then sleep on the completion channel, the TCP socket
 * (which only tells that the peer is gone), the device's events and a descriptor that ww_link_stop makes ready.
 *
 * One thread may send while another receives. Calls pause and go on as those of stream/stream.h do. */
#ifndef WW_VERBS_LINK_H
#define WW_VERBS_LINK_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"
#include "stream/stream.h"
#include "verbs/verbs.h"

#define WW_CHUNK ((size_t)256 << 10) /* a peer's receive slot; a larger SEND would overrun it */
#define WW_SEND_SLOTS 8
#define WW_RECEIVE_SLOTS 24

enum ww_framing {
    WW_FRAME_FREE,     /* no message boundaries: the peer reads a stream of bytes */
    WW_FRAME_REQUESTS, /* cmd 1, size 8, payload */
    WW_FRAME_RESPONSES /* size 8, payload */
};

struct ww_link;

struct ww_link_config {
    const struct ww_verbs *verbs;
    struct ibv_context *context;
    struct ibv_qp *qp; /* in INIT or later */
    const struct ww_cq *send_cq;
    const struct ww_cq *recv_cq;
    uint8_t *tx; /* tx_slots * WW_CHUNK, registered with tx_key */
    uint8_t *rx; /* rx_slots * WW_CHUNK, registered with rx_key */
    uint32_t tx_key, rx_key;
    uint32_t tx_slots, rx_slots;
    uint32_t inlined; /* bytes a SEND may carry inline */
};

/* Posts every receive slot. The caller keeps what config names until ww_link_free. */
struct ww_status ww_link_new(const struct ww_link_config *config, struct ww_link **link);
/* Before the first byte moves: the connected TCP socket, and how messages are framed. */
void ww_link_attach(struct ww_link *link, int tcp_fd, int framing);
/* With nobody inside. The slots are the caller's: the device goes on writing there until the queue pair is gone. */
void ww_link_free(struct ww_link *link);

/* Wakes whoever waits, for good: WW_CLOSED from then on. From any thread. */
void ww_link_stop(struct ww_link *link);

/* One part of what is to be sent; used up as it goes. */
struct ww_link_part {
    const uint8_t *data; /* NULL: the bytes are in a file */
    uint64_t nbytes;
    int registered; /* data lies in memory registered with key: sent from there */
    uint32_t key;
    int fd;
    uint64_t offset;
};

struct ww_link_parts {
    struct ww_link_part *next;
    size_t count;
};

/* Sends all parts; waits until the peer has them where a message ends, and where they were sent from the caller's memory.
 * WW_SHORT: the file of the first part left ends at its offset. */
struct ww_status ww_link_send(struct ww_link *link, struct ww_link_parts *parts, struct ww_flow *flow);

/* As ww_recv_exact. What had arrived before the peer went is delivered first. */
struct ww_status ww_link_recv(struct ww_link *link, void *data, size_t nbytes, struct ww_flow *flow);

/* Copies up to nbytes of what has arrived without taking it; how many. Never waits. */
size_t ww_link_peek(struct ww_link *link, void *data, size_t nbytes);

enum ww_fault_kind {
    WW_FAULT_NONE,
    WW_FAULT_STATUS,   /* a completion in error: wc_status, vendor */
    WW_FAULT_OVERSIZE, /* a completion longer than its slot: nbytes */
    WW_FAULT_EMPTY,    /* one SEND after the other without a byte */
    WW_FAULT_STRAY,    /* a completion of nothing that was posted */
    WW_FAULT_TCP       /* the peer has sent nothing here, and goes on over TCP */
};

struct ww_link_fault {
    int kind;
    int wc_status;
    uint32_t vendor;
    uint32_t nbytes;
    int sending;
};

/* Why a call came back with WW_FAULT. */
struct ww_link_fault ww_link_fault(struct ww_link *link);

struct ww_link_counts {
    uint64_t sends;        /* SENDs posted */
    uint64_t receives;     /* completions consumed */
    uint64_t direct_bytes; /* sent from registered memory */
    uint64_t copied_bytes; /* sent by way of the ring */
    uint64_t copies;       /* SENDs out of the ring */
    uint64_t window_full;  /* how often a slot had to be waited for */
    uint32_t high_water;   /* most SENDs outstanding at once */
};

struct ww_link_counts ww_link_counts(const struct ww_link *link);

#endif
