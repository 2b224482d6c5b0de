/* Exercises csrc/verbs over the stand-in libibverbs, for builds with sanitizers: prints what it checked, exits non-zero at the first
 * wrong answer. */
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "verbs/link.h"
#include "verbs/verbs.h"

#include "check.h"

#define DONE(status) CHECK((status).code == WW_DONE)

static const struct ww_verbs *verbs;

struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ww_cq send_cq, recv_cq;
    struct ibv_qp *qp;
    uint32_t number, tx_key, rx_key;
    uint8_t *tx, *rx;
    struct ibv_mr *tx_mr, *rx_mr;
    struct ww_link *link;
    int tcp;
};

static void make(struct side *side, const char *device)
{
    struct ww_qp_limits limits = {WW_SEND_SLOTS, WW_RECEIVE_SLOTS, 256};
    DONE(ww_context_open(verbs, device, &side->context));
    DONE(ww_pd_alloc(verbs, side->context, &side->pd));
    DONE(ww_cq_create(verbs, side->context, WW_SEND_SLOTS + 1, &side->send_cq));
    DONE(ww_cq_create(verbs, side->context, WW_RECEIVE_SLOTS, &side->recv_cq));
    DONE(ww_qp_create(verbs, side->pd, &side->send_cq, &side->recv_cq, &limits, &side->qp, &side->number));
    side->tx = malloc(WW_SEND_SLOTS * WW_CHUNK);
    side->rx = malloc(WW_RECEIVE_SLOTS * WW_CHUNK);
    DONE(ww_mr_register(verbs, side->pd, side->tx, WW_SEND_SLOTS * WW_CHUNK, 1, &side->tx_mr, &side->tx_key));
    DONE(ww_mr_register(verbs, side->pd, side->rx, WW_RECEIVE_SLOTS * WW_CHUNK, 1, &side->rx_mr, &side->rx_key));
    DONE(ww_qp_init(verbs, side->qp, 1));
    struct ww_link_config config = {
        .verbs = verbs, .context = side->context, .qp = side->qp, .send_cq = &side->send_cq, .recv_cq = &side->recv_cq,
        .tx = side->tx, .rx = side->rx, .tx_key = side->tx_key, .rx_key = side->rx_key,
        .tx_slots = WW_SEND_SLOTS, .rx_slots = WW_RECEIVE_SLOTS, .inlined = limits.inlined,
    };
    DONE(ww_link_new(&config, &side->link));
}

static void rise(struct side *side, uint32_t peer, const uint8_t *gid, int framing)
{
    struct ww_qp_peer to = {.number = peer, .psn = peer & 0xffffff};
    memcpy(to.gid, gid, 16);
    DONE(ww_qp_to_receive(verbs, side->qp, 1, 2, 3, &to));
    DONE(ww_qp_to_send(verbs, side->qp, side->number & 0xffffff));
    ww_link_attach(side->link, side->tcp, framing);
}

static void connect_sides(struct side *one, struct side *other)
{
    struct ww_device_info device;
    uint8_t gid[16];
    int count, type, ends[2];
    DONE(ww_devices(verbs, &device, 1, &count));
    CHECK(count == 1);
    memset(one, 0, sizeof *one);
    memset(other, 0, sizeof *other);
    make(one, device.name);
    make(other, device.name);
    DONE(ww_gid(verbs, one->context, 1, 2, gid, &type));
    CHECK(type == WW_GID_ROCE_V2);
    CHECK(ww_gid(verbs, one->context, 1, 3, gid, &type).code == WW_SHORT);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    one->tcp = ends[0];
    other->tcp = ends[1];
    rise(one, other->number, gid, WW_FRAME_REQUESTS);
    rise(other, one->number, gid, WW_FRAME_RESPONSES);
}

static void drop(struct side *side)
{
    ww_link_free(side->link);
    close(side->tcp);
    CHECK(ww_qp_free(verbs, side->qp) == 0);
    CHECK(ww_mr_free(verbs, side->tx_mr) == 0);
    CHECK(ww_mr_free(verbs, side->rx_mr) == 0);
    free(side->tx);
    free(side->rx);
    CHECK(ww_cq_free(verbs, &side->send_cq) == 0);
    CHECK(ww_cq_free(verbs, &side->recv_cq) == 0);
    CHECK(ww_pd_free(verbs, side->pd) == 0);
    CHECK(ww_context_close(verbs, side->context) == 0);
}

static struct ww_status send_all(struct side *side, const uint8_t *data, uint64_t nbytes, uint32_t key, int64_t timeout_ns)
{
    struct ww_link_part part = {.data = data, .nbytes = nbytes, .registered = key != 0, .key = key};
    struct ww_link_parts parts = {&part, 1};
    struct ww_flow flow;
    struct ww_status status;
    ww_flow_start(&flow, timeout_ns);
    do {
        status = ww_link_send(side->link, &parts, &flow);
    } while (status.code == WW_PAUSED);
    return status;
}

static struct ww_status recv_all(struct side *side, uint8_t *data, size_t nbytes, int64_t timeout_ns)
{
    struct ww_flow flow;
    struct ww_status status;
    ww_flow_start(&flow, timeout_ns);
    do {
        status = ww_link_recv(side->link, data, nbytes, &flow);
    } while (status.code == WW_PAUSED);
    return status;
}

/* A stream of messages, the same for everyone who asks. */

#define STREAM ((size_t)24 << 20)

static uint8_t *stream_of(int with_command, unsigned int seed, size_t *nbytes)
{
    uint8_t *stream = malloc(STREAM + 64);
    size_t at = 0;
    while (at < STREAM - ((size_t)4 << 20)) {
        uint64_t size = rand_r(&seed) % 5 ? rand_r(&seed) % 600 : rand_r(&seed) % (3 << 20);
        if (with_command) {
            stream[at++] = (uint8_t)rand_r(&seed);
        }
        for (int i = 0; i < 8; i++) {
            stream[at++] = (uint8_t)(size >> (8 * i));
        }
        for (uint64_t i = 0; i < size; i++) {
            stream[at++] = (uint8_t)(i * 131 + seed);
        }
    }
    *nbytes = at;
    return stream;
}

struct job {
    struct side *side;
    uint8_t *stream;
    size_t nbytes;
    uint32_t key;
    unsigned int seed;
};

static void *send_stream(void *argument)
{
    struct job *job = argument;
    for (size_t at = 0; at < job->nbytes;) {
        size_t n = 1 + rand_r(&job->seed) % (2 << 20);
        n = n < job->nbytes - at ? n : job->nbytes - at;
        DONE(send_all(job->side, job->stream + at, n, job->key, -1));
        at += n;
    }
    return NULL;
}

static void *recv_stream(void *argument)
{
    struct job *job = argument;
    uint8_t *got = malloc(3 << 20);
    for (size_t at = 0; at < job->nbytes;) {
        size_t n = 1 + rand_r(&job->seed) % (3 << 20);
        n = n < job->nbytes - at ? n : job->nbytes - at;
        DONE(recv_all(job->side, got, n, -1));
        CHECK(memcmp(got, job->stream + at, n) == 0);
        at += n;
    }
    free(got);
    return NULL;
}

/* Both ways at once, cut anywhere, from the ring and from registered memory. */
static void check_moving(int registered)
{
    struct side one, other;
    struct job jobs[4];
    pthread_t threads[4];
    struct ibv_mr *region = NULL;
    connect_sides(&one, &other);
    jobs[0].stream = stream_of(1, 7, &jobs[0].nbytes);
    jobs[1].stream = stream_of(0, 8, &jobs[1].nbytes);
    jobs[0].side = &one;
    jobs[1].side = &other;
    jobs[0].key = jobs[1].key = 0;
    if (registered) {
        DONE(ww_mr_register(verbs, one.pd, jobs[0].stream, jobs[0].nbytes, 0, &region, &jobs[0].key));
    }
    jobs[2] = jobs[0];
    jobs[3] = jobs[1];
    jobs[2].side = &other;
    jobs[3].side = &one;
    for (int i = 0; i < 4; i++) {
        jobs[i].seed = 100 + (unsigned int)i;
        CHECK(pthread_create(&threads[i], NULL, i < 2 ? send_stream : recv_stream, &jobs[i]) == 0);
    }
    while (ww_link_counts(one.link).receives < 40) { /* anybody may look on */
        usleep(100);
    }
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    struct ww_link_counts counts = ww_link_counts(one.link);
    CHECK(counts.high_water <= WW_SEND_SLOTS);
    CHECK(counts.direct_bytes + counts.copied_bytes == jobs[0].nbytes);
    CHECK(registered ? counts.direct_bytes > jobs[0].nbytes / 2 : counts.direct_bytes == 0);
    if (region) {
        CHECK(ww_mr_free(verbs, region) == 0);
    }
    free(jobs[0].stream);
    free(jobs[1].stream);
    drop(&one);
    drop(&other);
}

static void *answer_all(void *argument)
{
    struct side *side = argument;
    uint8_t request[21], answer[24] = {16};
    for (int i = 0; i < 400; i++) {
        DONE(recv_all(side, request, sizeof request, -1));
        DONE(send_all(side, answer, sizeof answer, 0, -1));
    }
    return NULL;
}

/* Answers pile up unread while requests go out, and some are never read. */
static void check_relief(void)
{
    struct side one, other;
    pthread_t thread;
    uint8_t request[21] = {11, 12}, answer[24];
    connect_sides(&one, &other);
    CHECK(pthread_create(&thread, NULL, answer_all, &other) == 0);
    for (int i = 0; i < 400; i++) {
        DONE(send_all(&one, request, sizeof request, 0, -1));
        if (i % 3 == 2) {
            DONE(recv_all(&one, answer, sizeof answer, -1));
            DONE(recv_all(&one, answer, sizeof answer, -1));
        }
    }
    /* What is left over fits the slots: the other side, which is not read from any more, comes to its end. */
    for (int i = 266; i < 392; i++) {
        DONE(recv_all(&one, answer, sizeof answer, -1));
        CHECK(answer[0] == 16);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    drop(&one);
    drop(&other);
}

#define MUCH (60 * WW_CHUNK)

/* Sends more than there are slots left for, and reads only then. */
static void *send_then_read(void *argument)
{
    struct side *side = argument;
    uint8_t answer[24] = {16}, header[9], *much = malloc(MUCH);
    for (int i = 0; i < 10; i++) {
        DONE(send_all(side, answer, sizeof answer, 0, -1));
    }
    DONE(recv_all(side, header, sizeof header, -1));
    DONE(recv_all(side, much, MUCH, -1));
    free(much);
    return NULL;
}

/* What a receive has found and left in its slots is in nobody's way either. */
static void check_relief_of_found(void)
{
    struct side one, other;
    pthread_t thread;
    uint8_t header[9] = {6}, answer[24] = {16};
    uint8_t *much = calloc(1, MUCH);
    connect_sides(&one, &other);
    for (int i = 0; i < WW_RECEIVE_SLOTS / 2; i++) { /* each takes two slots: size and payload */
        DONE(send_all(&other, answer, sizeof answer, 0, -1));
    }
    DONE(recv_all(&one, answer, 4, -1)); /* has found all of them, and is done with none */
    CHECK(pthread_create(&thread, NULL, send_then_read, &other) == 0);
    for (int i = 0; i < 8; i++) {
        header[1 + i] = (uint8_t)((uint64_t)MUCH >> (8 * i));
    }
    DONE(send_all(&one, header, sizeof header, 0, INT64_C(30000000000)));
    DONE(send_all(&one, much, MUCH, 0, INT64_C(30000000000)));
    CHECK(pthread_join(thread, NULL) == 0);
    DONE(recv_all(&one, answer, 20, -1));
    for (int i = 1; i < WW_RECEIVE_SLOTS / 2 + 10; i++) {
        DONE(recv_all(&one, answer, sizeof answer, -1));
        CHECK(answer[0] == 16);
    }
    free(much);
    drop(&one);
    drop(&other);
}

/* An answer that had come before a SEND failed is delivered, to a receive that comes after. */
static void check_last_words(void)
{
    struct side one, other;
    uint8_t header[9] = {1, 0, 0, 4}, answer[24] = {16}, got[24];
    uint8_t *much = calloc(1, WW_CHUNK);
    connect_sides(&one, &other);
    DONE(send_all(&one, header, sizeof header, 0, -1));
    DONE(send_all(&other, answer, sizeof answer, 0, -1));
    CHECK(send_all(&one, much, WW_CHUNK, 0xdead, -1).code == WW_FAULT);
    DONE(recv_all(&one, got, sizeof got, -1));
    CHECK(memcmp(got, answer, sizeof got) == 0);
    CHECK(recv_all(&one, got, 1, -1).code == WW_FAULT);
    CHECK(ww_link_fault(one.link).sending);
    free(much);
    drop(&one);
    drop(&other);
}

/* The socket tells of a reset once, and whoever asks later hears the same. */
static void check_reset(void)
{
    struct side one, other;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct linger at_once = {1, 0};
    socklen_t size = sizeof here;
    uint8_t byte, header[9] = {6};
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    connect_sides(&one, &other);
    CHECK(bind(listening, (struct sockaddr *)&here, size) == 0 && listen(listening, 1) == 0);
    CHECK(getsockname(listening, (struct sockaddr *)&here, &size) == 0);
    close(one.tcp);
    close(other.tcp);
    one.tcp = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(one.tcp, (struct sockaddr *)&here, size) == 0);
    other.tcp = accept(listening, NULL, NULL);
    CHECK(other.tcp >= 0);
    ww_link_attach(one.link, one.tcp, WW_FRAME_REQUESTS);
    CHECK(setsockopt(other.tcp, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    close(other.tcp);
    other.tcp = listening;
    DONE(send_all(&one, header, sizeof header, 0, -1)); /* the queue pair goes on for as long as it does */
    for (int i = 0; i < 2; i++) {
        struct ww_status status = recv_all(&one, &byte, 1, -1);
        CHECK(status.code == WW_CLOSED && status.error == ECONNRESET);
    }
    drop(&one);
    drop(&other);
}

static void check_ends(void)
{
    struct side one, other;
    uint8_t header[9] = {6}, byte;
    uint8_t *much = calloc(1, 60 * WW_CHUNK);
    connect_sides(&one, &other);
    header[8] = 1; /* a message that goes on for long */
    DONE(send_all(&one, header, sizeof header, 0, -1));
    CHECK(recv_all(&one, &byte, 1, 1000000).code == WW_TIMEOUT);
    CHECK(send_all(&one, much, 60 * WW_CHUNK, 0, 1000000).code == WW_TIMEOUT);
    DONE(recv_all(&other, header, sizeof header, -1));
    ww_link_stop(other.link);
    CHECK(recv_all(&other, much, 60 * WW_CHUNK, -1).code == WW_CLOSED);
    shutdown(other.tcp, SHUT_RDWR);
    CHECK(send_all(&one, much, 60 * WW_CHUNK, 0, -1).code == WW_CLOSED);
    drop(&one);
    drop(&other);
    free(much);
}

static void check_faults(void)
{
    struct side one, other;
    uint8_t bytes[64] = {1};
    connect_sides(&one, &other);
    DONE(ww_qp_to_error(verbs, one.qp));
    CHECK(recv_all(&one, bytes, 1, -1).code == WW_FAULT);
    CHECK(ww_link_fault(one.link).kind == WW_FAULT_STATUS);
    CHECK(send_all(&one, bytes, 9, 0, -1).code == WW_FAULT);
    drop(&one);
    drop(&other);
    connect_sides(&one, &other);
    /* A key that no region has. */
    uint8_t *much = calloc(1, WW_CHUNK);
    memcpy(much, "\1\0\0\0\1\0\0\0\0", 9);
    DONE(send_all(&one, much, 9, 0, -1));
    CHECK(send_all(&one, much, WW_CHUNK, 0xdead, -1).code == WW_FAULT);
    CHECK(ww_link_fault(one.link).sending);
    CHECK(strlen(ww_completion_text(verbs, ww_link_fault(one.link).wc_status)) > 0);
    free(much);
    drop(&one);
    drop(&other);
}

int main(void)
{
    char why[256] = "";
    if (ww_verbs_open(&verbs, why, sizeof why).code != WW_DONE) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    check_moving(0);
    check_moving(1);
    puts("moving");
    check_relief();
    check_relief_of_found();
    puts("relief");
    check_last_words();
    check_reset();
    check_ends();
    puts("ends");
    check_faults();
    puts("faults");
    return 0;
}
