#include "memory/memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14; the headers may be older than the kernel */
#define MADV_POPULATE_WRITE 23
#endif

#define HUGE ((size_t)2 << 20)
#define LOOK 4096 /* pages looked at in one call */

static size_t page_size(void)
{
    long n = sysconf(_SC_PAGESIZE);
    return n > 0 ? (size_t)n : 4096;
}

struct ww_status ww_region_map(struct ww_region *region, size_t nbytes)
{
    size_t page = page_size();
    memset(region, 0, sizeof *region);
    if (nbytes > SIZE_MAX - HUGE - page) {
        return ww_status_of(WW_FAILED, ENOMEM, "mmap");
    }
    size_t mapped = nbytes ? (nbytes + page - 1) / page * page : page;
    uint8_t *whole = mmap(NULL, mapped + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) {
        return ww_status_of(WW_FAILED, errno, "mmap");
    }
    size_t lead = (HUGE - (uintptr_t)whole % HUGE) % HUGE;
    if (lead) {
        munmap(whole, lead);
    }
    if (HUGE - lead) {
        munmap(whole + lead + mapped, HUGE - lead);
    }
    region->base = whole + lead;
    region->nbytes = nbytes;
    region->mapped = mapped;
    (void)madvise(region->base, mapped, MADV_HUGEPAGE); /* a kernel without huge pages says EINVAL: small ones then */
    return ww_status_of(WW_DONE, 0, "mmap");
}

void ww_region_unmap(struct ww_region *region)
{
    if (region->base) {
        munmap(region->base, region->mapped);
    }
    memset(region, 0, sizeof *region);
}

/* For kernels without MADV_POPULATE_WRITE. Adding nothing, atomically, cannot undo what another thread writes meanwhile. */
static void touch(uint8_t *at, size_t nbytes, size_t page)
{
    for (size_t i = 0; i < nbytes; i += page) {
        (void)__atomic_fetch_add(at + i, 0, __ATOMIC_RELAXED);
    }
}

int ww_region_populate(const struct ww_region *region, size_t offset, size_t nbytes)
{
    size_t page = page_size();
    if (offset >= region->nbytes || nbytes == 0) {
        return 1;
    }
    if (nbytes > region->nbytes - offset) {
        nbytes = region->nbytes - offset;
    }
    size_t first = offset / page * page;
    size_t last = (offset + nbytes + page - 1) / page * page;
    for (;;) {
        if (madvise(region->base + first, last - first, MADV_POPULATE_WRITE) == 0) {
            return 1;
        }
        if (errno == EINVAL) {
            touch(region->base + first, last - first, page);
            return 1;
        }
        if (errno != EINTR) {
            return 0;
        }
    }
}

size_t ww_first_difference(const void *a, const void *b, size_t n)
{
    const uint8_t *x = a, *y = b;
    size_t at = 0;
    while (at < n) {
        size_t step = n - at < 4096 ? n - at : 4096;
        if (memcmp(x + at, y + at, step) != 0) {
            /* Within the step: another thread may have made them equal by now. */
            for (size_t i = 0; i < step; i++) {
                if (x[at + i] != y[at + i]) {
                    return at + i;
                }
            }
        }
        at += step;
    }
    return n;
}

struct ww_status ww_resident(int fd, uint64_t offset, uint64_t nbytes, uint64_t *resident)
{
    uint64_t page = page_size();
    uint64_t end = nbytes < UINT64_MAX - offset ? offset + nbytes : UINT64_MAX;
    /* A file ends somewhere, and the cache has nothing behind that. */
    struct stat file;
    uint64_t last = INT64_MAX;
    if (fstat(fd, &file) == 0 && S_ISREG(file.st_mode)) {
        last = ((uint64_t)file.st_size + page - 1) / page * page;
    }
    end = (end < last ? end : last) / page * page;
    uint64_t at = offset < end ? (offset + page - 1) / page * page : end;
    unsigned char pages[LOOK];
    *resident = 0;
    while (at < end) {
        size_t step = end - at < LOOK * page ? (size_t)(end - at) : (size_t)(LOOK * page);
        void *base = mmap(NULL, step, PROT_READ, MAP_SHARED, fd, (off_t)at);
        if (base == MAP_FAILED) {
            return ww_status_of(WW_FAILED, errno, "mmap");
        }
        int failed = mincore(base, step, pages) == 0 ? 0 : errno;
        munmap(base, step);
        if (failed) {
            return ww_status_of(WW_FAILED, failed, "mincore");
        }
        for (size_t i = 0; i < step / page; i++) {
            *resident += pages[i] & 1 ? page : 0;
        }
        at += step;
    }
    return ww_status_of(WW_DONE, 0, "mincore");
}
