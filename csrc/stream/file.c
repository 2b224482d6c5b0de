#include "stream/stream.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SENDFILE_MAX ((size_t)16 << 20)
#define WINDOW_MAX ((size_t)32 << 20)
#define WINDOW_ALIGN ((uint64_t)64 << 10) /* a multiple of every page size */
#define COPY_MAX ((size_t)64 << 10)

/* sendfile hands the socket 64 KiB at a time and can lose the processor after each. Where sender and receiver share one,
 * every wake-up of the receiver preempts the sender, and one long send from a mapping is up to twice as fast; where they
 * have one each, sendfile is up to twice as fast as that. So: look every LOOK bytes, leave sendfile when preempted more than
 * a handful of times, and give it another try after RETRY bytes. */
#define LOOK ((uint64_t)16 << 20)
#define RETRY ((uint64_t)1 << 30)
#define HANDFUL 6

struct ww_status ww_read_file(int fd, uint64_t offset, void *data, size_t nbytes, size_t *got)
{
    *got = 0;
    while (*got < nbytes) {
        size_t left = nbytes - *got, want = left < WW_SYSCALL_MAX ? left : WW_SYSCALL_MAX;
        ssize_t n = pread(fd, (char *)data + *got, want, (off_t)(offset + *got));
        if (n > 0) {
            *got += (size_t)n;
        } else if (n == 0) {
            return ww_status_of(WW_SHORT, 0, "pread");
        } else if (errno != EINTR) {
            return ww_status_of(WW_FAILED, errno, "pread");
        }
    }
    return ww_status_of(WW_DONE, 0, "pread");
}

void ww_write_back(int fd, uint64_t offset, uint64_t nbytes, int wait)
{
    unsigned flags = SYNC_FILE_RANGE_WRITE;
    if (wait) {
        flags |= SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER;
    }
    (void)sync_file_range(fd, (off_t)offset, (off_t)nbytes, flags);
}

static uint64_t preemptions(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? (uint64_t)usage.ru_nivcsw : 0;
}

static void learn(struct ww_file_pace *pace, size_t sent, uint64_t *seen)
{
    pace->bytes += sent;
    if (pace->bytes < (pace->way == WW_BY_SENDFILE ? LOOK : RETRY)) {
        return;
    }
    uint64_t now = preemptions();
    pace->preempted += now - *seen;
    *seen = now;
    if (pace->way == WW_BY_WINDOW) {
        pace->way = WW_BY_SENDFILE;
    } else if (pace->preempted > HANDFUL * (pace->bytes / LOOK)) {
        pace->way = WW_BY_WINDOW;
    }
    pace->bytes = 0;
    pace->preempted = 0;
}

/* sendfile has no MSG_NOSIGNAL. Returns what it returned, errno kept, and lets no SIGPIPE of its own out. */
static ssize_t by_sendfile(int fd, const struct ww_file_part *part)
{
    off_t offset = (off_t)part->offset;
    size_t want = part->nbytes < SENDFILE_MAX ? (size_t)part->nbytes : SENDFILE_MAX;
    sigset_t pipe_only, before, pending;
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &pipe_only, &before);
    ssize_t sent = sendfile(fd, part->fd, &offset, want);
    int error = errno;
    if (sent < 0 && error == EPIPE && !sigismember(&pending, SIGPIPE)) {
        struct timespec now = {0, 0};
        while (sigtimedwait(&pipe_only, NULL, &now) < 0 && errno == EINTR) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return sent;
}

void ww_file_part_close(struct ww_file_part *part)
{
    if (part->window) {
        munmap(part->window, part->window_nbytes);
        part->window = NULL;
    }
}

/* Makes the window hold the next byte. */
static int move_window(struct ww_file_part *part)
{
    if (part->window && part->offset < part->window_offset + part->window_nbytes) {
        return 1;
    }
    ww_file_part_close(part);
    uint64_t first = part->offset / WINDOW_ALIGN * WINDOW_ALIGN;
    uint64_t nbytes = part->offset - first + part->nbytes;
    size_t size = nbytes < WINDOW_MAX ? (size_t)nbytes : WINDOW_MAX;
    void *window = mmap(NULL, size, PROT_READ, MAP_SHARED, part->fd, (off_t)first);
    if (window == MAP_FAILED) {
        return 0;
    }
    part->window = window;
    part->window_nbytes = size;
    part->window_offset = first;
    return 1;
}

/* How much of [offset, offset + nbytes) the file has now; negative, errno set, if that cannot be said. */
static ssize_t there(int fd, uint64_t offset, size_t nbytes)
{
    struct stat file;
    while (fstat(fd, &file) != 0) {
        if (errno != EINTR) {
            return -1;
        }
    }
    uint64_t size = (uint64_t)file.st_size;
    return size <= offset ? 0 : size - offset < nbytes ? (ssize_t)(size - offset) : (ssize_t)nbytes;
}

/* As sendfile: 0 at the end of the file. Past the end the last page of a mapping reads as zeroes and the next as EFAULT, so
 * the size is asked for before, and again after what was sent. */
static ssize_t by_window(int fd, const struct ww_file_part *part, int *file_failed)
{
    size_t at = (size_t)(part->offset - part->window_offset);
    size_t want = part->window_nbytes - at;
    want = part->nbytes < want ? (size_t)part->nbytes : want;
    for (int attempt = 0;; attempt++) {
        ssize_t have = there(part->fd, part->offset, want);
        if (have <= 0) {
            *file_failed = have < 0;
            return have;
        }
        ssize_t sent = send(fd, part->window + at, (size_t)have, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            have = there(part->fd, part->offset, (size_t)sent);
            *file_failed = have < 0;
            return have;
        }
        if (errno != EFAULT || attempt) {
            return sent;
        }
    }
}

/* Reads some and sends what the socket takes of it; the rest is read again. */
static ssize_t by_copy(int fd, const struct ww_file_part *part, struct ww_profile *profile, int *file_failed)
{
    char data[COPY_MAX];
    size_t want = part->nbytes < sizeof data ? (size_t)part->nbytes : sizeof data;
    int aside = ww_profile_aside(profile, WW_STAGE_READ);
    ssize_t got = pread(part->fd, data, want, (off_t)part->offset);
    int error = errno;
    ww_profile_back(profile, aside);
    errno = error;
    *file_failed = got < 0;
    if (got <= 0) {
        return got;
    }
    return send(fd, data, (size_t)got, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Whether to read the file instead, because the kernel cannot do it this way, or because what failed is not the socket but
 * the file: pread says so. EOVERFLOW: offsets beyond 2 GiB of a file that is no ordinary one, such as /proc/self/mem.
 * EFAULT: a page that the disk does not give. */
static int is_to_be_read(enum ww_file_way way, int error)
{
    if (way == WW_BY_SENDFILE) {
        return error == EINVAL || error == ENOSYS || error == EOVERFLOW || error == EIO || error == ESTALE;
    }
    return way == WW_BY_WINDOW && error == EFAULT;
}

static struct ww_status send_file(int fd, struct ww_file_part *part, struct ww_file_pace *pace, struct ww_flow *flow,
                                  uint64_t *seen)
{
    while (part->nbytes) {
        enum ww_file_way way = part->must_copy ? WW_BY_COPY : pace->way;
        if (way == WW_BY_WINDOW && !move_window(part)) {
            way = WW_BY_SENDFILE;
        }
        const char *operation = way == WW_BY_SENDFILE ? "sendfile" : "send";
        int file_failed = 0;
        ssize_t sent = way == WW_BY_SENDFILE ? by_sendfile(fd, part)
            : way == WW_BY_WINDOW            ? by_window(fd, part, &file_failed)
                                             : by_copy(fd, part, flow->profile, &file_failed);
        if (sent > 0) {
            part->offset += (uint64_t)sent;
            part->nbytes -= (uint64_t)sent;
            ww_flow_moved(flow, (size_t)sent);
            learn(pace, (size_t)sent, seen);
            if (flow->progress_ns >= flow->slice_ns && part->nbytes) {
                return ww_status_of(WW_PAUSED, 0, operation);
            }
        } else if (sent == 0) {
            return ww_status_of(WW_SHORT, 0, operation);
        } else if (file_failed) {
            const char *call = way == WW_BY_WINDOW ? "fstat" : "pread";
            return errno == EINTR ? ww_status_of(WW_PAUSED, 0, call) : ww_status_of(WW_FAILED, errno, call);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            struct ww_status status = ww_flow_wait(flow, fd, POLLOUT, operation);
            if (status.code != WW_DONE) {
                return status;
            }
        } else if (is_to_be_read(way, errno)) {
            part->must_copy = 1;
        } else {
            return ww_socket_failure(errno, operation);
        }
    }
    return ww_status_of(WW_DONE, 0, "sendfile");
}

struct ww_status ww_send_file(int fd, struct ww_file_part *part, struct ww_file_pace *pace, struct ww_flow *flow)
{
    ww_flow_slice(flow);
    uint64_t seen = preemptions();
    struct ww_status status = send_file(fd, part, pace, flow, &seen);
    pace->preempted += preemptions() - seen;
    return status;
}
