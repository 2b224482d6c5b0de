/* Built with memcmp, sendfile, send, pread and fstat wrapped: what memory, files and disks do so rarely that they have to
 * be told to. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory/memory.h"
#include "stream/stream.h"

#include "check.h"

#define NBYTES 100000

/* What the next call fails with, and how many work before it. */
static struct {
    int error, after;
} sendfile_fails, send_fails, pread_fails, fstat_fails;
static int differs, stats;

int __real_memcmp(const void *a, const void *b, size_t n);
ssize_t __real_sendfile(int out, int in, off_t *offset, size_t nbytes);
ssize_t __real_send(int fd, const void *data, size_t nbytes, int flags);
ssize_t __real_pread(int fd, void *data, size_t nbytes, off_t offset);
int __real_fstat(int fd, struct stat *file);
int __wrap_memcmp(const void *a, const void *b, size_t n);
ssize_t __wrap_sendfile(int out, int in, off_t *offset, size_t nbytes);
ssize_t __wrap_send(int fd, const void *data, size_t nbytes, int flags);
ssize_t __wrap_pread(int fd, void *data, size_t nbytes, off_t offset);
int __wrap_fstat(int fd, struct stat *file);

#define MAY_FAIL(which) \
    if (which.error && which.after-- <= 0) { \
        errno = which.error; \
        return -1; \
    }

int __wrap_memcmp(const void *a, const void *b, size_t n)
{
    return differs ? differs-- : __real_memcmp(a, b, n);
}

ssize_t __wrap_sendfile(int out, int in, off_t *offset, size_t nbytes)
{
    MAY_FAIL(sendfile_fails)
    return __real_sendfile(out, in, offset, nbytes);
}

ssize_t __wrap_send(int fd, const void *data, size_t nbytes, int flags)
{
    MAY_FAIL(send_fails)
    return __real_send(fd, data, nbytes, flags);
}

ssize_t __wrap_pread(int fd, void *data, size_t nbytes, off_t offset)
{
    MAY_FAIL(pread_fails)
    return __real_pread(fd, data, nbytes, offset);
}

int __wrap_fstat(int fd, struct stat *file)
{
    stats++;
    if (fstat_fails.error && fstat_fails.after-- <= 0) {
        errno = fstat_fails.error;
        fstat_fails.error = errno == EINTR ? 0 : errno; /* a signal comes once */
        return -1;
    }
    return __real_fstat(fd, file);
}

/* Another thread makes a byte what it should be, after it was found to differ. */
static void comparing(void)
{
    uint8_t *one = calloc(1, 10000), *other = calloc(1, 10000);
    for (int i = 1; i <= 3; i++) {
        differs = i;
        CHECK(ww_first_difference(one, other, 10000) == 10000);
    }
    other[9999] = 1;
    differs = 2;
    CHECK(ww_first_difference(one, other, 10000) == 9999);
    free(one);
    free(other);
}

/* Sends all of a file; 1 if exactly its bytes have come. */
static struct ww_status send_file(enum ww_file_way way, int *whole)
{
    static uint8_t data[NBYTES], got[NBYTES + 1];
    FILE *file = tmpfile();
    int fd[2], room = 4 * NBYTES;
    for (size_t i = 0; i < NBYTES; i++) {
        data[i] = (uint8_t)(i * 7 + i / 256);
    }
    CHECK(file && fwrite(data, 1, NBYTES, file) == NBYTES && fflush(file) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    CHECK(setsockopt(fd[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
    CHECK(ww_socket_prepare(fd[0]).code == WW_DONE && ww_socket_prepare(fd[1]).code == WW_DONE);
    struct ww_file_part part = {.fd = fileno(file), .nbytes = NBYTES};
    struct ww_file_pace pace = {.way = way};
    struct ww_flow flow;
    struct ww_status status;
    size_t come = 0;
    ww_flow_start(&flow, 0);
    do {
        status = ww_send_file(fd[0], &part, &pace, &flow);
    } while (status.code == WW_PAUSED);
    for (ssize_t n; (n = recv(fd[1], got + come, sizeof got - come, MSG_DONTWAIT)) > 0;) {
        come += (size_t)n;
    }
    *whole = come == NBYTES && flow.done == NBYTES && __real_memcmp(got, data, NBYTES) == 0;
    ww_file_part_close(&part);
    close(fd[0]);
    close(fd[1]);
    fclose(file);
    return status;
}

static int is(struct ww_status status, int error, const char *operation)
{
    return status.code == WW_FAILED && status.error == error && strcmp(status.operation, operation) == 0;
}

/* It is the file that fails, not the socket. */
static void sending(void)
{
    static const int errors[] = {EIO, ESTALE};
    int whole;
    for (size_t i = 0; i < 2; i++) {
        sendfile_fails.error = errors[i];
        CHECK(send_file(WW_BY_SENDFILE, &whole).code == WW_DONE && whole);
        pread_fails.error = errors[i];
        CHECK(is(send_file(WW_BY_SENDFILE, &whole), errors[i], "pread"));
        sendfile_fails.error = pread_fails.error = 0;
    }
    /* So does a page that the disk does not give, to whom it is mapped. */
    send_fails.error = EFAULT;
    pread_fails.error = EIO;
    CHECK(is(send_file(WW_BY_WINDOW, &whole), EIO, "pread"));
    send_fails.error = pread_fails.error = 0;

    stats = 0;
    CHECK(send_file(WW_BY_WINDOW, &whole).code == WW_DONE && whole && stats >= 2);
    for (int after = 0; after < 2; after++) { /* the size before sending, and after */
        fstat_fails.error = EINTR;
        fstat_fails.after = after;
        CHECK(send_file(WW_BY_WINDOW, &whole).code == WW_DONE && whole && fstat_fails.error == 0);
        fstat_fails.error = ESTALE;
        fstat_fails.after = after;
        CHECK(is(send_file(WW_BY_WINDOW, &whole), ESTALE, "fstat"));
        fstat_fails.error = 0;
    }
}

int main(void)
{
    comparing();
    puts("comparing");
    sending();
    puts("sending");
    return 0;
}
