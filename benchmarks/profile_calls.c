/* Nanoseconds a call: of nothing, and of ww_profile_switch through NULL, off and on. Prints one line each. */
#include <stdio.h>

#include "profile/profile.h"

#define CALLS 20000000

__attribute__((noinline)) static int nothing(struct ww_profile *profile, int stage)
{
    __asm__ volatile("" : : "r"(profile), "r"(stage) : "memory");
    return WW_STAGE_GAP;
}

/* Inlined where streams use it; here a call of its own, as the empty one is. */
__attribute__((noinline)) static int switching(struct ww_profile *profile, int stage)
{
    __asm__ volatile("" : : : "memory");
    return ww_profile_switch(profile, stage);
}

static void measure(const char *name, int (*call)(struct ww_profile *, int), struct ww_profile *profile, int calls)
{
    int64_t began = ww_profile_clock();
    for (int i = 0; i < calls; i++) {
        (void)call(profile, i & 7);
    }
    printf("%s %.3f\n", name, (double)(ww_profile_clock() - began) / calls);
}

int main(void)
{
    struct ww_profile off, on;
    ww_profile_start(&off);
    ww_profile_start(&on);
    ww_profile_turn_on(&on);
    measure("warming", nothing, NULL, CALLS);
    measure("nothing", nothing, NULL, CALLS);
    measure("null", switching, NULL, CALLS);
    measure("off", switching, &off, CALLS);
    measure("on", switching, &on, CALLS / 10);
    ww_profile_end(&off);
    ww_profile_end(&on);
    return 0;
}
