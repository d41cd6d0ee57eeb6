/* silu(gate) * up, relu and the two gelus, element by element: a value depends on its own inputs, not on its place in a row. */
#ifndef REAL
#define BODY "activate.c"
#include "both.h"
#else

INLINE REAL NAME(silu)(REAL x) { return x / (1 + NAME(exp)(-x)); }

/* 0.5 x (1 + tanh(u)) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3) */
INLINE REAL NAME(gelu_tanh)(REAL x) {
    REAL u = (REAL)0.7978845608028654 * (x + (REAL)0.044715 * (x * x * x));
    return x / (1 + NAME(exp)(-2 * u));
}

INLINE REAL NAME(gelu)(REAL x) {
    REAL scaled = x * (REAL)0.7071067811865476;
    return (REAL)0.5 * x * (1 + (IS_FLOAT ? erff(scaled) : erf(scaled)));
}

/* kind 0: x [M, gate | up] to silu(gate) * up [M, cols]; 1: gelu_tanh, 2: gelu and 3: relu, all [M, cols] */
void NAME(sw_activate)(int kind, const REAL *x, int64_t rows, int64_t cols, REAL *restrict out) {
    int threads = threads_for(rows * cols * 4);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const REAL *row = x + r * cols * (kind == 0 ? 2 : 1);
        REAL *to = out + r * cols;
        if (kind == 0)
            for (int64_t k = 0; k < cols; k++) to[k] = NAME(silu)(row[k]) * row[cols + k];
        else if (kind == 1)
            for (int64_t k = 0; k < cols; k++) to[k] = NAME(gelu_tanh)(row[k]);
        else if (kind == 2)
            for (int64_t k = 0; k < cols; k++) to[k] = NAME(gelu)(row[k]);
        else
            for (int64_t k = 0; k < cols; k++) to[k] = row[k] < 0 ? 0 : row[k]; /* NaN stays */
    }
}
#endif
