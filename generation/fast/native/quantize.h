/* Float weights -> four bits, in panels: for each group the scale and the zero of the least squared error that a search
 * of 15 beginnings finds, each followed by one step of least squares. LANES outputs are searched side by side. */
#pragma once
#include "panels.h"

typedef struct { vec scale, zero, error, codes, squares, products; } Fit;

static inline vec nearest(vec x) { return x + all(12582912.0f) - all(12582912.0f); } /* of less than 2^22 */
static inline vec within(float least, float most, vec x) { return at_most(all(most), at_least(all(least), x)); }
static inline uvec encoded(vec scale) { return (((uvec)scale + (1u << 17)) >> 18) - (112u << 5); }

/* Round a group x with a scale and a zero as they can be stored. All sums count each number as often as `share` says: the
 * squared error, the codes, their squares, and numbers times codes. */
static inline __attribute__((always_inline)) Fit fit(const vec *x, const vec *share, vec scale, vec zero) {
    scale = (vec)((encoded(within(0x1p-15f, 1.96f, scale)) << 18) + (112u << 23));
    zero = nearest(within(0, 15.875f, zero) * all(8.0f)) * all(0.125f);
    vec inverse = all(1.0f) / scale, error = {0}, codes = {0}, squares = {0}, products = {0};
    for (int i = 0; i < GROUP; i++) {
        vec code = within(0, 15, nearest(multiply_add(x[i], inverse, zero))), off = (code - zero) * scale - x[i];
        vec counted = share[i] * code;
        error = multiply_add(share[i] * off, off, error);
        codes += counted;
        squares = multiply_add(counted, code, squares);
        products = multiply_add(counted, x[i], products);
    }
    return (Fit){scale, zero, error, codes, squares, products};
}

static inline Fit better(Fit a, Fit b) {
    uvec which = (uvec)(b.error < a.error);
    a.scale = (vec)(((uvec)b.scale & which) | ((uvec)a.scale & ~which));
    a.zero = (vec)(((uvec)b.zero & which) | ((uvec)a.zero & ~which));
    a.error = (vec)(((uvec)b.error & which) | ((uvec)a.error & ~which));
    return a;
}

/* The best scale and zero of a group x (GROUP,) of each lane. Large numbers count for more, as they are often those of
 * channels that are large themselves. */
static Fit search(const vec *x) {
    const float tiny = 1e-12f;
    vec low = {0}, high = {0}, sum = {0}, squared = {0}, count = {0}, share[GROUP];
    for (int i = 0; i < GROUP; i++) low = at_most(low, x[i]), high = at_least(high, x[i]), squared += x[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) squared[lane] = sqrtf(squared[lane] / GROUP);
    for (int i = 0; i < GROUP; i++) {
        share[i] = squared + at_least(x[i], -x[i]) + all(tiny);
        count += share[i];
        sum = multiply_add(share[i], x[i], sum);
    }
    vec each = all(1.0f) / count;
    Fit best = {.error = all(FLT_MAX)};
    for (int more = -1; more <= 3; more++) /* the range has so many steps more than 15 */
        for (int shift = -1; shift <= 1; shift++) {
            vec scale = at_least(all(tiny), (high - low) * all(1.0f / (15 + more)));
            Fit one = fit(x, share, scale, all(shift / 3.0f - more / 2.0f) - low / scale);
            best = better(best, one);
            /* x is about slope * code + begin */
            vec slope = (one.products - one.codes * sum * each) /
                        at_least(all(tiny), one.squares - one.codes * one.codes * each);
            vec zero = (one.codes - sum / at_least(all(tiny), slope)) * each;
            zero = nearest(within(0, 15.875f, zero) * all(8.0f)) * all(0.125f);
            vec squares = one.squares - zero * (all(2.0f) * one.codes - count * zero);
            best = better(best, fit(x, share, (one.products - zero * sum) / at_least(all(tiny), squares), zero));
        }
    return best;
}

/* weight (rows, columns) -> panels, and the scale of each row: see Matrix. */
static void quantize(const float *weight, int64_t rows, int64_t columns, uint32_t *panels, float *scale, Member *me) {
    int64_t units = units_of(columns), pieces = (rows + PANEL - 1) / PANEL * 2;
    for (int64_t piece; (piece = next_unit(me, pieces)) >= 0;) {
        uint32_t *out = panels + piece / 2 * units * PANEL + piece % 2 * LANES;
        float inverse[LANES] = {0};
        for (int64_t lane = 0, row = piece * LANES; lane < LANES; lane++, row++) {
            float largest = row < rows ? largest_of(weight + row * columns, columns, 1) : 0;
            scale[row] = largest <= FLT_MAX ? largest / 7.5f : NAN; /* what is in it has no meaning then */
            inverse[lane] = largest <= FLT_MAX && largest > 1e-30f ? 7.5f / largest : 0;
        }
        for (int64_t from = 0; from < round_up(columns, BLOCK_COLUMNS); from += GROUP, out += 4 * PANEL) {
            int half = from / GROUP % 2;
            vec x[GROUP];
            for (int64_t i = 0; i < GROUP; i++)
                for (int64_t lane = 0; lane < LANES; lane++) {
                    int there = piece * LANES + lane < rows && from + i < columns && inverse[lane] > 0;
                    x[i][lane] = there ? weight[(piece * LANES + lane) * columns + from + i] * inverse[lane] : 0;
                }
            Fit best = search(x);
            uvec first = encoded(best.scale) | (uvec)__builtin_convertvector(best.zero * all(8.0f), ivec) << 9;
            if (half) *(uvec *)(out - 5 * PANEL) |= first << 16;
            else *(uvec *)out = first, out += PANEL;
            vec inverse_scale = all(1.0f) / best.scale;
            for (int64_t i = 0; i < GROUP; i += 8) {
                uvec unit = {0};
                for (int64_t j = 0; j < 8; j++) {
                    vec code = within(0, 15, nearest(multiply_add(x[i + j], inverse_scale, best.zero)));
                    unit |= (uvec)__builtin_convertvector(code, ivec) << (j % 4 * 8 + j / 4 * 4);
                }
                *(uvec *)(out + i / 8 * PANEL) = unit;
            }
        }
    }
}
void ocelli_quantize(const float *weight, int64_t rows, int64_t columns, uint32_t *panels, float *scale, Pass *pass) {
    WITH_TEAM(pass, quantize(weight, rows, columns, panels, scale, &me))
}
