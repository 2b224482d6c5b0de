/* Work requests, and what becomes of them. */
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fake_qp *fake_pair(uint32_t number)
{
    struct fake_qp *pair = fake.pairs;
    while (pair && pair->base.qp_num != number) {
        pair = pair->next;
    }
    return pair;
}

void fake_complete(struct fake_cq *queue, struct fake_qp *pair, uint64_t id, int status, int opcode, uint32_t nbytes)
{
    if (queue->held == queue->capacity) {
        fake.misuse++; /* an overrun: a real queue would lose it */
        return;
    }
    struct ibv_wc *wc = &queue->queue[(queue->first + queue->held++) % FAKE_QUEUE];
    memset(wc, 0xee, sizeof *wc); /* of a completion in error, most fields mean nothing */
    wc->wr_id = id;
    wc->status = (enum ibv_wc_status)status;
    wc->vendor_err = status == IBV_WC_SUCCESS ? 0 : 0x40 + (uint32_t)status;
    wc->qp_num = pair->base.qp_num;
    if (status == IBV_WC_SUCCESS) {
        wc->opcode = (enum ibv_wc_opcode)opcode;
        wc->byte_len = nbytes;
    }
    if (queue->armed && queue->base.channel) {
        struct fake_channel *channel = (struct fake_channel *)queue->base.channel;
        struct ibv_cq *which = &queue->base;
        queue->armed = 0;
        queue->raised++;
        if (write(channel->events, &which, sizeof which) != sizeof which) {
            fake.misuse++;
        }
    }
}

static struct fake_request take(struct fake_request *queue, int *first, int *held)
{
    struct fake_request request = queue[*first];
    *first = (*first + 1) % FAKE_QUEUE;
    (*held)--;
    return request;
}

static struct fake_request take_send(struct fake_qp *pair)
{
    return take(pair->sends, &pair->first_send, &pair->held_sends);
}

static struct fake_request take_receive(struct fake_qp *pair)
{
    return take(pair->receives, &pair->first_receive, &pair->held_receives);
}

static void send_done(struct fake_qp *pair, struct fake_request *request, int status)
{
    if (request->inlined) {
        free(request->data);
    }
    fake_complete((struct fake_cq *)pair->base.send_cq, pair, request->id, status, IBV_WC_SEND, 0);
}

static void receive_done(struct fake_qp *pair, struct fake_request *request, int status, uint32_t nbytes)
{
    fake_complete((struct fake_cq *)pair->base.recv_cq, pair, request->id, status, IBV_WC_RECV, nbytes);
}

void fake_break(struct fake_qp *pair, int status)
{
    pair->base.state = IBV_QPS_ERR;
    while (pair->held_sends) {
        struct fake_request request = take_send(pair);
        send_done(pair, &request, status);
        status = IBV_WC_WR_FLUSH_ERR;
    }
    while (pair->held_receives) {
        struct fake_request request = take_receive(pair);
        receive_done(pair, &request, IBV_WC_WR_FLUSH_ERR, 0);
    }
}

static int within(const struct fake_qp *pair, const struct fake_request *request, int writing)
{
    uintptr_t at = (uintptr_t)request->data;
    for (struct fake_mr *region = fake.regions; region; region = region->next) {
        uintptr_t base = (uintptr_t)region->base.addr;
        if (region->base.lkey == request->key && region->base.pd == pair->base.pd && (!writing || region->writable)) {
            return at >= base && request->nbytes <= region->base.length && at - base <= region->base.length - request->nbytes;
        }
    }
    return 0;
}

/* One SEND to its end, if there is anything it can do. */
static int move_one(struct fake_qp *pair)
{
    struct fake_qp *peer = fake_pair(pair->peer);
    if (!pair->held_sends || pair->base.state != IBV_QPS_RTS || fake.s_stall) {
        return 0;
    }
    struct fake_request *next = &pair->sends[pair->first_send];
    if (!next->inlined && !within(pair, next, 0)) {
        struct fake_request request = take_send(pair);
        send_done(pair, &request, IBV_WC_LOC_PROT_ERR);
        fake_break(pair, IBV_WC_WR_FLUSH_ERR);
        return 1;
    }
    if (!peer || peer->base.state == IBV_QPS_ERR || peer->peer != pair->base.qp_num) {
        struct fake_request request = take_send(pair);
        send_done(pair, &request, IBV_WC_RETRY_EXC_ERR);
        fake_break(pair, IBV_WC_WR_FLUSH_ERR);
        return 1;
    }
    if (peer->base.state != IBV_QPS_RTR && peer->base.state != IBV_QPS_RTS) {
        return 0; /* it will be ready, or retries will end */
    }
    if (!peer->held_receives) {
        if (pair->rnr_retry == 7) {
            return 0;
        }
        struct fake_request request = take_send(pair);
        send_done(pair, &request, IBV_WC_RNR_RETRY_EXC_ERR);
        fake_break(pair, IBV_WC_WR_FLUSH_ERR);
        return 1;
    }
    struct fake_request request = take_send(pair), slot = take_receive(peer);
    if (request.nbytes > slot.nbytes || !within(peer, &slot, 1)) {
        receive_done(peer, &slot, request.nbytes > slot.nbytes ? IBV_WC_LOC_LEN_ERR : IBV_WC_LOC_PROT_ERR, 0);
        send_done(pair, &request, IBV_WC_REM_INV_REQ_ERR);
        fake_break(peer, IBV_WC_WR_FLUSH_ERR);
        fake_break(pair, IBV_WC_WR_FLUSH_ERR);
        return 1;
    }
    memcpy(slot.data, request.data, request.nbytes);
    receive_done(peer, &slot, IBV_WC_SUCCESS, request.nbytes);
    send_done(pair, &request, IBV_WC_SUCCESS);
    return 1;
}

void fake_move(void)
{
    int moved;
    do {
        moved = 0;
        for (struct fake_qp *pair = fake.pairs; pair; pair = pair->next) {
            moved |= move_one(pair);
        }
    } while (moved);
}

static int queue_send(struct fake_qp *pair, const struct ibv_send_wr *request)
{
    int error = fake_failure("post_send", NULL);
    int inlined = (request->send_flags & IBV_SEND_INLINE) != 0;
    uint32_t nbytes = request->sg_list[0].length;
    if (error) {
        return error;
    }
    if (request->num_sge != 1 || request->opcode != IBV_WR_SEND || (inlined && nbytes > pair->cap.max_inline_data) ||
        pair->base.state == IBV_QPS_RESET || pair->base.state == IBV_QPS_INIT || pair->base.state == IBV_QPS_RTR) {
        return EINVAL;
    }
    if (pair->incomplete >= (int)pair->cap.max_send_wr) {
        return ENOMEM;
    }
    struct fake_request new = {.id = request->wr_id, .data = (uint8_t *)(uintptr_t)request->sg_list[0].addr, .nbytes = nbytes,
                               .key = request->sg_list[0].lkey, .inlined = inlined};
    if (inlined) {
        new.data = malloc(nbytes ? nbytes : 1);
        memcpy(new.data, (void *)(uintptr_t)request->sg_list[0].addr, nbytes);
    }
    pair->incomplete++;
    if (pair->incomplete > fake.most_in_flight) {
        fake.most_in_flight = pair->incomplete;
    }
    if (pair->base.state == IBV_QPS_ERR) {
        send_done(pair, &new, IBV_WC_WR_FLUSH_ERR);
        return 0;
    }
    pair->sends[(pair->first_send + pair->held_sends++) % FAKE_QUEUE] = new;
    return 0;
}

int fake_post_send(struct ibv_qp *base, struct ibv_send_wr *request, struct ibv_send_wr **bad)
{
    int error = 0;
    pthread_mutex_lock(&fake.lock);
    for (; request && !error; request = request->next) {
        error = queue_send((struct fake_qp *)base, request);
        if (error) {
            *bad = request;
        }
    }
    fake_move();
    pthread_mutex_unlock(&fake.lock);
    return error;
}

int fake_post_recv(struct ibv_qp *base, struct ibv_recv_wr *request, struct ibv_recv_wr **bad)
{
    struct fake_qp *pair = (struct fake_qp *)base;
    pthread_mutex_lock(&fake.lock);
    int error = fake_failure("post_recv", NULL);
    for (; request && !error; request = request->next) {
        if (request->num_sge != 1 || base->state == IBV_QPS_RESET) {
            error = EINVAL;
        } else if (pair->held_receives >= (int)pair->cap.max_recv_wr) {
            error = ENOMEM;
        } else {
            struct fake_request new = {.id = request->wr_id, .data = (uint8_t *)(uintptr_t)request->sg_list[0].addr,
                                       .nbytes = request->sg_list[0].length, .key = request->sg_list[0].lkey};
            if (base->state == IBV_QPS_ERR) {
                receive_done(pair, &new, IBV_WC_WR_FLUSH_ERR, 0);
            } else {
                pair->receives[(pair->first_receive + pair->held_receives++) % FAKE_QUEUE] = new;
            }
        }
        if (error) {
            *bad = request;
        }
    }
    fake_move();
    pthread_mutex_unlock(&fake.lock);
    return error;
}

int fake_poll_cq(struct ibv_cq *base, int capacity, struct ibv_wc *found)
{
    struct fake_cq *queue = (struct fake_cq *)base;
    int n = 0;
    pthread_mutex_lock(&fake.lock);
    fake.polls++;
    if (fake_failure("poll_cq", NULL)) {
        n = -1;
    }
    while (n >= 0 && n < capacity && queue->held) {
        found[n] = queue->queue[queue->first];
        struct fake_qp *pair = fake_pair(found[n].qp_num);
        if (pair && pair->base.send_cq == base && pair->incomplete) {
            pair->incomplete--;
        }
        queue->first = (queue->first + 1) % FAKE_QUEUE;
        queue->held--;
        n++;
    }
    pthread_mutex_unlock(&fake.lock);
    return n;
}

int fake_req_notify_cq(struct ibv_cq *base, int solicited)
{
    (void)solicited;
    pthread_mutex_lock(&fake.lock);
    int error = fake_failure("req_notify_cq", NULL);
    fake.arms++;
    if (!error) {
        ((struct fake_cq *)base)->armed = 1;
    }
    pthread_mutex_unlock(&fake.lock);
    return error;
}
