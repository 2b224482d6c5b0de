/* FNV-1a of one buffer with NEON, which every 64-bit Arm has. */
#include "fnv1a/variants.h"

#ifdef WW_FNV1A_NEON
#include <arm_neon.h>

typedef uint8x16_t vec;
typedef int32x4_t sum;
#define LANES 16
#define WIDTH 4
#define STEPS 32
#define TOGETHER 1
#define SUMS 1
#define PIN(v) __asm__ volatile("" : "+w"(v))

#define WORDS vreinterpretq_u16_u8
#define BYTES vreinterpretq_u8_u16
#define v_set8(byte) vdupq_n_u8((uint8_t)(byte))
#define v_set16(word) BYTES(vdupq_n_u16(word))
#define v_xor veorq_u8
#define v_and vandq_u8
#define v_or vorrq_u8
#define v_add8 vaddq_u8
#define v_sub16(a, b) BYTES(vsubq_u16(WORDS(a), WORDS(b)))
#define v_mul16(a, b) BYTES(vmulq_u16(WORDS(a), WORDS(b)))
#define v_high(v) BYTES(vshrq_n_u16(WORDS(v), 8))
#define v_raise(v) BYTES(vshlq_n_u16(WORDS(v), 8))
#define v_zip_low vzip1q_u8
#define v_zip_high vzip2q_u8
#define v_gather(at, stride) vld1q_u8(at)
#define sum_join vaddq_s32

static inline sum sum_zero(void)
{
    return vdupq_n_s32(0);
}

static inline sum sum_add(sum to, vec d, vec w)
{
    int16x8_t a = vreinterpretq_s16_u8(d), b = vreinterpretq_s16_u8(w);
    return vmlal_high_s16(vmlal_s16(to, vget_low_s16(a), vget_low_s16(b)), a, b);
}

#define lanes_up(v, count) vextq_u8(vdupq_n_u8(0), v, 16 - (count))

static inline vec v_scan(vec v)
{
    v = v_xor(v, lanes_up(v, 1));
    v = v_xor(v, lanes_up(v, 2));
    v = v_xor(v, lanes_up(v, 4));
    return v_xor(v, lanes_up(v, 8));
}

static inline vec v_shift(vec v)
{
    return lanes_up(v, 1);
}

static inline vec v_last(vec v)
{
    return vdupq_laneq_u8(v, 15);
}

static inline uint64_t sum_total(const sum *sums)
{
    uint64_t total = 0;
    for (int limb = 3; limb >= 0; limb--) {
        total = (total << 16) + (uint64_t)vaddlvq_s32(sums[limb]);
    }
    return total;
}

#include "fnv1a/segments.h"

static int offered(void)
{
    return 1;
}

const struct ww_fnv1a_variant ww_fnv1a_neon = {"neon", BLOCK, offered, prepare, hash_blocks};
#else
typedef int ww_no_neon;
#endif
