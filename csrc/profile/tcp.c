#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

/* The kernel's own header: the C library's struct tcp_info ends before these fields. */
#include <linux/tcp.h>

#include "profile/profile.h"

#define NS_PER_US 1000

int ww_tcp_limits(int fd, struct ww_tcp_limits *limits)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
        return -1;
    }
    if (size < offsetof(struct tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited) {
        return -1; /* before Linux 4.10 */
    }
    limits->busy_ns = (uint64_t)info.tcpi_busy_time * NS_PER_US;
    limits->window_ns = (uint64_t)info.tcpi_rwnd_limited * NS_PER_US;
    limits->buffer_ns = (uint64_t)info.tcpi_sndbuf_limited * NS_PER_US;
    return 0;
}
