#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "verbs/link_state.h"

struct ww_status ww_link_new(const struct ww_link_config *config, struct ww_link **out)
{
    *out = NULL;
    if (config->tx_slots == 0 || config->tx_slots > WW_SEND_SLOTS || config->rx_slots == 0 ||
        config->rx_slots > WW_RECEIVE_SLOTS) {
        return ww_status_of(WW_FAILED, EINVAL, "rings");
    }
    struct ww_link *link = calloc(1, sizeof *link);
    if (!link) {
        return ww_status_of(WW_FAILED, ENOMEM, "calloc");
    }
    link->c = *config;
    link->tcp_fd = -1;
    link->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (link->wake_fd < 0) {
        int error = errno;
        free(link);
        return ww_status_of(WW_FAILED, error, "eventfd");
    }
    pthread_mutex_init(&link->fault_lock, NULL);
    pthread_mutex_init(&link->send_lock, NULL);
    pthread_mutex_init(&link->recv_lock, NULL);
    struct ww_status status = ww_status_of(WW_DONE, 0, "ibv_post_recv");
    for (uint32_t i = 0; i < config->rx_slots && status.code == WW_DONE; i++) {
        status = ww_qp_post_receive(config->qp, i, config->rx + i * WW_CHUNK, WW_CHUNK, config->rx_key);
        link->posted_slots[i] = 1;
    }
    if (status.code != WW_DONE) {
        ww_link_free(link);
        return status;
    }
    *out = link;
    return status;
}

void ww_link_attach(struct ww_link *link, int tcp_fd, int framing)
{
    link->tcp_fd = tcp_fd;
    memset(&link->framer, 0, sizeof link->framer);
    link->framer.framing = framing;
}

void ww_link_free(struct ww_link *link)
{
    if (!link) {
        return;
    }
    for (uint32_t i = 0; i < link->held; i++) {
        struct ww_arrival *arrival = &link->arrivals[(link->first + i) % WW_ARRIVALS];
        if (arrival->slot < 0) {
            free(arrival->data);
        }
    }
    close(link->wake_fd);
    pthread_mutex_destroy(&link->fault_lock);
    pthread_mutex_destroy(&link->send_lock);
    pthread_mutex_destroy(&link->recv_lock);
    free(link);
}

/* Wakes every wait, now and to come: the descriptor is never read. */
static void wake(struct ww_link *link)
{
    uint64_t one = 1;
    ssize_t written = write(link->wake_fd, &one, sizeof one);
    (void)written;
}

void ww_link_stop(struct ww_link *link)
{
    atomic_store(&link->stopped, 1);
    wake(link);
}

void ww_link_blame(struct ww_link *link, struct ww_link_fault fault)
{
    pthread_mutex_lock(&link->fault_lock);
    /* The first cause counts. Completions that were flushed only follow from one. */
    int follows = link->fault.kind == WW_FAULT_STATUS && link->fault.wc_status == IBV_WC_WR_FLUSH_ERR;
    if (link->fault.kind == WW_FAULT_NONE || follows) {
        link->fault = fault;
    }
    pthread_mutex_unlock(&link->fault_lock);
    atomic_store(&link->faulty, 1);
    wake(link); /* the thread that moves bytes the other way */
}

void ww_link_lose(struct ww_link *link, int error, const char *operation)
{
    pthread_mutex_lock(&link->fault_lock);
    if (!atomic_load(&link->lost)) {
        link->lost_in = operation;
        atomic_store(&link->lost, error);
    }
    pthread_mutex_unlock(&link->fault_lock);
    wake(link);
}

struct ww_link_fault ww_link_fault(struct ww_link *link)
{
    pthread_mutex_lock(&link->fault_lock);
    struct ww_link_fault fault = link->fault;
    pthread_mutex_unlock(&link->fault_lock);
    return fault;
}

struct ww_link_counts ww_link_counts(const struct ww_link *link)
{
    struct ww_link_counts counts;
    counts.sends = atomic_load(&link->posted);
    counts.receives = link->received;
    counts.direct_bytes = link->direct_bytes;
    counts.copied_bytes = link->copied_bytes;
    counts.copies = link->copies;
    counts.window_full = link->window_full;
    counts.high_water = link->high_water;
    return counts;
}
