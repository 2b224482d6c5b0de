/* In place of the rest of this folder where the headers of libibverbs are missing: everything says that there is no RDMA. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "verbs/link.h"
#include "verbs/verbs.h"

#define ABSENT ww_status_of(WW_ABSENT, ENOSYS, "ibv_get_device_list")

struct ww_status ww_verbs_open(const struct ww_verbs **verbs, char *why, size_t why_size)
{
    *verbs = NULL;
    snprintf(why, why_size, "weightwire was built without RDMA: the headers of libibverbs were missing, or WEIGHTWIRE_VERBS=off");
    return ABSENT;
}

/* Nothing below can be reached with objects that exist: ww_verbs_open gives nobody the means to make one. */

struct ww_status ww_devices(const struct ww_verbs *v, struct ww_device_info *devices, int capacity, int *count)
{
    (void)v, (void)devices, (void)capacity;
    *count = 0;
    return ABSENT;
}

struct ww_status ww_context_open(const struct ww_verbs *v, const char *name, struct ibv_context **context)
{
    (void)v, (void)name;
    *context = NULL;
    return ABSENT;
}

int ww_context_close(const struct ww_verbs *v, struct ibv_context *context)
{
    (void)v, (void)context;
    return ENOSYS;
}

struct ww_status ww_port_count(const struct ww_verbs *v, struct ibv_context *context, int *count)
{
    (void)v, (void)context;
    *count = 0;
    return ABSENT;
}

struct ww_status ww_port(const struct ww_verbs *v, struct ibv_context *context, int port, struct ww_port_info *info)
{
    (void)v, (void)context, (void)port;
    memset(info, 0, sizeof *info);
    return ABSENT;
}

struct ww_status ww_gid(const struct ww_verbs *v, struct ibv_context *context, int port, int index, uint8_t raw[16], int *type)
{
    (void)v, (void)context, (void)port, (void)index;
    memset(raw, 0, 16);
    *type = WW_GID_UNKNOWN;
    return ABSENT;
}

struct ww_status ww_pd_alloc(const struct ww_verbs *v, struct ibv_context *context, struct ibv_pd **pd)
{
    (void)v, (void)context;
    *pd = NULL;
    return ABSENT;
}

int ww_pd_free(const struct ww_verbs *v, struct ibv_pd *pd)
{
    (void)v, (void)pd;
    return ENOSYS;
}

struct ww_status ww_mr_register(const struct ww_verbs *v, struct ibv_pd *pd, void *data, size_t nbytes, int writable,
                                struct ibv_mr **mr, uint32_t *key)
{
    (void)v, (void)pd, (void)data, (void)nbytes, (void)writable, (void)key;
    *mr = NULL;
    return ABSENT;
}

int ww_mr_free(const struct ww_verbs *v, struct ibv_mr *mr)
{
    (void)v, (void)mr;
    return ENOSYS;
}

struct ww_status ww_cq_create(const struct ww_verbs *v, struct ibv_context *context, int entries, struct ww_cq *cq)
{
    (void)v, (void)context, (void)entries;
    memset(cq, 0, sizeof *cq);
    cq->fd = -1;
    return ABSENT;
}

int ww_cq_free(const struct ww_verbs *v, struct ww_cq *cq)
{
    (void)v, (void)cq;
    return ENOSYS;
}

struct ww_status ww_cq_poll(const struct ww_cq *cq, struct ww_completion *completions, int capacity, int *count)
{
    (void)cq, (void)completions, (void)capacity;
    *count = 0;
    return ABSENT;
}

const char *ww_completion_text(const struct ww_verbs *v, int status)
{
    (void)v, (void)status;
    return "unknown";
}

struct ww_status ww_qp_create(const struct ww_verbs *v, struct ibv_pd *pd, const struct ww_cq *send_cq,
                              const struct ww_cq *recv_cq, struct ww_qp_limits *limits, struct ibv_qp **qp, uint32_t *number)
{
    (void)v, (void)pd, (void)send_cq, (void)recv_cq, (void)limits, (void)number;
    *qp = NULL;
    return ABSENT;
}

int ww_qp_free(const struct ww_verbs *v, struct ibv_qp *qp)
{
    (void)v, (void)qp;
    return ENOSYS;
}

struct ww_status ww_qp_init(const struct ww_verbs *v, struct ibv_qp *qp, int port)
{
    (void)v, (void)qp, (void)port;
    return ABSENT;
}

struct ww_status ww_qp_to_receive(const struct ww_verbs *v, struct ibv_qp *qp, int port, int gid_index, int mtu,
                                  const struct ww_qp_peer *peer)
{
    (void)v, (void)qp, (void)port, (void)gid_index, (void)mtu, (void)peer;
    return ABSENT;
}

struct ww_status ww_qp_to_send(const struct ww_verbs *v, struct ibv_qp *qp, uint32_t psn)
{
    (void)v, (void)qp, (void)psn;
    return ABSENT;
}

struct ww_status ww_qp_to_error(const struct ww_verbs *v, struct ibv_qp *qp)
{
    (void)v, (void)qp;
    return ABSENT;
}

struct ww_status ww_qp_post_send(struct ibv_qp *qp, uint64_t id, const void *data, uint32_t nbytes, uint32_t key, int inlined)
{
    (void)qp, (void)id, (void)data, (void)nbytes, (void)key, (void)inlined;
    return ABSENT;
}

struct ww_status ww_qp_post_receive(struct ibv_qp *qp, uint64_t id, void *data, uint32_t nbytes, uint32_t key)
{
    (void)qp, (void)id, (void)data, (void)nbytes, (void)key;
    return ABSENT;
}

struct ww_status ww_link_new(const struct ww_link_config *config, struct ww_link **link)
{
    (void)config;
    *link = NULL;
    return ABSENT;
}

void ww_link_attach(struct ww_link *link, int tcp_fd, int framing)
{
    (void)link, (void)tcp_fd, (void)framing;
}

void ww_link_free(struct ww_link *link)
{
    (void)link;
}

void ww_link_stop(struct ww_link *link)
{
    (void)link;
}

struct ww_status ww_link_send(struct ww_link *link, struct ww_link_parts *parts, struct ww_flow *flow)
{
    (void)link, (void)parts, (void)flow;
    return ABSENT;
}

struct ww_status ww_link_recv(struct ww_link *link, void *data, size_t nbytes, struct ww_flow *flow)
{
    (void)link, (void)data, (void)nbytes, (void)flow;
    return ABSENT;
}

struct ww_link_fault ww_link_fault(struct ww_link *link)
{
    (void)link;
    return (struct ww_link_fault){.kind = WW_FAULT_NONE};
}

size_t ww_link_peek(struct ww_link *link, void *data, size_t nbytes)
{
    (void)link;
    (void)data;
    (void)nbytes;
    return 0;
}

struct ww_link_counts ww_link_counts(const struct ww_link *link)
{
    (void)link;
    return (struct ww_link_counts){.high_water = 0};
}
