/* What the kernels are written in: one vector type, a fused multiply-add, exp, and the split of work over threads.
 *
 * The whole library is compiled with -ffp-contract=off and without any -ffast-math, so a product is fused with a sum
 * exactly where fma is written, and a loop has the same bits whether the compiler vectorises it, unrolls it or leaves it
 * alone. Hence the width of the machine's vectors never enters a result. Included once per REAL, by both.h.
 */
#ifndef SW_VECTOR_H
#define SW_VECTOR_H
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#define MAX_ROWS 12 /* x 2 vectors: 24 of 32 registers hold sums */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#define MAX_ROWS 6 /* x 2 vectors: 12 of 16 registers hold sums */
#elif defined(__aarch64__)
#include <arm_neon.h>
#define VECTOR_BYTES 16
#define MAX_ROWS 12
#else
#error "the kernels need AVX2 with FMA and F16C (any x86-64 since 2013) or 64-bit ARM"
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define TOKENS 16 /* tokens in a block of the key/value cache: BLOCK of config.py */
#define PANEL 32  /* output features in a panel of packed weights */
#define WIDTH ((int)(VECTOR_BYTES / sizeof(REAL)))

/* Rows of x that one pass takes: the least of the compiled sizes that is enough; surplus rows are computed and dropped. */
INLINE int rows_taken(int64_t rows) {
    static const int sizes[] = {1, 2, 3, 4, 6, 8, 12};
    int i = 0;
    while (sizes[i] < rows && sizes[i] < MAX_ROWS) i++;
    return sizes[i];
}
#if MAX_ROWS == 12
#define FOR_ROWS(CALL, ...) ROWS_TO_6(CALL, __VA_ARGS__) CALL(__VA_ARGS__, 8) CALL(__VA_ARGS__, 12)
#else
#define FOR_ROWS(CALL, ...) ROWS_TO_6(CALL, __VA_ARGS__)
#endif
#define ROWS_TO_6(CALL, ...) \
    CALL(__VA_ARGS__, 1) CALL(__VA_ARGS__, 2) CALL(__VA_ARGS__, 3) CALL(__VA_ARGS__, 4) CALL(__VA_ARGS__, 6)

/* All threads or, for little work (elements, or multiply-adds / 16), only the caller's. Never a number between: libgomp
 * ends the threads that a smaller team leaves over and starts them anew for the next larger one. */
INLINE int threads_for(int64_t work) { return work < 16384 ? 1 : omp_get_max_threads(); }
#endif

/* Unaligned, and may alias: memory is read and written through this type. */
typedef REAL NAME(vec) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

INLINE NAME(vec) NAME(load)(const REAL *from) { return *(const NAME(vec) *)from; }
INLINE void NAME(store)(REAL *to, NAME(vec) value) { *(NAME(vec) *)to = value; }
INLINE NAME(vec) NAME(fill)(REAL value) { return value - (NAME(vec)){0}; } /* -0 stays -0 */

/* The same, in a register: a compiler that folds a load into each of its uses would load it once per row. */
INLINE NAME(vec) NAME(keep)(NAME(vec) value) {
#if defined(__x86_64__)
    __asm__("" : "+v"(value));
#endif
    return value;
}

#if IS_FLOAT
INLINE float fma1_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE double fma1_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif

INLINE NAME(vec) NAME(fma)(NAME(vec) a, NAME(vec) b, NAME(vec) c) {
#if VECTOR_BYTES == 64 && IS_FLOAT
    return (vec_f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VECTOR_BYTES == 64
    return (vec_f64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif VECTOR_BYTES == 32 && IS_FLOAT
    return (vec_f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif VECTOR_BYTES == 32
    return (vec_f64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif IS_FLOAT
    return (vec_f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return (vec_f64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#endif
}

/* e to the x: 2^n times the Taylor series of e^r, |r| <= log(2) / 2, as scalar code that vectorises in any loop.
 * Rounding to a whole n is done by adding and subtracting 1.5 * 2^(mantissa bits), whose low bits then hold n. Below the
 * normal numbers it is 0. The double one uses no fma, so that torch can repeat it bit for bit (noise.py). */
#if IS_FLOAT
INLINE float exp_f32(float x) {
    float c = x < -87.0f ? -87.0f : x;
    c = c > 89.0f ? 89.0f : c;
    const float magic = 12582912.0f;
    float shifted = c * 0x1.715476p+0f + magic, n = shifted - magic;
    float r = fma1_f32(n, -0x1.62e400p-1f, c);
    r = fma1_f32(n, -0x1.7f7d1cp-20f, r);
    float s = 1.0f / 5040;
    s = fma1_f32(s, r, 1.0f / 720);
    s = fma1_f32(s, r, 1.0f / 120);
    s = fma1_f32(s, r, 1.0f / 24);
    s = fma1_f32(s, r, 1.0f / 6);
    s = fma1_f32(s, r, 0.5f);
    s = fma1_f32(s, r, 1.0f);
    s = fma1_f32(s, r, 1.0f);
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : s * power;
}
#else
INLINE double exp_f64(double x) {
    double c = x < -708.0 ? -708.0 : x;
    c = c > 710.0 ? 710.0 : c;
    const double magic = 6755399441055744.0;
    double shifted = c * 1.4426950408889634 + magic, n = shifted - magic;
    double r = (c - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double s = 1.0 / 6227020800;
    s = s * r + 1.0 / 479001600;
    s = s * r + 1.0 / 39916800;
    s = s * r + 1.0 / 3628800;
    s = s * r + 1.0 / 362880;
    s = s * r + 1.0 / 40320;
    s = s * r + 1.0 / 5040;
    s = s * r + 1.0 / 720;
    s = s * r + 1.0 / 120;
    s = s * r + 1.0 / 24;
    s = s * r + 1.0 / 6;
    s = s * r + 0.5;
    s = s * r + 1.0;
    s = s * r + 1.0;
    uint64_t bits;
    double power;
    memcpy(&bits, &shifted, 8);
    bits = (bits + 1023) << 52;
    memcpy(&power, &bits, 8);
    return x < -708.0 ? 0.0 : s * power;
}
#endif
