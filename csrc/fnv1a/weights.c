#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

uint64_t ww_fnv1a_power(uint64_t base, uint64_t n)
{
    uint64_t result = 1;
    for (; n; n >>= 1, base *= base) {
        if (n & 1) {
            result *= base;
        }
    }
    return result;
}

void ww_fnv1a_weights(int16_t *table, size_t steps, size_t width, size_t lanes)
{
    for (size_t step = 0; step < steps; step++) {
        for (size_t lane = 0; lane < lanes; lane++) {
            uint64_t rest = ww_fnv1a_power(WW_FNV1A_PRIME, steps * width * (lanes - 1 - lane) + steps - step);
            for (size_t limb = 0; limb < 4; limb++) {
                uint32_t digit = (uint32_t)(rest & 0xffff);
                table[((step * 2 + lane % 2) * 4 + limb) * (lanes / 2) + lane / 2] =
                    (int16_t)((int32_t)(digit ^ 0x8000) - 0x8000);
                rest = (rest >> 16) + (digit >> 15); /* above 32767 it counts as less 65536: one more above */
            }
        }
    }
}
