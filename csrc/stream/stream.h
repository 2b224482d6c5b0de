/* Whole messages over a connected socket: gather-write, exact-read, file to socket.
 *
 * Every function here goes on where its arguments say it stands, and comes back with WW_PAUSED at a signal or when its slice
 * of time is over, so that the caller can look around (has Ctrl-C been pressed?) and call again with the same arguments.
 * None raises SIGPIPE, none asks the kernel for more than WW_SYSCALL_MAX bytes at once, and each expects a socket in
 * non-blocking mode. */
#ifndef WW_STREAM_H
#define WW_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>
#include <time.h>

#include "profile/profile.h"
#include "status.h"

#ifndef WW_SYSCALL_MAX
#define WW_SYSCALL_MAX ((size_t)1 << 30)
#endif
#define WW_SLICE_NS INT64_C(100000000) /* long enough to cost nothing, short enough for Ctrl-C */

#define WW_NEVER_NS INT64_C(3600000000000) /* a slice that is as good as none */

/* One message on its way. */
struct ww_flow {
    int64_t timeout_ns;  /* longest time without progress; negative: for ever */
    int64_t started_ns;  /* CLOCK_MONOTONIC */
    int64_t progress_ns; /* when the last byte moved, or started_ns */
    int64_t slice_ns;    /* when the running call comes back; set by each call */
    int impatient;       /* come back with WW_PAUSED where one would have to wait */
    int patient;         /* wait without slices: nobody has to look around */
    uint64_t done;       /* bytes moved */
    struct ww_profile *profile; /* is told of waiting, and of what is not moving bytes; or NULL */
};

void ww_flow_start(struct ww_flow *flow, int64_t timeout_ns);

/* Seconds since the last byte moved. */
double ww_flow_idle(const struct ww_flow *flow);

/* Reads until flow->done == nbytes, to data + flow->done. WW_CLOSED: the peer closed; flow->done tells how far it came. */
struct ww_status ww_recv_exact(int fd, void *data, size_t nbytes, struct ww_flow *flow);

/* Parts still to be sent; the vector is used up as they go. */
struct ww_parts {
    struct iovec *next;
    size_t count;
};

/* Sends all parts. more: something follows at once, do not send a small last packet yet. */
struct ww_status ww_send_parts(int fd, struct ww_parts *parts, int more, struct ww_flow *flow);

/* Reads up to nbytes of a file into data; *got tells how many. WW_SHORT: it ends at offset + *got. */
struct ww_status ww_read_file(int fd, uint64_t offset, void *data, size_t nbytes, size_t *got);

/* Has the kernel write those bytes of a file to the disk now (0 bytes: to the end), and waits for it if asked to; what the
 * file needs besides is not written (sync_file_range(2)). A hint: where a file system cannot, nothing happens. */
void ww_write_back(int fd, uint64_t offset, uint64_t nbytes, int wait);

/* How the bytes of a file get to the socket. */
enum ww_file_way {
    WW_BY_SENDFILE = 0, /* no copy on this side; best where sender and receiver have a processor each */
    WW_BY_WINDOW,       /* from a mapping: one long call that is not preempted by every wake-up of the receiver */
    WW_BY_COPY          /* through a buffer: where the kernel can do neither with this file */
};

/* What one sender has learnt about the two; starts all zero, lives as long as the connection. */
struct ww_file_pace {
    enum ww_file_way way;
    uint64_t bytes;     /* sent this way since the last look */
    uint64_t preempted; /* and how often the thread was preempted meanwhile */
};

/* Bytes of a file still to be sent; moves on as they go. The first three fields are the caller's, the others start zero. */
struct ww_file_part {
    int fd;
    uint64_t offset;
    uint64_t nbytes;
    int must_copy;
    char *window; /* a mapping of the file around offset, or NULL */
    size_t window_nbytes;
    uint64_t window_offset;
};

/* Sends the range. WW_SHORT: the file ended at part->offset. WW_FAILED in "pread" or "fstat": the file cannot be read. The
 * mapping is only ever touched by the kernel, on whose side a file cut short is an error and not a SIGBUS. */
struct ww_status ww_send_file(int fd, struct ww_file_part *part, struct ww_file_pace *pace, struct ww_flow *flow);

/* Gives back what ww_send_file holds for the part; after the last call, however it ended. */
void ww_file_part_close(struct ww_file_part *part);

/* Whether the peer has closed or reset the connection, as far as is known now. Takes no bytes, never waits. */
int ww_socket_ended(int fd);

/* Puts a socket in non-blocking mode. */
struct ww_status ww_socket_prepare(int fd);

/* Used within this folder. */
int64_t ww_now_ns(void);
void ww_flow_slice(struct ww_flow *flow);
void ww_flow_moved(struct ww_flow *flow, size_t nbytes);
/* How long the next wait may last, from now on; 1: until the flow times out, 0: until its slice is over. */
int ww_flow_limit(const struct ww_flow *flow, struct timespec *limit);
/* WW_DONE: try the call again. WW_PAUSED (at once, if impatient), WW_TIMEOUT or WW_FAILED otherwise. */
struct ww_status ww_flow_wait(struct ww_flow *flow, int fd, short events, const char *operation);
/* What a failed call on a socket means. */
struct ww_status ww_socket_failure(int error, const char *operation);

#endif
