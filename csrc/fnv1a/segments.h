/* FNV-1a of one buffer in byte lanes: the method of docs/hashing.md, written once for every kind of vector.
 *
 * Each variant includes this after it has defined
 *   vec, LANES                      a vector and its bytes
 *   WIDTH, STEPS                    vectors beside each other, bytes of a segment: LANES * WIDTH * STEPS are a block
 *   TOGETHER                        of the WIDTH vectors, how many the linear pass takes at once
 *   PIN(v)                          makes the compiler have v in a register, here
 *   v_set8, v_set16, v_xor, v_and, v_or, v_add8, v_sub16, v_mul16, v_high, v_raise (16-bit lanes moved by 8 bits)
 *   v_gather(at, stride)            16 bytes of each of LANES / 16 places that are 16 * stride apart
 *   v_zip_low, v_zip_high           the bytes of both lower, or upper, halves of each 16 in turn
 *   v_scan(v)                       inclusive prefix XOR over the lanes, in order
 *   v_shift(v)                      lanes moved up by one; 0 comes in
 *   v_last(v)                       the last lane in all lanes
 *   sum, sum_zero, sum_add(sum, d, w), sum_join, sum_total(sum[4])
 *                                   sums of products of 16-bit lanes in 32-bit lanes; sum_total makes four limbs one
 *   SUMS                            1, or 2 where one chain of sum_add would be waited for
 * Segment q of a block stands in lane q / WIDTH of vector q % WIDTH; "row" is one byte of every segment. */
#include "fnv1a/fnv1a.h"
#include "fnv1a/variants.h"

#define BLOCK ((size_t)LANES * WIDTH * STEPS)
#define TILES (STEPS / 16 * WIDTH)
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
/* Inlined into one another these passes need more registers than there are, and spill what their longest chain has. */
#define APART static __attribute__((noinline))

/* Steps are paired, and a 32-bit sum holds 2 * 2 * STEPS products of 9 by 16 bits. */
_Static_assert(STEPS % 16 == 0 && STEPS <= 64 && TILES % 4 == 0 && WIDTH % TOGETHER == 0, "what the method takes");
_Static_assert(BLOCK >= WW_FNV1A_SHORT && BLOCK <= WW_FNV1A_LONGEST, "as others take it to be");

struct rows {
    vec at[STEPS * WIDTH];
    vec even[WIDTH], odd[WIDTH]; /* XOR of the even rows, and of the odd ones */
};

static int16_t weights[STEPS * 2 * 4 * LANES / 2] __attribute__((aligned(64)));
static uint64_t vector_power[WIDTH], block_power;

static void prepare(void)
{
    ww_fnv1a_weights(weights, STEPS, WIDTH, LANES);
    for (size_t i = 0; i < WIDTH; i++) {
        vector_power[i] = ww_fnv1a_power(WW_FNV1A_PRIME, STEPS * (WIDTH - 1 - i));
    }
    block_power = ww_fnv1a_power(WW_FNV1A_PRIME, BLOCK);
}

/* column[k] = byte k of LANES places that are stride apart. */
INLINE void columns(const uint8_t *at, size_t stride, vec *column)
{
    vec other[16];
    for (size_t i = 0; i < 16; i++) {
        column[i] = v_gather(at + stride * i, stride);
    }
    for (int stage = 0; stage < 4; stage++) { /* each interleaves the bytes of i and i + 8 */
        vec *from = stage % 2 ? other : column, *to = stage % 2 ? column : other;
        for (int i = 0; i < 8; i++) {
            to[2 * i] = v_zip_low(from[i], from[i + 8]);
            to[2 * i + 1] = v_zip_high(from[i], from[i + 8]);
        }
    }
}

/* Sixteen rows of one vector. */
APART void take_tile(const uint8_t *block, size_t tile, struct rows *rows)
{
    size_t vector = tile % WIDTH, step = tile / WIDTH * 16;
    vec column[16];
    columns(block + vector * STEPS + step, STEPS * WIDTH, column);
    vec *to = rows->at + step * WIDTH + vector;
    UNROLL for (int k = 0; k < 16; k++) {
        to[k * WIDTH] = column[k];
    }
    vec even = v_xor(v_xor(v_xor(column[0], column[2]), v_xor(column[4], column[6])),
                     v_xor(v_xor(column[8], column[10]), v_xor(column[12], column[14])));
    vec odd = v_xor(v_xor(v_xor(column[1], column[3]), v_xor(column[5], column[7])),
                    v_xor(v_xor(column[9], column[11]), v_xor(column[13], column[15])));
    rows->even[vector] = step ? v_xor(rows->even[vector], even) : even;
    rows->odd[vector] = step ? v_xor(rows->odd[vector], odd) : odd;
}

/* A quarter of the first block of n bytes. The same quarter of the block after it is fetched meanwhile: no CPU foresees
 * that many streams, and all of them at once would be more than it keeps waiting for. */
INLINE void take_quarter(const uint8_t *block, size_t n, size_t quarter, struct rows *rows)
{
    if (n) {
        if (n > BLOCK) {
            for (size_t i = 0; i < BLOCK / 4; i += 64) {
                __builtin_prefetch(block + BLOCK + quarter * (BLOCK / 4) + i);
            }
        }
        for (size_t tile = quarter * (TILES / 4); tile < (quarter + 1) * (TILES / 4); tile++) {
            take_tile(block, tile, rows);
        }
    }
}

/* From what each segment toggles, and what the block starts with, to what each segment starts with; returns what the
 * next block does. */
INLINE vec spread(const vec *toggle, vec first, vec *start)
{
    vec before[WIDTH], sum = toggle[0];
    UNROLL for (int i = 1; i < WIDTH; i++) {
        before[i] = sum;
        sum = v_xor(sum, toggle[i]);
    }
    vec scan = v_scan(sum);
    start[0] = v_xor(v_shift(scan), first);
    UNROLL for (int i = 1; i < WIDTH; i++) {
        start[i] = v_xor(start[0], before[i]);
    }
    return v_xor(v_last(scan), first);
}

/* Bits 0 and 1 need no pass: a step toggles bit 0 by the byte's, and bit 1 by the byte's and by bit 0 before. */
INLINE vec resolve_lowest(const struct rows *rows, vec low, vec *start)
{
    vec toggle[WIDTH];
    UNROLL for (int i = 0; i < WIDTH; i++) {
        vec odd = v_and(rows->odd[i], v_set8(1));
        toggle[i] = v_and(v_xor(v_xor(rows->even[i], rows->odd[i]), v_add8(odd, odd)), v_set8(3));
    }
    return spread(toggle, v_and(low, v_set8(3)), start);
}

/* Bits `bit` and `bit` + 1 of every start, from where the segments end when they start with the bits below. */
INLINE vec resolve(const struct rows *rows, const vec *end, vec low, int bit, vec next, vec *start)
{
    const vec this_bit = v_set8(1 << bit), bit_above = v_set8(2 << bit);
    vec moved[WIDTH], toggle[WIDTH], found[WIDTH];
    UNROLL for (int i = 0; i < WIDTH; i++) {
        moved[i] = v_xor(end[i], start[i]);
        toggle[i] = v_and(moved[i], this_bit);
    }
    next = v_or(next, spread(toggle, v_and(low, this_bit), found));
    UNROLL for (int i = 0; i < WIDTH; i++) {
        /* Let g be what the bits below add to this bit of a step's product. Had the segment started with this bit set,
         * each step would toggle the bit above by 1 ^ g. Over an even number of steps the ones cancel, and the g
         * together are how the segment moved this bit, less how its bytes did. */
        vec all = v_xor(rows->even[i], rows->odd[i]);
        vec more = v_and(found[i], v_xor(moved[i], all));
        toggle[i] = v_xor(v_and(moved[i], bit_above), v_add8(more, more));
        start[i] = v_or(start[i], found[i]);
    }
    next = v_or(next, spread(toggle, v_and(low, bit_above), found));
    UNROLL for (int i = 0; i < WIDTH; i++) {
        start[i] = v_or(start[i], found[i]);
    }
    return next;
}

/* The low four bits of each segment's end: 0xb3 is 3 mod 16, and needs no multiply. */
APART void pass_nibbles(const vec *row, const vec *start, vec *end)
{
    vec s[WIDTH];
    UNROLL for (int i = 0; i < WIDTH; i++) {
        s[i] = start[i];
    }
    const vec *stop = row + STEPS * WIDTH;
    do {
        UNROLL for (int k = 0; k < 2; k++) {
            UNROLL for (int i = 0; i < WIDTH; i++) {
                vec x = v_xor(s[i], row[k * WIDTH + i]);
                s[i] = v_add8(x, v_add8(x, x));
                PIN(s[i]);
            }
        }
        row += 2 * WIDTH;
    } while (row != stop);
    UNROLL for (int i = 0; i < WIDTH; i++) {
        end[i] = s[i];
    }
}

/* Each segment's end. Even and odd byte lanes run in 16 bits, whose upper halves hold what nobody looks at. */
APART void pass_bytes(const vec *row, const vec *start, vec *end)
{
    vec factor = v_set16(0xb3);
    PIN(factor);
    vec even[WIDTH], odd[WIDTH];
    UNROLL for (int i = 0; i < WIDTH; i++) {
        even[i] = start[i];
        odd[i] = v_high(start[i]);
    }
    const vec *stop = row + STEPS * WIDTH;
    do {
        UNROLL for (int k = 0; k < 2; k++) {
            UNROLL for (int i = 0; i < WIDTH; i++) {
                vec bytes = row[k * WIDTH + i];
                PIN(bytes);
                even[i] = v_xor(even[i], bytes);
                PIN(even[i]);
                even[i] = v_mul16(even[i], factor);
                PIN(even[i]);
                odd[i] = v_xor(odd[i], v_high(bytes));
                PIN(odd[i]);
                odd[i] = v_mul16(odd[i], factor);
                PIN(odd[i]);
            }
        }
        row += 2 * WIDTH;
    } while (row != stop);
    UNROLL for (int i = 0; i < WIDTH; i++) {
        end[i] = v_or(v_and(even[i], v_set16(0xff)), v_raise(odd[i]));
    }
}

/* What the steps add to the hash beside the multiplications, x - l each, by its weight; of TOGETHER vectors. */
APART void pass_linear(const vec *row, const vec *start, uint64_t *total)
{
    vec factor = v_set16(0xb3), low_byte = v_set16(0xff);
    PIN(factor);
    PIN(low_byte);
    vec even[TOGETHER], odd[TOGETHER];
    sum sums[TOGETHER][SUMS * 4];
    UNROLL for (int i = 0; i < TOGETHER; i++) {
        even[i] = v_and(start[i], low_byte);
        odd[i] = v_high(start[i]);
        UNROLL for (int k = 0; k < SUMS * 4; k++) {
            sums[i][k] = sum_zero();
        }
    }
    const vec *weight = (const vec *)weights, *stop = weight + STEPS * 8;
    do {
        UNROLL for (int k = 0; k < 2; k++) {
            vec even_less[TOGETHER], odd_less[TOGETHER];
            UNROLL for (int i = 0; i < TOGETHER; i++) {
                vec bytes = row[k * WIDTH + i];
                PIN(bytes);
                vec even_x = v_xor(even[i], v_and(bytes, low_byte)), odd_x = v_xor(odd[i], v_high(bytes));
                PIN(even_x);
                PIN(odd_x);
                even_less[i] = v_sub16(even_x, even[i]);
                odd_less[i] = v_sub16(odd_x, odd[i]);
                PIN(even_less[i]);
                PIN(odd_less[i]);
                even[i] = v_mul16(even_x, factor);
                odd[i] = v_mul16(odd_x, factor);
                PIN(even[i]);
                PIN(odd[i]);
            }
            UNROLL for (int limb = 0; limb < 4; limb++) {
                UNROLL for (int i = 0; i < TOGETHER; i++) {
                    sums[i][limb] = sum_add(sums[i][limb], even_less[i], weight[k * 8 + limb]);
                    PIN(sums[i][limb]);
                }
            }
            UNROLL for (int limb = 0; limb < 4; limb++) {
                UNROLL for (int i = 0; i < TOGETHER; i++) {
                    sum *to = &sums[i][(SUMS - 1) * 4 + limb];
                    *to = sum_add(*to, odd_less[i], weight[k * 8 + 4 + limb]);
                    PIN(*to);
                }
            }
        }
        weight += 16;
        row += 2 * WIDTH;
    } while (weight != stop);
    UNROLL for (int i = 0; i < TOGETHER; i++) {
        UNROLL for (int limb = 0; SUMS == 2 && limb < 4; limb++) {
            sums[i][limb] = sum_join(sums[i][limb], sums[i][SUMS * 4 - 4 + limb]);
        }
        total[i] = sum_total(sums[i]);
    }
}

static uint64_t hash_blocks(const uint8_t *data, size_t n, uint64_t hash)
{
    struct rows room[2], *rows = &room[0], *rows_after = &room[1];
    vec low = v_set8((int)(hash & 0xff));
    for (size_t quarter = 0; quarter < 4; quarter++) {
        take_quarter(data, n, quarter, rows);
    }
    for (; n; n -= BLOCK) {
        /* The block after is taken apart between the steps below, each of which waits for the one before. */
        vec start[WIDTH], end[WIDTH];
        vec next = resolve_lowest(rows, low, start);
        take_quarter(data + BLOCK, n - BLOCK, 0, rows_after);
        pass_nibbles(rows->at, start, end);
        next = resolve(rows, end, low, 2, next, start);
        take_quarter(data + BLOCK, n - BLOCK, 1, rows_after);
        pass_bytes(rows->at, start, end);
        next = resolve(rows, end, low, 4, next, start);
        take_quarter(data + BLOCK, n - BLOCK, 2, rows_after);
        pass_bytes(rows->at, start, end);
        low = resolve(rows, end, low, 6, next, start);
        take_quarter(data + BLOCK, n - BLOCK, 3, rows_after);
        uint64_t sum_of_all = 0, total[TOGETHER];
        for (size_t i = 0; i < WIDTH; i += TOGETHER) {
            pass_linear(rows->at + i, start + i, total);
            for (size_t k = 0; k < TOGETHER; k++) {
                sum_of_all += total[k] * vector_power[i + k];
            }
        }
        hash = hash * block_power + sum_of_all;
        struct rows *swap = rows;
        rows = rows_after;
        rows_after = swap;
        data += BLOCK;
    }
    return hash;
}
