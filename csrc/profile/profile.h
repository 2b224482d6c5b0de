/* One clock that is always in exactly one stage, and counts of requests: what a connection spends its time on.
 *
 * Time inside a span is counted only from a mark to the next, so that what has been spent before the first tensor and after
 * the last belongs to none; because every nanosecond between goes to exactly one stage, the stages add up to the span. Off,
 * each call is one relaxed load. On, calls may come from any thread: one lock, held for some instructions. */
#ifndef WW_PROFILE_H
#define WW_PROFILE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum ww_stage {
    WW_STAGE_GAP,     /* none of the others */
    WW_STAGE_READ,    /* reading a file */
    WW_STAGE_HASH,    /* hashing, or waiting for who hashes */
    WW_STAGE_ASK,     /* asking the cache, or finding an answer */
    WW_STAGE_STAGING, /* copying on the way */
    WW_STAGE_WIRE,    /* moving bytes to or from the transport */
    WW_STAGE_WAIT,    /* waiting for what the peer sends */
    WW_STAGE_BLOCKED, /* waiting for room to send */
    WW_STAGE_INSIDE,  /* how many there are within the span; those that follow are counted beside it */
    WW_STAGE_ALLOC = WW_STAGE_INSIDE,
    WW_STAGE_VERIFY,
    WW_STAGE_INDEX,
    WW_STAGES
};

#define WW_PROFILE_COMMANDS 32

struct ww_command_count {
    uint64_t count;
    uint64_t ns;
};

struct ww_profile {
    atomic_int on;
    pthread_mutex_t lock;
    int stage;
    int open; /* has a span begun? */
    int64_t since_ns;
    uint64_t spent[WW_STAGES];
    uint64_t unmarked[WW_STAGE_INSIDE]; /* since the last mark */
    struct ww_command_count commands[WW_PROFILE_COMMANDS];
};

/* What has been counted so far. */
struct ww_profile_counts {
    uint64_t spent[WW_STAGES];
    struct ww_command_count commands[WW_PROFILE_COMMANDS];
};

/* Off, and everything zero. */
void ww_profile_start(struct ww_profile *profile);
/* From here on it counts. */
void ww_profile_turn_on(struct ww_profile *profile);
void ww_profile_end(struct ww_profile *profile);
struct ww_profile_counts ww_profile_counts(struct ww_profile *profile);

/* What the calls below come to when it is on. */
int ww_profile_enter(struct ww_profile *profile, int stage);
int ww_profile_leave_wire(struct ww_profile *profile, int stage);
void ww_profile_open(struct ww_profile *profile, int anew);
void ww_profile_commit(struct ww_profile *profile);
void ww_profile_count(struct ww_profile *profile, unsigned int command, uint64_t count, int64_t since_ns);

/* CLOCK_MONOTONIC, nanoseconds. */
int64_t ww_profile_clock(void);

static inline int ww_profile_is_on(struct ww_profile *profile)
{
    return profile && atomic_load_explicit(&profile->on, memory_order_relaxed);
}

/* Enters a stage; the one that was left. profile may be NULL, here and below. */
static inline int ww_profile_switch(struct ww_profile *profile, int stage)
{
    return ww_profile_is_on(profile) ? ww_profile_enter(profile, stage) : WW_STAGE_GAP;
}

/* From WIRE to stage, for the part of moving bytes that is something else: copying, reading a file, sleeping. From any other stage
 * nowhere, since whoever chose that knows better what all of it is for. What ww_profile_back is to be told. */
static inline int ww_profile_aside(struct ww_profile *profile, int stage)
{
    return ww_profile_is_on(profile) ? ww_profile_leave_wire(profile, stage) : 0;
}

static inline void ww_profile_back(struct ww_profile *profile, int left)
{
    if (left) {
        (void)ww_profile_enter(profile, WW_STAGE_WIRE);
    }
}

/* The span begins, unless one has begun. anew: a further stretch begins, and what lies between counts for nothing. */
static inline void ww_profile_begin(struct ww_profile *profile, int anew)
{
    if (ww_profile_is_on(profile)) {
        ww_profile_open(profile, anew);
    }
}

/* The span lasts until now, at least. */
static inline void ww_profile_mark(struct ww_profile *profile)
{
    if (ww_profile_is_on(profile)) {
        ww_profile_commit(profile);
    }
}

/* CLOCK_MONOTONIC for ww_profile_command; 0 when off. */
static inline int64_t ww_profile_now(struct ww_profile *profile)
{
    return ww_profile_is_on(profile) ? ww_profile_clock() : 0;
}

/* count requests that began at since_ns have been dealt with. */
static inline void ww_profile_command(struct ww_profile *profile, unsigned int command, uint64_t count, int64_t since_ns)
{
    if (ww_profile_is_on(profile)) {
        ww_profile_count(profile, command, count, since_ns);
    }
}

/* What the kernel says kept a TCP connection from sending faster, nanoseconds since it was made. Source: tcp(7) on TCP_INFO and
 * linux/tcp.h: time with data to send; of that, with the receiver's window closed; and with the send buffer full. */
struct ww_tcp_limits {
    uint64_t busy_ns;
    uint64_t window_ns;
    uint64_t buffer_ns;
};

/* 0, or -1 where the socket or the kernel cannot say. */
int ww_tcp_limits(int fd, struct ww_tcp_limits *limits);

#endif
