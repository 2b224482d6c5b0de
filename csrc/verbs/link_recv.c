#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "verbs/link_state.h"

#define DRAIN_MAX 8
/* Answers are far smaller, payloads far larger. */
#define SMALL_ARRIVAL 4096

static void post_slot(struct ww_link *link, int slot)
{
    struct ww_status status = ww_qp_post_receive(link->c.qp, (uint64_t)slot, link->c.rx + (size_t)slot * WW_CHUNK, WW_CHUNK,
                                                 link->c.rx_key);
    if (status.code == WW_DONE) {
        link->posted_slots[slot] = 1;
    } else {
        ww_link_lose(link, status.error, status.operation);
    }
}

static void accept(struct ww_link *link, const struct ibv_wc *wc)
{
    struct ww_link_fault fault = {.kind = WW_FAULT_NONE, .nbytes = 0};
    if (wc->status != IBV_WC_SUCCESS) {
        fault.kind = WW_FAULT_STATUS;
        fault.wc_status = wc->status;
        fault.vendor = wc->vendor_err;
    } else if (wc->wr_id >= link->c.rx_slots || !link->posted_slots[wc->wr_id] || wc->opcode != IBV_WC_RECV) {
        fault.kind = WW_FAULT_STRAY;
    } else if (wc->byte_len > WW_CHUNK) {
        fault.kind = WW_FAULT_OVERSIZE;
        fault.nbytes = wc->byte_len;
    }
    if (fault.kind != WW_FAULT_NONE) {
        link->ended = 1;
        ww_link_blame(link, fault);
        return;
    }
    int slot = (int)wc->wr_id;
    link->posted_slots[slot] = 0;
    link->received++;
    if (wc->byte_len == 0) {
        /* Some are harmless; a peer that sends nothing else would keep us busy for ever. */
        if (++link->empties > link->c.rx_slots) {
            link->ended = 1;
            ww_link_blame(link, (struct ww_link_fault){.kind = WW_FAULT_EMPTY});
            return;
        }
        post_slot(link, slot);
        return;
    }
    link->empties = 0;
    struct ww_arrival *arrival = &link->arrivals[(link->first + link->held++) % WW_ARRIVALS];
    arrival->data = link->c.rx + (size_t)slot * WW_CHUNK;
    arrival->nbytes = wc->byte_len;
    arrival->used = 0;
    arrival->slot = slot;
}

int ww_link_drain(struct ww_link *link)
{
    int total = 0;
    /* Not until the link is faulty: what had arrived before a SEND failed is still to be delivered. */
    while (link->held + DRAIN_MAX <= WW_ARRIVALS && !link->ended) {
        struct ibv_wc found[DRAIN_MAX];
        int n = ibv_poll_cq(link->c.recv_cq->cq, DRAIN_MAX, found);
        for (int i = 0; i < n && !link->ended; i++) {
            accept(link, &found[i]);
        }
        if (n < 0) {
            ww_link_lose(link, EIO, "ibv_poll_cq");
            return -1;
        }
        total += n;
        if (n < DRAIN_MAX) {
            break;
        }
    }
    if (total) {
        ww_link_touch(link);
    }
    return atomic_load(&link->faulty) ? -1 : total;
}

int ww_link_relieve(struct ww_link *link)
{
    int n = -1;
    pthread_mutex_lock(&link->recv_lock);
    if (link->receivers == 0) {
        n = ww_link_drain(link);
        /* What was found earlier too: with every slot in use, nothing more will come. Room is kept for all slots, or they
         * could no longer be drained. */
        for (uint32_t i = 0; n >= 0 && i < link->held && link->held + link->c.rx_slots < WW_ARRIVALS; i++) {
            struct ww_arrival *arrival = &link->arrivals[(link->first + i) % WW_ARRIVALS];
            uint32_t left = arrival->nbytes - arrival->used;
            uint8_t *copy = arrival->slot >= 0 && left <= SMALL_ARRIVAL ? malloc(left) : NULL;
            if (copy) {
                memcpy(copy, arrival->data + arrival->used, left);
                post_slot(link, arrival->slot);
                *arrival = (struct ww_arrival){.data = copy, .nbytes = left, .used = 0, .slot = -1};
            }
        }
    }
    pthread_mutex_unlock(&link->recv_lock);
    return n;
}

/* Copies what has arrived; with recv_lock held. */
static size_t consume(struct ww_link *link, uint8_t *to, size_t wanted)
{
    size_t done = 0;
    while (link->held && done < wanted) {
        struct ww_arrival *arrival = &link->arrivals[link->first];
        size_t n = arrival->nbytes - arrival->used;
        n = n < wanted - done ? n : wanted - done;
        memcpy(to + done, arrival->data + arrival->used, n);
        arrival->used += (uint32_t)n;
        done += n;
        if (arrival->used < arrival->nbytes) {
            break;
        }
        int slot = arrival->slot;
        if (slot < 0) {
            free(arrival->data);
        }
        link->first = (link->first + 1) % WW_ARRIVALS;
        link->held--;
        if (slot >= 0) {
            post_slot(link, slot);
        }
    }
    return done;
}

size_t ww_link_peek(struct ww_link *link, void *data, size_t nbytes)
{
    size_t seen = 0;
    pthread_mutex_lock(&link->recv_lock);
    (void)ww_link_drain(link);
    for (uint32_t i = 0; i < link->held && seen < nbytes; i++) {
        const struct ww_arrival *arrival = &link->arrivals[(link->first + i) % WW_ARRIVALS];
        size_t n = arrival->nbytes - arrival->used;
        n = n < nbytes - seen ? n : nbytes - seen;
        memcpy((uint8_t *)data + seen, arrival->data + arrival->used, n);
        seen += n;
    }
    pthread_mutex_unlock(&link->recv_lock);
    return seen;
}

/* Whether anything had arrived. */
static int take_arrived(struct ww_link *link, uint8_t *data, size_t nbytes, struct ww_flow *flow)
{
    pthread_mutex_lock(&link->recv_lock);
    if (link->held == 0) {
        (void)ww_link_drain(link);
    }
    size_t n = consume(link, data + flow->done, nbytes - (size_t)flow->done);
    pthread_mutex_unlock(&link->recv_lock);
    if (n) {
        ww_flow_moved(flow, n);
    }
    return n > 0;
}

static struct ww_status receive(struct ww_link *link, uint8_t *data, size_t nbytes, struct ww_flow *flow)
{
    while (flow->done < nbytes) {
        if (take_arrived(link, data, nbytes, flow)) {
            if (flow->progress_ns >= flow->slice_ns && flow->done < nbytes) {
                return ww_status_of(WW_PAUSED, 0, "ibv_poll_cq");
            }
            continue;
        }
        struct ww_status status = ww_link_wait(link, flow, WW_SIDE_RECV, "ibv_poll_cq");
        /* What another thread has found broken may have brought something before. */
        int broken = (status.code == WW_FAULT || status.code == WW_CLOSED) && !atomic_load(&link->stopped);
        if (status.code != WW_DONE && !(broken && take_arrived(link, data, nbytes, flow))) {
            return status;
        }
    }
    return ww_status_of(WW_DONE, 0, "ibv_poll_cq");
}

struct ww_status ww_link_recv(struct ww_link *link, void *data, size_t nbytes, struct ww_flow *flow)
{
    ww_flow_slice(flow);
    pthread_mutex_lock(&link->recv_lock);
    link->receivers++;
    pthread_mutex_unlock(&link->recv_lock);
    struct ww_status status = receive(link, data, nbytes, flow);
    pthread_mutex_lock(&link->recv_lock);
    link->receivers--;
    pthread_mutex_unlock(&link->recv_lock);
    return status;
}
