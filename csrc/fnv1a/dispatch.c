/* Which variant hashes: the best this CPU has, or the one it was told to take. */
#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* Best first. */
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
static _Atomic size_t chosen;

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
    atomic_store(&chosen, best);
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
    return atomic_load(&chosen);
}

void ww_fnv1a_choose(size_t index)
{
    pthread_once(&once, set_up);
    atomic_store(&chosen, index);
}

/* A zero byte only multiplies by the prime, and that can be taken back: a tail becomes a block with zeros behind. */
static uint64_t hash_tail(const struct ww_fnv1a_variant *variant, const uint8_t *tail, size_t n, uint64_t hash)
{
    uint8_t padded[WW_FNV1A_LONGEST] __attribute__((aligned(64)));
    memcpy(padded, tail, n);
    memset(padded + n, 0, variant->block - n);
    return variant->blocks(padded, variant->block, hash) * ww_fnv1a_power(WW_FNV1A_INVERSE, variant->block - n);
}

size_t ww_fnv1a_vectors(const uint8_t *data, size_t n, uint64_t *hash)
{
    size_t which = ww_fnv1a_chosen();
    if (which == VARIANTS) {
        return 0;
    }
    const struct ww_fnv1a_variant *variant = variants[which];
    size_t tail = n % variant->block, done = n - tail;
    if (done) {
        *hash = variant->blocks(data, done, *hash);
    }
    if (tail >= WW_FNV1A_SHORT) {
        *hash = hash_tail(variant, data + done, tail, *hash);
        done = n;
    }
    return done;
}

uint64_t ww_fnv1a64(const void *data, size_t n, uint64_t hash)
{
    const uint8_t *at = data;
    size_t done = n < WW_FNV1A_SHORT ? 0 : ww_fnv1a_vectors(at, n, &hash);
    return done == n ? hash : ww_fnv1a_plain(at + done, n - done, hash);
}
