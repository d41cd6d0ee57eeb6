/* rotate_write: splits rows of q | k | v heads, turns q and k by their position, stores k and v in the cache.
 *
 * In the layout of Hugging Face ("rotate half"): of the first 2 * half dims of a head, dim i and dim i + half are a plane
 * turned by angle i. Every output is two products and their sum, each rounded, as torch does it. Keys are stored with the
 * 16 tokens of a block side by side ([block][Hkv][D][16]), since that is how attend reads them; values as rows.
 */
#ifndef REAL
#define BODY "rope.c"
#include "both.h"
#else

/* One head, written with a stride between dims. */
INLINE void NAME(turn)(const REAL *from, const REAL *cos, const REAL *sin, int64_t half, int64_t dims, REAL *to,
                       const int64_t stride) {
    for (int64_t i = 0; i < half; i++) {
        REAL left = from[i], right = from[i + half];
        to[i * stride] = left * cos[i] - right * sin[i];
        to[(i + half) * stride] = right * cos[i] + left * sin[i];
    }
    for (int64_t i = 2 * half; i < dims; i++) to[i * stride] = from[i];
}

/* qkv [M, heads + 2 key_heads, dims], cos and sin [positions, half] (unused when half is 0), q [M, heads, dims]. */
void NAME(sw_rotate_write)(const REAL *qkv, const REAL *cos, const REAL *sin, int64_t half, const int32_t *positions,
                           const int32_t *slots, int64_t rows, int64_t heads, int64_t key_heads, int64_t dims,
                           int64_t padded, REAL *restrict keys, REAL *restrict values, REAL *restrict q) {
    int threads = threads_for(rows * (heads + 2 * key_heads) * dims / 2);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const REAL *from = qkv + r * (heads + 2 * key_heads) * dims;
        const REAL *c = cos + positions[r] * half, *s = sin + positions[r] * half;
        int64_t block = slots[r] / TOKENS, offset = slots[r] % TOKENS;
        for (int64_t h = 0; h < heads; h++, from += dims) NAME(turn)(from, c, s, half, dims, q + (r * heads + h) * dims, 1);
        for (int64_t h = 0; h < key_heads; h++, from += dims)
            NAME(turn)(from, c, s, half, dims, keys + (block * key_heads + h) * dims * TOKENS + offset, TOKENS);
        for (int64_t h = 0; h < key_heads; h++, from += dims)
            memcpy(values + ((block * key_heads + h) * TOKENS + offset) * padded, from, dims * sizeof(REAL));
    }
}
#endif
