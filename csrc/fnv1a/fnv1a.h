/* FNV-1a, 64 bit: of one buffer, and of many payloads at once. */
#ifndef WW_FNV1A_H
#define WW_FNV1A_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

#define WW_FNV1A_OFFSET UINT64_C(0xcbf29ce484222325)
#define WW_FNV1A_PRIME UINT64_C(0x00000100000001b3)

/* The hash of n bytes, continued from hash (WW_FNV1A_OFFSET to begin). data may be NULL when n is 0. */
uint64_t ww_fnv1a64(const void *data, size_t n, uint64_t hash);

/* Reads nbytes of a file from offset into data, and hashes what has come while it is in a cache: *hash goes on, *got tells
 * how many bytes. WW_SHORT: the file ends at offset + *got. WW_FAILED ("pread"). */
struct ww_status ww_fnv1a_read(int fd, uint64_t offset, void *data, size_t nbytes, size_t *got, uint64_t *hash);

/* The ways there are of hashing one buffer on this architecture, best first, the plain loop last: the name of number
 * `index`, and whether this CPU has its instructions. NULL past the last. */
const char *ww_fnv1a_variant(size_t index, int *offered);

/* The number of the one in use: the first that is offered, unless another has been chosen. */
size_t ww_fnv1a_chosen(void);

/* From now on number `index`, which must be offered; for the whole process. */
void ww_fnv1a_choose(size_t index);

#define WW_FNV1A_LANES 4
/* What one lane reads of a file at a time: whole blocks, and little enough to stay in a second-level cache. */
#define WW_FNV1A_WINDOW ((size_t)128 << 10)

/* One payload: nbytes at data, or, where data is NULL, nbytes of the open file fd from offset. */
struct ww_fnv1a_job {
    const uint8_t *data;
    int fd;
    uint64_t offset;
    uint64_t nbytes;
    uint64_t hash; /* set WW_FNV1A_OFFSET (or a hash to continue); the result stands here at the end */
};

struct ww_fnv1a_lane {
    const uint8_t *at;   /* next byte */
    size_t ready;        /* bytes readable at `at` */
    uint64_t unread;     /* bytes of the file range not yet in the window */
    uint64_t offset;     /* where the file goes on */
    uint64_t hash;
    uint8_t *window;     /* WW_FNV1A_WINDOW bytes, or NULL where no job is a file */
    size_t job;
};

/* Many payloads in one thread: one after another in vectors, where there are any. What is left, four at a time: each
 * byte of one hash waits for a multiply, four hide each other. A lane whose payload ends takes the next one, so unequal
 * lengths keep all four busy. */
struct ww_fnv1a_many {
    struct ww_fnv1a_job *jobs;
    size_t count;
    size_t next;                              /* first job no lane has taken */
    size_t active;                            /* lanes in use; they stand first */
    struct ww_fnv1a_lane lane[WW_FNV1A_LANES];
    uint64_t left;                            /* bytes the running call may still hash; set by each call */
    int64_t until_ns;                         /* CLOCK_MONOTONIC: when the running call comes back; set by each call */
    int late;                                 /* that moment has passed */
    int plain;                                /* set after the start: one payload after another, by the plain loop alone */
    size_t failed;                            /* the job of a failure */
    uint64_t failed_at;                       /* and the offset in its file */
};

/* windows: WW_FNV1A_LANES * WW_FNV1A_WINDOW bytes for the lanes to read files into; NULL if no job is a file. */
void ww_fnv1a_many_start(struct ww_fnv1a_many *many, struct ww_fnv1a_job *jobs, size_t count, uint8_t *windows);

/* Goes on for about `budget` bytes, or, where files are slow, until it has read for `slice_ns`; some bytes are hashed
 * however short that is. WW_DONE: every job has its hash. WW_PAUSED: look around, then call again, or never again.
 * WW_SHORT or WW_FAILED ("pread"): many->failed and many->failed_at say where; do not go on. */
struct ww_status ww_fnv1a_many_run(struct ww_fnv1a_many *many, uint64_t budget, int64_t slice_ns);

#endif
