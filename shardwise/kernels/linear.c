/* linear: x [M, K] times packed weights: each output is the sum over the chunks of K in the order of an addition program.
 *
 * Weights lie in panels of 32 output features, [ceil(N / 32)][K][32], so that an output's sum lives in one vector lane:
 * nothing is ever added across lanes, and neither the vector width nor the number of rows, outputs or threads can enter
 * the order. Inside a chunk the sum is fused multiply-adds in ascending k from zero. A chunk's sum is pushed on a stack,
 * where the program adds up subtrees (placement.Tree). (sum + bias) + residual comes last. finish does the same to sums
 * that were computed elsewhere.
 *
 * A tile is R rows of x times a strip of two vectors: outputs s * WIDTH and 16 + s * WIDTH onwards of a panel (so that a
 * pair of bfloat16 (i, i + 16), packed as one word, opens into two vectors without a shuffle). x is packed as [K][R] to
 * read along with it. Whole numbers of 8 or 4 bits, which share a scale in groups along K, are read by groups.h.
 */
#ifndef REAL
#include <stdint.h>

enum { F32, BF16, F16, F64, INT8, INT4 };
#define FORMAT_BYTES(format) ((format) == F32 ? 4 : (format) == F64 ? 8 : 2)
#define NIBBLES 8 /* columns of 4-bit numbers in a word, the first in the lowest bits */
#define WORDS(cols) (((cols) + NIBBLES - 1) / NIBBLES)
#define STRIP_BYTES(format) (WIDTH * FORMAT_BYTES(format) * ((format) == BF16 ? 2 : 1))

struct program { /* as in native.py */
    int64_t chunks, nodes, depth;
    const int64_t *bounds, *merges;
};

#define BODY "linear.c"
#include "both.h"

#define PACK(NAME, TYPE, PLACE)                                                                                  \
    static void NAME(TYPE *panels, int64_t cols, int64_t row, int64_t rows, const TYPE *from) {                  \
        for (int64_t r = 0; r < rows; r++) {                                                                     \
            int64_t lane = (row + r) % PANEL;                                                                    \
            TYPE *to = panels + (row + r) / PANEL * PANEL * cols + (PLACE);                                      \
            for (int64_t k = 0; k < cols; k++) to[k * PANEL] = from[r * cols + k];                               \
        }                                                                                                        \
    }
PACK(pack_8, uint8_t, lane)
PACK(pack_16, uint16_t, lane)
PACK(pack_bf16, uint16_t, lane % 16 * 2 + lane / 16)
PACK(pack_32, uint32_t, lane)
PACK(pack_64, uint64_t, lane)

/* Numbers of 4 bits, from int8_t [rows][cols], plus 8, to the words [WORDS(cols)][PANEL] of their panels. */
static void pack_4(uint32_t *panels, int64_t cols, int64_t row, int64_t rows, const int8_t *from) {
    for (int64_t r = 0; r < rows; r++) {
        uint32_t *to = panels + (row + r) / PANEL * PANEL * WORDS(cols) + (row + r) % PANEL;
        for (int64_t k = 0; k < cols; k++) {
            uint32_t *word = to + k / NIBBLES * PANEL, place = k % NIBBLES * 4;
            *word = (*word & ~(15u << place)) | (uint32_t)(from[r * cols + k] + 8) << place;
        }
    }
}

/* Stores rows of the weight's own type [rows][cols] (int8_t for INT4) as rows row.. of the panels. */
void sw_pack(int format, void *panels, int64_t cols, int64_t row, int64_t rows, const void *from) {
    if (format == F32) pack_32(panels, cols, row, rows, from);
    if (format == BF16) pack_bf16(panels, cols, row, rows, from);
    if (format == F16) pack_16(panels, cols, row, rows, from);
    if (format == F64) pack_64(panels, cols, row, rows, from);
    if (format == INT8) pack_8(panels, cols, row, rows, from);
    if (format == INT4) pack_4(panels, cols, row, rows, from);
}

static int8_t nibble(const uint32_t *panels, int64_t words, int64_t row, int64_t k) {
    uint32_t word = panels[(row / PANEL * words + k / NIBBLES) * PANEL + row % PANEL];
    return (int8_t)(word >> k % NIBBLES * 4 & 15) - 8;
}

/* Rows ids of the panels, unpacked in the weight's own type (int8_t for INT4): to [count][cols]. */
void sw_take(int format, const void *panels, int64_t cols, const int64_t *ids, int64_t count, void *to) {
    for (int64_t i = 0; i < count; i++) {
        int64_t lane = ids[i] % PANEL, panel = ids[i] / PANEL * PANEL * cols;
        if (format == BF16) lane = lane % 16 * 2 + lane / 16;
        for (int64_t k = 0; k < cols; k++) {
            int64_t from = panel + k * PANEL + lane;
            if (format == F32) ((uint32_t *)to)[i * cols + k] = ((const uint32_t *)panels)[from];
            else if (format == F64) ((uint64_t *)to)[i * cols + k] = ((const uint64_t *)panels)[from];
            else if (format == INT8) ((int8_t *)to)[i * cols + k] = ((const int8_t *)panels)[from];
            else if (format == INT4) ((int8_t *)to)[i * cols + k] = nibble(panels, WORDS(cols), ids[i], k);
            else ((uint16_t *)to)[i * cols + k] = ((const uint16_t *)panels)[from];
        }
    }
}

#else

struct NAME(job) {
    int format;
    const void *weight;
    int64_t outputs, cols, rows;
    const uint32_t *scales; /* of INT8 and INT4: see groups.h */
    int64_t group, phase, groups;
    REAL *sums;
    const struct program *program;
    const REAL *bias, *residual;
    REAL *out;
};

/* A vector of sums from output on, closed with bias and residual, into out, short of the outputs that are not there. */
static void NAME(write)(const struct NAME(job) *job, int64_t node, int64_t row, int64_t output, NAME(vec) total) {
    int64_t at = row * job->outputs + output, missing = output + WIDTH - job->outputs;
    REAL *out = job->out + node * job->rows * job->outputs + at;
    if (missing <= 0) {
        if (job->bias) total = total + NAME(load)(job->bias + output);
        if (job->residual) total = total + NAME(load)(job->residual + at);
        NAME(store)(out, total);
        return;
    }
    for (int64_t i = 0; i < WIDTH - missing; i++) {
        REAL value = total[i];
        if (job->bias) value = value + job->bias[output + i];
        if (job->residual) value = value + job->residual[at + i];
        out[i] = value;
    }
}

/* The two vectors of a strip at one k. */
INLINE void NAME(weights)(int format, const void *weight, NAME(vec) *low, NAME(vec) *high) {
    (void)format;
#if IS_FLOAT
    typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    const uint16_t *half = weight;
    if (format == BF16) {
        words pairs = *(const words *)weight;
        *low = (vec_f32)(pairs << 16);
        *high = (vec_f32)(pairs & 0xffff0000u);
        return;
    }
    if (format == F16) {
#if VECTOR_BYTES == 64
        *low = (vec_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)half));
        *high = (vec_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(half + 16)));
#elif VECTOR_BYTES == 32
        *low = (vec_f32)_mm256_cvtph_ps(_mm_loadu_si128((const void *)half));
        *high = (vec_f32)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(half + 16)));
#else
        *low = (vec_f32)vcvt_f32_f16(vld1_f16((const float16_t *)half));
        *high = (vec_f32)vcvt_f32_f16(vld1_f16((const float16_t *)(half + 16)));
#endif
        return;
    }
#endif
    *low = NAME(load)((const REAL *)weight);
    *high = NAME(load)((const REAL *)weight + 16);
}

#define AHEAD 32 /* columns */

/* Strips that a pass over R rows takes side by side: as many as there are registers for, so that few rows read memory in
 * whole lines. */
#define STRIPS (16 / WIDTH)
/* Panels that it takes side by side where a panel is but one strip: numbers of 4 bits come faster from memory than two
 * sums in a register each can take them in. */
#define ACROSS(format, R) ((format) == INT4 && STRIPS == 1 && (R) <= 3 ? 2 : 1)
#define SIDE(R) (STRIPS >= 4 && 4 * (R) <= MAX_ROWS ? 4 : STRIPS >= 2 && 2 * (R) <= MAX_ROWS ? 2 : 1)

/* One chunk, columns start to stop: R rows of x [cols][R] times SIDE(R) strips of a panel; sum [SIDE][R][2]. */
INLINE void NAME(chunk)(const int R, const int format, const struct NAME(job) *job, const REAL *x, int64_t panel,
                        int64_t strip, int64_t start, int64_t stop, NAME(vec) *sum) {
    const int G = SIDE(R);
    const char *weight = (const char *)job->weight + (panel * job->cols + start) * PANEL * FORMAT_BYTES(format);
    weight += strip * STRIP_BYTES(format);
    x += start * R;
    NAME(vec) total[4][MAX_ROWS][2];
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int r = 0; r < R; r++) total[g][r][0] = total[g][r][1] = NAME(fill)(0);
    for (int64_t k = start; k < stop; k++, x += R, weight += PANEL * FORMAT_BYTES(format)) {
        UNROLL for (int g = 0; g < G; g++) {
            NAME(vec) low, high;
            NAME(weights)(format, weight + g * STRIP_BYTES(format), &low, &high);
            if (VECTOR_BYTES == 64 && R >= 4) { /* measured: up to 15 % there, nothing with shorter vectors or fewer rows */
                __builtin_prefetch(weight + AHEAD * PANEL * FORMAT_BYTES(format));
                if (format == F32) __builtin_prefetch(weight + AHEAD * PANEL * FORMAT_BYTES(format) + 64);
            }
            low = NAME(keep)(low);
            high = NAME(keep)(high);
            UNROLL for (int r = 0; r < R; r++) {
                NAME(vec) value = NAME(fill)(x[r]);
                total[g][r][0] = NAME(fma)(value, low, total[g][r][0]);
                total[g][r][1] = NAME(fma)(value, high, total[g][r][1]);
            }
        }
    }
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int r = 0; r < R; r++) {
            sum[2 * (g * R + r)] = total[g][r][0];
            sum[2 * (g * R + r) + 1] = total[g][r][1];
        }
}

#include "groups.h"

typedef void (*NAME(chunk_kernel))(const struct NAME(job) *job, const REAL *x, const REAL *sums, int64_t panel,
                                   int64_t strip, int64_t start, int64_t stop, NAME(vec) *sum);

#define CHUNK(FORMAT, R)                                                                                          \
    static void NAME(chunk_##FORMAT##_##R)(const struct NAME(job) *job, const REAL *x, const REAL *sums,          \
                                           int64_t panel, int64_t strip, int64_t start, int64_t stop,             \
                                           NAME(vec) *sum) {                                                      \
        (void)sums;                                                                                               \
        if (FORMAT >= INT8) NAME(group_chunk)(R, FORMAT, job, x, sums, panel, strip, start, stop, sum);           \
        else NAME(chunk)(R, FORMAT, job, x, panel, strip, start, stop, sum);                                      \
    }
#define CHUNK_CASE(FORMAT, R)                                                                                     \
    case FORMAT * 16 + R:                                                                                         \
        return NAME(chunk_##FORMAT##_##R);
#if IS_FLOAT
#define FOR_FORMATS(CALL) \
    FOR_ROWS(CALL, F32) FOR_ROWS(CALL, BF16) FOR_ROWS(CALL, F16) FOR_ROWS(CALL, INT8) FOR_ROWS(CALL, INT4)
#else
#define FOR_FORMATS(CALL) FOR_ROWS(CALL, F64) FOR_ROWS(CALL, INT8) FOR_ROWS(CALL, INT4)
#endif
FOR_FORMATS(CHUNK)

static NAME(chunk_kernel) NAME(kernel_for)(int format, int R) {
    switch (format * 16 + R) { FOR_FORMATS(CHUNK_CASE) }
    return NULL;
}
#undef FOR_FORMATS
#undef CHUNK
#undef CHUNK_CASE

/* The first live of R rows, from row on, times one panel. */
static void NAME(panel)(const struct NAME(job) *job, int R, const REAL *x, int64_t row, int64_t live, int64_t panel) {
    const struct program *program = job->program;
    const NAME(chunk_kernel) kernel = NAME(kernel_for)(job->format, R);
    const int64_t across = ACROSS(job->format, R), side = across > 1 ? across : SIDE(R), step = 2 * R * side;
    const REAL *sums = job->sums ? job->sums + row * (program->chunks + job->groups) : NULL;
    NAME(vec) stack[program->depth * step];
    for (int64_t strip = 0; strip < STRIPS; strip += side) {
        NAME(vec) *top = stack;
        for (int64_t c = 0; c < program->chunks; c++, top += step) {
            kernel(job, x, sums ? sums + c * R : NULL, panel, strip, program->bounds[c], program->bounds[c + 1], top);
            for (int64_t m = program->merges[c]; m > 0; m--, top -= step)
                for (int64_t i = 0; i < step; i++) top[i - step] = top[i - step] + top[i];
        }
        for (int64_t node = 0; node < program->nodes; node++)
            for (int64_t i = 0; i < side; i++)
                for (int64_t r = 0; r < 2 * live; r++)
                    NAME(write)(job, node, row + r / 2,
                                panel * PANEL + r % 2 * 16 + (across > 1 ? i * PANEL : (strip + i) * WIDTH),
                                stack[node * step + i * 2 * R + r]);
    }
}

/* Columns start to stop of x, in blocks of MAX_ROWS rows, each block as [cols][R]; surplus rows are zero. */
static void NAME(pack_rows)(REAL *to, const REAL *x, int64_t rows, int64_t cols, int64_t start, int64_t stop) {
    for (int64_t row = 0; row < rows; row += MAX_ROWS) {
        REAL *block = to + row * cols;
        int64_t live = rows - row < MAX_ROWS ? rows - row : MAX_ROWS, R = rows_taken(live);
        for (int64_t k = start; k < stop; k++)
            for (int64_t r = 0; r < R; r++) block[k * R + r] = r < live ? x[(row + r) * cols + k] : 0;
    }
}

/* Thread me of threads: its share of x to pack and of its sums, then its share of the tiles, panel by panel. */
static void NAME(share)(const struct NAME(job) *job, const REAL *x, REAL *packed, int me, int threads) {
    int64_t rows = job->rows, cols = job->cols;
    if (job->sums) NAME(sum_parts)(job, x, me, threads);
    if (packed) {
        NAME(pack_rows)(packed, x, rows, cols, cols * me / threads, cols * (me + 1) / threads);
        x = packed;
    }
    if ((packed || job->sums) && threads > 1) {
#pragma omp barrier
    }
    int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, total = (job->outputs + PANEL - 1) / PANEL * blocks;
    for (int64_t i = total * me / threads; i < total * (me + 1) / threads; i++) {
        int64_t row = i % blocks * MAX_ROWS, live = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        int R = rows_taken(live);
        if (i / blocks % ACROSS(job->format, R) == 0) NAME(panel)(job, R, x + row * cols, row, live, i / blocks);
    }
}

#undef AHEAD
#undef STRIPS
#undef ACROSS
#undef SIDE

/* out [M, N] or, with several nodes, [nodes, M, N]; bias [N] and residual [M, N] may be null. 0, or -1: no memory. */
int NAME(sw_linear)(int format, const void *weight, int64_t outputs, int64_t cols, const void *scales, int64_t group,
                    int64_t phase, const struct program *program, const REAL *x, int64_t rows, const REAL *bias,
                    const REAL *residual, REAL *out) {
    int64_t groups = group ? (phase + cols + group - 1) / group : 0, most = rows + MAX_ROWS;
    struct NAME(job) job = {format, weight,   outputs, cols, rows, scales, group, phase, groups, NULL,
                            program, bias, residual, out};
    REAL *packed = NULL;
    if (rows > 1 && !(packed = malloc(sizeof(REAL) * cols * most))) return -1;
    if (format == INT4 && !(job.sums = malloc(sizeof(REAL) * (program->chunks + groups) * most))) {
        free(packed);
        return -1;
    }
    int threads = threads_for(rows * outputs * cols / 16);
    if (threads == 1) {
        NAME(share)(&job, x, packed, 0, 1);
    } else {
#pragma omp parallel num_threads(threads)
        NAME(share)(&job, x, packed, omp_get_thread_num(), omp_get_num_threads());
    }
    free(packed);
    free(job.sums);
    return 0;
}

#define STRETCH 256

/* The tree that is left: nodes summed by a program that leaves one sum, then + bias, then + residual. */
void NAME(sw_finish)(const REAL *const *nodes, int64_t count, const int64_t *merges, int64_t depth, int64_t rows,
                     int64_t outputs, const REAL *bias, const REAL *residual, REAL *out) {
    int64_t stretches = (outputs + STRETCH - 1) / STRETCH;
    int threads = threads_for(rows * outputs);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows * stretches; i++) {
        REAL stack[depth][STRETCH];
        int64_t output = i % stretches * STRETCH, at = i / stretches * outputs + output, top = 0;
        int64_t size = outputs - output < STRETCH ? outputs - output : STRETCH;
        for (int64_t n = 0; n < count; n++) {
            memcpy(stack[top], nodes[n] + at, size * sizeof(REAL));
            for (int64_t m = merges[n]; m > 0; m--, top--)
                for (int64_t j = 0; j < size; j++) stack[top - 1][j] = stack[top - 1][j] + stack[top][j];
            top++;
        }
        for (int64_t j = 0; bias && j < size; j++) stack[0][j] = stack[0][j] + bias[output + j];
        for (int64_t j = 0; residual && j < size; j++) stack[0][j] = stack[0][j] + residual[at + j];
        memcpy(out + at, stack[0], size * sizeof(REAL));
    }
}
#endif
