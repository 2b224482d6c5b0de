#include "stream/stream.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

/* While this much or more is to come, sleep until that much is there: woken for every packet, the receiver takes the
 * processor from whoever else fills, touches or sends memory, and moves half as much. Measured over loopback; larger marks
 * let the sender run dry. */
#define LOW_WATER ((size_t)256 << 10)

static void set_low_water(int fd, size_t nbytes)
{
    int mark = (int)nbytes;
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
}

static struct ww_status receive(int fd, char *data, size_t nbytes, struct ww_flow *flow, int *marked)
{
    int looked_again = 0;
    while (flow->done < nbytes) {
        size_t left = nbytes - (size_t)flow->done;
        ssize_t got = recv(fd, data + flow->done, left < WW_SYSCALL_MAX ? left : WW_SYSCALL_MAX, MSG_DONTWAIT);
        if (got > 0) {
            looked_again = 0;
            ww_flow_moved(flow, (size_t)got);
            if (flow->progress_ns >= flow->slice_ns && flow->done < nbytes) {
                return ww_status_of(WW_PAUSED, 0, "recv");
            }
        } else if (got == 0) {
            return ww_status_of(WW_CLOSED, 0, "recv");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int mark = left >= LOW_WATER && !flow->impatient;
            if (mark != *marked) {
                set_low_water(fd, mark ? LOW_WATER : 1);
                *marked = mark;
            }
            /* Up to the mark poll(2) does not tell of bytes that have come: somebody has to look. */
            int patient = flow->patient;
            flow->patient = patient && !mark;
            struct ww_status status = ww_flow_wait(flow, fd, POLLIN, "recv");
            flow->patient = patient;
            if (status.code == WW_TIMEOUT && mark && !looked_again) {
                looked_again = 1; /* less than the mark may have come, and is progress all the same */
            } else if (status.code != WW_DONE) {
                return status;
            }
        } else {
            return ww_socket_failure(errno, "recv");
        }
    }
    return ww_status_of(WW_DONE, 0, "recv");
}

struct ww_status ww_recv_exact(int fd, void *data, size_t nbytes, struct ww_flow *flow)
{
    int marked = 0;
    ww_flow_slice(flow);
    struct ww_status status = receive(fd, data, nbytes, flow, &marked);
    if (marked) {
        set_low_water(fd, 1);
    }
    return status;
}
