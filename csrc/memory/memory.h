/* Anonymous memory in huge pages, touched ahead of the data that will come; and what of a file is in memory. */
#ifndef WW_MEMORY_H
#define WW_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

struct ww_region {
    uint8_t *base; /* 2 MiB aligned */
    size_t nbytes; /* asked for */
    size_t mapped; /* a whole number of pages, at least one */
};

/* Maps nbytes (0 is fine) of zeroes, none of it touched yet. WW_FAILED ("mmap"), ENOMEM if it cannot be had. */
struct ww_status ww_region_map(struct ww_region *region, size_t nbytes);

/* Gives it back; fine twice, and on a region that was never mapped (all zero). */
void ww_region_unmap(struct ww_region *region);

/* Makes the pages of [offset, offset + nbytes) present and writable without changing a byte, others may be writing there.
 * A hint: where the kernel cannot, nothing happens. False: the kernel said no, asking for more is of no use. */
int ww_region_populate(const struct ww_region *region, size_t offset, size_t nbytes);

/* The first byte that differs between two buffers of n bytes, or n. */
size_t ww_first_difference(const void *a, const void *b, size_t n);

/* How many of the bytes [offset, offset + nbytes) of a file lie in pages that the page cache holds, of pages that lie wholly in
 * that range; none of them is read. Where this process may not be told (mincore(2): a file that it neither owns nor could
 * write), that is all of them. WW_FAILED ("mmap", "mincore"): it has no such pages. */
struct ww_status ww_resident(int fd, uint64_t offset, uint64_t nbytes, uint64_t *resident);

#endif
