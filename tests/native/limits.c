/* Built with a small WW_SYSCALL_MAX and with sendmsg, recv and pread wrapped: no call may ask for more than that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "stream/stream.h"

#include "check.h"

static size_t sends, receives, reads, largest;

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __real_recv(int fd, void *data, size_t nbytes, int flags);
ssize_t __real_pread(int fd, void *data, size_t nbytes, off_t offset);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_recv(int fd, void *data, size_t nbytes, int flags);
ssize_t __wrap_pread(int fd, void *data, size_t nbytes, off_t offset);

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    size_t total = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        total += message->msg_iov[i].iov_len;
    }
    largest = total > largest ? total : largest;
    sends++;
    return __real_sendmsg(fd, message, flags);
}

ssize_t __wrap_recv(int fd, void *data, size_t nbytes, int flags)
{
    largest = nbytes > largest ? nbytes : largest;
    receives++;
    return __real_recv(fd, data, nbytes, flags);
}

ssize_t __wrap_pread(int fd, void *data, size_t nbytes, off_t offset)
{
    largest = nbytes > largest ? nbytes : largest;
    reads++;
    return __real_pread(fd, data, nbytes, offset);
}

int main(void)
{
    enum { PARTS = 3, EACH = 5000, TOTAL = PARTS * EACH }; /* the cuts fall inside the parts */
    static unsigned char data[TOTAL], got[TOTAL];
    struct iovec vectors[PARTS];
    for (size_t i = 0; i < TOTAL; i++) {
        data[i] = (unsigned char)(i * 7 + i / 256);
    }
    for (size_t i = 0; i < PARTS; i++) {
        vectors[i] = (struct iovec){.iov_base = data + i * EACH, .iov_len = EACH};
    }
    int fd[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    CHECK(ww_socket_prepare(fd[0]).code == WW_DONE && ww_socket_prepare(fd[1]).code == WW_DONE);
    struct ww_parts parts = {.next = vectors, .count = PARTS};
    struct ww_flow flow;
    ww_flow_start(&flow, -1);
    CHECK(ww_send_parts(fd[0], &parts, 0, &flow).code == WW_DONE && flow.done == TOTAL);
    size_t least = (TOTAL + WW_SYSCALL_MAX - 1) / WW_SYSCALL_MAX;
    CHECK(sends >= least && largest == WW_SYSCALL_MAX);
    largest = 0;
    ww_flow_start(&flow, -1);
    CHECK(ww_recv_exact(fd[1], got, TOTAL, &flow).code == WW_DONE && flow.done == TOTAL);
    CHECK(receives >= least && largest == WW_SYSCALL_MAX);
    CHECK(memcmp(data, got, TOTAL) == 0);
    FILE *file = tmpfile();
    CHECK(file && fwrite(data, 1, TOTAL, file) == TOTAL && fflush(file) == 0);
    memset(got, 0, TOTAL);
    largest = 0;
    size_t nbytes;
    CHECK(ww_read_file(fileno(file), 0, got, TOTAL, &nbytes).code == WW_DONE && nbytes == TOTAL);
    CHECK(reads >= least && largest == WW_SYSCALL_MAX);
    CHECK(memcmp(data, got, TOTAL) == 0);
    CHECK(fclose(file) == 0);
    puts("split");
    return 0;
}
