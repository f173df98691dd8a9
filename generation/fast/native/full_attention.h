/* Attention of all patches of a tile to the real ones: keys and values in panels, whole rows of scores at a time. */
#pragma once
#include "activations.h"
#include "panels.h"

/* In bfloat16 where the machine has dot products of them and the weights are not floats; else in floats. A unit of 32
 * bits holds PAIR elements of the inner dimension: those of a head for scores, keys for the sum of values. */
#if defined(__AVX512BF16__) && LANES == 16 && WEIGHT_BITS != 32
#define HALF_ATTENTION 1
#define PAIR 2
typedef uint16_t element;
typedef __m512i units;
#define SPREAD(word) _mm512_set1_epi32((int)(word))
#define LOAD_UNITS(w) _mm512_loadu_si512(w)
#define ADD_DOT(in, w, s) (vec)_mm512_dpbf16_ps((__m512)(s), (__m512bh)(w), (__m512bh)(in))
#else
#define HALF_ATTENTION 0
#define PAIR 1
typedef float element;
typedef vec units;
#define SPREAD(word) (vec)((uvec){0} + (word))
#define LOAD_UNITS(w) (*(const vec *)(w))
#define ADD_DOT(in, w, s) multiply_add(in, w, s)
#endif
#if LANES == 16
#define QUERIES 12 /* rows at a time: as many as have their sums in registers */
#define EACH_QUERY(X) ROWS12(X, 1)
#else
#define QUERIES 6
#define EACH_QUERY(X) ROWS6(X, 1)
#endif
#define QUERY_BLOCK 96 /* rows of a unit of work */

/* out (QUERIES, PANEL) = x (QUERIES rows, `stride` words apart) times a panel. */
#define BEGIN_QUERY(r, S) vec a##r = {0}, b##r = {0};
#define ADD_QUERY(r, S) { \
        uint32_t word; \
        memcpy(&word, x + r * stride + k, 4); \
        units in = SPREAD(word); \
        a##r = ADD_DOT(in, wa, a##r); \
        b##r = ADD_DOT(in, wb, b##r); \
    }
#define END_QUERY(r, S) ((vec *)(out + r * out_stride))[0] = a##r, ((vec *)(out + r * out_stride))[1] = b##r;
static __attribute__((noinline, noclone)) void meet(const uint32_t *x, int64_t stride, const uint32_t *w, int64_t units_inside,
                                           float *out, int64_t out_stride) {
    EACH_QUERY(BEGIN_QUERY)
    for (int64_t k = 0; k < units_inside; k++, w += PANEL) {
        units wa = LOAD_UNITS(w), wb = LOAD_UNITS(w + LANES);
        EACH_QUERY(ADD_QUERY)
    }
    EACH_QUERY(END_QUERY)
}

/* Queries, keys and values (patches, heads * dim), rows `stride` elements apart, and room for the panels of all heads.
 * Queries have rows enough to fill the last group of QUERIES. */
typedef struct {
    int64_t heads, dim, patches, stride, count; /* count: keys that are attended to */
    const int64_t *key;                         /* (count,): their patches */
    const element *q, *k, *v;
    uint32_t *key_panels, *value_panels;
} Heads;

static inline int64_t head_units(int64_t dim) { return (dim + PAIR - 1) / PAIR; }
static inline int64_t padded_keys(const Heads *a) { return round_up(a->count, PANEL); }
static inline int64_t key_panel_words(int64_t keys, int64_t dim) { return round_up(keys, PANEL) * head_units(dim); }
static inline int64_t value_panel_words(int64_t keys, int64_t dim) {
    return round_up(keys, PANEL) / PAIR * round_up(dim, PANEL);
}
/* Floats that a thread needs: scores and weights of QUERIES rows, and their sums. */
static inline int64_t attention_floats(int64_t keys) { return QUERIES * (2 * (round_up(keys, PANEL) + 16) + PANEL); }

/* One head's keys of one panel, and their values. Missing ones, and what the head lacks to whole units, are zeros. */
static void pack_keys(const Heads *a, int64_t head, int64_t from) {
    int64_t du = head_units(a->dim), ku = padded_keys(a) / PAIR, wide = round_up(a->dim, PANEL);
    int64_t count = a->count - from < PANEL ? a->count - from : PANEL, whole = a->dim / PAIR;
    uint32_t *keys = a->key_panels + head * key_panel_words(a->count, a->dim) + from * du;
    uint32_t *values = a->value_panels + head * value_panel_words(a->count, a->dim) + from / PAIR * PANEL;
    for (int64_t j = 0; j < count; j++) /* rows lie too far apart for the processor to guess the next one */
        for (int64_t i = 0; i < a->dim; i += 64 / (int64_t)sizeof(element)) {
            __builtin_prefetch(a->k + a->key[from + j] * a->stride + head * a->dim + i);
            __builtin_prefetch(a->v + a->key[from + j] * a->stride + head * a->dim + i);
        }
    if (count < PANEL || whole < du) memset(keys, 0, PANEL * du * 4);
    for (int64_t j = 0; j < count; j++) {
        const element *row = a->k + a->key[from + j] * a->stride + head * a->dim;
        for (int64_t u = 0; u < whole; u++) memcpy(keys + u * PANEL + j, row + u * PAIR, 4);
        if (whole < du) memcpy(keys + whole * PANEL + j, row + whole * PAIR, sizeof(element));
    }
    for (int64_t c = 0; c < wide; c += PANEL) {
        int64_t inside = a->dim - c < PANEL ? a->dim - c : PANEL;
        element *out = (element *)(values + c * ku);
        if (count < PANEL || inside < PANEL) memset(out, 0, PANEL / PAIR * PANEL * 4);
        for (int64_t j = 0; j < count; j += PAIR) {
            const element *row = a->v + a->key[from + j] * a->stride + head * a->dim + c;
#if PAIR == 2
            const element *other = j + 1 < count ? a->v + a->key[from + j + 1] * a->stride + head * a->dim + c : NULL;
            uint32_t *pairs = (uint32_t *)(out + j * PANEL);
            if (other)
                for (int64_t i = 0; i < inside; i++) pairs[i] = row[i] | (uint32_t)other[i] << 16;
            else
                for (int64_t i = 0; i < inside; i++) pairs[i] = row[i];
#else
            memcpy(out + j * PANEL, row, inside * sizeof(element));
#endif
        }
    }
}

/* Scores (keys,) of one row become weights, as yet not divided by their sum, which is returned. */
static float soften(float *score, int64_t count, float scale, element *weight) {
    vec most = all(-INFINITY), sum = {0}, by = all(scale);
    int64_t padded = round_up(count, PANEL);
    for (int64_t j = count; j < padded; j++) score[j] = -INFINITY;
    for (int64_t j = 0; j < padded; j += LANES) most = at_least(most, load_f32(score + j));
    float largest = -INFINITY; /* a NaN need not be found: its weight is NaN, and so is the sum */
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    vec shift = all(-largest * scale);
    for (int64_t j = 0; j < padded; j += LANES) {
        vec power = power_of_two(multiply_add(load_f32(score + j), by, shift), HALF_ATTENTION);
        sum += power;
#if HALF_ATTENTION
        store_bf16(weight + j, power);
#else
        *(vec *)(weight + j) = power;
#endif
    }
    return sum_lanes(sum);
}

/* Rows [from, to) of one head. room: attention_floats. */
static void attend_all(const Heads *a, int64_t head, int64_t from, int64_t to, float *room, Output out) {
    int64_t du = head_units(a->dim), padded = padded_keys(a), ku = padded / PAIR, stride = padded + 16;
    const uint32_t *keys = a->key_panels + head * key_panel_words(a->count, a->dim);
    const uint32_t *values = a->value_panels + head * value_panel_words(a->count, a->dim);
    float *score = room, *mixed = score + QUERIES * stride, sums[QUERIES];
    uint32_t *weight = (uint32_t *)(mixed + QUERIES * PANEL);
    for (int64_t r = from; r < to; r += QUERIES) {
        int64_t rows = to - r < QUERIES ? to - r : QUERIES;
        const uint32_t *q = (const uint32_t *)(a->q + r * a->stride + head * a->dim);
        for (int64_t j = 0; j < padded; j += PANEL)
            meet(q, a->stride / PAIR, keys + j * du, du, score + j, stride);
        for (int64_t i = 0; i < rows; i++)
            sums[i] = soften(score + i * stride, a->count, 1.44269504f / sqrtf((float)a->dim),
                             (element *)(weight + i * stride));
        for (int64_t c = 0; c < a->dim; c += PANEL) {
            meet(weight, stride, values + c * ku, ku, mixed, PANEL);
            for (int64_t i = 0; i < rows; i++) {
                vec by = all(1.0f / sums[i]), *row = (vec *)(mixed + i * PANEL);
                put(out, (r + i) * out.stride + head * a->dim + c, row[0] * by, row[1] * by, a->dim - c);
            }
        }
    }
}
