/* Curves in vectors: powers of two, the two forms of gelu, and silu. */
#pragma once
#include "vectors.h"

#define LOG2E 1.44269504f

/* The larger and the smaller of two, x where x is NaN. */
static inline vec at_least(vec least, vec x) {
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)least, (__m512)x);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)least, (__m256)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = least[i] > x[i] ? least[i] : x[i];
    return x;
#endif
}
static inline vec at_most(vec most, vec x) {
#if LANES == 16
    return (vec)_mm512_min_ps((__m512)most, (__m512)x);
#elif defined(__AVX__)
    return (vec)_mm256_min_ps((__m256)most, (__m256)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = most[i] < x[i] ? most[i] : x[i];
    return x;
#endif
}

/* 2^t for t of at most 127; what is below -126 counts as that, and NaN stays. The polynomials (least relative error
 * on -0.5..0.5) are right to 7e-8, or to 7e-5 for what is rounded to bfloat16 afterwards. */
INLINE vec power_of_two(vec t, int rough) {
    t = at_least(all(-126.0f), t);
#if LANES == 16
    vec whole = (vec)_mm512_roundscale_ps((__m512)t, 0), f = t - whole, y;
#else
    vec shifted = t + all(12582912.0f); /* 1.5 * 2^23: the sum's last bits are t's nearest integer */
    vec f = t - (shifted - all(12582912.0f)), y;
#endif
    if (rough) {
        y = multiply_add(all(5.517162365e-2f), f, all(2.426111187e-1f));
        y = multiply_add(y, f, all(6.932609938e-1f));
        y = multiply_add(y, f, all(9.999280740e-1f));
    } else {
        y = multiply_add(all(1.327646679e-3f), f, all(9.675541293e-3f));
        y = multiply_add(y, f, all(5.550713290e-2f));
        y = multiply_add(y, f, all(2.402211972e-1f));
        y = multiply_add(y, f, all(6.931469671e-1f));
        y = multiply_add(y, f, all(1.0f));
    }
#if LANES == 16
    return (vec)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    return y * (vec)(((uvec)shifted + 127) << 23);
#endif
}

enum curve { NO_CURVE, TANH_GELU, ERF_GELU, SILU };

INLINE vec curve_of(vec x, enum curve form, int rough) {
    if (form == SILU) return x / (all(1.0f) + power_of_two(at_most(all(126.0f), x * all(-LOG2E)), rough));
    if (form == TANH_GELU) { /* x (1 + tanh u) / 2 = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3) */
        vec u = x * multiply_add(x * x, all(-2 * LOG2E * 0.7978845608f * 0.044715f), all(-2 * LOG2E * 0.7978845608f));
        vec below = all(1.0f) + power_of_two(at_most(all(126.0f), u), rough);
#if LANES == 16
        if (rough) return x * (vec)_mm512_rcp14_ps((__m512)below); /* right to 6e-5, and never waited for */
#endif
        return x / below;
    }
    /* max(x, 0) - |x| erfc(z) / 2, z = |x| / sqrt(2); erfc as Abramowitz and Stegun have it (7.1.26), to 1.5e-7 */
    vec size = (vec)((uvec)x & 0x7fffffffu), z = size * all(0.70710678f);
    vec t = all(1.0f) / multiply_add(z, all(0.3275911f), all(1.0f));
    vec y = multiply_add(all(1.061405429f), t, all(-1.453152027f));
    y = multiply_add(y, t, all(1.421413741f));
    y = multiply_add(y, t, all(-0.284496736f));
    y = multiply_add(y, t, all(0.254829592f)) * t * power_of_two(z * z * all(-LOG2E), rough);
    return at_least(all(0.0f), x) - size * all(0.5f) * y;
}
