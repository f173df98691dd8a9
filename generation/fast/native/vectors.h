/* Vectors of floats, and how the types that weights and cache are stored in become them. Vectors are GCC's
 * generic ones: the compiler picks the instruction set. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* A loop with a constant number of rounds, which is unrolled: then an array of its vectors is in registers. */
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

/* AVX-512 without dot products of bytes multiplies int8 and four-bit weights as AVX2 does. */
#if defined(__AVX512F__) && (WEIGHT_BITS > 8 || (defined(__AVX512VNNI__) && defined(__AVX512BW__)))
#define LANES 16 /* floats in a vector: one register (on NEON, two) */
#else
#define LANES 8
#endif
#define MOST_CHUNK 128 /* cache positions that one unit of attention work covers at most */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

/* Have x in a register before it is used: GCC would read it from memory at each use, which takes longer. */
#if defined(__AVX__)
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#else
#define IN_REGISTER(x) (void)(x)
#endif

static inline vec all(float x) { return x - (vec){0}; }
static inline vec load_f32(const float *p) { return *(const vec *)p; }
static inline vec load_bf16(const uint16_t *p) {
#if defined(__AVX2__) && !defined(__AVX512F__) /* GCC 12 takes this conversion apart */
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16);
#endif
}
static inline float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t float_to_bf16(float value) { /* round to nearest even, as PyTorch does; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline void store_bf16(uint16_t *p, vec v) {
#ifdef __AVX512BF16__
    *(__m256i_u *)p = (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
    for (int i = 0; i < LANES; i++) p[i] = float_to_bf16(v[i]);
#endif
}

#if CACHE_BITS == 32
typedef float cached;
#define CACHED_VALUE(c) (c)
#define TO_CACHED(v) (v)
#else
typedef uint16_t cached;
#define CACHED_VALUE bf16_to_float
#define TO_CACHED float_to_bf16
#endif

static inline float sum_lanes(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

/* a * b + c, rounded once where the machine can. Elsewhere products and sums are rounded as they are written
 * (-ffp-contract=off): left to itself, GCC decides that loop by loop, and a result would not be the same in each. */
static inline vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

static inline float multiply_add_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float sum_of(const float *x, int64_t n) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += load_f32(x + i);
    float total = sum_lanes(sum);
    for (; i < n; i++) total += x[i];
    return total;
}

static inline float squares_of(const float *x, int64_t n) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = multiply_add(load_f32(x + i), load_f32(x + i), sum);
    float total = sum_lanes(sum);
    for (; i < n; i++) total = multiply_add_one(x[i], x[i], total);
    return total;
}

/* The largest of x, NaN if there is a positive one: floats are in order as integers, which compilers reduce in
 * vectors without asking what becomes of NaN. magnitude: of |x|, where NaN of either sign is the largest. */
static inline float largest_of(const float *x, int64_t n, int magnitude) {
    int32_t largest = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits = magnitude ? bits & 0x7fffffff : bits ^ ((bits >> 31) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    largest ^= (largest >> 31) & 0x7fffffff;
    float result;
    memcpy(&result, &largest, 4);
    return result;
}

/* e^x to about 2 ulp, of x no further out than -87 and 88: 2^k * polynomial (the coefficients are Cephes' expf). */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x; /* NaN stays: it fails both, and y is NaN then */
    float k = x == x ? floorf(x * 1.44269504f + 0.5f) : 0.0f;
    x -= k * 0.693359375f;
    x -= k * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return y * scale;
}
