/* Products of activations and weights that lie in panels.
 *
 * A panel holds PANEL outputs, and for each step along the inner dimension one 32-bit unit of each of them: a float,
 * two bfloat16 or four int8. A vector of units meets a unit of activations that is the same in all lanes, so every
 * output is summed by itself, in the order of the inner dimension. However many rows there are, and however they are
 * grouped, a row's result has the same bits.
 *
 * Activations are kept as what the machine multiplies fastest with the weights:
 *   float weights   floats
 *   bfloat16        bfloat16 where there are dot products of them (AVX512_BF16), else floats
 *   int8            unsigned bytes where there are dot products of them (VNNI), one for each activation or two that
 *                   make 16 bits together; else 16-bit integers, on ARM with dot products as two signed bytes.
 *                   One scale a row.
 *   codes           bytes: codes.h, which has all that is said of four bits
 * `total` is what sums become between two blocks of the inner dimension.
 */
#pragma once
#include "activations.h"
#include "team.h"

#define PANEL (2 * LANES)
#define UNIT (32 / WEIGHT_BITS) /* weights in a unit */
#define BLOCK_ROWS 96           /* rows of activations that meet a panel in turn */
#define MOST_STREAMS 6          /* panels that a kernel reads at once */
#define AHEAD 512 /* words from what few rows meet to what they will: a processor itself looks no further than a page */
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#if WEIGHT_BITS == 8 && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOT_BYTES 1
typedef int32_t total; /* exact up to 65,000 columns: 255 * 127 for each */
#else
typedef float total;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
/* The products of four signed bytes in each lane with the four of `in`, added to sums. */
INLINE ivec add_bytes(ivec sums, ivec bytes, int32_t in) {
    union { ivec all; int32x4_t part[2]; } to = {sums};
    union { ivec all; int8x16_t part[2]; } of = {bytes};
    EACH(i, 2) to.part[i] = vdotq_s32(to.part[i], of.part[i], vreinterpretq_s8_s32(vdupq_n_s32(in)));
    return to.all;
}
#endif

/* A kernel: `rows` rows of activations, `stride` words apart, meet `streams` panels, `apart` words apart, over `units` of
 * the inner dimension. out: totals (rows, streams, PANEL), rows `out_stride` apart. first: the sums begin here. */
#define OPERANDS const uint32_t *x, int64_t stride, const uint32_t *w, int64_t apart, int64_t units, int first, total *out, \
        int64_t out_stride
#define OUT(r, s) (out + (r) * out_stride + (s) * PANEL)

#if WEIGHT_BITS == 4
#define BLOCK_COLUMNS 64
#define BLOCK_OF_WORDS 24 /* see codes.h */
#define words_of(units) ((units) / 8 * BLOCK_OF_WORDS)
#else
/* One step along the inner dimension. sums: of the outputs of a piece of a panel. piece: their weights of one step.
 * factor: the activations that meet them, WORDS 32-bit words. Sums go on from their totals, or are exact integers of at
 * most SEGMENT units that floats gather. */
#if WEIGHT_BITS == 32
typedef vec sums, piece, factor;
#define LOAD_PIECE(w, p) load_f32((const float *)(w) + (p) * LANES)
#define LOAD_FACTOR(x) all(*(const float *)(x))
#define MULTIPLY_ADD(in, w, s) multiply_add(in, w, s)

#elif WEIGHT_BITS == 16 && defined(__AVX512BF16__)
#define DOT_BF16 1
typedef vec sums;
typedef __m512i piece, factor;
#define LOAD_PIECE(w, p) _mm512_loadu_si512((w) + (p) * LANES)
#define LOAD_FACTOR(x) _mm512_set1_epi32(*(const int *)(x))
#define MULTIPLY_ADD(in, w, s) (vec)_mm512_dpbf16_ps((__m512)(s), (__m512bh)(w), (__m512bh)(in))

#elif WEIGHT_BITS == 16
typedef vec sums, wide_sums;
typedef uvec piece;
typedef struct { vec even, odd; } factor;
#define WORDS 2
#define LOAD_PIECE(w, p) (*(const uvec *)((w) + (p) * LANES))
#define LOAD_FACTOR(x) ((factor){all(((const float *)(x))[0]), all(((const float *)(x))[1])})
#define MULTIPLY_ADD(in, w, s) \
    multiply_add((in).odd, (vec)((w) & 0xffff0000u), multiply_add((in).even, (vec)((w) << 16), s))
#define WIDE_FACTOR(x) all(*(const float *)(x))
#define WIDE_ADD(in, w, s) multiply_add(in, w, s)
#define WIDE_BEGIN(at) first ? (vec){0} : *(const vec *)(at)
#define WIDE_END(at, s) *(vec *)(at) = s
#define WIDE_UNIT uvec
#define WIDE_LOW(w) ((w) << 16)
#define WIDE_HIGH(w) ((w) & 0xffff0000u)

#elif defined(DOT_BYTES)
typedef vec sums; /* of integers: as __m512i, GCC 12 copies them at each step */
typedef __m512i piece, factor;
#define LOAD_PIECE(w, p) _mm512_loadu_si512((w) + (p) * LANES)
#define LOAD_FACTOR(x) _mm512_set1_epi32(*(const int *)(x))
#define MULTIPLY_ADD(in, w, s) (vec)_mm512_dpbusd_epi32((__m512i)(s), in, w)

#elif defined(__AVX2__)
typedef __m256i sums, piece, factor, wide_sums; /* sums of four outputs: two lanes each */
#define PIECES 4
#define WORDS 2
#define SEGMENT 128 /* 32767 * 127 * 4 * SEGMENT < 2^31: end_panel adds two lanes */
#define LOAD_PIECE(w, p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)((w) + (p) * 4)))
#define LOAD_FACTOR(x) _mm256_set1_epi64x(*(const long long *)(x))
#define MULTIPLY_ADD(in, w, s) _mm256_add_epi32(s, _mm256_madd_epi16(w, in))
#define WIDE_FACTOR(x) _mm256_set1_epi32(*(const int *)(x))
#define WIDE_ADD(in, w, s) MULTIPLY_ADD(in, w, s)
#define WIDE_BEGIN(at) _mm256_setzero_si256()
#define WIDE_END(at, s) *(vec *)(at) = (vec)_mm256_cvtepi32_ps(s) + (first ? (vec){0} : *(vec *)(at))
#define WIDE_UNIT ivec
#define WIDE_LOW(w) (((w) << 24 >> 24 & 0xffff) | ((w) << 16 >> 24 << 16))
#define WIDE_HIGH(w) (((w) << 8 >> 24 & 0xffff) | ((w) >> 24 << 16))

#else
typedef ivec sums, piece;
#define WORDS 2
#define SEGMENT 128 /* 32767 * 127 * 4 * SEGMENT < 2^31 */
#define LOAD_PIECE(w, p) (*(const ivec *)((w) + (p) * LANES))
#define LOAD_FACTOR(x) (*(const factor *)(x))
#if defined(__ARM_FEATURE_DOTPROD)
#define SPLIT_BYTES 1
typedef struct { int32_t high, low; } factor; /* bytes of four activations, 256 * high + low */
#define MULTIPLY_ADD(in, w, s) add_bytes((s) + (add_bytes((ivec){0}, w, (in).high) << 8), w, (in).low)
#else
typedef struct { int16_t x[4]; } factor;
#define MULTIPLY_ADD(in, w, s) ((s) + ((w) << 24 >> 24) * (in).x[0] + ((w) << 16 >> 24) * (in).x[1] + \
                                ((w) << 8 >> 24) * (in).x[2] + ((w) >> 24) * (in).x[3])
#endif
#endif
#ifndef PIECES
#define PIECES 2
#endif
#ifndef WORDS
#define WORDS 1
#endif
#ifdef SEGMENT
#define CARRY 0
#define BLOCK_UNITS SEGMENT
#else
#define CARRY 1
#define BLOCK_UNITS (256 / WORDS) /* of a panel, that stay in the first cache while a block of rows meets them */
#endif
#define words_of(units) ((units) * WORDS) /* of activations that meet so many units of an output */
typedef sums sums_at __attribute__((aligned(4), may_alias));

/* What the sums of a panel's pieces leave in out (PANEL,). Without loops: after them, GCC 12 needs more registers. */
INLINE void end_panel(const sums *sum, total *out, int first) {
#if PIECES == 4
    EACH(i, 2) {
        __m256 pairs = _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[2 * i], sum[2 * i + 1]), 0xd8));
        _mm256_storeu_ps(out + 8 * i, first ? pairs : _mm256_add_ps(_mm256_loadu_ps(out + 8 * i), pairs));
    }
#elif CARRY
    (void)first;
    ((sums_at *)out)[0] = sum[0];
    ((sums_at *)out)[1] = sum[1];
#else
    vec low = __builtin_convertvector(sum[0], vec), high = __builtin_convertvector(sum[1], vec);
    if (!first) low += ((vec *)out)[0], high += ((vec *)out)[1];
    ((vec *)out)[0] = low;
    ((vec *)out)[1] = high;
#endif
}

INLINE void meet_panels(OPERANDS, int rows, int streams) {
    sums sum[12][MOST_STREAMS][PIECES];
    EACH(r, rows) EACH(s, streams) EACH(p, PIECES)
        sum[r][s][p] = CARRY && !first ? ((const sums_at *)OUT(r, s))[p] : (sums){0};
    for (int64_t k = 0; k < units; k++, w += PANEL) {
        piece weight[MOST_STREAMS][PIECES];
        if (rows <= 2) EACH(s, streams) EACH(i, PANEL / 16) __builtin_prefetch(w + s * apart + AHEAD + i * 16);
        EACH(s, streams) EACH(p, PIECES) weight[s][p] = LOAD_PIECE(w + s * apart, p);
        EACH(r, rows) {
            factor in = LOAD_FACTOR(x + r * stride + k * WORDS);
            EACH(s, streams) EACH(p, PIECES) sum[r][s][p] = MULTIPLY_ADD(in, weight[s][p], sum[r][s][p]);
        }
    }
    EACH(r, rows) EACH(s, streams) end_panel(sum[r][s], OUT(r, s), first);
}

/* Many rows meet a panel whose weights were widened before, where that takes more instructions than one: bfloat16 to
 * floats, bytes to 16 bits, in two steps of the inner dimension a unit. The sums stay the same. */
#ifdef WIDE_ADD
#define WIDENED(units) (2 * (units))
static void widen(const uint32_t *w, int64_t units, uint32_t *out) {
    for (; units; units--, w += PANEL, out += 2 * PANEL)
        for (int64_t i = 0; i < PANEL; i += LANES) {
            WIDE_UNIT unit = *(const WIDE_UNIT *)(w + i);
            *(uvec *)(out + i) = (uvec)WIDE_LOW(unit);
            *(uvec *)(out + PANEL + i) = (uvec)WIDE_HIGH(unit);
        }
}
INLINE void meet_wide(OPERANDS, int rows, int streams) {
    wide_sums sum[12][2];
    (void)apart, (void)streams;
    EACH(r, rows) EACH(p, 2) sum[r][p] = WIDE_BEGIN(OUT(r, 0) + p * LANES);
    for (int64_t k = 0; k < 2 * units; k++, w += PANEL) {
        wide_sums weight[2] = {((const wide_sums *)w)[0], ((const wide_sums *)w)[1]};
        EACH(r, rows) {
            wide_sums in = WIDE_FACTOR(x + r * stride + k);
            EACH(p, 2) sum[r][p] = WIDE_ADD(in, weight[p], sum[r][p]);
        }
    }
    EACH(r, rows) EACH(p, 2) WIDE_END(OUT(r, 0) + p * LANES, sum[r][p]);
}
#endif
#endif
#ifndef SEGMENT
#define SEGMENT (INT64_MAX / 4)
#endif

/* Weights (rows, columns). Rows and columns are padded with zeros in the panels, and rows in the vectors. */
typedef struct {
    const uint32_t *panels; /* (ceil(rows / PANEL), ceil(columns / UNIT), PANEL) */
    const float *scale;     /* (rows,), of int8 weights and of our own four bits; else NULL */
    const int32_t *sum;     /* (rows,), of int8 weights: the sum of each row */
    const float *bias;      /* (rows,) or NULL */
    int64_t rows, columns;
    const uint32_t *words, *coarse; /* of the groups of codes.h, whose codes are in `panels` then */
    int64_t form, bits, span;
} Matrix;

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline int64_t units_of(int64_t columns) {
#if WEIGHT_BITS == 4
    return (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * 8; /* of four bits */
#else
    return (columns + UNIT - 1) / UNIT;
#endif
}
static inline int64_t panels_of(Matrix m) { return (m.rows + PANEL - 1) / PANEL; }

/* As many sums as fit into registers. The kernels of several panels read memory in several places at once: it gives
 * a core a third more for six streams than for one. FEW: (rows, panels) for at most MOST_FEW rows; else one panel. */
#define TO_4(X) X(1) X(2) X(3) X(4)
#define TO_6(X) TO_4(X) X(5) X(6)
#define TO_12(X) TO_6(X) X(7) X(8) X(9) X(10) X(11) X(12)
#if WEIGHT_BITS != 4
#if LANES == 16
#define MOST_ROWS 12
#define MOST_FEW 6
#define EACH_SINGLE TO_12
#define EACH_FEW(X) X(1, 4) X(2, 4) X(3, 4) X(4, 3) X(5, 2) X(6, 2)
#elif PIECES == 4
#define MOST_ROWS 2 /* three would fill all 16 registers with sums and weights */
#define MOST_FEW 1
#define EACH_SINGLE(X) X(1) X(2)
#define EACH_FEW(X) X(1, 3)
#elif WORDS == 2
#define MOST_ROWS 4
#define MOST_FEW 2
#define EACH_SINGLE TO_4
#define EACH_FEW(X) X(1, 6) X(2, 2)
#else
#define MOST_ROWS 6
#define MOST_FEW 3
#define EACH_SINGLE TO_6
#define EACH_FEW(X) X(1, 6) X(2, 3) X(3, 2)
#endif
typedef void (*Kernel)(OPERANDS);
#define DEFINE(name, work, R, S) \
    static __attribute__((noinline, noclone)) void name##_##R(OPERANDS) { \
        work(x, stride, w, apart, units, first, out, out_stride, R, S); \
    }
#define DEFINE_SINGLE(R) DEFINE(single, meet_panels, R, 1)
#define DEFINE_FEW(R, S) DEFINE(few, meet_panels, R, S)
#define NAME_SINGLE(R) single_##R,
#define NAME_FEW(R, S) few_##R,
#define STREAMS_FEW(R, S) S,
EACH_SINGLE(DEFINE_SINGLE)
EACH_FEW(DEFINE_FEW)
static const Kernel single_panel[] = {0, EACH_SINGLE(NAME_SINGLE)};
static const Kernel few_rows[] = {0, EACH_FEW(NAME_FEW)};
static const int few_streams[] = {0, EACH_FEW(STREAMS_FEW)};
#ifdef WIDENED
#define LEAST_WIDE 8 /* rows for which it pays */
#define MOST_WIDE (LANES == 16 ? 12 : 6)
#define DEFINE_WIDE(R) DEFINE(wide, meet_wide, R, 1)
#define NAME_WIDE(R) wide_##R,
#if LANES == 16
#define EACH_WIDE TO_12
#else
#define EACH_WIDE TO_6
#endif
EACH_WIDE(DEFINE_WIDE)
static const Kernel wide_panel[] = {0, EACH_WIDE(NAME_WIDE)};
#else
#define LEAST_WIDE (BLOCK_ROWS + 1)
#define WIDENED(units) (units)
#define widen(w, units, out) (void)(out)
#define wide_panel single_panel
#define MOST_WIDE MOST_ROWS
#endif
#endif

/* --------------------------------------------------------------------------------------------------- activations */

/* Rows of activations as the kernels take them: `tokens` of them, each `halves` rows `stride` words apart. Only with
 * DOT_BYTES there can be two halves of a token: high and low bytes of 16-bit integers. */
typedef struct {
    uint32_t *x;
    float *scale; /* (tokens,) */
    int64_t tokens, stride;
    int halves;
} Inputs;

#if defined(DOT_BYTES)
#define PRECISE_HALVES 2
#else
#define PRECISE_HALVES 1
#endif

/* Words from row to row: not a multiple of a page, in which all rows would fall on the same lines of the cache. */
static inline int64_t input_stride(int64_t columns) { return round_up(words_of(units_of(columns)), 16) + 16; }

/* Inputs in memory that the caller has; input_floats(tokens, columns) of it. */
static inline int64_t input_floats(int64_t tokens, int64_t columns) {
    return round_up(tokens, 16) + tokens * PRECISE_HALVES * input_stride(columns);
}
static inline Inputs inputs_at(float *room, int64_t tokens, int64_t columns, int halves) {
    return (Inputs){(uint32_t *)(room + round_up(tokens, 16)), room, tokens, input_stride(columns), halves};
}

#if WEIGHT_BITS == 8
/* Activation i of a row, which is so many steps of the row's scale. */
INLINE void put_steps(Inputs in, uint32_t *row, int64_t i, int32_t steps) {
#if defined(DOT_BYTES)
    if (in.halves == 2) ((uint8_t *)(row + in.stride))[i] = (uint8_t)steps;
    ((uint8_t *)row)[i] = (uint8_t)((in.halves == 2 ? steps >> 8 : steps) + 128);
#elif defined(SPLIT_BYTES)
    int8_t *high = (int8_t *)(row + i / 4 * 2) + i % 4;
    high[4] = (int8_t)steps; /* the low one is signed, too */
    high[0] = (int8_t)((steps - high[4]) / 256);
#else
    (void)in;
    ((int16_t *)row)[i] = (int16_t)steps;
#endif
}
#endif

/* ------------------------------------------------------------------------------------------------------- products */

/* What becomes of the outputs (tokens, rows) of a product. */
typedef struct {
    float *y;       /* with `half`, bfloat16 is written there */
    int64_t stride; /* from token to token */
    int add;        /* add to what is there; not with `half` */
    int times;      /* multiply with what is there */
    enum curve curve;
    int half;
    const float *factor; /* (rows,), padded as a bias is, of what is put or added; NULL: one */
    const float *first, *last; /* the least and the largest of it, before all that and after it; or NULL */
} Output;

/* Inputs of one row a token, written by a product instead of set_input: not with int8 and four-bit weights, whose inputs
 * need scales. end_input completes each token's row. */
#if WEIGHT_BITS > 8
static inline Output as_output(Inputs in) {
#if defined(DOT_BF16)
    return (Output){.y = (float *)in.x, .stride = 2 * in.stride, .half = 1};
#else
    return (Output){.y = (float *)in.x, .stride = in.stride};
#endif
}
static inline void end_input(Inputs in, int64_t token, int64_t columns) {
    if (columns % UNIT == 0) return;
#if defined(DOT_BF16)
    ((uint16_t *)(in.x + token * in.stride))[columns] = 0;
#else
    in.x[token * in.stride + columns] = 0;
#endif
}
#endif

#if defined(DOT_BF16) || defined(DOT_BYTES)
#define ROUGH 1 /* outputs are rounded to 8 bits or so for the next product */
#else
#define ROUGH 0
#endif

INLINE vec bounded(vec value, const float *bounds) {
    return bounds ? at_most(all(bounds[1]), at_least(all(bounds[0]), value)) : value;
}
INLINE void put_vector(Output out, int64_t at, vec value) {
    float *y = out.y + at;
    value = bounded(value, out.first);
    if (out.curve == TANH_GELU) value = curve_of(value, TANH_GELU, ROUGH);
    if (out.curve == ERF_GELU) value = curve_of(value, ERF_GELU, ROUGH);
    if (out.curve == SILU) value = curve_of(value, SILU, ROUGH);
    if (out.add) value += load_f32(y);
    if (out.times) value *= out.half ? load_bf16((uint16_t *)out.y + at) : load_f32(y);
    value = bounded(value, out.last);
    if (out.half) store_bf16((uint16_t *)out.y + at, value);
    else *(vec *)y = value;
}

/* Values of a panel, of which `left` count, to place `at` of an output. */
INLINE void put(Output out, int64_t at, vec low, vec high, int64_t left) {
    if (left >= PANEL) {
        put_vector(out, at, low);
        put_vector(out, at + LANES, high);
        return;
    }
    float room[PANEL] = {0}; /* the whole panel is put into room, and what counts of it into place */
    Output whole = out;
    whole.y = room;
    char *place = (char *)out.y + at * (out.half ? 2 : 4);
    memcpy(room, place, left * (out.half ? 2 : 4));
    put_vector(whole, 0, low);
    put_vector(whole, LANES, high);
    memcpy(place, room, left * (out.half ? 2 : 4));
}

/* Totals of one token, its halves `half` apart, become outputs: a vector of them from `column` on, or a panel. */
INLINE vec finish_vector(Matrix m, Inputs in, int64_t token, int64_t column, const total *c, int64_t half) {
#if defined(DOT_BYTES)
    ivec high = *(const ivec *)c - (*(const ivec *)(m.sum + column) << 7);
    vec value = __builtin_convertvector(high, vec);
    if (in.halves == 2)
        value = multiply_add(value, all(256.0f), __builtin_convertvector(*(const ivec *)(c + half), vec));
#else
    (void)half, (void)in, (void)token;
    vec value = *(const vec *)c;
#endif
#if WEIGHT_BITS == 8
    value *= load_f32(m.scale + column) * in.scale[token];
#elif WEIGHT_BITS == 4
    if (m.scale) value *= load_f32(m.scale + column);
#endif
    if (m.bias) value += load_f32(m.bias + column);
    return value;
}
INLINE void finish(Matrix m, Inputs in, int64_t token, int64_t panel, const total *c, int64_t half, Output out) {
    int64_t column = panel * PANEL;
    vec low = finish_vector(m, in, token, column, c, half);
    vec high = finish_vector(m, in, token, column + LANES, c + LANES, half);
    if (out.factor) low *= load_f32(out.factor + column), high *= load_f32(out.factor + column + LANES);
    put(out, token * out.stride + column, low, high, m.rows - column);
}

#if WEIGHT_BITS == 4
#include "codes.h"
#else
/* x (columns,) as the inputs of one token. */
static void set_input(Inputs in, int64_t token, const float *x, int64_t columns) {
    uint32_t *row = in.x + token * in.halves * in.stride;
#if WEIGHT_BITS == 8
    float largest = largest_of(x, columns, 1);
#if defined(DOT_BYTES)
    const float most = in.halves == 2 ? 32767.0f : 127.0f;
#elif defined(SPLIT_BYTES)
    const float most = 127 * 257.0f;
#else
    const float most = 32767.0f;
#endif
    int known = largest <= FLT_MAX; /* NaN and infinity keep their meaning: all outputs become NaN */
    float by = known && largest > 1e-30f ? most / largest : 0; /* no smaller: its inverse would be infinite */
    in.scale[token] = known ? largest / most : NAN;
    for (int64_t i = 0; i < columns; i++) put_steps(in, row, i, known ? (int32_t)nearbyintf(x[i] * by) : 0);
    for (int64_t i = columns; i < units_of(columns) * UNIT; i++) put_steps(in, row, i, 0);
#elif defined(DOT_BF16)
    uint16_t *out = (uint16_t *)row;
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES) store_bf16(out + i, load_f32(x + i));
    for (; i < columns; i++) out[i] = float_to_bf16(x[i]);
    if (columns % 2) out[columns] = 0;
#else
    memcpy(row, x, columns * sizeof(float));
    if (UNIT == 2 && columns % 2) ((float *)row)[columns] = 0;
#endif
}

/* Row `id` of a table, (columns,). */
static void embed(Matrix m, int64_t id, float *x) {
    const uint32_t *unit = m.panels + id / PANEL * units_of(m.columns) * PANEL + id % PANEL;
    for (int64_t i = 0; i < m.columns; i++) {
        uint32_t bits = unit[i / UNIT * PANEL];
#if WEIGHT_BITS == 32
        memcpy(x + i, &bits, 4);
#elif WEIGHT_BITS == 16
        x[i] = bf16_to_float((uint16_t)(bits >> i % 2 * 16));
#else
        x[i] = (float)(int8_t)(bits >> i % 4 * 8) * m.scale[id];
#endif
    }
}

/* Outputs of `streams` panels, `apart` panels from each other, for few rows. */
static void product_of_few(Matrix m, Inputs in, int64_t panel, int64_t apart, int streams, Kernel kernel, Output out) {
    total c[MOST_ROWS * MOST_STREAMS * PANEL] __attribute__((aligned(64)));
    int64_t units = units_of(m.columns), width = streams * PANEL;
    const uint32_t *w = m.panels + panel * units * PANEL;
    for (int64_t k = 0; k < units; k += SEGMENT)
        kernel(in.x + words_of(k), in.stride, w + k * PANEL, apart * units * PANEL,
               units - k < SEGMENT ? units - k : SEGMENT, k == 0, c, width);
    for (int64_t t = 0; t < in.tokens; t++)
        for (int s = 0; s < streams; s++)
            finish(m, in, t, panel + s * apart, c + t * in.halves * width + s * PANEL, width, out);
}

/* Outputs of a panel for rows [first, first + count), at most BLOCK_ROWS. coming: the panel after it. */
static void product_of_many(Matrix m, Inputs in, int64_t panel, int64_t coming, int64_t first, int64_t count, Output out) {
    total c[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    uint32_t widened[LEAST_WIDE < BLOCK_ROWS ? WIDENED(BLOCK_UNITS) * PANEL : 1] __attribute__((aligned(64)));
    int64_t units = units_of(m.columns), most = (count < LEAST_WIDE ? MOST_ROWS : MOST_WIDE) / in.halves * in.halves;
    const Kernel *kernels = count < LEAST_WIDE ? single_panel : wide_panel;
    const uint32_t *w = m.panels + panel * units * PANEL, *after = m.panels + coming * units * PANEL;
    for (int64_t k = 0; k < units; k += BLOCK_UNITS) {
        int64_t inside = units - k < BLOCK_UNITS ? units - k : BLOCK_UNITS;
        const uint32_t *here = w + k * PANEL, *next = k + BLOCK_UNITS < units ? here + BLOCK_UNITS * PANEL : after;
        if (count >= LEAST_WIDE) {
            widen(here, inside, widened);
            here = widened;
        }
        for (int64_t r = 0; r < count; r += most) {
            for (int64_t i = r * inside / count * PANEL; i < (r + most) * inside / count * PANEL; i += 16)
                __builtin_prefetch(next + i); /* weights come from far: have the next ones near */
            kernels[count - r < most ? count - r : most](in.x + (first + r) * in.stride + words_of(k), in.stride, here,
                                                         0, inside, k == 0, c + r * PANEL, PANEL);
        }
    }
    for (int64_t r = 0; r < count; r += in.halves)
        finish(m, in, (first + r) / in.halves, panel, c + r * PANEL, PANEL, out);
}
#define PRODUCT_OF_FEW(panel, apart, streams) \
    product_of_few(m, in, panel, apart, streams, ((streams) > 1 ? few_rows : single_panel)[rows], out)
#define PRODUCT_OF_MANY(panel, coming, first, count) product_of_many(m, in, panel, coming, first, count, out)
#define PANELS_OF_FEW few_streams[rows]
#endif

/* Whether each thread makes the same outputs of every matrix of one shape. */
static inline int evenly_shared(Inputs in) { return in.tokens * in.halves <= MOST_FEW; }

/* y = x W^T + b: all threads of a team call it, and it does not wait for the others at its end. */
static void product(Matrix m, Inputs in, Output out, Member *me) {
    if (!in.tokens) return;
    int64_t rows = in.tokens * in.halves, panels = panels_of(m), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, from, to;
    if (evenly_shared(in)) {
        share(me, panels, &from, &to);
        int64_t streams = PANELS_OF_FEW, apart = (to - from) / streams, rest = from + apart * streams;
        for (int64_t panel = from; panel < from + apart; panel++) PRODUCT_OF_FEW(panel, apart, streams);
        for (int64_t panel = rest; panel < to; panel++) PRODUCT_OF_FEW(panel, 0, 1);
        return;
    }
    for (int64_t unit = next_unit(me, blocks * panels), after; unit >= 0; unit = after) {
        after = next_unit(me, blocks * panels);
        int64_t first = unit / panels * BLOCK_ROWS, count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        PRODUCT_OF_MANY(unit % panels, (after < 0 ? unit : after) % panels, first, count);
    }
}

/* The inputs of tokens [from, to) out of all of them, x (tokens, columns). */
static void set_inputs(Inputs in, int64_t from, int64_t to, const float *x, int64_t columns) {
    for (int64_t i = from; i < to; i++) set_input(in, i, x + i * columns, columns);
}
