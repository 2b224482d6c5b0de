"""The core's clock of stages, for the module that makes it and the streams that feed it."""

from libc.stdint cimport int64_t, uint64_t


cdef extern from "profile/profile.h" nogil:
    enum ww_stage:
        WW_STAGE_READ
        WW_STAGE_WIRE
        WW_STAGE_INSIDE
        WW_STAGES

    const unsigned int WW_PROFILE_COMMANDS

    struct ww_profile:
        pass

    struct ww_command_count:
        uint64_t count
        uint64_t ns

    struct ww_counts "ww_profile_counts":
        uint64_t spent[11]
        ww_command_count commands[32]

    struct ww_limits "ww_tcp_limits":
        uint64_t busy_ns
        uint64_t window_ns
        uint64_t buffer_ns

    void ww_profile_start(ww_profile *profile) noexcept
    void ww_profile_turn_on(ww_profile *profile) noexcept
    void ww_profile_end(ww_profile *profile) noexcept
    int ww_profile_is_on(ww_profile *profile) noexcept
    int ww_profile_switch(ww_profile *profile, int stage) noexcept
    int ww_profile_aside(ww_profile *profile, int stage) noexcept
    void ww_profile_back(ww_profile *profile, int left) noexcept
    void ww_profile_begin(ww_profile *profile, int anew) noexcept
    void ww_profile_mark(ww_profile *profile) noexcept
    int64_t ww_profile_now(ww_profile *profile) noexcept
    void ww_profile_command(ww_profile *profile, unsigned int command, uint64_t count, int64_t since_ns) noexcept
    ww_counts counts_so_far "ww_profile_counts"(ww_profile *profile) noexcept
    int tcp_limits "ww_tcp_limits"(int fd, ww_limits *limits) noexcept


cdef class Profile:
    cdef ww_profile core
