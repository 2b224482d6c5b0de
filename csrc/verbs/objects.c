#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "verbs/table.h"
#include "verbs/verbs.h"

#define POLL_MAX 16

static struct ww_status failed(int error, const char *operation)
{
    return ww_status_of(WW_FAILED, error ? error : EIO, operation);
}

/* Some of the library's functions return an errno value, some -1 and set errno. */
static struct ww_status outcome(int returned, const char *operation)
{
    if (returned == 0) {
        return ww_status_of(WW_DONE, 0, operation);
    }
    return failed(returned < 0 ? errno : returned, operation);
}

struct ww_status ww_pd_alloc(const struct ww_verbs *verbs, struct ibv_context *context, struct ibv_pd **pd)
{
    errno = 0;
    *pd = verbs->alloc_pd(context);
    return *pd ? ww_status_of(WW_DONE, 0, "ibv_alloc_pd") : failed(errno, "ibv_alloc_pd");
}

int ww_pd_free(const struct ww_verbs *verbs, struct ibv_pd *pd)
{
    return verbs->dealloc_pd(pd);
}

struct ww_status ww_mr_register(const struct ww_verbs *verbs, struct ibv_pd *pd, void *data, size_t nbytes, int writable,
                                struct ibv_mr **mr, uint32_t *key)
{
    errno = 0;
    *mr = verbs->reg_mr(pd, data, nbytes, writable ? IBV_ACCESS_LOCAL_WRITE : 0);
    if (!*mr) {
        return failed(errno, "ibv_reg_mr");
    }
    *key = (*mr)->lkey;
    return ww_status_of(WW_DONE, 0, "ibv_reg_mr");
}

int ww_mr_free(const struct ww_verbs *verbs, struct ibv_mr *mr)
{
    return verbs->dereg_mr(mr);
}

struct ww_status ww_cq_create(const struct ww_verbs *verbs, struct ibv_context *context, int entries, struct ww_cq *cq)
{
    memset(cq, 0, sizeof *cq);
    cq->fd = -1;
    errno = 0;
    cq->channel = verbs->create_comp_channel(context);
    if (!cq->channel) {
        return failed(errno, "ibv_create_comp_channel");
    }
    struct ww_status status = ww_status_of(WW_DONE, 0, "ibv_create_cq");
    int flags = fcntl(cq->channel->fd, F_GETFL);
    if (flags < 0 || fcntl(cq->channel->fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        status = failed(errno, "fcntl");
    } else {
        errno = 0;
        cq->cq = verbs->create_cq(context, entries, NULL, cq->channel, 0);
        if (!cq->cq) {
            status = failed(errno, "ibv_create_cq");
        }
    }
    if (status.code != WW_DONE) {
        verbs->destroy_comp_channel(cq->channel);
        cq->channel = NULL;
        return status;
    }
    cq->fd = cq->channel->fd;
    return status;
}

int ww_cq_free(const struct ww_verbs *verbs, struct ww_cq *cq)
{
    int error = cq->cq ? verbs->destroy_cq(cq->cq) : 0;
    int also = cq->channel ? verbs->destroy_comp_channel(cq->channel) : 0;
    memset(cq, 0, sizeof *cq);
    cq->fd = -1;
    return error ? error : also;
}

struct ww_status ww_cq_poll(const struct ww_cq *cq, struct ww_completion *completions, int capacity, int *count)
{
    struct ibv_wc found[POLL_MAX];
    int n = ibv_poll_cq(cq->cq, capacity < POLL_MAX ? capacity : POLL_MAX, found);
    *count = n < 0 ? 0 : n;
    if (n < 0) {
        return failed(0, "ibv_poll_cq");
    }
    for (int i = 0; i < n; i++) {
        completions[i].id = found[i].wr_id;
        completions[i].status = found[i].status;
        completions[i].vendor = found[i].vendor_err;
        /* Of a completion in error only the fields above mean anything. */
        completions[i].nbytes = found[i].status == IBV_WC_SUCCESS ? found[i].byte_len : 0;
        completions[i].received = found[i].status == IBV_WC_SUCCESS && (found[i].opcode & IBV_WC_RECV) != 0;
    }
    return ww_status_of(WW_DONE, 0, "ibv_poll_cq");
}

const char *ww_completion_text(const struct ww_verbs *verbs, int status)
{
    const char *text = verbs->wc_status_str((enum ibv_wc_status)status);
    return text ? text : "unknown";
}

struct ww_status ww_qp_create(const struct ww_verbs *verbs, struct ibv_pd *pd, const struct ww_cq *send_cq,
                              const struct ww_cq *recv_cq, struct ww_qp_limits *limits, struct ibv_qp **qp, uint32_t *number)
{
    uint32_t wishes[] = {limits->inlined, 0};
    *qp = NULL;
    for (int i = 0; i < 2 && !*qp; i++) {
        struct ibv_qp_init_attr attributes;
        memset(&attributes, 0, sizeof attributes);
        attributes.send_cq = send_cq->cq;
        attributes.recv_cq = recv_cq->cq;
        attributes.qp_type = IBV_QPT_RC;
        attributes.sq_sig_all = 1;
        attributes.cap.max_send_wr = limits->sends;
        attributes.cap.max_recv_wr = limits->receives;
        attributes.cap.max_send_sge = 1;
        attributes.cap.max_recv_sge = 1;
        attributes.cap.max_inline_data = wishes[i];
        errno = 0;
        *qp = verbs->create_qp(pd, &attributes);
        uint32_t granted = attributes.cap.max_inline_data;
        limits->inlined = granted < wishes[i] ? granted : wishes[i];
        if (!*qp && wishes[i] == 0) {
            break;
        }
    }
    if (!*qp) {
        return failed(errno, "ibv_create_qp");
    }
    *number = (*qp)->qp_num;
    return ww_status_of(WW_DONE, 0, "ibv_create_qp");
}

int ww_qp_free(const struct ww_verbs *verbs, struct ibv_qp *qp)
{
    return verbs->destroy_qp(qp);
}

struct ww_status ww_qp_init(const struct ww_verbs *verbs, struct ibv_qp *qp, int port)
{
    struct ibv_qp_attr attributes;
    if (!ww_is_port(port)) {
        return failed(EINVAL, "ibv_modify_qp to INIT");
    }
    memset(&attributes, 0, sizeof attributes);
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = (uint8_t)port;
    return outcome(verbs->modify_qp(qp, &attributes,
                                    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
                   "ibv_modify_qp to INIT");
}

struct ww_status ww_qp_to_receive(const struct ww_verbs *verbs, struct ibv_qp *qp, int port, int gid_index, int mtu,
                                  const struct ww_qp_peer *peer)
{
    struct ibv_qp_attr attributes;
    if (!ww_is_port(port)) {
        return failed(EINVAL, "ibv_modify_qp to RTR");
    }
    memset(&attributes, 0, sizeof attributes);
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = (enum ibv_mtu)mtu;
    attributes.dest_qp_num = peer->number;
    attributes.rq_psn = peer->psn;
    attributes.max_dest_rd_atomic = 1;
    attributes.min_rnr_timer = 1;
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.port_num = (uint8_t)port;
    memcpy(attributes.ah_attr.grh.dgid.raw, peer->gid, 16);
    attributes.ah_attr.grh.sgid_index = (uint8_t)gid_index;
    attributes.ah_attr.grh.hop_limit = 1;
    return outcome(verbs->modify_qp(qp, &attributes,
                                    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
                   "ibv_modify_qp to RTR");
}

struct ww_status ww_qp_to_send(const struct ww_verbs *verbs, struct ibv_qp *qp, uint32_t psn)
{
    struct ibv_qp_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = 14;  /* 4.096 us * 2^14 = 67 ms */
    attributes.retry_cnt = 7;
    attributes.rnr_retry = 7; /* for ever: a peer that reads slowly is no error */
    attributes.sq_psn = psn;
    attributes.max_rd_atomic = 1;
    return outcome(verbs->modify_qp(qp, &attributes,
                                    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                        IBV_QP_MAX_QP_RD_ATOMIC),
                   "ibv_modify_qp to RTS");
}

struct ww_status ww_qp_to_error(const struct ww_verbs *verbs, struct ibv_qp *qp)
{
    struct ibv_qp_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.qp_state = IBV_QPS_ERR;
    return outcome(verbs->modify_qp(qp, &attributes, IBV_QP_STATE), "ibv_modify_qp to ERR");
}

struct ww_status ww_qp_post_send(struct ibv_qp *qp, uint64_t id, const void *data, uint32_t nbytes, uint32_t key, int inlined)
{
    struct ibv_sge part = {.addr = (uintptr_t)data, .length = nbytes, .lkey = key};
    struct ibv_send_wr request, *bad;
    memset(&request, 0, sizeof request);
    request.wr_id = id;
    request.sg_list = &part;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    request.send_flags = IBV_SEND_SIGNALED | (inlined ? IBV_SEND_INLINE : 0);
    return outcome(ibv_post_send(qp, &request, &bad), "ibv_post_send");
}

struct ww_status ww_qp_post_receive(struct ibv_qp *qp, uint64_t id, void *data, uint32_t nbytes, uint32_t key)
{
    struct ibv_sge part = {.addr = (uintptr_t)data, .length = nbytes, .lkey = key};
    struct ibv_recv_wr request, *bad;
    memset(&request, 0, sizeof request);
    request.wr_id = id;
    request.sg_list = &part;
    request.num_sge = 1;
    return outcome(ibv_post_recv(qp, &request, &bad), "ibv_post_recv");
}
