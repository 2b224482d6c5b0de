/* The ways of hashing whole blocks of one buffer, and which of them this CPU takes. All give the same hash. */
#ifndef WW_FNV1A_VARIANTS_H
#define WW_FNV1A_VARIANTS_H

#include <stddef.h>
#include <stdint.h>

/* Fewer bytes are left to the plain loop. A block alone costs as much as 520 to 660 bytes there, in every variant. */
#define WW_FNV1A_SHORT ((size_t)1024)
/* No block is longer. */
#define WW_FNV1A_LONGEST ((size_t)8192)
/* WW_FNV1A_PRIME times this is 1, mod 2^64. */
#define WW_FNV1A_INVERSE UINT64_C(0xce965057aff6957b)

struct ww_fnv1a_variant {
    const char *name;
    size_t block;         /* bytes; it hashes multiples of that and nothing else */
    int (*offered)(void); /* whether CPU and operating system have the instructions */
    void (*prepare)(void); /* builds its tables; called once, before the first of `blocks` */
    uint64_t (*blocks)(const uint8_t *data, size_t n, uint64_t hash); /* n: a multiple of block above 0 */
};

#if defined(__x86_64__) && defined(__GNUC__)
#define WW_FNV1A_X86 1
extern const struct ww_fnv1a_variant ww_fnv1a_avx512, ww_fnv1a_avx2, ww_fnv1a_sse2;
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define WW_FNV1A_AVXVNNI 1
extern const struct ww_fnv1a_variant ww_fnv1a_avxvnni;
#endif
#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__GNUC__) && !defined(__AARCH64EB__)
#define WW_FNV1A_NEON 1
extern const struct ww_fnv1a_variant ww_fnv1a_neon;
#endif

/* The plain loop: any length, any CPU. */
uint64_t ww_fnv1a_plain(const uint8_t *data, size_t n, uint64_t hash);

/* Continues *hash over data in vectors; returns how many bytes that were: all but fewer than WW_FNV1A_SHORT, which are
 * left to the plain loop, as everything is where there are no vectors. */
size_t ww_fnv1a_vectors(const uint8_t *data, size_t n, uint64_t *hash);

/* base to the power n, mod 2^64. */
uint64_t ww_fnv1a_power(uint64_t base, uint64_t n);

/* For each step, two rows of `lanes` / 2: the even byte lanes and the odd ones; of each, four limbs, the least first:
 * signed 16-bit digits of the weight p^(steps * width * (lanes - 1 - lane) + steps - step). */
void ww_fnv1a_weights(int16_t *table, size_t steps, size_t width, size_t lanes);

#endif
