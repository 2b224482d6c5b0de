#include "stream/stream.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <time.h>

int64_t ww_now_ns(void)
{
    return ww_profile_clock();
}

void ww_flow_start(struct ww_flow *flow, int64_t timeout_ns)
{
    flow->timeout_ns = timeout_ns;
    flow->started_ns = ww_now_ns();
    flow->progress_ns = flow->started_ns;
    flow->slice_ns = flow->started_ns + WW_SLICE_NS;
    flow->impatient = 0;
    flow->patient = 0;
    flow->done = 0;
    flow->profile = NULL;
}

double ww_flow_idle(const struct ww_flow *flow)
{
    return (double)(ww_now_ns() - flow->progress_ns) * 1e-9;
}

void ww_flow_slice(struct ww_flow *flow)
{
    flow->slice_ns = ww_now_ns() + WW_SLICE_NS;
}

void ww_flow_moved(struct ww_flow *flow, size_t nbytes)
{
    flow->done += nbytes;
    flow->progress_ns = ww_now_ns();
}

int ww_flow_limit(const struct ww_flow *flow, struct timespec *limit)
{
    int64_t now = ww_now_ns();
    int64_t until = flow->patient ? now + WW_NEVER_NS : flow->slice_ns;
    int last = flow->timeout_ns >= 0 && flow->timeout_ns <= until - flow->progress_ns;
    if (last) {
        until = flow->progress_ns + flow->timeout_ns;
    }
    int64_t left = until > now ? until - now : 0;
    limit->tv_sec = left / 1000000000;
    limit->tv_nsec = left % 1000000000;
    return last;
}

struct ww_status ww_flow_wait(struct ww_flow *flow, int fd, short events, const char *operation)
{
    if (flow->impatient) {
        return ww_status_of(WW_PAUSED, 0, operation);
    }
    struct timespec limit;
    int last = ww_flow_limit(flow, &limit);
    struct pollfd watched = {.fd = fd, .events = events};
    int aside = ww_profile_aside(flow->profile, events & POLLOUT ? WW_STAGE_BLOCKED : WW_STAGE_WAIT);
    int ready = ppoll(&watched, 1, &limit, NULL);
    int error = errno;
    ww_profile_back(flow->profile, aside);
    if (ready > 0) {
        if (watched.revents & POLLNVAL) {
            return ww_status_of(WW_FAILED, EBADF, operation);
        }
        /* POLLHUP and POLLERR too: only the call itself tells bytes still queued from the end or an error. */
        return ww_status_of(WW_DONE, 0, operation);
    }
    if (ready < 0 && error != EINTR) {
        return ww_status_of(WW_FAILED, error, "ppoll");
    }
    if (ready == 0 && last) {
        return ww_status_of(WW_TIMEOUT, 0, operation);
    }
    return ww_status_of(WW_PAUSED, 0, operation);
}

struct ww_status ww_socket_failure(int error, const char *operation)
{
    switch (error) {
    case EINTR:
        return ww_status_of(WW_PAUSED, 0, operation);
    case EPIPE:
    case ECONNRESET:
    case ECONNABORTED:
        return ww_status_of(WW_CLOSED, error, operation);
    default:
        return ww_status_of(WW_FAILED, error, operation);
    }
}

int ww_socket_ended(int fd)
{
    /* Without POLLIN, which bytes that nobody has read yet would raise too. */
    struct pollfd watched = {.fd = fd, .events = POLLRDHUP};
    return poll(&watched, 1, 0) > 0;
}

struct ww_status ww_socket_prepare(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        return ww_status_of(WW_FAILED, errno, "fcntl");
    }
    return ww_status_of(WW_DONE, 0, "fcntl");
}
