/* The hasher alone, for builds with sanitizers: every variant this CPU offers, against a loop of its own. Prints their
 * names, exits non-zero at the first wrong hash. Buffers end at a page that cannot be read, and begin after one.
 * With the argument "tables": only that several threads may be the first. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

#include "check.h"

enum { THREADS = 8, LONGEST = 3 * 8192 + 1100 };

static uint64_t seed = 88172645463325252u;

static uint64_t noise(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

static uint64_t plain(const uint8_t *data, size_t n, uint64_t hash)
{
    while (n--) {
        hash = (hash ^ *data++) * UINT64_C(1099511628211);
    }
    return hash;
}

/* Room for n bytes, with a page on either side that cannot be read. */
static uint8_t *fenced(size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = (n + page - 1) / page * page;
    uint8_t *base = mmap(NULL, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base != MAP_FAILED);
    CHECK(mprotect(base + page, inside, PROT_READ | PROT_WRITE) == 0);
    return base + page;
}

static const uint8_t *common;
static uint64_t expected;
static pthread_barrier_t together;

static void *hash_first(void *argument)
{
    pthread_barrier_wait(&together);
    *(uint64_t *)argument = ww_fnv1a64(common, LONGEST, WW_FNV1A_OFFSET);
    return NULL;
}

/* Before anything else has hashed: several threads want the tables at once. */
static void tables_at_once(void)
{
    pthread_t thread[THREADS];
    uint64_t result[THREADS];
    CHECK(pthread_barrier_init(&together, NULL, THREADS) == 0);
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&thread[i], NULL, hash_first, &result[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(thread[i], NULL) == 0);
        CHECK(result[i] == expected);
    }
    pthread_barrier_destroy(&together);
}

static void check(const uint8_t *data, size_t n, uint64_t start)
{
    CHECK(ww_fnv1a64(data, n, start) == plain(data, n, start));
}

static void variant(uint8_t *room, size_t inside)
{
    uint8_t *end = room + inside;
    for (size_t n = 0; n <= 4200; n++) { /* up to the fence */
        check(end - n, n, noise());
    }
    for (size_t blocks = 1; blocks <= 3; blocks++) { /* and from it, about the lengths of every block */
        for (size_t block = 1024; block <= 8192; block *= 2) {
            for (size_t n = blocks * block - 2; n <= blocks * block + 2; n++) {
                check(room, n, noise());
                check(end - n, n, noise());
                check(room + n % 67, n, noise());
                check(room, n + WW_FNV1A_SHORT, noise());
            }
        }
    }
    for (int i = 0; i < 300; i++) { /* any place, length and start; in two pieces too */
        size_t at = noise() % 100, n = noise() % (LONGEST - 100), first = n ? noise() % n : 0;
        uint64_t start = noise();
        check(room + at, n, start);
        uint64_t half = ww_fnv1a64(room + at, first, start);
        CHECK(ww_fnv1a64(room + at + first, n - first, half) == plain(room + at, n, start));
    }
    static const uint8_t same[] = {0x00, 0xff, 0x80, 0x01, 0x55, 0xaa, 0xb3, 0x4d};
    uint8_t *flat = fenced(LONGEST);
    for (size_t i = 0; i < sizeof same; i++) { /* sums as large as they get, and states that stay */
        memset(flat, same[i], LONGEST);
        for (uint64_t low = 0; low < 256; low += 5) {
            check(flat, LONGEST, low);
            check(flat, LONGEST, UINT64_MAX - low);
        }
    }
}

int main(int argc, char **argv)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = ((size_t)LONGEST + page - 1) / page * page;
    uint8_t *room = fenced(LONGEST);
    for (size_t i = 0; i < inside; i++) {
        room[i] = (uint8_t)noise();
    }
    common = room;
    expected = plain(room, LONGEST, WW_FNV1A_OFFSET);
    tables_at_once();
    if (argc > 1 && strcmp(argv[1], "tables") == 0) {
        return 0;
    }
    CHECK(ww_fnv1a_power(3, 5) == 243 && ww_fnv1a_power(3, 0) == 1 && WW_FNV1A_PRIME * WW_FNV1A_INVERSE == 1);
    CHECK(ww_fnv1a64(NULL, 0, 7) == 7);
    size_t best = ww_fnv1a_chosen();
    const char *name;
    int offered;
    for (size_t i = 0; (name = ww_fnv1a_variant(i, &offered)); i++) {
        CHECK(offered || i < best || strcmp(name, "plain") != 0);
        CHECK(!offered || i >= best);
        if (offered) {
            ww_fnv1a_choose(i);
            CHECK(ww_fnv1a_chosen() == i);
            variant(room, inside);
            uint64_t hash = 5;
            size_t done = ww_fnv1a_vectors(room, LONGEST, &hash);
            CHECK(strcmp(name, "plain") == 0 ? done == 0 : done + WW_FNV1A_SHORT > LONGEST);
            CHECK(hash == plain(room, done, 5));
            puts(name);
        }
    }
    return 0;
}
