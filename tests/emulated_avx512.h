/* What the C code uses of AVX-512 with VNNI, in plain C, lane by lane as Intel's manual defines it: so its paths run
 * where no such processor is. Included before all else, without -march. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef int32_t lanes __attribute__((vector_size(64)));
typedef union { __m512i all; int32_t words[16]; int16_t halves[32]; int8_t bytes[64]; uint8_t codes[64]; } Lanes;

static inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(x - (lanes){0}); }
static inline __m512i _mm512_loadu_si512(const void *p) {
    __m512i x;
    memcpy(&x, p, 64);
    return x;
}
static inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    Lanes to = {sums}, of = {a}, with = {b};
    for (int i = 0; i < 64; i++) to.words[i / 4] += of.codes[i] * with.bytes[i];
    return to.all;
}
static inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
    Lanes to = {{0}}, of = {a}, with = {b};
    for (int i = 0; i < 32; i++) to.words[i / 2] += of.halves[i] * with.halves[i];
    return to.all;
}
#define EACH(name, parameters, expression) \
    static inline __m512 name parameters { \
        __m512 y; \
        for (int i = 0; i < 16; i++) y[i] = expression; \
        return y; \
    }
EACH(_mm512_fmadd_ps, (__m512 a, __m512 b, __m512 c), fmaf(a[i], b[i], c[i]))
EACH(_mm512_max_ps, (__m512 a, __m512 b), a[i] > b[i] ? a[i] : b[i])
EACH(_mm512_min_ps, (__m512 a, __m512 b), a[i] < b[i] ? a[i] : b[i])
EACH(_mm512_scalef_ps, (__m512 a, __m512 b), ldexpf(a[i], (int)floorf(b[i])))
EACH(_mm512_rcp14_ps, (__m512 a), 1 / a[i])
#define _mm512_roundscale_ps(a, how) nearest_of(a)
EACH(nearest_of, (__m512 a), nearbyintf(a[i]))
#undef EACH
