#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

uint64_t ww_fnv1a_plain(const uint8_t *data, size_t n, uint64_t hash)
{
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ data[i]) * WW_FNV1A_PRIME;
    }
    return hash;
}
