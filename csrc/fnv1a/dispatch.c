/* Which variant hashes: the best this CPU has, or the one it was told to take. */
#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

#include <pthread.h>
#include <stdatomic.h>

/* Best first. One that comes later takes what is too short for one before. */
static const struct ww_fnv1a_variant *const variants[] = {
#ifdef WW_FNV1A_X86
    &ww_fnv1a_avx512,
#ifdef WW_FNV1A_AVXVNNI
    &ww_fnv1a_avxvnni,
#endif
    &ww_fnv1a_avx2, &ww_fnv1a_sse2,
#endif
#ifdef WW_FNV1A_NEON
    &ww_fnv1a_neon,
#endif
    NULL, /* the plain loop */
};
#define VARIANTS (sizeof variants / sizeof *variants - 1)

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int is_offered[VARIANTS + 1];
static _Atomic size_t first; /* those before it are not used */

static void set_up(void)
{
    size_t best = VARIANTS;
    for (size_t i = VARIANTS; i-- > 0;) {
        is_offered[i] = variants[i]->offered();
        if (is_offered[i]) {
            variants[i]->prepare();
            best = i;
        }
    }
    is_offered[VARIANTS] = 1;
    atomic_store(&first, best);
}

const char *ww_fnv1a_variant(size_t index, int *offered)
{
    if (index > VARIANTS) {
        return NULL;
    }
    pthread_once(&once, set_up);
    *offered = is_offered[index];
    return index < VARIANTS ? variants[index]->name : "plain";
}

size_t ww_fnv1a_chosen(void)
{
    pthread_once(&once, set_up);
    return atomic_load(&first);
}

void ww_fnv1a_choose(size_t index)
{
    pthread_once(&once, set_up);
    atomic_store(&first, index);
}

size_t ww_fnv1a_blocks(const uint8_t *data, size_t n, uint64_t *hash)
{
    size_t done = 0;
    for (size_t i = ww_fnv1a_chosen(); i < VARIANTS && n - done >= WW_FNV1A_SHORT; i++) {
        size_t blocks = is_offered[i] ? (n - done) / variants[i]->block * variants[i]->block : 0;
        if (blocks) {
            *hash = variants[i]->blocks(data + done, blocks, *hash);
            done += blocks;
        }
    }
    return done;
}

uint64_t ww_fnv1a64(const void *data, size_t n, uint64_t hash)
{
    const uint8_t *at = data;
    size_t done = n < WW_FNV1A_SHORT ? 0 : ww_fnv1a_blocks(at, n, &hash);
    return done == n ? hash : ww_fnv1a_plain(at + done, n - done, hash);
}
