/* FNV-1a of one buffer with AVX2. */
#include "fnv1a/target.h"
#include "fnv1a/variants.h"

#ifdef WW_FNV1A_X86
#include <immintrin.h>

static int offered(void)
{
    return __builtin_cpu_supports("avx2");
}

WW_TARGET_BEGIN("avx2")
#include "fnv1a/ymm.h"

#define SUMS 1
#define sum_add(sum, d, w) _mm256_add_epi32(sum, _mm256_madd_epi16(d, w))

#include "fnv1a/segments.h"
WW_TARGET_END

const struct ww_fnv1a_variant ww_fnv1a_avx2 = {"avx2", BLOCK, offered, prepare, hash_blocks};
#else
typedef int ww_no_avx2;
#endif
