/* attend: softmax attention of query rows over blocks of cached keys [block][Hkv][D][16] and values [block][Hkv][16][padded].
 *
 * One task is one sequence, one key head and up to R queries (rows times the query heads that share the key head), which
 * read each key and value together. Per query, and whatever the other queries of the task are:
 *   1. score of key t = scale * (fused multiply-adds over d, ascending, from zero): one key per vector lane; then, where
 *      heads have slopes, + slope * (t - the query's position), and -infinity outside of the window;
 *   2. their exact maximum, then e^(score - maximum);
 *   3. the sum of these: key t goes to partial sum t % 16, blocks ascending, then a fixed tree over the 16;
 *   4. output = (fused multiply-adds over t, ascending, from zero) / sum: one dim per vector lane.
 * A key's place in every sum is its absolute position, so neither the chunk that a query came in, nor the batch, nor the
 * length of the table matters. Steps 2 to 4 stop at the query's own position: what lies behind it never enters a sum.
 */
#ifndef REAL
#define BODY "attend.c"
#include "both.h"
#else

struct NAME(call) {
    const REAL *q, *keys, *values;
    const int32_t *positions;
    const int64_t *groups;
    int64_t heads, key_heads, dims, padded;
    REAL scale, *out;
    const REAL *slopes; /* of the query heads, or NULL */
    int64_t window;     /* keys that a query sees, itself included */
};

struct NAME(task) {
    const int32_t *blocks; /* of the sequence */
    int64_t row;           /* first row of the sequence */
    int64_t key_head, first, count; /* queries first to first + count; query i is row i / group and head i % group */
};

/* Vectors that a pass over R queries takes side by side: more where queries are few, for there must be work in flight. */
#define SIDE(R) (4 * (R) <= 2 * MAX_ROWS ? 4 : 2)
#define MAX_SIDE 4

/* Scores [block][R][16] of R queries, packed as [dims][R], for count keys; up to SIDE vectors more are written. keys is
 * the key head's part of block 0, blocks are block_size apart. */
INLINE void NAME(score)(const int R, const REAL *q, int64_t dims, REAL scale, const REAL *keys, const int32_t *blocks,
                        int64_t block_size, int64_t count, REAL *scores) {
    const int N = SIDE(R);
    const NAME(vec) factor = NAME(fill)(scale);
    const int64_t vectors = (count + WIDTH - 1) / WIDTH, per_block = TOKENS / WIDTH;
    const REAL *here[MAX_SIDE], *next[MAX_SIDE];
    for (int64_t v = -N; v < vectors; v += N) {
        UNROLL for (int n = 0; n < N; n++) { /* past the end: the last vector again */
            int64_t ahead = v + N + n < vectors ? v + N + n : vectors - 1;
            here[n] = next[n];
            next[n] = keys + blocks[ahead / per_block] * block_size + ahead % per_block * WIDTH;
        }
        if (v < 0) continue;
        NAME(vec) sum[MAX_ROWS][MAX_SIDE];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int n = 0; n < N; n++) sum[r][n] = NAME(fill)(0);
        for (int64_t d = 0; d < dims; d++) {
            NAME(vec) key[MAX_SIDE];
            UNROLL for (int n = 0; n < N; n++) {
                key[n] = NAME(keep)(NAME(load)(here[n] + d * TOKENS));
                __builtin_prefetch(next[n] + d * TOKENS);
            }
            UNROLL for (int r = 0; r < R; r++) {
                NAME(vec) value = NAME(fill)(q[d * R + r]);
                UNROLL for (int n = 0; n < N; n++) sum[r][n] = NAME(fma)(value, key[n], sum[r][n]);
            }
        }
        UNROLL for (int n = 0; n < N; n++) {
            REAL *to = scores + (v + n) / per_block * R * TOKENS + (v + n) % per_block * WIDTH;
            UNROLL for (int r = 0; r < R; r++) NAME(store)(to + r * TOKENS, sum[r][n] * factor);
        }
    }
}

/* Adds keys start to stop to the outputs [R][padded] of R queries, in N vectors of dims from value on. Their weights lie
 * as [block][stride][16] from the first query's; values is the key head's part of block 0, blocks are block_size apart. */
INLINE void NAME(blend)(const int R, const int N, const int64_t stride, const REAL *weights, const REAL *values,
                        const int32_t *blocks, int64_t block_size, int64_t padded, int64_t start, int64_t stop,
                        REAL *out) {
    NAME(vec) sum[MAX_ROWS][MAX_SIDE];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++) sum[r][n] = NAME(load)(out + r * padded + n * WIDTH);
    for (int64_t t = start; t < stop;) {
        const int64_t block = t / TOKENS, end = block * TOKENS + TOKENS < stop ? block * TOKENS + TOKENS : stop;
        const REAL *weight = weights + block * stride * TOKENS + t % TOKENS;
        const REAL *value = values + blocks[block] * block_size + t % TOKENS * padded;
        const int64_t ahead = end < stop ? (blocks[block + 1] - blocks[block]) * block_size : 0;
        for (; t < end; t++, weight++, value += padded) {
            NAME(vec) row[MAX_SIDE];
            UNROLL for (int n = 0; n < N; n++) {
                row[n] = NAME(keep)(NAME(load)(value + n * WIDTH));
                __builtin_prefetch(value + ahead + n * WIDTH);
            }
            UNROLL for (int r = 0; r < R; r++) {
                NAME(vec) factor = NAME(fill)(weight[r * TOKENS]);
                UNROLL for (int n = 0; n < N; n++) sum[r][n] = NAME(fma)(factor, row[n], sum[r][n]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++) NAME(store)(out + r * padded + n * WIDTH, sum[r][n]);
}

#define KERNELS(NONE, R)                                                                                              \
    static void NAME(score_##R)(const REAL *q, int64_t dims, REAL scale, const REAL *keys, const int32_t *blocks,     \
                                int64_t block_size, int64_t count, REAL *scores) {                                    \
        NAME(score)(R, q, dims, scale, keys, blocks, block_size, count, scores);                                      \
    }                                                                                                                 \
    static void NAME(blend_##R)(int64_t stride, const REAL *weights, const REAL *values, const int32_t *blocks,       \
                                int64_t block_size, int64_t padded, int64_t start, int64_t stop, REAL *out) {         \
        int64_t d = 0;                                                                                                \
        for (; d + SIDE(R) * WIDTH <= padded; d += SIDE(R) * WIDTH)                                                   \
            NAME(blend)(R, SIDE(R), stride, weights, values + d, blocks, block_size, padded, start, stop, out + d);   \
        for (; d < padded; d += WIDTH)                                                                                \
            NAME(blend)(R, 1, stride, weights, values + d, blocks, block_size, padded, start, stop, out + d);         \
    }
FOR_ROWS(KERNELS, )
#define CASE(NONE, R)                                                                \
    case R:                                                                          \
        return (struct NAME(kernels)){NAME(score_##R), NAME(blend_##R)};

struct NAME(kernels) {
    void (*score)(const REAL *, int64_t, REAL, const REAL *, const int32_t *, int64_t, int64_t, REAL *);
    void (*blend)(int64_t, const REAL *, const REAL *, const int32_t *, int64_t, int64_t, int64_t, int64_t, REAL *);
};

static struct NAME(kernels) NAME(kernels_for)(int R) {
    switch (R) { FOR_ROWS(CASE, ) }
    abort();
}
#undef KERNELS
#undef CASE
#undef SIDE
#undef MAX_SIDE

/* Turns the scores of one query ([block][R][16]) into e^(score - maximum) in place; returns their sum. */
static REAL NAME(exponentials)(int R, REAL *scores, int64_t keys) {
    REAL most[TOKENS], sum[TOKENS];
    for (int i = 0; i < TOKENS; i++) most[i] = -INFINITY, sum[i] = 0;
    int64_t whole = keys / TOKENS, left = keys % TOKENS;
    REAL *last = scores + whole * R * TOKENS;
    for (int64_t b = 0; b < whole; b++)
        for (int i = 0; i < TOKENS; i++) {
            REAL score = scores[b * R * TOKENS + i];
            most[i] = score > most[i] ? score : most[i];
        }
    for (int i = 0; i < left; i++) most[i] = last[i] > most[i] ? last[i] : most[i];
    for (int i = 1; i < TOKENS; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    REAL top = most[0];
    for (int64_t b = 0; b < whole; b++)
        for (int i = 0; i < TOKENS; i++) {
            REAL *score = scores + b * R * TOKENS + i;
            *score = NAME(exp)(*score - top);
            sum[i] = sum[i] + *score;
        }
    for (int i = 0; i < left; i++) {
        last[i] = NAME(exp)(last[i] - top);
        sum[i] = sum[i] + last[i];
    }
    for (int half = TOKENS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] = sum[i] + sum[i + half];
    return sum[0];
}

/* Adds slope * (key - last) to the scores of one query ([block][R][16]), last being its own key; hides those that lie a
 * window or more behind. e^-infinity is an exact 0, which changes none of the sums that follow. */
static void NAME(lean)(int R, REAL *scores, int64_t keys, REAL slope, int64_t window) {
    for (int64_t t = 0; t < keys; t++) {
        REAL *score = scores + t / TOKENS * R * TOKENS + t % TOKENS;
        *score = keys - t > window ? -INFINITY : *score + slope * (REAL)(t - (keys - 1));
    }
}

/* One task; scratch holds packed queries [dims][R], outputs [R][padded] and scores [blocks + 4][R][16]. */
static void NAME(run)(const struct NAME(call) *call, const struct NAME(task) *task, REAL *scratch) {
    const int R = rows_taken(task->count);
    const struct NAME(kernels) kernels = NAME(kernels_for)(R);
    const int64_t dims = call->dims, padded = call->padded, head = task->key_head;
    const int64_t group = call->groups[head + 1] - call->groups[head];
    const int64_t key_block = call->key_heads * dims * TOKENS, value_block = call->key_heads * padded * TOKENS;
    const REAL *keys = call->keys + head * dims * TOKENS, *values = call->values + head * padded * TOKENS;
    REAL *packed = scratch, *out = packed + dims * R, *scores = out + padded * R;
    int64_t places[MAX_ROWS], seen[MAX_ROWS], most = 0, least = INT64_MAX;
    for (int r = 0; r < R; r++) { /* surplus queries repeat the last one */
        int64_t i = task->first + (r < task->count ? r : task->count - 1), row = task->row + i / group;
        places[r] = (row * call->heads + call->groups[head] + i % group) * dims;
        seen[r] = (int64_t)call->positions[row] + 1;
        most = seen[r] > most ? seen[r] : most;
        least = seen[r] < least ? seen[r] : least;
        for (int64_t d = 0; d < dims; d++) packed[d * R + r] = call->q[places[r] + d];
    }
    kernels.score(packed, dims, call->scale, keys, task->blocks, key_block, most, scores);
    REAL sums[MAX_ROWS];
    for (int r = 0; r < R; r++) {
        int64_t i = task->first + (r < task->count ? r : task->count - 1);
        if (call->slopes || seen[r] > call->window)
            NAME(lean)(R, scores + r * TOKENS, seen[r],
                       call->slopes ? call->slopes[call->groups[head] + i % group] : 0, call->window);
        sums[r] = NAME(exponentials)(R, scores + r * TOKENS, seen[r]);
    }
    memset(out, 0, sizeof(REAL) * padded * R);
    kernels.blend(R, scores, values, task->blocks, value_block, padded, 0, least, out);
    for (int r = 0; r < task->count; r++) {
        REAL *sum = out + r * padded;
        if (least < seen[r])
            NAME(blend_1)(R, scores + r * TOKENS, values, task->blocks, value_block, padded, least, seen[r], sum);
        for (int64_t d = 0; d < dims; d++) call->out[places[r] + d] = sum[d] / sums[r];
    }
}

/* q and out [M, heads, dims]; starts [sequences + 1]; table [sequences, width]; groups [key_heads + 1]; slopes [heads] or
 * NULL; window INT64_MAX where there is none. 0; -1: no memory. */
int NAME(sw_attend)(const REAL *q, const REAL *keys, const REAL *values, const int32_t *starts, int64_t sequences,
                    const int32_t *table, int64_t width, const int32_t *positions, const int64_t *groups,
                    int64_t heads, int64_t key_heads, int64_t dims, int64_t padded, double scale,
                    const REAL *slopes, int64_t window, REAL *out) {
    struct NAME(call) call = {q,    keys,   values, positions, groups, heads, key_heads,
                              dims, padded, scale,  out,       slopes, window};
    int64_t rows = starts[sequences] - starts[0], longest = 0, count = 0, work = 0;
    for (int64_t row = starts[0]; row < starts[sequences]; row++) {
        longest = positions[row] >= longest ? positions[row] + 1 : longest;
        work += (int64_t)(positions[row] + 1) * heads * dims / 8;
    }
    struct NAME(task) *tasks = malloc(sizeof(*tasks) * (rows * heads + 1));
    if (!tasks) return -1;
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t j = 0; j < key_heads; j++) {
            int64_t queries = (starts[s + 1] - starts[s]) * (groups[j + 1] - groups[j]);
            for (int64_t i = 0; i < queries; i += MAX_ROWS)
                tasks[count++] = (struct NAME(task)){table + s * width, starts[s], j, i,
                                                     queries - i < MAX_ROWS ? queries - i : MAX_ROWS};
        }
    int threads = threads_for(work), failed = 0;
    size_t room = sizeof(REAL) * MAX_ROWS * (dims + padded + TOKENS * (longest / TOKENS + 5));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        REAL *scratch = malloc(room);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = count - 1; i >= 0; i--) /* backwards: the last queries of a chunk see the most keys */
            if (scratch) NAME(run)(&call, &tasks[i], scratch);
        free(scratch);
    }
    free(tasks);
    return -failed;
}
#endif
