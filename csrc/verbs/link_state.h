/* What a link is made of. Not for use outside this folder. */
#ifndef WW_VERBS_LINK_STATE_H
#define WW_VERBS_LINK_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "verbs/link.h"
#include "verbs/table.h"

/* Arrived and not read: every slot, and what was moved out of slots while a send had to wait. */
#define WW_ARRIVALS 512

struct ww_arrival {
    uint8_t *data;
    uint32_t nbytes;
    uint32_t used;
    int slot; /* -1: data is a copy, to be freed */
};

/* Where in a message the outgoing bytes stand. */
struct ww_framer {
    int framing;
    int field;
    uint64_t left; /* bytes to the end of this field */
    uint64_t size; /* the size field, as far as it has been seen */
};

struct ww_link {
    struct ww_link_config c;
    int tcp_fd;
    int wake_fd;
    atomic_int stopped;
    atomic_int lost;            /* errno, once the device has gone or its queues have broken */
    atomic_int faulty;          /* fault is set */
    _Atomic int64_t recent_ns;  /* of the last completion or post: near it, spinning is worth while */
    _Atomic int64_t hangup_ns;  /* when the TCP socket was first seen closed; 0: not yet */

    pthread_mutex_t fault_lock;
    struct ww_link_fault fault;
    const char *lost_in; /* the call that told */
    int hangup_error;    /* what the TCP socket said of its end, which it does once */

    /* Sending: one thread at a time, but completions may be reaped by another. */
    pthread_mutex_t send_lock;
    atomic_uint_least64_t posted;
    atomic_uint_least64_t completed;
    uint64_t direct_until; /* posted, when the last SEND from the caller's memory had been */
    uint32_t filled;       /* bytes in the slot that goes next */
    /* Counts are read by whoever asks for them. */
    _Atomic uint32_t high_water;
    _Atomic uint64_t direct_bytes, copied_bytes, copies, window_full;
    struct ww_framer framer;

    /* Receiving */
    pthread_mutex_t recv_lock;
    int receivers;
    struct ww_arrival arrivals[WW_ARRIVALS];
    uint32_t first, held;
    uint32_t empties; /* SENDs without a byte, one after the other */
    int ended;        /* a completion was the last to be taken */
    _Atomic uint64_t received;
    uint8_t posted_slots[WW_RECEIVE_SLOTS];
};

enum ww_side { WW_SIDE_SEND, WW_SIDE_RECV };

/* What completions there are: how many, or -1 once the link has broken. */
int ww_link_reap(struct ww_link *link);  /* of SENDs */
int ww_link_drain(struct ww_link *link); /* of receives; with recv_lock held */

/* With nobody receiving: takes what has arrived, and moves small messages out of their slots, so that a peer which answers while
 * we send is not kept from reading. How many completions. */
int ww_link_relieve(struct ww_link *link);

/* Sleeps until something may have changed. WW_DONE: look again. */
struct ww_status ww_link_wait(struct ww_link *link, struct ww_flow *flow, enum ww_side side, const char *operation);

/* Has the link broken? WW_DONE: no. */
struct ww_status ww_link_health(struct ww_link *link, const char *operation);

void ww_link_blame(struct ww_link *link, struct ww_link_fault fault);
void ww_link_lose(struct ww_link *link, int error, const char *operation);
void ww_link_touch(struct ww_link *link);

#endif
