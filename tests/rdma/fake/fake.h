/* A stand-in for libibverbs, for tests: queue pairs of one process, connected in memory. Nothing here is fast, or a measurement.
 *
 * Everything happens under one lock and at once: a SEND lands when it is posted, or when the peer posts the receive it waits
 * for. Misuse that real hardware would punish at a distance (objects destroyed before what is made of them, events never
 * acknowledged, keys and bounds that do not fit) is counted or completes in error. */
#ifndef FAKE_H
#define FAKE_H

#include <infiniband/verbs.h>
#include <pthread.h>

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

#define FAKE_DEVICES 40
#define FAKE_GIDS 8
#define FAKE_QUEUE 128

struct fake_context {
    struct ibv_context base;
    int events; /* the end to write to */
    struct fake_context *next;
};

struct fake_cq {
    struct ibv_cq base;
    struct ibv_wc queue[FAKE_QUEUE];
    int first, held, capacity, armed, users;
    unsigned int raised, acknowledged;
};

struct fake_channel {
    struct ibv_comp_channel base;
    int events; /* the end to write to */
    int users;
};

struct fake_pd {
    struct ibv_pd base;
    int users;
};

struct fake_mr {
    struct ibv_mr base;
    int writable;
    struct fake_mr *next;
};

struct fake_request {
    uint64_t id;
    uint8_t *data;
    uint32_t nbytes;
    uint32_t key;
    int inlined; /* data is a copy */
};

struct fake_qp {
    struct ibv_qp base;
    struct ibv_qp_cap cap;
    uint32_t peer;
    int rnr_retry;
    struct fake_request sends[FAKE_QUEUE], receives[FAKE_QUEUE];
    int first_send, held_sends, first_receive, held_receives;
    int incomplete; /* sends posted whose completion has not been taken: they occupy the queue */
    struct fake_qp *next;
};

struct fake_gid {
    uint8_t raw[16];
    int type;
};

struct fake_world {
    pthread_mutex_t lock;
    struct ibv_device devices[FAKE_DEVICES];
    struct fake_context *contexts;
    struct fake_mr *regions;
    struct fake_qp *pairs;
    struct fake_gid gids[FAKE_GIDS];
    uint32_t next_key, next_pair;
    /* counts of open handles, and of pinned bytes */
    long n_contexts, n_pds, n_mrs, n_cqs, n_channels, n_qps, pinned, misuse, most_in_flight, polls, arms, inside;
    /* settings */
    long s_devices, s_budget, s_port_state, s_max_inline, s_stall, s_queue_cost, s_hold;
};

extern struct fake_world fake;

/* The errno that this call is to fail with, or 0. detail may be NULL. */
int fake_failure(const char *call, const char *detail);

/* Within a call that takes long: until `hold` is 0. */
void fake_linger(void);

/* Of fake_wire.c; all with the lock held. */
int fake_post_send(struct ibv_qp *pair, struct ibv_send_wr *request, struct ibv_send_wr **bad);
int fake_post_recv(struct ibv_qp *pair, struct ibv_recv_wr *request, struct ibv_recv_wr **bad);
int fake_poll_cq(struct ibv_cq *queue, int capacity, struct ibv_wc *found);
int fake_req_notify_cq(struct ibv_cq *queue, int solicited);
void fake_complete(struct fake_cq *queue, struct fake_qp *pair, uint64_t id, int status, int opcode, uint32_t nbytes);
void fake_break(struct fake_qp *pair, int status);
void fake_move(void);
struct fake_qp *fake_pair(uint32_t number);

#endif
