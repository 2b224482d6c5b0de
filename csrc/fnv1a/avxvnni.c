/* FNV-1a of one buffer with AVX2 and AVX-VNNI, which multiplies and adds to a sum in one. */
#include "fnv1a/target.h"
#include "fnv1a/variants.h"

#ifdef WW_FNV1A_AVXVNNI
#include <cpuid.h>
#include <immintrin.h>

static int offered(void)
{
    /* Not every compiler knows AVX-VNNI by name: CPUID leaf 7, subleaf 1, EAX bit 4. */
    unsigned a = 0, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

WW_TARGET_BEGIN("avx2,avxvnni")
#include "fnv1a/ymm.h"

#define SUMS 2
#define sum_add _mm256_dpwssd_avx_epi32

#include "fnv1a/segments.h"
WW_TARGET_END

const struct ww_fnv1a_variant ww_fnv1a_avxvnni = {"avxvnni", BLOCK, offered, prepare, hash_blocks};
#else
typedef int ww_no_avxvnni;
#endif
