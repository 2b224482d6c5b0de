/* Exercises the core alone, for builds with sanitizers: prints what it checked, exits non-zero at the first wrong answer. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fnv1a/fnv1a.h"
#include "memory/memory.h"
#include "profile/profile.h"
#include "stream/stream.h"

#include "check.h"

static uint64_t plain(const uint8_t *data, size_t n)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    while (n--) {
        hash = (hash ^ *data++) * UINT64_C(1099511628211);
    }
    return hash;
}

/* An exact-size copy, so that one byte read past the end is caught. */
static uint8_t *noise(size_t n, unsigned seed)
{
    uint8_t *data = malloc(n ? n : 1);
    CHECK(data);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1103515245u + 12345u;
        data[i] = (uint8_t)(seed >> 16);
    }
    return data;
}

static int file_of(const uint8_t *data, size_t n)
{
    char name[] = "/tmp/weightwire-native-XXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0);
    unlink(name);
    CHECK(n == 0 || write(fd, data, n) == (ssize_t)n);
    return fd;
}

static struct ww_status hash_slices(struct ww_fnv1a_many *many, uint64_t budget, int64_t slice_ns, unsigned *pauses)
{
    for (*pauses = 0;; ++*pauses) {
        struct ww_status status = ww_fnv1a_many_run(many, budget, slice_ns);
        if (status.code != WW_PAUSED) {
            return status;
        }
    }
}

static struct ww_status hash_all(struct ww_fnv1a_many *many, uint64_t budget)
{
    unsigned pauses;
    return hash_slices(many, budget, INT64_MAX / 2, &pauses);
}

static void hashing(void)
{
    CHECK(ww_fnv1a64(NULL, 0, WW_FNV1A_OFFSET) == WW_FNV1A_OFFSET);
    CHECK(ww_fnv1a64("a", 1, WW_FNV1A_OFFSET) == UINT64_C(0xaf63dc4c8601ec8c));
    enum { JOBS = 23 };
    uint8_t *windows = malloc(WW_FNV1A_LANES * WW_FNV1A_WINDOW);
    CHECK(windows);
    for (unsigned round = 0; round < 12; round++) {
        struct ww_fnv1a_job jobs[JOBS];
        uint8_t *data[JOBS];
        uint64_t expected[JOBS];
        size_t count = round % 2 ? JOBS : round;
        for (unsigned i = 0; i < count; i++) {
            size_t n = (i * 7919u * (round + 1)) % (i % 3 ? 500u : 300000u);
            int file = (i + round) % 2;
            data[i] = noise(n, i + round);
            expected[i] = plain(data[i], n);
            jobs[i] = (struct ww_fnv1a_job){.data = data[i], .fd = -1, .nbytes = n, .hash = WW_FNV1A_OFFSET};
            if (file) {
                jobs[i].data = NULL;
                jobs[i].fd = file_of(data[i], n);
            }
        }
        struct ww_fnv1a_many many;
        ww_fnv1a_many_start(&many, jobs, count, windows);
        CHECK(hash_all(&many, round < 6 ? 1 + round * 1000 : UINT64_MAX).code == WW_DONE);
        for (size_t i = 0; i < count; i++) {
            CHECK(jobs[i].hash == expected[i]);
            if (jobs[i].fd >= 0) {
                close(jobs[i].fd);
            }
            free(data[i]);
        }
    }
    size_t long_one = 5 * WW_FNV1A_WINDOW + 9; /* a slice without any time: back after each read, further each time */
    uint8_t *data = noise(long_one, 3);
    int fd = file_of(data, long_one);
    struct ww_fnv1a_job one = {.fd = fd, .nbytes = long_one, .hash = WW_FNV1A_OFFSET};
    struct ww_fnv1a_many many;
    unsigned pauses;
    ww_fnv1a_many_start(&many, &one, 1, windows);
    CHECK(hash_slices(&many, UINT64_MAX, 0, &pauses).code == WW_DONE);
    CHECK(one.hash == plain(data, long_one) && pauses >= 4 && pauses <= 6);
    close(fd);
    free(data);
    data = noise(1000, 5);
    fd = file_of(data, 1000);
    struct ww_fnv1a_job jobs[2] = {{.data = data, .nbytes = 1000}, {.fd = fd, .offset = 100, .nbytes = 901}};
    ww_fnv1a_many_start(&many, jobs, 2, windows);
    CHECK(hash_all(&many, 64).code == WW_SHORT);
    CHECK(many.failed == 1 && many.failed_at == 1000);
    close(fd);
    ww_fnv1a_many_start(&many, jobs, 2, windows);
    struct ww_status status = hash_all(&many, 64);
    CHECK(status.code == WW_FAILED && status.error == EBADF && strcmp(status.operation, "pread") == 0);
    free(data);
    free(windows);
}

static void memory(void)
{
    struct ww_region region;
    memset(&region, 0, sizeof region);
    ww_region_unmap(&region);
    size_t sizes[] = {0, 1, 4096, 4097, ((size_t)2 << 20) - 1, ((size_t)5 << 20) + 9};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        CHECK(ww_region_map(&region, n).code == WW_DONE);
        CHECK((uintptr_t)region.base % ((size_t)2 << 20) == 0 && region.mapped >= n && region.nbytes == n);
        CHECK(ww_region_populate(&region, 0, n));
        CHECK(ww_region_populate(&region, n / 2, n));
        CHECK(ww_region_populate(&region, n + 10, 1));
        uint8_t *zero = calloc(n ? n : 1, 1);
        CHECK(zero && ww_first_difference(region.base, zero, n) == n);
        if (n) {
            memset(region.base, 0x5a, n);
            CHECK(ww_region_populate(&region, 0, n));
            memset(zero, 0x5a, n);
            CHECK(ww_first_difference(region.base, zero, n) == n);
            zero[n - 1] ^= 1;
            CHECK(ww_first_difference(region.base, zero, n) == n - 1);
            zero[n / 2] ^= 2;
            CHECK(ww_first_difference(region.base, zero, n) == n / 2);
        }
        free(zero);
        ww_region_unmap(&region);
        ww_region_unmap(&region);
    }
    struct ww_status status = ww_region_map(&region, SIZE_MAX - 5);
    CHECK(status.code == WW_FAILED && status.error == ENOMEM && region.base == NULL);
    status = ww_region_map(&region, (size_t)1 << 47);
    CHECK(status.code == WW_FAILED && status.error == ENOMEM);
}

struct reader {
    int fd;
    uint8_t *into;
    size_t nbytes;
    struct ww_status status;
    uint64_t done;
};

static void *read_all(void *argument)
{
    struct reader *reader = argument;
    struct ww_flow flow;
    ww_flow_start(&flow, -1);
    do {
        reader->status = ww_recv_exact(reader->fd, reader->into, reader->nbytes, &flow);
    } while (reader->status.code == WW_PAUSED);
    reader->done = flow.done;
    return NULL;
}

static void open_pair(int fd[2], int small)
{
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    for (int i = 0; i < 2; i++) {
        int one = 1;
        CHECK(!small || setsockopt(fd[i], SOL_SOCKET, SO_SNDBUF, &one, sizeof one) == 0);
        CHECK(ww_socket_prepare(fd[i]).code == WW_DONE);
    }
}

static void close_pair(const int fd[2])
{
    close(fd[0]);
    close(fd[1]);
}

/* What arrives when `parts` vectors over data, then a file part with the rest, are sent through tiny buffers. */
static void transfer(size_t nbytes, size_t count, size_t in_file, enum ww_file_way way)
{
    uint8_t *data = noise(nbytes, 77), *got = malloc(nbytes ? nbytes : 1);
    struct iovec *vectors = malloc((count ? count : 1) * sizeof *vectors);
    CHECK(got && vectors);
    size_t in_parts = nbytes - in_file, at = 0;
    for (size_t i = 0; i < count; i++) {
        size_t n = i + 1 == count ? in_parts - at : in_parts / count;
        vectors[i] = (struct iovec){.iov_base = data + at, .iov_len = n};
        at += n;
    }
    int fd[2];
    open_pair(fd, 1);
    struct reader reader = {.fd = fd[1], .into = got, .nbytes = nbytes};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, read_all, &reader) == 0);
    struct ww_parts parts = {.next = vectors, .count = count};
    struct ww_flow flow;
    struct ww_status status;
    ww_flow_start(&flow, INT64_C(30000000000));
    do {
        status = ww_send_parts(fd[0], &parts, in_file != 0, &flow);
    } while (status.code == WW_PAUSED);
    CHECK(status.code == WW_DONE && parts.count == 0);
    if (in_file) {
        int file = file_of(data, nbytes);
        struct ww_file_part part = {.fd = file, .offset = in_parts, .nbytes = in_file, .must_copy = way == WW_BY_COPY};
        struct ww_file_pace pace = {.way = way};
        do {
            status = ww_send_file(fd[0], &part, &pace, &flow);
        } while (status.code == WW_PAUSED);
        CHECK(status.code == WW_DONE && part.nbytes == 0 && part.offset == nbytes);
        CHECK(part.must_copy == (way == WW_BY_COPY) && (part.window != NULL || way != WW_BY_WINDOW));
        ww_file_part_close(&part);
        close(file);
    }
    CHECK(flow.done == nbytes);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(reader.status.code == WW_DONE && reader.done == nbytes && memcmp(got, data, nbytes) == 0);
    close_pair(fd);
    free(vectors);
    free(data);
    free(got);
}

static void stream(void)
{
    transfer(0, 0, 0, WW_BY_SENDFILE);
    transfer(5, 3, 0, WW_BY_SENDFILE);
    transfer(700000, 1, 0, WW_BY_SENDFILE);
    transfer(700000, 3000, 0, WW_BY_SENDFILE);
    for (int way = WW_BY_SENDFILE; way <= WW_BY_COPY; way++) {
        transfer(1, 0, 1, way);
        transfer(700000, 3, 600000, way);
    }
    transfer((size_t)70 << 20, 1, ((size_t)70 << 20) - 77777, WW_BY_WINDOW); /* more than two windows */
    transfer((size_t)70 << 20, 1, ((size_t)70 << 20) - 77777, WW_BY_SENDFILE);
}

static void *close_later(void *argument)
{
    struct timespec moment = {.tv_nsec = 30000000};
    nanosleep(&moment, NULL);
    close(*(int *)argument);
    return NULL;
}

static void ends(void)
{
    uint8_t data[4096] = {0};
    int fd[2];
    struct ww_flow flow;
    struct ww_status status;

    open_pair(fd, 0); /* nothing comes: first without waiting, then with */
    ww_flow_start(&flow, 0);
    flow.impatient = 1;
    CHECK(ww_recv_exact(fd[0], data, 5, &flow).code == WW_PAUSED && flow.done == 0);
    flow.impatient = 0;
    CHECK(ww_recv_exact(fd[0], data, 5, &flow).code == WW_TIMEOUT);
    ww_flow_start(&flow, INT64_C(20000000));
    CHECK(ww_recv_exact(fd[0], data, 5, &flow).code == WW_TIMEOUT && ww_flow_idle(&flow) >= 0.02);
    struct timespec limit; /* ten times a second somebody looks around */
    ww_flow_start(&flow, -1);
    CHECK(ww_flow_limit(&flow, &limit) == 0 && limit.tv_sec == 0 && limit.tv_nsec <= 100000000);
    ww_flow_start(&flow, -1); /* a slice ends by itself */
    CHECK(ww_recv_exact(fd[0], data, 5, &flow).code == WW_PAUSED);

    CHECK(!ww_socket_ended(fd[0]));
    CHECK(write(fd[1], "abc", 3) == 3); /* the peer closes inside a message, while we wait */
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, close_later, &fd[1]) == 0);
    ww_flow_start(&flow, -1);
    do {
        status = ww_recv_exact(fd[0], data, sizeof data, &flow);
    } while (status.code == WW_PAUSED);
    CHECK(status.code == WW_CLOSED && status.error == 0 && flow.done == 3 && memcmp(data, "abc", 3) == 0);
    pthread_join(thread, NULL);
    CHECK(ww_socket_ended(fd[0]));

    signal(SIGPIPE, SIG_DFL); /* and is not there any more when we send */
    struct iovec vector = {.iov_base = data, .iov_len = sizeof data};
    struct ww_parts parts = {.next = &vector, .count = 1};
    ww_flow_start(&flow, -1);
    status = ww_send_parts(fd[0], &parts, 0, &flow);
    CHECK(status.code == WW_CLOSED && status.error == EPIPE && parts.count == 1);
    int file = file_of(data, sizeof data);
    struct ww_file_part part = {.fd = file, .nbytes = sizeof data};
    struct ww_file_pace pace = {.way = WW_BY_SENDFILE};
    CHECK(ww_send_file(fd[0], &part, &pace, &flow).code == WW_CLOSED);
    pace.way = WW_BY_WINDOW;
    CHECK(ww_send_file(fd[0], &part, &pace, &flow).code == WW_CLOSED && part.window);
    ww_file_part_close(&part);
    part.must_copy = 1;
    CHECK(ww_send_file(fd[0], &part, &pace, &flow).code == WW_CLOSED && part.nbytes == sizeof data);
    close(fd[0]);

    open_pair(fd, 0); /* a file that ends early, every way */
    for (int way = WW_BY_SENDFILE; way <= WW_BY_COPY; way++) {
        for (size_t size = 4096; size >= 4001; size -= 95) { /* at the end of a page, then inside one */
            CHECK(ftruncate(file, (off_t)size) == 0);
            part = (struct ww_file_part){.fd = file, .offset = 4000, .nbytes = 20000, .must_copy = way == WW_BY_COPY};
            pace.way = way;
            ww_flow_start(&flow, -1);
            CHECK(ww_send_file(fd[0], &part, &pace, &flow).code == WW_SHORT);
            CHECK(part.offset == size && flow.done == size - 4000);
            ww_file_part_close(&part);
        }
    }
    CHECK(ftruncate(file, 4096) == 0);
    size_t got;
    CHECK(ww_read_file(file, 4000, data, 96, &got).code == WW_DONE && got == 96);
    CHECK(ww_read_file(file, 4000, data, 97, &got).code == WW_SHORT && got == 96);
    close(file);
    CHECK(ww_read_file(file, 0, data, 1, &got).error == EBADF);

    ww_flow_start(&flow, INT64_C(20000000)); /* nobody reads */
    do {
        vector = (struct iovec){.iov_base = data, .iov_len = sizeof data};
        parts = (struct ww_parts){.next = &vector, .count = 1};
        status = ww_send_parts(fd[0], &parts, 0, &flow);
    } while (status.code == WW_DONE);
    CHECK(status.code == WW_TIMEOUT);
    close_pair(fd);
    CHECK(ww_socket_prepare(fd[0]).error == EBADF);
    ww_flow_start(&flow, -1);
    status = ww_recv_exact(fd[0], data, 1, &flow);
    CHECK(status.code == WW_FAILED && status.error == EBADF && strcmp(status.operation, "recv") == 0);
}

static void caught(int number)
{
    (void)number;
}

static void *signal_later(void *argument)
{
    struct timespec moment = {.tv_nsec = 30000000};
    nanosleep(&moment, NULL);
    pthread_kill(*(pthread_t *)argument, SIGUSR1);
    return NULL;
}

static void signals(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = caught;
    action.sa_flags = SA_RESTART;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    int fd[2];
    open_pair(fd, 0);
    pthread_t self = pthread_self(), thread;
    CHECK(pthread_create(&thread, NULL, signal_later, &self) == 0);
    struct ww_flow flow;
    uint8_t byte;
    ww_flow_start(&flow, -1);
    CHECK(ww_recv_exact(fd[0], &byte, 1, &flow).code == WW_PAUSED);
    pthread_join(thread, NULL);
    close_pair(fd);
}

static void *switching(void *argument)
{
    struct ww_profile *profile = argument;
    for (int i = 0; i < 20000; i++) {
        (void)ww_profile_switch(profile, i % WW_STAGES);
        ww_profile_back(profile, ww_profile_aside(profile, WW_STAGE_WAIT));
        ww_profile_command(profile, (unsigned int)i % 40, 1, ww_profile_now(profile));
        ww_profile_mark(profile);
    }
    return NULL;
}

static uint64_t all_of(struct ww_profile *profile, int first, int last)
{
    struct ww_profile_counts counts = ww_profile_counts(profile);
    uint64_t sum = 0;
    while (first < last) {
        sum += counts.spent[first++];
    }
    return sum;
}

static void profile(void)
{
    struct ww_profile profile;
    ww_profile_start(&profile);
    CHECK(!ww_profile_is_on(&profile) && !ww_profile_is_on(NULL));
    CHECK(switching(&profile) == NULL && switching(NULL) == NULL);
    CHECK(all_of(&profile, 0, WW_STAGES) == 0 && ww_profile_counts(&profile).commands[0].count == 0);

    int64_t before = ww_profile_clock();
    ww_profile_turn_on(&profile);
    ww_profile_begin(&profile, 0);
    CHECK(ww_profile_switch(&profile, WW_STAGE_ASK) == WW_STAGE_GAP);
    CHECK(ww_profile_switch(&profile, WW_STAGES) == WW_STAGE_ASK && ww_profile_switch(&profile, -1) == WW_STAGE_ASK);
    CHECK(!ww_profile_aside(&profile, WW_STAGE_WAIT));
    CHECK(ww_profile_switch(&profile, WW_STAGE_WIRE) == WW_STAGE_ASK);
    int aside = ww_profile_aside(&profile, WW_STAGE_BLOCKED);
    CHECK(aside && ww_profile_switch(&profile, WW_STAGE_BLOCKED) == WW_STAGE_BLOCKED);
    ww_profile_back(&profile, aside);
    CHECK(ww_profile_switch(&profile, WW_STAGE_GAP) == WW_STAGE_WIRE);
    ww_profile_mark(&profile);
    uint64_t marked = all_of(&profile, 0, WW_STAGE_INSIDE);
    CHECK(marked > 0 && marked <= (uint64_t)(ww_profile_clock() - before));

    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, switching, &profile) == 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    ww_profile_mark(&profile);
    CHECK(all_of(&profile, 0, WW_STAGES) <= (uint64_t)(ww_profile_clock() - before));
    CHECK(ww_profile_counts(&profile).commands[31].count == 3 * 500);
    ww_profile_end(&profile);

    struct ww_tcp_limits limits;
    int fd[2];
    open_pair(fd, 0);
    CHECK(ww_tcp_limits(fd[0], &limits) == -1 && ww_tcp_limits(-1, &limits) == -1);
    close_pair(fd);
}

int main(void)
{
    hashing();
    puts("hashing");
    memory();
    puts("memory");
    stream();
    puts("stream");
    ends();
    puts("ends");
    signals();
    puts("signals");
    profile();
    puts("profile");
    return 0;
}
