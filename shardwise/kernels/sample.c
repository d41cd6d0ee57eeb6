/* gumbel: noise -log(-log(u)) that is a pure function of (stream, token id); exp of float64 arrays.
 *
 * Only integer operations and IEEE + - * /, in the order of the torch twins (ops.py), so that both give the same bits, on
 * any machine and for any split of the ids. The stream is the 64-bit start that ops.stream hashes from (seed, position);
 * id i takes number i + 1 of the splitmix64 sequence from there (Steele, Lea, Flood 2014).
 */
#ifndef REAL
#define BODY "sample.c"
#include "both.h"
#elif !IS_FLOAT

INLINE uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

INLINE double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* fdlibm's e_log.c for positive normal x. A whole number below 2^52 becomes a double as the mantissa of 2^52, which,
 * unlike a conversion, every machine has as a vector operation. */
INLINE double log_positive(double x) {
    uint64_t bits = bits_of(x) + (0x3FF0000000000000u - 0x3FE6A09E00000000u);
    double k = double_of((bits >> 52) | 0x4330000000000000u) - (0x1p52 + 1023);
    double f = double_of((bits & 0x000FFFFFFFFFFFFFu) + 0x3FE6A09E00000000u) - 1.0;
    double s = f / (f + 2.0);
    double z = s * s;
    double series = 1.479819860511658591e-01;
    series = series * z + 1.531383769920937332e-01;
    series = series * z + 1.818357216161805012e-01;
    series = series * z + 2.222219843214978396e-01;
    series = series * z + 2.857142874366239149e-01;
    series = series * z + 3.999999999940941908e-01;
    series = series * z + 6.666666666666735130e-01;
    double half = f * f * 0.5;
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + series * z) + k * 1.90821492927058770002e-10)) - f);
}

/* out [streams, count]: the noise of ids first to first + count */
void sw_gumbel(const uint64_t *streams, int64_t count_streams, int64_t first, int64_t count, double *restrict out) {
    int threads = threads_for(count_streams * count);
#pragma omp parallel for num_threads(threads) if (threads > 1) collapse(2)
    for (int64_t r = 0; r < count_streams; r++)
        for (int64_t part = 0; part < (count + 1023) / 1024; part++) {
            uint64_t start = streams[r] + (uint64_t)(first + 1 + part * 1024) * 0x9E3779B97F4A7C15u;
            int64_t size = count - part * 1024 < 1024 ? count - part * 1024 : 1024;
            double *to = out + r * count + part * 1024;
            for (int64_t i = 0; i < size; i++) {
                uint64_t bits = start + (uint64_t)i * 0x9E3779B97F4A7C15u;
                bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
                bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
                bits ^= bits >> 31;
                double uniform = (double_of((bits >> 12) | 0x3FF0000000000000u) - 1.0) + 0x1p-53;
                to[i] = -log_positive(-log_positive(uniform));
            }
        }
}

void sw_exp(const double *x, int64_t count, double *restrict out) {
    int threads = threads_for(count);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) out[i] = exp_f64(x[i]);
}
#endif
