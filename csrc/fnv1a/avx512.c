/* FNV-1a of one buffer with AVX-512 and its VNNI. */
#include "fnv1a/target.h"
#include "fnv1a/variants.h"

#ifdef WW_FNV1A_X86
#include <immintrin.h>

static int offered(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni");
}

WW_TARGET_BEGIN("avx512f,avx512bw,avx512vnni")

typedef __m512i vec;
typedef __m512i sum;
#define LANES 64
#define WIDTH 4
#define STEPS 32
#define TOGETHER 2
#define SUMS 1
#define PIN(v) __asm__ volatile("" : "+v"(v))

#define v_set8(byte) _mm512_set1_epi8((char)(byte))
#define v_set16 _mm512_set1_epi16
#define v_xor _mm512_xor_si512
#define v_and _mm512_and_si512
#define v_or _mm512_or_si512
#define v_add8 _mm512_add_epi8
#define v_sub16 _mm512_sub_epi16
#define v_mul16 _mm512_mullo_epi16
#define v_high(v) _mm512_srli_epi16(v, 8)
#define v_raise(v) _mm512_slli_epi16(v, 8)
#define v_zip_low _mm512_unpacklo_epi8
#define v_zip_high _mm512_unpackhi_epi8
#define sum_add _mm512_dpwssd_epi32
#define sum_join _mm512_add_epi32
#define sum_zero _mm512_setzero_si512

static inline vec v_gather(const uint8_t *at, size_t stride)
{
    vec v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at + stride * 16)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at + stride * 32)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at + stride * 48)), 3);
}

#define quarters_up(v, count) _mm512_alignr_epi64(v, _mm512_setzero_si512(), 8 - 2 * (count))

static inline vec v_scan(vec v)
{
    v = v_xor(v, _mm512_bslli_epi128(v, 1)); /* in each quarter */
    v = v_xor(v, _mm512_bslli_epi128(v, 2));
    v = v_xor(v, _mm512_bslli_epi128(v, 4));
    v = v_xor(v, _mm512_bslli_epi128(v, 8));
    vec last = _mm512_shuffle_epi8(v, _mm512_set1_epi8(15));
    return v_xor(v_xor(v, quarters_up(last, 1)), v_xor(quarters_up(last, 2), quarters_up(last, 3)));
}

static inline vec v_shift(vec v)
{
    return _mm512_alignr_epi8(v, quarters_up(v, 1), 15);
}

static inline vec v_last(vec v)
{
    return _mm512_shuffle_epi8(_mm512_shuffle_i64x2(v, v, 0xff), _mm512_set1_epi8(15));
}

static inline uint64_t sum_total(const sum *sums)
{
    vec total = _mm512_setzero_si512();
    for (int limb = 3; limb >= 0; limb--) {
        vec wide = _mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(sums[limb])),
                                    _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sums[limb], 1)));
        total = _mm512_add_epi64(_mm512_slli_epi64(total, 16), wide);
    }
    /* Not _mm512_reduce_add_epi64, which gcc adds with signed integers. */
    __m256i half = _mm256_add_epi64(_mm512_castsi512_si256(total), _mm512_extracti64x4_epi64(total, 1));
    __m128i quarter = _mm_add_epi64(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_add_epi64(quarter, _mm_unpackhi_epi64(quarter, quarter)));
}

#include "fnv1a/segments.h"
WW_TARGET_END

const struct ww_fnv1a_variant ww_fnv1a_avx512 = {"avx512", BLOCK, offered, prepare, hash_blocks};
#else
typedef int ww_no_avx512;
#endif
