/* The functions of libibverbs. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void lock(void)
{
    pthread_mutex_lock(&fake.lock);
}

static void unlock(void)
{
    pthread_mutex_unlock(&fake.lock);
}

/* Fails as libibverbs does: NULL and errno. */
static int refuse(const char *call, const char *detail)
{
    lock();
    int error = fake_failure(call, detail);
    unlock();
    if (error) {
        errno = error;
    }
    return error;
}

static int misused(void)
{
    lock();
    fake.misuse++;
    unlock();
    return EBUSY;
}

/* Pins within the budget; 0: does not fit. */
static int pin(long nbytes)
{
    lock();
    int fits = fake.s_budget < 0 || fake.pinned + nbytes <= fake.s_budget;
    if (fits) {
        fake.pinned += nbytes;
    }
    unlock();
    errno = fits ? errno : ENOMEM;
    return fits;
}

static void count(long *what, long by)
{
    lock();
    *what += by;
    unlock();
}

struct ibv_device **ibv_get_device_list(int *n)
{
    if (refuse("get_device_list", NULL)) {
        return NULL;
    }
    struct ibv_device **list = calloc(FAKE_DEVICES + 1, sizeof *list);
    lock();
    int devices = (int)fake.s_devices;
    for (int i = 0; i < devices; i++) {
        list[i] = &fake.devices[i];
    }
    unlock();
    if (n) {
        *n = devices;
    }
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
    uint8_t raw[8] = {0x02, 0, 0, 0xff, 0xfe, 0, 0, (uint8_t)(device - fake.devices)};
    __be64 guid;
    memcpy(&guid, raw, 8);
    return guid;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    int ends[2];
    if (refuse("open_device", NULL) || pipe2(ends, O_CLOEXEC)) {
        return NULL;
    }
    struct fake_context *context = calloc(1, sizeof *context);
    context->base.device = device;
    context->base.async_fd = ends[0];
    context->base.cmd_fd = -1;
    context->base.ops.post_send = fake_post_send;
    context->base.ops.post_recv = fake_post_recv;
    context->base.ops.poll_cq = fake_poll_cq;
    context->base.ops.req_notify_cq = fake_req_notify_cq;
    context->events = ends[1];
    lock();
    context->next = fake.contexts;
    fake.contexts = context;
    fake.n_contexts++;
    unlock();
    return &context->base;
}

int ibv_close_device(struct ibv_context *base)
{
    struct fake_context *context = (struct fake_context *)base, **at = &fake.contexts;
    lock();
    while (*at != context) {
        at = &(*at)->next;
    }
    *at = context->next;
    fake.n_contexts--;
    fake.misuse += fake.inside;
    unlock();
    close(base->async_fd);
    close(context->events);
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
    (void)context;
    fake_linger();
    memset(attributes, 0, sizeof *attributes);
    attributes->phys_port_cnt = 1;
    return refuse("query_device", NULL);
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat)
{
    struct ibv_port_attr *attributes = (struct ibv_port_attr *)compat;
    (void)context;
    fake_linger();
    int error = refuse("query_port", NULL);
    if (error || port != 1) {
        return error ? error : EINVAL;
    }
    lock();
    attributes->state = (enum ibv_port_state)fake.s_port_state;
    unlock();
    attributes->max_mtu = IBV_MTU_4096;
    attributes->active_mtu = IBV_MTU_1024;
    attributes->gid_tbl_len = FAKE_GIDS;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    attributes->active_width = 2;
    attributes->active_speed = 32;
    return 0;
}

static int empty(int index)
{
    static const uint8_t nothing[16];
    return memcmp(fake.gids[index].raw, nothing, 16) == 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    (void)context;
    if (refuse("query_gid", NULL)) {
        return -1;
    }
    if (port != 1 || index < 0 || index >= FAKE_GIDS) {
        errno = EINVAL;
        return -1;
    }
    lock();
    memcpy(gid->raw, fake.gids[index].raw, 16);
    unlock();
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags,
                      size_t entry_size)
{
    (void)context, (void)flags, (void)entry_size;
    int error = refuse("query_gid_ex", NULL);
    if (error || port != 1 || index >= FAKE_GIDS) {
        return error ? error : EINVAL;
    }
    lock();
    int none = empty((int)index);
    memcpy(entry->gid.raw, fake.gids[index].raw, 16);
    entry->gid_type = (uint32_t)fake.gids[index].type;
    unlock();
    return none ? ENODATA : 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    if (refuse("alloc_pd", NULL)) {
        return NULL;
    }
    struct fake_pd *pd = calloc(1, sizeof *pd);
    pd->base.context = context;
    count(&fake.n_pds, 1);
    return &pd->base;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    if (((struct fake_pd *)pd)->users) {
        return misused();
    }
    free(pd);
    count(&fake.n_pds, -1);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t nbytes, int access)
{
    if (refuse("reg_mr", NULL) || !pin((long)nbytes)) {
        return NULL;
    }
    struct fake_mr *mr = calloc(1, sizeof *mr);
    mr->base.context = pd->context;
    mr->base.pd = pd;
    mr->base.addr = addr;
    mr->base.length = nbytes;
    mr->writable = (access & IBV_ACCESS_LOCAL_WRITE) != 0;
    lock();
    mr->base.lkey = fake.next_key += 0x101;
    mr->next = fake.regions;
    fake.regions = mr;
    fake.n_mrs++;
    ((struct fake_pd *)pd)->users++;
    unlock();
    return &mr->base;
}

int ibv_dereg_mr(struct ibv_mr *base)
{
    struct fake_mr **at = &fake.regions;
    lock();
    while (&(*at)->base != base) {
        at = &(*at)->next;
    }
    *at = (*at)->next;
    fake.pinned -= (long)base->length;
    fake.n_mrs--;
    ((struct fake_pd *)base->pd)->users--;
    unlock();
    free(base);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    int ends[2];
    if (refuse("create_comp_channel", NULL) || pipe2(ends, O_CLOEXEC)) {
        return NULL;
    }
    struct fake_channel *channel = calloc(1, sizeof *channel);
    channel->base.context = context;
    channel->base.fd = ends[0];
    channel->events = ends[1];
    count(&fake.n_channels, 1);
    return &channel->base;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *base)
{
    struct fake_channel *channel = (struct fake_channel *)base;
    if (channel->users) {
        return misused();
    }
    close(base->fd);
    close(channel->events);
    free(channel);
    count(&fake.n_channels, -1);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *private, struct ibv_comp_channel *channel, int vector)
{
    (void)vector;
    if (refuse("create_cq", NULL)) {
        return NULL;
    }
    if (entries > FAKE_QUEUE) {
        errno = EINVAL;
        return NULL;
    }
    struct fake_cq *queue = calloc(1, sizeof *queue);
    queue->base.context = context;
    queue->base.channel = channel;
    queue->base.cq_context = private;
    queue->base.cqe = entries;
    queue->capacity = entries;
    lock();
    ((struct fake_channel *)channel)->users++;
    fake.n_cqs++;
    unlock();
    return &queue->base;
}

int ibv_destroy_cq(struct ibv_cq *base)
{
    struct fake_cq *queue = (struct fake_cq *)base;
    if (queue->users) {
        return misused();
    }
    lock();
    struct fake_channel *channel = (struct fake_channel *)base->channel;
    channel->users--;
    fake.n_cqs--;
    unlock();
    /* The real one waits here for ever for events that were taken and not acknowledged. */
    struct ibv_cq *which;
    int flags = fcntl(base->channel->fd, F_GETFL);
    fcntl(base->channel->fd, F_SETFL, flags | O_NONBLOCK);
    while (read(base->channel->fd, &which, sizeof which) == sizeof which) {
        queue->raised--;
    }
    if (queue->raised != queue->acknowledged) {
        misused();
    }
    free(queue);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **private)
{
    if (read(channel->fd, queue, sizeof *queue) != sizeof *queue) {
        return -1;
    }
    *private = (*queue)->cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *queue, unsigned int n)
{
    lock();
    ((struct fake_cq *)queue)->acknowledged += n;
    unlock();
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
    const char *detail = attributes->cap.max_inline_data ? "INLINE" : "PLAIN";
    if (refuse("create_qp", detail)) {
        return NULL;
    }
    lock();
    int fits = (long)attributes->cap.max_inline_data <= fake.s_max_inline;
    long cost = fake.s_queue_cost;
    unlock();
    if (!fits || attributes->qp_type != IBV_QPT_RC || attributes->cap.max_send_wr > FAKE_QUEUE ||
        attributes->cap.max_recv_wr > FAKE_QUEUE) {
        errno = EINVAL;
        return NULL;
    }
    if (!pin(cost)) {
        return NULL;
    }
    struct fake_qp *pair = calloc(1, sizeof *pair);
    pair->base.context = pd->context;
    pair->base.pd = pd;
    pair->base.send_cq = attributes->send_cq;
    pair->base.recv_cq = attributes->recv_cq;
    pair->base.qp_type = IBV_QPT_RC;
    pair->base.state = IBV_QPS_RESET;
    pair->base.handle = (uint32_t)cost;
    pair->cap = attributes->cap;
    lock();
    pair->base.qp_num = 0x1000001 + fake.next_pair++; /* more than the 24 bits of a sequence number */
    pair->next = fake.pairs;
    fake.pairs = pair;
    fake.n_qps++;
    ((struct fake_pd *)pd)->users++;
    ((struct fake_cq *)pair->base.send_cq)->users++;
    ((struct fake_cq *)pair->base.recv_cq)->users++;
    unlock();
    return &pair->base;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attributes, int mask)
{
    static const struct {
        const char *name;
        int from, needs;
    } steps[] = {
        [IBV_QPS_INIT] = {"INIT", IBV_QPS_RESET, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
        [IBV_QPS_RTR] = {"RTR", IBV_QPS_INIT,
                         IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                             IBV_QP_MIN_RNR_TIMER},
        [IBV_QPS_RTS] = {"RTS", IBV_QPS_RTR,
                         IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC},
    };
    struct fake_qp *pair = (struct fake_qp *)base;
    int to = attributes->qp_state;
    fake_linger();
    if (to == IBV_QPS_ERR) {
        lock();
        fake_break(pair, IBV_WC_WR_FLUSH_ERR);
        fake_move();
        unlock();
        return 0;
    }
    if (to < IBV_QPS_INIT || to > IBV_QPS_RTS) {
        return EINVAL;
    }
    int error = refuse("modify_qp", steps[to].name);
    if (error) {
        return error;
    }
    if ((int)base->state != steps[to].from || (mask & ~IBV_QP_STATE) != steps[to].needs) {
        return EINVAL;
    }
    if (to == IBV_QPS_RTR && (attributes->rq_psn >> 24 || attributes->ah_attr.grh.hop_limit != 1 || !attributes->ah_attr.is_global)) {
        return EINVAL;
    }
    lock();
    base->state = (enum ibv_qp_state)to;
    if (to == IBV_QPS_RTR) {
        pair->peer = attributes->dest_qp_num;
    } else if (to == IBV_QPS_RTS) {
        pair->rnr_retry = attributes->rnr_retry;
    }
    fake_move();
    unlock();
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *base)
{
    struct fake_qp *pair = (struct fake_qp *)base, **at = &fake.pairs;
    lock();
    for (int i = 0; i < pair->held_sends; i++) {
        struct fake_request *request = &pair->sends[(pair->first_send + i) % FAKE_QUEUE];
        if (request->inlined) {
            free(request->data);
        }
    }
    while (*at != pair) {
        at = &(*at)->next;
    }
    *at = pair->next;
    fake.n_qps--;
    fake.misuse += fake.inside;
    fake.pinned -= (long)base->handle;
    ((struct fake_pd *)base->pd)->users--;
    ((struct fake_cq *)base->send_cq)->users--;
    ((struct fake_cq *)base->recv_cq)->users--;
    fake_move();
    unlock();
    free(pair);
    return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    return read(context->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    static const char *const names[] = {
        [IBV_WC_SUCCESS] = "success",
        [IBV_WC_LOC_LEN_ERR] = "local length error",
        [IBV_WC_LOC_PROT_ERR] = "local protection error",
        [IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
        [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
        [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
        [IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
    };
    return status < sizeof names / sizeof *names && names[status] ? names[status] : "another error";
}
