/* Float weights -> four bits, in panels: for each group the scale and the zero of the least squared error that a search
 * of eight beginnings finds, each followed by one step of least squares, and the best one by two. LANES outputs are
 * searched side by side, rounding each product and sum: every processor finds the same. The codes' form is EIGHTHS. */
#pragma once
#include "panels.h"

#define PHASES 4 /* zeros that are tried with a scale */

/* A group, with how much each number counts: its numbers' sum and that of what they count. */
typedef struct { const vec *x, *share; vec sum, count; } Numbers;
typedef struct { vec scale, zero, error; } Fit;

static inline vec nearest(vec x) { return x + all(12582912.0f) - all(12582912.0f); } /* of less than 2^22 */
static inline vec within(float least, float most, vec x) { return at_most(all(most), at_least(all(least), x)); }
static inline uvec encoded(vec scale) { return (((uvec)scale + (1u << 17)) >> 18) - (112u << 5); }

static inline Fit better(Fit a, Fit b) {
    uvec which = (uvec)(b.error < a.error);
    a.scale = (vec)(((uvec)b.scale & which) | ((uvec)a.scale & ~which));
    a.zero = (vec)(((uvec)b.zero & which) | ((uvec)a.zero & ~which));
    a.error = (vec)(((uvec)b.error & which) | ((uvec)a.error & ~which));
    return a;
}

/* The best of `best` and, for `count` zeros, what least squares make of the codes that the numbers have with them and a
 * scale of 1 / inverse: a scale and a zero as they can be stored. Errors leave out the squares of the numbers. */
INLINE Fit improve(Numbers n, vec inverse, const vec *zero, int count, Fit best) {
    vec codes[PHASES] = {{0}}, squares[PHASES] = {{0}}, products[PHASES] = {{0}}, each = all(1.0f) / n.count;
    for (int i = 0; i < GROUP; i++)
        for (int k = 0; k < count; k++) { /* side by side, as sums wait for one another */
            vec code = within(0, 15, nearest(n.x[i] * inverse + zero[k])), counted = n.share[i] * code;
            codes[k] += counted;
            squares[k] += counted * code;
            products[k] += counted * n.x[i];
        }
    for (int k = 0; k < count; k++) { /* a number is about slope * code + begin */
        vec slope = (products[k] - codes[k] * n.sum * each) / at_least(all(1e-12f), squares[k] - codes[k] * codes[k] * each);
        vec from = (codes[k] - n.sum / at_least(all(1e-12f), slope)) * each;
        from = nearest(within(0, 15.875f, from) * all(8.0f)) * all(0.125f);
        vec square = squares[k] - from * (all(2.0f) * codes[k] - n.count * from), product = products[k] - from * n.sum;
        vec scale = within(0x1p-15f, 1.96f, product / at_least(all(1e-12f), square));
        scale = (vec)((encoded(scale) << 18) + (112u << 23));
        best = better(best, (Fit){scale, from, scale * (scale * square - all(2.0f) * product)});
    }
    return best;
}

/* The best scale and zero of a group x (GROUP,) of each lane. A number counts by its input's importance (GROUP,), and
 * large ones for more, as they are often those of inputs that are large themselves. */
static Fit search(const vec *x, const float *importance) {
    vec low = {0}, high = {0}, squared = {0}, share[GROUP], zero[PHASES];
    Numbers n = {x, share, {0}, {0}};
    for (int i = 0; i < GROUP; i++) low = at_most(low, x[i]), high = at_least(high, x[i]), squared += x[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) squared[lane] = sqrtf(squared[lane] / GROUP);
    for (int i = 0; i < GROUP; i++) {
        share[i] = (squared + at_least(x[i], -x[i]) + all(1e-12f)) * all(importance[i]);
        n.count += share[i];
        n.sum += share[i] * x[i];
    }
    Fit best = {.error = all(FLT_MAX)};
    for (float steps = 14.25f; steps < 16; steps++) { /* that the range has */
        vec inverse = all(steps) / at_least(all(1e-12f), high - low), middle = all(7.5f - steps / 2) - low * inverse;
        for (int k = 0; k < PHASES; k++) zero[k] = middle + all((k + 0.5f) / PHASES - 0.5f);
        best = improve(n, inverse, zero, PHASES, best);
    }
    zero[0] = best.zero;
    return improve(n, all(1.0f) / best.scale, zero, 1, best);
}

/* weight (rows, columns) -> panels, words of groups, and the scale of each row: see Matrix. importance: of inputs (columns,
 * padded to BLOCK_COLUMNS), about 1 in each group. */
static void quantize(const float *weight, const float *importance, int64_t rows, int64_t columns, uint32_t *panels,
                     uint32_t *words, float *scale, Member *me) {
    int64_t units = units_of(columns), pieces = (rows + PANEL - 1) / PANEL * 2;
    for (int64_t piece; (piece = next_unit(me, pieces)) >= 0;) {
        uint32_t *out = panels + piece / 2 * units * PANEL + piece % 2 * LANES;
        uint32_t *word = words + piece / 2 * (units / 8) * PANEL + piece % 2 * LANES;
        float inverse[LANES] = {0};
        for (int64_t lane = 0, row = piece * LANES; lane < LANES; lane++, row++) {
            float largest = row < rows ? largest_of(weight + row * columns, columns, 1) : 0;
            scale[row] = largest <= FLT_MAX ? largest / 7.5f : NAN; /* what is in it has no meaning then */
            inverse[lane] = largest <= FLT_MAX && largest > 1e-30f ? 7.5f / largest : 0;
        }
        for (int64_t from = 0; from < round_up(columns, BLOCK_COLUMNS); from += GROUP, out += 4 * PANEL) {
            int half = from / GROUP % 2;
            vec x[GROUP];
            memset(x, 0, sizeof x);
            for (int64_t lane = 0; lane < LANES; lane++) {
                const float *own = weight + (piece * LANES + lane) * columns + from;
                int64_t count = inverse[lane] > 0 ? columns - from < GROUP ? columns - from : GROUP : 0;
                for (int64_t i = 0; i < count; i++) ((float *)(x + i))[lane] = own[i] * inverse[lane];
            }
            Fit best = search(x, importance + from);
            uvec first = encoded(best.scale) | (uvec)__builtin_convertvector(best.zero * all(8.0f), ivec) << 9;
            if (half) *(uvec *)word |= first << 16, word += PANEL;
            else *(uvec *)word = first;
            vec inverse_scale = all(1.0f) / best.scale;
            for (int64_t i = 0; i < GROUP; i += 8) {
                uvec unit = {0};
                for (int64_t j = 0; j < 8; j++) {
                    vec code = within(0, 15, nearest(x[i + j] * inverse_scale + best.zero));
                    unit |= (uvec)__builtin_convertvector(code, ivec) << (j % 4 * 8 + j / 4 * 4);
                }
                *(uvec *)(out + i / 8 * PANEL) = unit;
            }
        }
    }
}
void ocelli_quantize(const float *weight, const float *importance, int64_t rows, int64_t columns, uint32_t *panels,
                     uint32_t *words, float *scale, Pass *pass) {
    WITH_TEAM(pass, quantize(weight, importance, rows, columns, panels, words, scale, &me))
}
