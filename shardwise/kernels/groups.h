/* A chunk of weights that are scale * number (INT8), or scale * number + offset (INT4), alike in groups of columns.
 *
 * A group is a run of columns of the whole matrix, so a chunk, or a rank's columns, may begin in the middle of one. The
 * part of a group within a chunk is summed in fused multiply-adds of x and the whole numbers, in ascending k from zero;
 * total = fma(scale, part, total), then fma(offset, sum of x, total), add it to the chunk's sum, groups ascending. INT8
 * has panels as in linear.c; INT4 has words of 8 columns, [WORDS(K)][32] a panel. Scales, then offsets, are bfloat16, as
 * panels of a matrix [N, groups]. Included by linear.c, once per REAL.
 */
#define LANES_OF(TYPE) __attribute__((vector_size(sizeof(TYPE) * VECTOR_BYTES / sizeof(REAL)), aligned(1), may_alias))
typedef int32_t NAME(ints) LANES_OF(int32_t);
typedef uint32_t NAME(words) LANES_OF(uint32_t);
typedef float NAME(floats) LANES_OF(float);
#undef LANES_OF

INLINE NAME(vec) NAME(whole)(const int8_t *from) {
#if VECTOR_BYTES == 64 && IS_FLOAT
    NAME(ints) wide = (NAME(ints))_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
#elif VECTOR_BYTES == 64 || (VECTOR_BYTES == 32 && IS_FLOAT)
    NAME(ints) wide = (NAME(ints))_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
#else
    NAME(ints) wide;
    UNROLL for (int i = 0; i < WIDTH; i++) wide[i] = from[i];
#endif
    return __builtin_convertvector(wide, NAME(vec));
}

/* Number j of a word, less 8. */
INLINE NAME(vec) NAME(nibble)(NAME(words) word, int j) {
#if VECTOR_BYTES == 64 && IS_FLOAT
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (vec_f32)_mm512_permutexvar_ps((__m512i)(word >> 4 * j), numbers); /* looks at the lowest 4 bits only */
#else
    /* Its 4 bits, where they are, in a float of the right exponent count from 2^(23 - 4 j) up. */
    if (j > 4) word = word >> 12, j = j - 3;
    const float base = 1 << (23 - 4 * j);
    NAME(words) bits = (word & (15u << 4 * j)) | (150u - 4 * j) << 23;
    return __builtin_convertvector((NAME(floats))bits - (base + 8), NAME(vec));
#endif
}

/* R rows of x at one column times G strips. */
INLINE void NAME(column)(const int R, const int G, const REAL *x, const NAME(vec) strips[4][2],
                         NAME(vec) part[4][MAX_ROWS][2]) {
    UNROLL for (int g = 0; g < G; g++) {
        NAME(vec) low = NAME(keep)(strips[g][0]), high = NAME(keep)(strips[g][1]);
        UNROLL for (int r = 0; r < R; r++) {
            NAME(vec) value = NAME(fill)(x[r]);
            part[g][r][0] = NAME(fma)(value, low, part[g][r][0]);
            part[g][r][1] = NAME(fma)(value, high, part[g][r][1]);
        }
    }
}

/* Columns k to stop of one group. */
INLINE void NAME(part_int8)(const int R, const int G, const int8_t *weight, int64_t gap, const REAL *x, int64_t k,
                            int64_t stop, NAME(vec) part[4][MAX_ROWS][2]) {
    for (; k < stop; k++) {
        NAME(vec) strips[4][2];
        UNROLL for (int g = 0; g < G; g++)
            UNROLL for (int half = 0; half < 2; half++)
                strips[g][half] = NAME(whole)(weight + k * PANEL + g * gap + half * 16);
        NAME(column)(R, G, x + k * R, strips, part);
    }
}

INLINE void NAME(part_int4)(const int R, const int G, const uint32_t *weight, int64_t gap, const REAL *x, int64_t k,
                            int64_t stop, NAME(vec) part[4][MAX_ROWS][2]) {
    while (k < stop) {
        int64_t skip = k % NIBBLES, count = stop - k < NIBBLES - skip ? stop - k : NIBBLES - skip;
        const uint32_t *at = weight + k / NIBBLES * PANEL;
        NAME(words) words[4][2];
        NAME(vec) strips[4][2];
        UNROLL for (int g = 0; g < G; g++)
            UNROLL for (int half = 0; half < 2; half++) {
                if (R <= 3) __builtin_prefetch(at + g * gap + half * 16 + 16 * PANEL); /* measured: 7 % there */
                words[g][half] = *(const NAME(words) *)(at + g * gap + half * 16);
            }
#define COLUMN(WORD, J)                                                                                              \
    UNROLL for (int g = 0; g < G; g++)                                                                               \
        UNROLL for (int half = 0; half < 2; half++) strips[g][half] = NAME(nibble)(WORD, J);                         \
    NAME(column)(R, G, x + (k + j) * R, strips, part);
        if (count == NIBBLES && R <= 4) { /* more rows hide shifts, and leave no registers */
            UNROLL for (int j = 0; j < NIBBLES; j++) { COLUMN(words[g][half], j) }
        } else {
            for (int j = 0; j < count; j++) { COLUMN(words[g][half] >> (int)(4 * (skip + j)), 0) }
        }
#undef COLUMN
        k += count;
    }
}

/* Where the part of a group that begins at column k ends, in a chunk that ends at stop. */
INLINE int64_t NAME(part_end)(const struct NAME(job) *job, int64_t k, int64_t stop) {
    int64_t end = ((job->phase + k) / job->group + 1) * job->group - job->phase;
    return end < stop ? end : stop;
}

/* A share of the sums of x over all parts, in ascending k from zero: in blocks of rows as pack_rows, each block as
 * [chunk + group][R]. */
static void NAME(sum_parts)(const struct NAME(job) *job, const REAL *x, int me, int threads) {
    const struct program *program = job->program;
    int64_t rows = job->rows, cols = job->cols, first = rows * me / threads, last = rows * (me + 1) / threads;
    for (int64_t row = first; row < last; row++) {
        int64_t block = row / MAX_ROWS * MAX_ROWS, R = rows_taken(rows - block < MAX_ROWS ? rows - block : MAX_ROWS);
        REAL *to = job->sums + block * (program->chunks + job->groups) + row - block;
        for (int64_t c = 0; c < program->chunks; c++)
            for (int64_t k = program->bounds[c], end; k < program->bounds[c + 1]; k = end) {
                REAL sum = 0;
                int64_t at = c + (job->phase + k) / job->group;
                end = NAME(part_end)(job, k, program->bounds[c + 1]);
                for (int64_t i = k; i < end; i++) sum = sum + x[row * cols + i];
                to[at * R] = sum;
            }
    }
}

/* Bfloat16 of the outputs i and i + 16, opened. */
INLINE void NAME(opened)(const uint32_t *from, NAME(vec) *low, NAME(vec) *high) {
    NAME(words) pair = *(const NAME(words) *)from;
    *low = __builtin_convertvector((NAME(floats))(pair << 16), NAME(vec));
    *high = __builtin_convertvector((NAME(floats))(pair & 0xffff0000u), NAME(vec));
}

/* As chunk in linear.c; sums are those of the chunk's first part less its group. */
INLINE void NAME(group_chunk)(const int R, const int format, const struct NAME(job) *job, const REAL *x,
                              const REAL *sums, int64_t panel, int64_t strip, int64_t start, int64_t stop,
                              NAME(vec) *sum) {
    const int G = ACROSS(format, R) > 1 ? ACROSS(format, R) : SIDE(R);
    const int64_t panels = (job->outputs + PANEL - 1) / PANEL, next = panel + 1 < panels; /* or the same again */
    const int64_t gap = ACROSS(format, R) == 1 ? WIDTH : next * PANEL * (format == INT8 ? job->cols : WORDS(job->cols));
    const int64_t scales_gap = ACROSS(format, R) == 1 ? WIDTH : next * 16 * job->groups;
    const int64_t lane = strip * WIDTH, offsets = panels * job->groups * 16;
    const int8_t *bytes = (const int8_t *)job->weight + panel * job->cols * PANEL + lane;
    const uint32_t *words = (const uint32_t *)job->weight + panel * WORDS(job->cols) * PANEL + lane;
    for (int i = 0; i < 2 * G * R; i++) sum[i] = NAME(fill)(0);
    for (int64_t k = start; k < stop;) {
        int64_t group = (job->phase + k) / job->group, end = NAME(part_end)(job, k, stop);
        NAME(vec) part[4][MAX_ROWS][2];
        UNROLL for (int g = 0; g < G; g++)
            UNROLL for (int r = 0; r < R; r++) part[g][r][0] = part[g][r][1] = NAME(fill)(0);
        if (format == INT8) NAME(part_int8)(R, G, bytes, gap, x, k, end, part);
        else NAME(part_int4)(R, G, words, gap, x, k, end, part);
        UNROLL for (int g = 0; g < G; g++) {
            const uint32_t *scales = job->scales + (panel * job->groups + group) * 16 + lane + g * scales_gap;
            NAME(vec) low, high, *total = sum + 2 * g * R;
            NAME(opened)(scales, &low, &high);
            UNROLL for (int r = 0; r < R; r++) {
                total[2 * r] = NAME(fma)(low, part[g][r][0], total[2 * r]);
                total[2 * r + 1] = NAME(fma)(high, part[g][r][1], total[2 * r + 1]);
            }
            if (format == INT8) continue;
            NAME(opened)(scales + offsets, &low, &high);
            UNROLL for (int r = 0; r < R; r++) {
                NAME(vec) value = NAME(fill)(sums[group * R + r]);
                total[2 * r] = NAME(fma)(low, value, total[2 * r]);
                total[2 * r + 1] = NAME(fma)(high, value, total[2 * r + 1]);
            }
        }
        k = end;
    }
}
