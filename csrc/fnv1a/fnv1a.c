#include "fnv1a/fnv1a.h"

uint64_t ww_fnv1a64(const void *data, size_t n, uint64_t hash)
{
    const uint8_t *at = data;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ at[i]) * WW_FNV1A_PRIME;
    }
    return hash;
}
