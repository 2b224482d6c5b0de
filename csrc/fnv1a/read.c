#include "fnv1a/fnv1a.h"

#include <errno.h>
#include <unistd.h>

/* What is read before it is hashed: little enough to be found in a second-level cache, with room beside it. */
#define STRIDE ((size_t)256 << 10)

struct ww_status ww_fnv1a_read(int fd, uint64_t offset, void *data, size_t nbytes, size_t *got, uint64_t *hash)
{
    size_t hashed = 0;
    struct ww_status status = ww_status_of(WW_DONE, 0, "pread");
    *got = 0;
    while (*got < nbytes) {
        size_t left = nbytes - *got, want = left < STRIDE ? left : STRIDE;
        ssize_t n = pread(fd, (uint8_t *)data + *got, want, (off_t)(offset + *got));
        if (n > 0) {
            *got += (size_t)n;
            /* Whole strides, but for the last: a hasher that is fed in odd lengths has a slow tail each time. */
            if (*got - hashed >= STRIDE || *got == nbytes) {
                *hash = ww_fnv1a64((uint8_t *)data + hashed, *got - hashed, *hash);
                hashed = *got;
            }
        } else if (n == 0) {
            status.code = WW_SHORT;
            break;
        } else if (errno != EINTR) {
            status = ww_status_of(WW_FAILED, errno, "pread");
            break;
        }
    }
    *hash = ww_fnv1a64((uint8_t *)data + hashed, *got - hashed, *hash);
    return status;
}
