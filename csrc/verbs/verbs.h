/* Verbs objects: devices, ports, GIDs, protection domains, completion queues, memory regions, RC queue pairs.
 *
 * libibverbs is opened when first wanted, never linked to: a machine without it gets WW_ABSENT, not a module that does not
 * load. Handles are the library's own, opaque here. Source: rdma-core's manual pages, ibv_*(3). */
#ifndef WW_VERBS_H
#define WW_VERBS_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

struct ibv_context;
struct ibv_pd;
struct ibv_mr;
struct ibv_cq;
struct ibv_comp_channel;
struct ibv_qp;
struct ww_verbs; /* the library's functions */

/* What only verbs can report, beside enum ww_code. */
enum ww_verbs_code {
    WW_ABSENT = 32, /* no libibverbs, or one without a function that is needed */
    WW_FAULT        /* a completion that ends the connection: see ww_link_fault */
};

/* Opens $WEIGHTWIRE_LIBIBVERBS, or libibverbs.so.1; once for the process, from any thread. WW_ABSENT: why tells. */
struct ww_status ww_verbs_open(const struct ww_verbs **verbs, char *why, size_t why_size);

struct ww_device_info {
    char name[64];
    char path[256]; /* in sysfs */
    uint64_t guid;  /* big-endian, as the device has it */
    int transport;  /* enum ibv_transport_type: 0 InfiniBand or RoCE, 1 iWARP */
};

/* Fills up to capacity entries; *count is how many devices there are. A kernel without RDMA has none. */
struct ww_status ww_devices(const struct ww_verbs *verbs, struct ww_device_info *devices, int capacity, int *count);

/* WW_FAILED with ENODEV: no device has this name (any more). */
struct ww_status ww_context_open(const struct ww_verbs *verbs, const char *name, struct ibv_context **context);
int ww_context_close(const struct ww_verbs *verbs, struct ibv_context *context);

struct ww_port_info {
    int state;         /* enum ibv_port_state: 4 is active */
    int mtu;           /* enum ibv_mtu: 1 is 256 bytes, 5 is 4096 */
    int max_mtu;
    int link_layer;    /* 1 InfiniBand, 2 Ethernet */
    int width;         /* bits: 1, 2, 4, 8, 16 for 1x, 4x, 8x, 12x, 2x */
    int speed;         /* bits, per lane */
    int gid_count;
};

struct ww_status ww_port_count(const struct ww_verbs *verbs, struct ibv_context *context, int *count);
struct ww_status ww_port(const struct ww_verbs *verbs, struct ibv_context *context, int port, struct ww_port_info *info);

enum ww_gid_type { WW_GID_UNKNOWN = -1, WW_GID_IB = 0, WW_GID_ROCE_V1 = 1, WW_GID_ROCE_V2 = 2 };

/* One entry of a port's GID table. WW_SHORT: the entry is empty. */
struct ww_status ww_gid(const struct ww_verbs *verbs, struct ibv_context *context, int port, int index, uint8_t raw[16],
                        int *type);

struct ww_status ww_pd_alloc(const struct ww_verbs *verbs, struct ibv_context *context, struct ibv_pd **pd);
int ww_pd_free(const struct ww_verbs *verbs, struct ibv_pd *pd);

/* Pins memory. writable: the device may write there. WW_FAILED with ENOMEM: over the limit of locked memory. */
struct ww_status ww_mr_register(const struct ww_verbs *verbs, struct ibv_pd *pd, void *data, size_t nbytes, int writable,
                                struct ibv_mr **mr, uint32_t *key);
int ww_mr_free(const struct ww_verbs *verbs, struct ibv_mr *mr);

/* A completion queue and the channel that tells when it is no longer empty. */
struct ww_cq {
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    int fd; /* of the channel, non-blocking */
};

struct ww_status ww_cq_create(const struct ww_verbs *verbs, struct ibv_context *context, int entries, struct ww_cq *cq);
int ww_cq_free(const struct ww_verbs *verbs, struct ww_cq *cq);

struct ww_completion {
    uint64_t id;
    int status; /* enum ibv_wc_status */
    uint32_t vendor;
    uint32_t nbytes;
    int received;
};

struct ww_status ww_cq_poll(const struct ww_cq *cq, struct ww_completion *completions, int capacity, int *count);
const char *ww_completion_text(const struct ww_verbs *verbs, int status);

struct ww_qp_limits {
    uint32_t sends;    /* work requests outstanding */
    uint32_t receives;
    uint32_t inlined;  /* in: bytes wished for; out: bytes granted, 0 where the device refuses any */
};

/* An RC queue pair, in RESET. */
struct ww_status ww_qp_create(const struct ww_verbs *verbs, struct ibv_pd *pd, const struct ww_cq *send_cq,
                              const struct ww_cq *recv_cq, struct ww_qp_limits *limits, struct ibv_qp **qp, uint32_t *number);
int ww_qp_free(const struct ww_verbs *verbs, struct ibv_qp *qp);

struct ww_qp_peer {
    uint32_t number;
    uint32_t psn; /* of the packets it will send */
    uint8_t gid[16];
};

/* The way up: to INIT, to RTR, to RTS. The attributes are those of the stock transport: docs/protocol.md, section 8. */
struct ww_status ww_qp_init(const struct ww_verbs *verbs, struct ibv_qp *qp, int port);
struct ww_status ww_qp_to_receive(const struct ww_verbs *verbs, struct ibv_qp *qp, int port, int gid_index, int mtu,
                                  const struct ww_qp_peer *peer);
struct ww_status ww_qp_to_send(const struct ww_verbs *verbs, struct ibv_qp *qp, uint32_t psn);
/* To ERR: everything outstanding completes as flushed. */
struct ww_status ww_qp_to_error(const struct ww_verbs *verbs, struct ibv_qp *qp);

struct ww_status ww_qp_post_send(struct ibv_qp *qp, uint64_t id, const void *data, uint32_t nbytes, uint32_t key, int inlined);
struct ww_status ww_qp_post_receive(struct ibv_qp *qp, uint64_t id, void *data, uint32_t nbytes, uint32_t key);

#endif
