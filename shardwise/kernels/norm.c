/* rms_norm and layer_norm of whole rows, head_norm of whole heads, so every rank computes the same bits.
 *
 * Sums over a row go to 32 partial sums (column k to k % 32, ascending), then a fixed tree: short chains keep the error
 * small, and a fixed number of them keeps the vector width out of the result. layer_norm takes the mean first and then
 * the mean square of the differences.
 */
#ifndef REAL
#define BODY "norm.c"
#include "both.h"
#else

#define PARTS 32

/* Sum of x over the columns, or with about of (x - about)^2. */
INLINE REAL NAME(total)(const REAL *x, int64_t cols, const int squared, REAL about) {
    REAL part[PARTS] = {0};
    int64_t whole = cols / PARTS * PARTS;
    for (int64_t k = 0; k < whole; k += PARTS)
        for (int i = 0; i < PARTS; i++) {
            REAL value = x[k + i] - about;
            part[i] = squared ? NAME(fma1)(value, value, part[i]) : part[i] + value;
        }
    for (int i = 0; i < cols - whole; i++) {
        REAL value = x[whole + i] - about;
        part[i] = squared ? NAME(fma1)(value, value, part[i]) : part[i] + value;
    }
    for (int half = PARTS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] + part[i + half];
    return part[0];
}

/* x / sqrt(mean(x^2) + eps) * weight */
INLINE void NAME(rms)(const REAL *row, const REAL *weight, int64_t cols, double eps, REAL *out) {
    REAL scale = 1 / (IS_FLOAT ? sqrtf(NAME(total)(row, cols, 1, 0) / cols + (REAL)eps)
                               : sqrt(NAME(total)(row, cols, 1, 0) / cols + (REAL)eps));
    for (int64_t k = 0; k < cols; k++) out[k] = row[k] * scale * weight[k];
}

void NAME(sw_rms_norm)(const REAL *x, const REAL *weight, int64_t rows, int64_t cols, double eps, REAL *restrict out) {
    int threads = threads_for(rows * cols);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) NAME(rms)(x + r * cols, weight, cols, eps, out + r * cols);
}

/* Rows of q | k | v heads: rms_norm of each q and each k head by its own weight [dims]; v as it is. */
void NAME(sw_head_norm)(const REAL *x, const REAL *q_weight, const REAL *k_weight, int64_t rows, int64_t heads,
                        int64_t key_heads, int64_t dims, double eps, REAL *restrict out) {
    const int64_t all = heads + 2 * key_heads;
    int threads = threads_for(rows * all * dims);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const REAL *row = x + r * all * dims;
        REAL *to = out + r * all * dims;
        for (int64_t h = 0; h < heads + key_heads; h++)
            NAME(rms)(row + h * dims, h < heads ? q_weight : k_weight, dims, eps, to + h * dims);
        memcpy(to + (heads + key_heads) * dims, row + (heads + key_heads) * dims, key_heads * dims * sizeof(REAL));
    }
}

/* (x - mean) / sqrt(variance + eps) * weight + bias */
void NAME(sw_layer_norm)(const REAL *x, const REAL *weight, const REAL *bias, int64_t rows, int64_t cols, double eps,
                         REAL *out) {
    int threads = threads_for(rows * cols);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const REAL *row = x + r * cols;
        REAL mean = NAME(total)(row, cols, 0, 0) / cols;
        REAL scale = 1 / (IS_FLOAT ? sqrtf(NAME(total)(row, cols, 1, mean) / cols + (REAL)eps)
                                   : sqrt(NAME(total)(row, cols, 1, mean) / cols + (REAL)eps));
        for (int64_t k = 0; k < cols; k++)
            out[r * cols + k] = NAME(fma1)((row[k] - mean) * scale, weight[k], bias[k]);
    }
}
#endif
