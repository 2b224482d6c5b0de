#include "profile/profile.h"

#include <string.h>
#include <time.h>

int64_t ww_profile_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void ww_profile_start(struct ww_profile *profile)
{
    memset(profile, 0, sizeof *profile);
    pthread_mutex_init(&profile->lock, NULL);
    atomic_init(&profile->on, 0);
}

void ww_profile_turn_on(struct ww_profile *profile)
{
    pthread_mutex_lock(&profile->lock);
    if (!atomic_load_explicit(&profile->on, memory_order_relaxed)) {
        profile->since_ns = ww_profile_clock();
        atomic_store_explicit(&profile->on, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&profile->lock);
}

void ww_profile_end(struct ww_profile *profile)
{
    pthread_mutex_destroy(&profile->lock);
}

/* Gives the time up to now to the stage at hand. With the lock held, under which the clock is read too: two threads must not
 * count a nanosecond twice. */
static void settle(struct ww_profile *profile)
{
    int64_t now = ww_profile_clock();
    uint64_t passed = (uint64_t)(now - profile->since_ns);
    profile->since_ns = now;
    if (profile->stage < WW_STAGE_INSIDE) {
        profile->unmarked[profile->stage] += passed;
    } else {
        profile->spent[profile->stage] += passed;
    }
}

int ww_profile_enter(struct ww_profile *profile, int stage)
{
    pthread_mutex_lock(&profile->lock);
    int left = profile->stage;
    if (stage != left && stage >= 0 && stage < WW_STAGES) {
        settle(profile);
        profile->stage = stage;
    }
    pthread_mutex_unlock(&profile->lock);
    return left;
}

int ww_profile_leave_wire(struct ww_profile *profile, int stage)
{
    pthread_mutex_lock(&profile->lock);
    int leaves = profile->stage == WW_STAGE_WIRE;
    if (leaves) {
        settle(profile);
        profile->stage = stage;
    }
    pthread_mutex_unlock(&profile->lock);
    return leaves;
}

void ww_profile_open(struct ww_profile *profile, int anew)
{
    pthread_mutex_lock(&profile->lock);
    if (anew || !profile->open) {
        settle(profile);
        memset(profile->unmarked, 0, sizeof profile->unmarked);
        profile->open = 1;
    }
    pthread_mutex_unlock(&profile->lock);
}

void ww_profile_commit(struct ww_profile *profile)
{
    pthread_mutex_lock(&profile->lock);
    settle(profile);
    for (int stage = 0; profile->open && stage < WW_STAGE_INSIDE; stage++) {
        profile->spent[stage] += profile->unmarked[stage];
        profile->unmarked[stage] = 0;
    }
    pthread_mutex_unlock(&profile->lock);
}

void ww_profile_count(struct ww_profile *profile, unsigned int command, uint64_t count, int64_t since_ns)
{
    if (command >= WW_PROFILE_COMMANDS) {
        return;
    }
    pthread_mutex_lock(&profile->lock);
    profile->commands[command].count += count;
    profile->commands[command].ns += (uint64_t)(ww_profile_clock() - since_ns);
    pthread_mutex_unlock(&profile->lock);
}

struct ww_profile_counts ww_profile_counts(struct ww_profile *profile)
{
    struct ww_profile_counts counts;
    pthread_mutex_lock(&profile->lock);
    if (atomic_load_explicit(&profile->on, memory_order_relaxed)) {
        settle(profile);
    }
    memcpy(counts.spent, profile->spent, sizeof counts.spent);
    memcpy(counts.commands, profile->commands, sizeof counts.commands);
    pthread_mutex_unlock(&profile->lock);
    return counts;
}
