#include "stream/stream.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

/* How many parts one call takes: within IOV_MAX and WW_SYSCALL_MAX; *cut is what the last one is shortened by. */
static size_t fit(const struct ww_parts *parts, size_t *total, size_t *cut)
{
    size_t n = 0;
    *total = 0;
    *cut = 0;
    while (n < parts->count && n < IOV_MAX && *total < WW_SYSCALL_MAX) {
        *total += parts->next[n++].iov_len;
    }
    if (*total > WW_SYSCALL_MAX) {
        *cut = *total - WW_SYSCALL_MAX;
        *total = WW_SYSCALL_MAX;
    }
    return n;
}

static void use_up(struct ww_parts *parts, size_t sent)
{
    while (parts->count && sent >= parts->next->iov_len) {
        sent -= parts->next->iov_len;
        parts->next++;
        parts->count--;
    }
    if (sent) {
        parts->next->iov_base = (char *)parts->next->iov_base + sent;
        parts->next->iov_len -= sent;
    }
}

struct ww_status ww_send_parts(int fd, struct ww_parts *parts, int more, struct ww_flow *flow)
{
    ww_flow_slice(flow);
    use_up(parts, 0); /* leading empty parts: sending nothing would look like an error */
    while (parts->count) {
        size_t total, cut;
        size_t n = fit(parts, &total, &cut);
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = parts->next;
        message.msg_iovlen = n;
        int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more || n < parts->count || cut ? MSG_MORE : 0);
        parts->next[n - 1].iov_len -= cut;
        ssize_t sent = sendmsg(fd, &message, flags);
        int error = errno;
        parts->next[n - 1].iov_len += cut;
        if (sent >= 0) {
            use_up(parts, (size_t)sent);
            ww_flow_moved(flow, (size_t)sent);
            if (flow->progress_ns >= flow->slice_ns && parts->count) {
                return ww_status_of(WW_PAUSED, 0, "sendmsg");
            }
        } else if (error == EAGAIN || error == EWOULDBLOCK) {
            struct ww_status status = ww_flow_wait(flow, fd, POLLOUT, "sendmsg");
            if (status.code != WW_DONE) {
                return status;
            }
        } else {
            return ww_socket_failure(error, "sendmsg");
        }
    }
    return ww_status_of(WW_DONE, 0, "sendmsg");
}
