#include <errno.h>
#include <string.h>

#include "verbs/link_state.h"

/* From registered memory below this, one copy into the ring is cheaper than a SEND of its own. */
#define DIRECT_MIN ((uint64_t)4096)
#define REAP_MAX 16

/* Framing: where the peer's reads end. */

enum field { COMMAND, SIZE, PAYLOAD };

static void enter(struct ww_framer *framer, int field)
{
    framer->field = field;
    framer->left = field == COMMAND ? 1 : field == SIZE ? 8 : framer->size;
    if (field == SIZE) {
        framer->size = 0;
    }
}

static int first_field(const struct ww_framer *framer)
{
    return framer->framing == WW_FRAME_REQUESTS ? COMMAND : SIZE;
}

/* Bytes up to the next boundary; at one, the next message begins. */
static uint64_t room_in_frame(struct ww_framer *framer)
{
    if (framer->framing == WW_FRAME_FREE) {
        return UINT64_MAX;
    }
    if (framer->left == 0) {
        enter(framer, first_field(framer));
    }
    return framer->left;
}

/* n bytes of this field have gone by. 1: here a SEND must end. */
static int advance(struct ww_framer *framer, const uint8_t *bytes, uint64_t n)
{
    if (framer->framing == WW_FRAME_FREE) {
        return 0;
    }
    if (framer->field == SIZE) {
        for (uint64_t i = 0; i < n; i++) {
            framer->size |= (uint64_t)bytes[i] << (8 * (8 - framer->left + i));
        }
    }
    framer->left -= n;
    if (framer->left) {
        return 0;
    }
    if (framer->field == COMMAND) {
        enter(framer, SIZE);
    } else if (framer->field == SIZE && framer->size) {
        enter(framer, PAYLOAD);
    }
    return 1;
}

static int message_ends(const struct ww_framer *framer)
{
    /* Within a message something is always left of its field. */
    return framer->framing == WW_FRAME_FREE || framer->left == 0;
}

/* The window */

int ww_link_reap(struct ww_link *link)
{
    struct ibv_wc found[REAP_MAX];
    pthread_mutex_lock(&link->send_lock);
    int n = ibv_poll_cq(link->c.send_cq->cq, REAP_MAX, found);
    for (int i = 0; i < n; i++) {
        uint64_t completed = atomic_load(&link->completed);
        if (found[i].status != IBV_WC_SUCCESS) {
            ww_link_blame(link, (struct ww_link_fault){.kind = WW_FAULT_STATUS, .wc_status = found[i].status,
                                                      .vendor = found[i].vendor_err, .sending = 1});
        } else if (found[i].wr_id != completed || completed == atomic_load(&link->posted)) {
            ww_link_blame(link, (struct ww_link_fault){.kind = WW_FAULT_STRAY, .sending = 1});
        } else {
            atomic_store(&link->completed, completed + 1);
        }
    }
    pthread_mutex_unlock(&link->send_lock);
    if (n > 0) {
        ww_link_touch(link);
    } else if (n < 0) {
        ww_link_lose(link, EIO, "ibv_poll_cq");
    }
    return atomic_load(&link->faulty) || n < 0 ? -1 : n;
}

static uint64_t outstanding(const struct ww_link *link)
{
    return atomic_load(&link->posted) - atomic_load(&link->completed);
}

static uint8_t *slot(const struct ww_link *link)
{
    return link->c.tx + (atomic_load(&link->posted) % link->c.tx_slots) * WW_CHUNK;
}

static struct ww_status post(struct ww_link *link, const uint8_t *data, uint32_t nbytes, uint32_t key, int may_inline)
{
    uint64_t sequence = atomic_load(&link->posted);
    int inlined = may_inline && nbytes <= link->c.inlined;
    /* Counted before it is posted: its completion may be seen by another thread at once. */
    atomic_store(&link->posted, sequence + 1);
    struct ww_status status = ww_qp_post_send(link->c.qp, sequence, data, nbytes, key, inlined);
    if (status.code != WW_DONE) {
        atomic_store(&link->posted, sequence);
        struct ww_status health = ww_link_health(link, status.operation);
        return health.code != WW_DONE ? health : status;
    }
    uint32_t now = (uint32_t)outstanding(link);
    if (now > link->high_water) {
        link->high_water = now;
    }
    ww_link_touch(link);
    return status;
}

static struct ww_status post_slot(struct ww_link *link)
{
    uint32_t nbytes = link->filled;
    link->filled = 0;
    link->copied_bytes += nbytes;
    link->copies++;
    return post(link, slot(link), nbytes, link->c.tx_key, 1);
}

/* Waits until no more than limit SENDs are outstanding. */
static struct ww_status settle(struct ww_link *link, uint64_t limit, struct ww_flow *flow)
{
    while (outstanding(link) > limit) {
        uint64_t completed = atomic_load(&link->completed);
        struct ww_status status = ww_status_of(WW_DONE, 0, "ibv_post_send");
        if (ww_link_reap(link) <= 0) {
            status = ww_link_wait(link, flow, WW_SIDE_SEND, "ibv_post_send");
        }
        if (atomic_load(&link->completed) != completed) {
            ww_flow_moved(flow, 0);
        }
        if (status.code != WW_DONE) {
            return status;
        }
    }
    return ww_status_of(WW_DONE, 0, "ibv_post_send");
}

/* Waits for a free slot. */
static struct ww_status settle_window(struct ww_link *link, struct ww_flow *flow)
{
    if (outstanding(link) >= link->c.tx_slots && ww_link_reap(link) == 0) {
        link->window_full++;
    }
    return settle(link, link->c.tx_slots - 1, flow);
}

/* The parts */

static void use(struct ww_link_part *part, uint64_t n)
{
    part->nbytes -= n;
    if (part->data) {
        part->data += n;
    } else {
        part->offset += n;
    }
}

/* Takes some of the part, into the slot or straight to the device. */
static struct ww_status take(struct ww_link *link, struct ww_link_part *part, struct ww_flow *flow)
{
    uint64_t frame = room_in_frame(&link->framer);
    uint64_t n = WW_CHUNK - link->filled;
    n = n < frame ? n : frame;
    n = n < part->nbytes ? n : part->nbytes;
    if (part->registered && part->nbytes >= DIRECT_MIN && frame >= DIRECT_MIN) {
        if (link->filled) {
            return post_slot(link);
        }
        const uint8_t *data = part->data;
        struct ww_status status = post(link, data, (uint32_t)n, part->key, 0);
        if (status.code == WW_DONE) {
            link->direct_bytes += n;
            link->direct_until = atomic_load(&link->posted);
            use(part, n);
            (void)advance(&link->framer, data, n);
            ww_flow_moved(flow, n);
        }
        return status;
    }
    uint8_t *to = slot(link) + link->filled;
    if (part->data) {
        int aside = ww_profile_aside(flow->profile, WW_STAGE_STAGING);
        memcpy(to, part->data, n);
        ww_profile_back(flow->profile, aside);
    } else {
        size_t got;
        int aside = ww_profile_aside(flow->profile, WW_STAGE_READ);
        struct ww_status status = ww_read_file(part->fd, part->offset, to, (size_t)n, &got);
        ww_profile_back(flow->profile, aside);
        if (status.code != WW_DONE) {
            use(part, got); /* so that its offset tells where the file ends */
            return status;
        }
    }
    use(part, n);
    link->filled += (uint32_t)n;
    ww_flow_moved(flow, n);
    if (advance(&link->framer, to, n) || link->filled == WW_CHUNK) {
        return post_slot(link);
    }
    return ww_status_of(WW_DONE, 0, "ibv_post_send");
}

struct ww_status ww_link_send(struct ww_link *link, struct ww_link_parts *parts, struct ww_flow *flow)
{
    ww_flow_slice(flow);
    struct ww_status status = ww_link_health(link, "ibv_post_send");
    while (status.code == WW_DONE) {
        while (parts->count && parts->next->nbytes == 0) {
            parts->next++;
            parts->count--;
        }
        if (parts->count == 0 && link->filled == 0) {
            break;
        }
        status = settle_window(link, flow);
        if (status.code != WW_DONE) {
            return status;
        }
        status = parts->count ? take(link, parts->next, flow) : post_slot(link);
        if (status.code == WW_DONE && parts->count && flow->progress_ns >= flow->slice_ns) {
            return ww_status_of(WW_PAUSED, 0, "ibv_post_send");
        }
    }
    if (status.code != WW_DONE) {
        return status;
    }
    if (message_ends(&link->framer)) {
        return settle(link, 0, flow);
    }
    /* What went out of the caller's memory must have left it; what was posted after may still be on its way. */
    uint64_t since = atomic_load(&link->posted) - link->direct_until;
    return link->direct_until && outstanding(link) > since ? settle(link, since, flow) : status;
}
