/* Attention of rows to one another, within each of several segments of them: keys and values in panels, and scores of
 * a block of keys at a time, whose sums go on to the next one. */
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
#else
#define QUERIES 6
#endif
#define QUERY_BLOCK 96 /* rows of a unit of work */
#define KEY_BLOCK 256  /* keys that meet them in turn: with their values they stay in the second cache */

/* out (QUERIES, PANEL) = x (QUERIES rows, `stride` words apart) times a panel, and what was there times each row's
 * factor; NULL: nothing was there. */
static __attribute__((noinline, noclone)) void meet(const uint32_t *x, int64_t stride, const uint32_t *w, int64_t units_inside,
                                                    float *out, int64_t out_stride, const float *factor) {
    vec sum[QUERIES][2];
    EACH(r, QUERIES) EACH(p, 2) sum[r][p] = (vec){0};
    if (factor) EACH(r, QUERIES) EACH(p, 2) sum[r][p] = ((const vec *)(out + r * out_stride))[p] * all(factor[r]);
    for (int64_t k = 0; k < units_inside; k++, w += PANEL) {
        units weight[2] = {LOAD_UNITS(w), LOAD_UNITS(w + LANES)};
        EACH(r, QUERIES) {
            uint32_t word;
            memcpy(&word, x + r * stride + k, 4);
            units in = SPREAD(word);
            EACH(p, 2) sum[r][p] = ADD_DOT(in, weight[p], sum[r][p]);
        }
    }
    EACH(r, QUERIES) EACH(p, 2) ((vec *)(out + r * out_stride))[p] = sum[r][p];
}

/* Rows that attend to one another: `count` of them from row `first` on. */
typedef struct {
    int64_t first, count;
} Segment;

/* One head of a segment: its queries, keys and values, rows `stride` elements apart, and room for panels. There are
 * queries enough to fill the last group of QUERIES. */
typedef struct {
    int64_t dim, stride, count;
    element *q, *k, *v;
    uint32_t *key_panels, *value_panels;
    const float *cosine, *sine; /* (count, dim) of rotary positions, or NULL */
    int64_t turned;             /* columns that are rotated together: all, or those of each axis */
    float scale;                /* of scores */
} Head;

static inline int64_t head_units(int64_t dim) { return (dim + PAIR - 1) / PAIR; }
static inline int64_t key_panel_words(int64_t keys, int64_t dim) { return round_up(keys, PANEL) * head_units(dim); }
static inline int64_t value_panel_words(int64_t keys, int64_t dim) {
    return round_up(keys, PANEL) / PAIR * round_up(dim, PANEL);
}
/* Floats that a thread needs, of a unit's rows: scores, the sums so far, their weights, their largest scores and what
 * changes their sums. */
static inline int64_t attention_floats(int64_t dim) { return QUERY_BLOCK * (KEY_BLOCK + 16 + round_up(dim, PANEL) + 3); }

static __attribute__((noinline)) void rotate_element(element *x, const float *cosine, const float *sine, int64_t dim) {
#if HALF_ATTENTION
#define VALUE_OF bf16_to_float
#define ELEMENT_OF float_to_bf16
#else
#define VALUE_OF
#define ELEMENT_OF
#endif
    for (int64_t i = 0, half = dim / 2; i < half; i++) {
        float a = VALUE_OF(x[i]), b = VALUE_OF(x[i + half]);
        x[i] = ELEMENT_OF(a * cosine[i] - b * sine[i]);
        x[i + half] = ELEMENT_OF(b * cosine[i] + a * sine[i]);
    }
}

/* The keys of one panel, and their values; queries are rotated with them. Missing keys, and what the head lacks to
 * whole units, are zeros. */
static void pack_keys(const Head *a, int64_t from) {
    int64_t du = head_units(a->dim), ku = round_up(a->count, PANEL) / PAIR, wide = round_up(a->dim, PANEL);
    int64_t count = a->count - from < PANEL ? a->count - from : PANEL, whole = a->dim / PAIR;
    uint32_t *keys = a->key_panels + from * du, *values = a->value_panels + from / PAIR * PANEL;
    for (int64_t j = from; j < from + count; j++) /* rows lie too far apart for the processor to guess the next one */
        for (int64_t i = 0; i < a->dim; i += 64 / (int64_t)sizeof(element)) {
            __builtin_prefetch(a->k + j * a->stride + i);
            __builtin_prefetch(a->v + j * a->stride + i);
        }
    for (int64_t j = from; a->cosine && j < from + count; j++)
        for (int64_t i = 0; i < a->dim; i += a->turned) {
            const float *cosine = a->cosine + j * a->dim + i, *sine = a->sine + j * a->dim + i;
            rotate_element(a->q + j * a->stride + i, cosine, sine, a->turned);
            rotate_element(a->k + j * a->stride + i, cosine, sine, a->turned);
        }
    if (count < PANEL || whole < du) memset(keys, 0, PANEL * du * 4);
    for (int64_t j = 0; j < count; j++) {
        const element *row = a->k + (from + j) * a->stride;
        for (int64_t u = 0; u < whole; u++) memcpy(keys + u * PANEL + j, row + u * PAIR, 4);
        if (whole < du) memcpy(keys + whole * PANEL + j, row + whole * PAIR, sizeof(element));
    }
    for (int64_t c = 0; c < wide; c += PANEL) {
        int64_t inside = a->dim - c < PANEL ? a->dim - c : PANEL;
        element *out = (element *)(values + c * ku);
        if (count < PANEL || inside < PANEL) memset(out, 0, PANEL / PAIR * PANEL * 4);
        for (int64_t j = 0; j < count; j += PAIR) {
            const element *row = a->v + (from + j) * a->stride + c;
#if PAIR == 2
            const element *other = j + 1 < count ? row + a->stride : NULL;
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

/* Scores (count,) of one row become weights, in their place, as yet not divided by their sum. What came before has `*sum` and
 * `*largest`, which become those of both, and is to be multiplied with the factor that is returned. */
static float soften(float *score, int64_t count, float scale, float *sum, float *largest) {
    vec most = all(-INFINITY), total = {0}, by = all(scale);
    int64_t padded = round_up(count, PANEL);
    for (int64_t j = count; j < padded; j++) score[j] = -INFINITY;
    for (int64_t j = 0; j < padded; j += LANES) most = at_least(most, load_f32(score + j));
    float before = *largest; /* a NaN need not be found: its weight is NaN, and so is the sum */
    for (int i = 0; i < LANES; i++) *largest = most[i] > *largest ? most[i] : *largest;
    vec shift = all(-*largest * scale);
    for (int64_t j = 0; j < padded; j += LANES) {
        vec power = power_of_two(multiply_add(load_f32(score + j), by, shift), HALF_ATTENTION);
        total += power;
#if HALF_ATTENTION
        store_bf16((uint16_t *)score + j, power);
#else
        *(vec *)(score + j) = power;
#endif
    }
    float factor = power_of_two(all((before - *largest) * scale), 0)[0];
    *sum = *sum * factor + sum_lanes(total);
    return factor;
}

/* Rows [from, to), at most QUERY_BLOCK of them; the head's first one goes to place `at` of the output. room:
 * attention_floats. */
static void attend_all(const Head *a, int64_t from, int64_t to, float *room, Output out, int64_t at) {
    int64_t du = head_units(a->dim), ku = round_up(a->count, PANEL) / PAIR, wide = round_up(a->dim, PANEL);
    const int64_t stride = KEY_BLOCK + 16;
    float *score = room, *mixed = score + QUERY_BLOCK * stride, *sum = mixed + QUERY_BLOCK * wide;
    float *largest = sum + QUERY_BLOCK, *factor = largest + QUERY_BLOCK;
    const uint32_t *q = (const uint32_t *)(a->q + from * a->stride), *weight = (const uint32_t *)score;
    for (int64_t i = 0; i < to - from; i++) sum[i] = 0, largest[i] = -INFINITY;
    for (int64_t key = 0; key < a->count; key += KEY_BLOCK) {
        int64_t count = a->count - key < KEY_BLOCK ? a->count - key : KEY_BLOCK, used = round_up(count, PANEL) / PAIR;
        for (int64_t j = 0; j < count; j += PANEL)
            for (int64_t r = 0; r < to - from; r += QUERIES)
                meet(q + r * a->stride / PAIR, a->stride / PAIR, a->key_panels + (key + j) * du, du,
                     score + r * stride + j, stride, NULL);
        for (int64_t i = 0; i < to - from; i++)
            factor[i] = soften(score + i * stride, count, LOG2E * a->scale, sum + i, largest + i);
        for (int64_t c = 0; c < a->dim; c += PANEL)
            for (int64_t r = 0; r < to - from; r += QUERIES)
                meet(weight + r * stride, stride, a->value_panels + c * ku + key / PAIR * PANEL, used, mixed + r * wide + c,
                     wide, key ? factor + r : NULL);
    }
    for (int64_t i = 0; i < to - from; i++)
        for (int64_t c = 0; c < a->dim; c += PANEL) {
            const vec by = all(1.0f / sum[i]), *row = (const vec *)(mixed + i * wide + c);
            put(out, at + (from + i) * out.stride + c, row[0] * by, row[1] * by, a->dim - c);
        }
}
