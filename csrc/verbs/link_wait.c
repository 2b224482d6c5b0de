#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "verbs/link_state.h"

/* How long after a completion the next is waited for awake: longer than a round trip on a network, shorter than anyone notices. */
#define SPIN_NS INT64_C(50000)
/* The end of the TCP connection can overtake what the peer sent before it: how long to go on looking. */
#define GRACE_NS INT64_C(20000000)
#define GRACE_STEP_NS 1000000

void ww_link_touch(struct ww_link *link)
{
    atomic_store_explicit(&link->recent_ns, ww_now_ns(), memory_order_relaxed);
}

/* 1: the peer has closed its end, *error tells how. */
static int hung_up(struct ww_link *link, int *error)
{
    struct pollfd watched = {.fd = link->tcp_fd, .events = POLLRDHUP};
    *error = 0;
    if (link->tcp_fd < 0 || poll(&watched, 1, 0) <= 0) {
        return 0;
    }
    char byte;
    pthread_mutex_lock(&link->fault_lock);
    if (recv(link->tcp_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
        link->hangup_error = errno;
    }
    *error = link->hangup_error;
    pthread_mutex_unlock(&link->fault_lock);
    return 1;
}

struct ww_status ww_link_health(struct ww_link *link, const char *operation)
{
    int error;
    if (atomic_load(&link->stopped)) {
        return ww_status_of(WW_CLOSED, 0, operation);
    }
    if (atomic_load(&link->faulty)) {
        struct ww_link_fault fault = ww_link_fault(link);
        if (fault.kind == WW_FAULT_STATUS && fault.wc_status == IBV_WC_WR_FLUSH_ERR) {
            /* The other queue may know the cause. */
            (void)ww_link_reap(link);
            fault = ww_link_fault(link);
        }
        /* A queue pair whose peer has left breaks in many ways; that the peer has left is what there is to say. */
        if (fault.kind == WW_FAULT_STATUS && hung_up(link, &error)) {
            return ww_status_of(WW_CLOSED, error, operation);
        }
        return ww_status_of(WW_FAULT, 0, operation);
    }
    if (atomic_load(&link->lost)) {
        return ww_status_of(WW_FAILED, atomic_load(&link->lost), link->lost_in); /* set before lost, and never again */
    }
    return ww_status_of(WW_DONE, 0, operation);
}

static void take_device_events(struct ww_link *link)
{
    struct ibv_async_event event;
    while (link->c.verbs->get_async_event(link->c.context, &event) == 0) {
        switch (event.event_type) {
        case IBV_EVENT_DEVICE_FATAL:
            ww_link_lose(link, ENODEV, "ibv_get_async_event");
            break;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
        case IBV_EVENT_CQ_ERR:
            ww_link_lose(link, EIO, "ibv_get_async_event");
            break;
        default: /* ports come and go; retries decide whether the connection does */
            break;
        }
        link->c.verbs->ack_async_event(&event);
    }
}

static void take_cq_events(struct ww_link *link, const struct ww_cq *cq)
{
    struct ibv_cq *which;
    void *unused;
    unsigned int n = 0;
    while (link->c.verbs->get_cq_event(cq->channel, &which, &unused) == 0) {
        n++;
    }
    if (n) {
        link->c.verbs->ack_cq_events(cq->cq, n);
    }
}

static int look(struct ww_link *link, enum ww_side side)
{
    if (side == WW_SIDE_SEND) {
        return ww_link_reap(link);
    }
    pthread_mutex_lock(&link->recv_lock);
    int n = ww_link_drain(link);
    n = n ? n : (int)link->held;
    pthread_mutex_unlock(&link->recv_lock);
    return n;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* 1: found something, or the link broke. */
static int spin(struct ww_link *link, enum ww_side side)
{
    int64_t started = ww_now_ns(), now = started;
    while (now - started < SPIN_NS && now - atomic_load_explicit(&link->recent_ns, memory_order_relaxed) < SPIN_NS) {
        if (look(link, side)) {
            return 1;
        }
        for (int i = 0; i < 16; i++) {
            relax();
        }
        now = ww_now_ns();
    }
    return 0;
}

/* The TCP socket is closed. What the peer sent before may still be on its way to us. */
static struct ww_status last_look(struct ww_link *link, const struct ww_cq *cq, const char *operation)
{
    int64_t now = ww_now_ns(), since = 0;
    if (atomic_compare_exchange_strong(&link->hangup_ns, &since, now)) {
        since = now;
    }
    if (now - since < GRACE_NS) {
        struct pollfd watched = {.fd = cq->fd, .events = POLLIN};
        struct timespec step = {.tv_sec = 0, .tv_nsec = GRACE_STEP_NS};
        (void)ppoll(&watched, 1, &step, NULL);
        return ww_status_of(WW_DONE, 0, operation);
    }
    int error;
    (void)hung_up(link, &error);
    return ww_status_of(WW_CLOSED, error, operation);
}

/* Asks for an event at the next completion. 0, or what the library said. */
static int arm(const struct ww_cq *cq)
{
    return ibv_req_notify_cq(cq->cq, 0);
}

enum { MINE, OTHER, TCP, WAKE, DEVICE, WATCHED };

static struct ww_status after_sleep(struct ww_link *link, struct pollfd *watched, const struct ww_cq *cq,
                                    const char *operation)
{
    if (watched[DEVICE].revents) {
        take_device_events(link);
        if (watched[DEVICE].revents & (POLLERR | POLLHUP | POLLNVAL)) {
            ww_link_lose(link, ENODEV, "ppoll");
        }
    }
    if (watched[MINE].revents & (POLLERR | POLLHUP | POLLNVAL)) {
        ww_link_lose(link, ENODEV, "ppoll");
    }
    if (watched[MINE].revents & POLLIN) {
        take_cq_events(link, cq);
        return ww_status_of(WW_DONE, 0, operation); /* before anything else: data that came is delivered */
    }
    struct ww_status health = ww_link_health(link, operation);
    if (health.code != WW_DONE) {
        return health;
    }
    if (watched[OTHER].revents) {
        pthread_mutex_lock(&link->recv_lock);
        /* A receiver that has come meanwhile waits for this event itself. */
        if (link->receivers == 0) {
            take_cq_events(link, link->c.recv_cq);
        }
        pthread_mutex_unlock(&link->recv_lock);
        return ww_status_of(WW_DONE, 0, operation);
    }
    if ((watched[TCP].revents & (POLLIN | POLLRDHUP | POLLHUP | POLLERR)) == POLLIN) {
        ww_link_blame(link, (struct ww_link_fault){.kind = WW_FAULT_TCP});
        return ww_status_of(WW_FAULT, 0, operation);
    }
    return watched[TCP].revents ? last_look(link, cq, operation) : ww_status_of(WW_DONE, 0, operation);
}

static struct ww_status wait_for(struct ww_link *link, struct ww_flow *flow, enum ww_side side, const char *operation)
{
    const struct ww_cq *cq = side == WW_SIDE_SEND ? link->c.send_cq : link->c.recv_cq;
    struct ww_status health = ww_link_health(link, operation);
    if (health.code != WW_DONE) {
        return health;
    }
    if (flow->impatient) {
        return ww_status_of(WW_PAUSED, 0, operation);
    }
    if (spin(link, side)) {
        return ww_status_of(WW_DONE, 0, operation);
    }
    int relieving = side == WW_SIDE_SEND && ww_link_relieve(link) >= 0;
    int refused = arm(cq);
    if (refused == 0 && relieving) {
        refused = arm(link->c.recv_cq);
    }
    if (refused) {
        return ww_status_of(WW_FAILED, refused < 0 ? EIO : refused, "ibv_req_notify_cq");
    }
    /* What completed before the queue was armed makes no event. */
    if (look(link, side) || (relieving && ww_link_relieve(link) > 0)) {
        return ww_status_of(WW_DONE, 0, operation);
    }
    struct timespec limit;
    int patient = flow->patient;
    /* A sender looks up: the thread that received when it went to sleep may have left, and what arrives is then its job. */
    flow->patient = patient && side == WW_SIDE_RECV;
    int last = ww_flow_limit(flow, &limit);
    flow->patient = patient;
    struct pollfd watched[WATCHED] = {
        [MINE] = {.fd = cq->fd, .events = POLLIN},
        [OTHER] = {.fd = relieving ? link->c.recv_cq->fd : -1, .events = POLLIN},
        [TCP] = {.fd = link->tcp_fd, .events = POLLRDHUP},
        [WAKE] = {.fd = link->wake_fd, .events = POLLIN},
        [DEVICE] = {.fd = link->c.context->async_fd, .events = POLLIN},
    };
    if (side == WW_SIDE_RECV && link->received == 0) {
        watched[TCP].events |= POLLIN; /* a peer that did not get as far as RDMA says nothing but that */
    }
    int ready = ppoll(watched, WATCHED, &limit, NULL);
    if (ready > 0) {
        return after_sleep(link, watched, cq, operation);
    }
    if (ready < 0 && errno != EINTR) {
        return ww_status_of(WW_FAILED, errno, "ppoll");
    }
    return ww_status_of(ready == 0 && last ? WW_TIMEOUT : WW_PAUSED, 0, operation);
}

struct ww_status ww_link_wait(struct ww_link *link, struct ww_flow *flow, enum ww_side side, const char *operation)
{
    int aside = ww_profile_aside(flow->profile, side == WW_SIDE_SEND ? WW_STAGE_BLOCKED : WW_STAGE_WAIT);
    struct ww_status status = wait_for(link, flow, side, operation);
    ww_profile_back(flow->profile, aside);
    return status;
}
