/* Built with -fno-tree-slp-vectorize where gcc is the compiler: see CMakeLists.txt. */
#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

/* Each runs that many lanes n bytes on; n is ready in all of them. Hashes are locals so that they stay in registers.
 * The multiplies of the lanes hide each other, which is all that can be had below a block, and without vectors. */

static void run4(struct ww_fnv1a_lane *lane, size_t n)
{
    const uint8_t *p0 = lane[0].at, *p1 = lane[1].at, *p2 = lane[2].at, *p3 = lane[3].at;
    uint64_t h0 = lane[0].hash, h1 = lane[1].hash, h2 = lane[2].hash, h3 = lane[3].hash;
    for (size_t i = 0; i < n; i++) {
        h0 = (h0 ^ p0[i]) * WW_FNV1A_PRIME;
        h1 = (h1 ^ p1[i]) * WW_FNV1A_PRIME;
        h2 = (h2 ^ p2[i]) * WW_FNV1A_PRIME;
        h3 = (h3 ^ p3[i]) * WW_FNV1A_PRIME;
    }
    lane[0].hash = h0;
    lane[1].hash = h1;
    lane[2].hash = h2;
    lane[3].hash = h3;
}

static void run3(struct ww_fnv1a_lane *lane, size_t n)
{
    const uint8_t *p0 = lane[0].at, *p1 = lane[1].at, *p2 = lane[2].at;
    uint64_t h0 = lane[0].hash, h1 = lane[1].hash, h2 = lane[2].hash;
    for (size_t i = 0; i < n; i++) {
        h0 = (h0 ^ p0[i]) * WW_FNV1A_PRIME;
        h1 = (h1 ^ p1[i]) * WW_FNV1A_PRIME;
        h2 = (h2 ^ p2[i]) * WW_FNV1A_PRIME;
    }
    lane[0].hash = h0;
    lane[1].hash = h1;
    lane[2].hash = h2;
}

static void run2(struct ww_fnv1a_lane *lane, size_t n)
{
    const uint8_t *p0 = lane[0].at, *p1 = lane[1].at;
    uint64_t h0 = lane[0].hash, h1 = lane[1].hash;
    for (size_t i = 0; i < n; i++) {
        h0 = (h0 ^ p0[i]) * WW_FNV1A_PRIME;
        h1 = (h1 ^ p1[i]) * WW_FNV1A_PRIME;
    }
    lane[0].hash = h0;
    lane[1].hash = h1;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Reads on into the lane's window. False: many->failed is set and *status says why. */
static int refill(struct ww_fnv1a_many *many, struct ww_fnv1a_lane *lane, struct ww_status *status)
{
    size_t want = lane->unread < WW_FNV1A_WINDOW ? (size_t)lane->unread : WW_FNV1A_WINDOW;
    ssize_t got;
    do {
        got = pread(many->jobs[lane->job].fd, lane->window, want, (off_t)lane->offset);
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
        many->failed = lane->job;
        many->failed_at = lane->offset;
        *status = got == 0 ? ww_status_of(WW_SHORT, 0, "pread") : ww_status_of(WW_FAILED, errno, "pread");
        return 0;
    }
    lane->at = lane->window;
    lane->ready = (size_t)got;
    lane->unread -= (uint64_t)got;
    lane->offset += (uint64_t)got;
    many->late = now_ns() >= many->until_ns; /* bytes in memory take as long as they are many; a file can be slow */
    return 1;
}

static void take_next(struct ww_fnv1a_many *many, struct ww_fnv1a_lane *lane)
{
    const struct ww_fnv1a_job *job = &many->jobs[many->next];
    lane->job = many->next++;
    lane->hash = job->hash;
    lane->offset = job->offset;
    lane->at = job->data;
    lane->ready = job->data ? (size_t)job->nbytes : 0;
    lane->unread = job->data ? 0 : job->nbytes;
}

void ww_fnv1a_many_start(struct ww_fnv1a_many *many, struct ww_fnv1a_job *jobs, size_t count, uint8_t *windows)
{
    many->jobs = jobs;
    many->count = count;
    many->next = 0;
    many->active = 0;
    many->until_ns = 0;
    many->late = 0;
    many->plain = 0;
    many->failed = 0;
    many->failed_at = 0;
    for (size_t i = 0; i < WW_FNV1A_LANES; i++) {
        many->lane[i] = (struct ww_fnv1a_lane){.window = windows ? windows + i * WW_FNV1A_WINDOW : NULL};
    }
}

static void advance(struct ww_fnv1a_many *many, struct ww_fnv1a_lane *lane, size_t n)
{
    lane->at += n;
    lane->ready -= n;
    many->left = n < many->left ? many->left - n : 0;
}

/* Hashes in vectors what the lane has, and what it reads of a file, which is still in the nearest caches then.
 * Afterwards it has only a few bytes ready, or there are no vectors, or this call is spent. False: as refill. */
static int run_vectors(struct ww_fnv1a_many *many, struct ww_fnv1a_lane *lane, struct ww_status *status)
{
    for (;;) {
        uint64_t n = lane->ready < many->left ? lane->ready : many->left;
        if (n >= WW_FNV1A_SHORT && !many->plain) {
            advance(many, lane, ww_fnv1a_vectors(lane->at, (size_t)n, &lane->hash));
        }
        if (lane->ready || !lane->unread || many->left == 0 || many->late) {
            return 1;
        }
        if (!refill(many, lane, status)) {
            return 0;
        }
    }
}

/* Leaves every active lane with bytes ready for the multiplies, unless this call is spent: finished payloads give
 * their hash and make room for the next, and a lane that nothing is left for is closed by moving the last one into
 * its place. */
static int settle(struct ww_fnv1a_many *many, struct ww_status *status)
{
    size_t lanes = many->plain ? 1 : WW_FNV1A_LANES;
    while (many->active < lanes && many->next < many->count) {
        take_next(many, &many->lane[many->active++]);
    }
    for (size_t i = 0; i < many->active;) {
        struct ww_fnv1a_lane *lane = &many->lane[i];
        if (!run_vectors(many, lane, status)) {
            return 0;
        }
        if (lane->ready || lane->unread) {
            i++;
        } else {
            many->jobs[lane->job].hash = lane->hash;
            if (many->next < many->count) {
                take_next(many, lane);
            } else {
                uint8_t *window = lane->window;
                *lane = many->lane[--many->active];
                many->lane[many->active].window = window;
            }
        }
    }
    return 1;
}

struct ww_status ww_fnv1a_many_run(struct ww_fnv1a_many *many, uint64_t budget, int64_t slice_ns)
{
    struct ww_status status = ww_status_of(WW_DONE, 0, "");
    many->left = budget;
    many->until_ns = now_ns() + slice_ns;
    many->late = 0;
    for (;;) {
        if (!settle(many, &status)) {
            return status;
        }
        if (many->active == 0) {
            return ww_status_of(WW_DONE, 0, "");
        }
        uint64_t step = many->left;
        for (size_t i = 0; i < many->active; i++) {
            step = many->lane[i].ready < step ? many->lane[i].ready : step;
        }
        if (step == 0) { /* spent: a lane that still has to read may stand without a byte */
            return ww_status_of(WW_PAUSED, 0, "");
        }
        size_t n = (size_t)step;
        switch (many->active) {
        case 4: run4(many->lane, n); break;
        case 3: run3(many->lane, n); break;
        case 2: run2(many->lane, n); break;
        default: many->lane[0].hash = ww_fnv1a_plain(many->lane[0].at, n, many->lane[0].hash); break;
        }
        for (size_t i = 0; i < many->active; i++) {
            advance(many, &many->lane[i], n);
        }
    }
}
