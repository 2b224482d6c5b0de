/* FNV-1a of one buffer with SSE2, which every x86-64 has. */
#include "fnv1a/variants.h"

#ifdef WW_FNV1A_X86
#include <emmintrin.h>

typedef __m128i vec;
typedef __m128i sum;
#define LANES 16
#define WIDTH 4
#define STEPS 32
#define TOGETHER 1
#define SUMS 1
#define PIN(v) __asm__ volatile("" : "+x"(v))

#define v_set8(byte) _mm_set1_epi8((char)(byte))
#define v_set16 _mm_set1_epi16
#define v_xor _mm_xor_si128
#define v_and _mm_and_si128
#define v_or _mm_or_si128
#define v_add8 _mm_add_epi8
#define v_sub16 _mm_sub_epi16
#define v_mul16 _mm_mullo_epi16
#define v_high(v) _mm_srli_epi16(v, 8)
#define v_raise(v) _mm_slli_epi16(v, 8)
#define v_zip_low _mm_unpacklo_epi8
#define v_zip_high _mm_unpackhi_epi8
#define v_gather(at, stride) _mm_loadu_si128((const vec *)(at))
#define sum_join _mm_add_epi32
#define sum_zero _mm_setzero_si128
#define sum_add(sum, d, w) _mm_add_epi32(sum, _mm_madd_epi16(d, w))

static inline vec v_scan(vec v)
{
    v = v_xor(v, _mm_slli_si128(v, 1));
    v = v_xor(v, _mm_slli_si128(v, 2));
    v = v_xor(v, _mm_slli_si128(v, 4));
    return v_xor(v, _mm_slli_si128(v, 8));
}

static inline vec v_shift(vec v)
{
    return _mm_slli_si128(v, 1);
}

static inline vec v_last(vec v)
{
    v = _mm_srli_si128(v, 15);
    v = _mm_unpacklo_epi8(v, v);
    v = _mm_shufflelo_epi16(v, 0);
    return _mm_unpacklo_epi64(v, v);
}

static inline uint64_t sum_total(const sum *sums)
{
    vec total = _mm_setzero_si128();
    for (int limb = 3; limb >= 0; limb--) {
        vec sign = _mm_srai_epi32(sums[limb], 31);
        vec wide = _mm_add_epi64(_mm_unpacklo_epi32(sums[limb], sign), _mm_unpackhi_epi32(sums[limb], sign));
        total = _mm_add_epi64(_mm_slli_epi64(total, 16), wide);
    }
    return (uint64_t)_mm_cvtsi128_si64(_mm_add_epi64(total, _mm_unpackhi_epi64(total, total)));
}

#include "fnv1a/segments.h"

static int offered(void)
{
    return 1;
}

const struct ww_fnv1a_variant ww_fnv1a_sse2 = {"sse2", BLOCK, offered, prepare, hash_blocks};
#else
typedef int ww_no_sse2;
#endif
