/* Vectors of 32 bytes, for the variants with AVX2: what segments.h asks for, but for sum_add. */
typedef __m256i vec;
typedef __m256i sum;
#define LANES 32
#define WIDTH 4
#define STEPS 32
#define TOGETHER 1
#define PIN(v) __asm__ volatile("" : "+x"(v))

#define v_set8(byte) _mm256_set1_epi8((char)(byte))
#define v_set16 _mm256_set1_epi16
#define v_xor _mm256_xor_si256
#define v_and _mm256_and_si256
#define v_or _mm256_or_si256
#define v_add8 _mm256_add_epi8
#define v_sub16 _mm256_sub_epi16
#define v_mul16 _mm256_mullo_epi16
#define v_high(v) _mm256_srli_epi16(v, 8)
#define v_raise(v) _mm256_slli_epi16(v, 8)
#define v_zip_low _mm256_unpacklo_epi8
#define v_zip_high _mm256_unpackhi_epi8
#define sum_join _mm256_add_epi32
#define sum_zero _mm256_setzero_si256

static inline vec v_gather(const uint8_t *at, size_t stride)
{
    __m128i half = _mm_loadu_si128((const __m128i *)at);
    __m128i upper = _mm_loadu_si128((const __m128i *)(at + stride * 16));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(half), upper, 1);
}

/* The lower half as the upper one, and 0 as the lower. */
static inline vec lower_up(vec v)
{
    return _mm256_permute2x128_si256(v, v, 0x08);
}

static inline vec v_scan(vec v)
{
    v = v_xor(v, _mm256_slli_si256(v, 1)); /* in either half */
    v = v_xor(v, _mm256_slli_si256(v, 2));
    v = v_xor(v, _mm256_slli_si256(v, 4));
    v = v_xor(v, _mm256_slli_si256(v, 8));
    return v_xor(v, _mm256_shuffle_epi8(lower_up(v), _mm256_set1_epi8(15)));
}

static inline vec v_shift(vec v)
{
    return _mm256_alignr_epi8(v, lower_up(v), 15);
}

static inline vec v_last(vec v)
{
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(v, 0xff), _mm256_set1_epi8(7));
}

static inline uint64_t sum_total(const sum *sums)
{
    vec total = _mm256_setzero_si256();
    for (int limb = 3; limb >= 0; limb--) {
        vec wide = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(sums[limb])),
                                    _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sums[limb], 1)));
        total = _mm256_add_epi64(_mm256_slli_epi64(total, 16), wide);
    }
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    return (uint64_t)_mm_cvtsi128_si64(half) + (uint64_t)_mm_extract_epi64(half, 1);
}
