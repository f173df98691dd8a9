/* Four-bit weights, in groups of 32 along the inner dimension: what a panel of them holds, and the kernels.
 *
 * 64 columns are a block of 9 units of each output. The first unit has 16 bits for each of its two groups:
 *   bits 0-8   the group's scale, 4 bits of exponent and 5 of fraction: 2^-15 to 2, times the scale of the row
 *   bits 9-15  its zero, in eighths of a code
 * and each of the others eight codes of 0 to 15: those of four columns in the low halves of its bytes, and those of
 * the next four in the high halves. A weight is (code - zero) * scale. There is no third number for a group: scale
 * and zero are as fine as a search for the least squared error can use.
 *
 * Activations are bytes with one scale a group. A block of them is 20 words: the two groups' scales, the sums of their
 * bytes in 16 bits each, nothing, and 16 words of bytes. All that is summed within a group is exact. */
#pragma once
#include "vectors.h"

#define GROUP 32
#define BLOCK_COLUMNS 64
#define BLOCK_OF_UNITS 9
#define BLOCK_OF_WORDS 20

/* Scale, divided by 8, and eight times the zero of group `half` in each lane, zeros where the sums of bytes are. */
static inline vec scales_of(uvec first, int half) {
    return (vec)(((half ? first << 2 : first << 18) & 0x07fc0000u) + (109u << 23));
}
static inline uvec zeros_of(uvec first, int half) { return first >> 9 & (half ? 0x007f0000u : 0x0000007fu); }

/* DOT: four codes and four bytes of each lane, added to `dots`. EIGHTFOLD: what they are then, times 8. TIMES: the
 * zeros of a group with the sum of its bytes. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef vec dots; /* of integers: as __m512i, GCC 12 copies them at each step */
typedef __m512i word;
#define LOAD_WORD(x) _mm512_set1_epi32(*(const int *)(x))
#define DOT(d, codes, in) (vec)_mm512_dpbusd_epi32((__m512i)(d), (__m512i)(codes), in)
#define EIGHTFOLD(d) ((ivec)(d) << 3)
#define TIMES(zeros, in) (ivec)_mm512_madd_epi16((__m512i)(zeros), in)
#elif defined(__AVX2__)
typedef __m256i dots; /* of 16 bits: 8 * 2 * 15 * 127 < 2^15 */
typedef __m256i word;
#define LOAD_WORD(x) _mm256_set1_epi32(*(const int *)(x))
#define DOT(d, codes, in) _mm256_add_epi16(d, _mm256_maddubs_epi16((__m256i)(codes), in))
#define EIGHTFOLD(d) (ivec)_mm256_madd_epi16(d, _mm256_set1_epi16(8))
#define TIMES(zeros, in) (ivec)_mm256_madd_epi16((__m256i)(zeros), in)
#else
typedef ivec dots;
typedef int32_t word;
#define LOAD_WORD(x) (*(const int32_t *)(x))
#if defined(__ARM_FEATURE_DOTPROD)
#define DOT(d, codes, in) add_bytes(d, (ivec)(codes), in)
#else
#define DOT(d, codes, in) ((d) + (ivec)((codes) & 0xff) * ((in) << 24 >> 24) + (ivec)((codes) >> 8 & 0xff) * ((in) << 16 >> 24) + \
                           (ivec)((codes) >> 16 & 0xff) * ((in) << 8 >> 24) + (ivec)((codes) >> 24) * ((in) >> 24))
#endif
#define EIGHTFOLD(d) ((d) << 3)
#define TIMES(zeros, in) ((ivec)((zeros) & 0xffff) * ((in) << 16 >> 16) + (ivec)((zeros) >> 16) * ((in) >> 16))
#endif

/* A group's part of a sum. `in`: the row's block of activations. */
static inline __attribute__((always_inline)) vec add_group(vec sum, dots d, vec scales, uvec zeros, const uint32_t *in,
                                                           int half) {
    vec exact = __builtin_convertvector(EIGHTFOLD(d) - TIMES(zeros, LOAD_WORD(in + 2)), vec);
    return multiply_add(exact * scales, all(((const float *)in)[half]), sum);
}

#define BEGIN_PANEL(r, s) vec a##r##_##s = first ? (vec){0} : ((const vec *)OUT(r, s))[0], \
    b##r##_##s = first ? (vec){0} : ((const vec *)OUT(r, s))[1];
#define BEGIN_DOTS(r, s) dots da##r##_##s = (dots){0}, db##r##_##s = (dots){0};
#define LOAD_CODES(r, s) uvec wa##s = *(const uvec *)(codes + s * apart), wb##s = *(const uvec *)(codes + s * apart + LANES); \
    uvec la##s = wa##s & 0x0f0f0f0fu, ha##s = wa##s >> 4 & 0x0f0f0f0fu; \
    uvec lb##s = wb##s & 0x0f0f0f0fu, hb##s = wb##s >> 4 & 0x0f0f0f0fu;
#define ADD_CODES(r, s) \
    da##r##_##s = DOT(DOT(da##r##_##s, la##s, low), ha##s, high); \
    db##r##_##s = DOT(DOT(db##r##_##s, lb##s, low), hb##s, high);
#define LOAD_GROUP(r, s) uvec fa##s = *(const uvec *)(w + s * apart), fb##s = *(const uvec *)(w + s * apart + LANES);
#define ADD_GROUP(r, s, half) \
    a##r##_##s = add_group(a##r##_##s, da##r##_##s, scales_of(fa##s, half), zeros_of(fa##s, half), x + r * stride, half); \
    b##r##_##s = add_group(b##r##_##s, db##r##_##s, scales_of(fb##s, half), zeros_of(fb##s, half), x + r * stride, half);
#define ADD_FIRST(r, s) ADD_GROUP(r, s, 0)
#define ADD_SECOND(r, s) ADD_GROUP(r, s, 1)
#define END_PANEL(r, s) ((vec *)OUT(r, s))[0] = a##r##_##s, ((vec *)OUT(r, s))[1] = b##r##_##s;
#define BEGIN_ROW(r, S) STREAMS##S(BEGIN_PANEL, r)
#define DOTS_ROW(r, S) STREAMS##S(BEGIN_DOTS, r)
#define CODES_ROW(r, S) { word low = LOAD_WORD(in + r * stride), high = LOAD_WORD(in + r * stride + 1); STREAMS##S(ADD_CODES, r) }
#define FIRST_ROW(r, S) STREAMS##S(ADD_FIRST, r)
#define SECOND_ROW(r, S) STREAMS##S(ADD_SECOND, r)
#define END_ROW(r, S) STREAMS##S(END_PANEL, r)
#define HALF(R, S, half, ADD) { \
        ROWS##R(DOTS_ROW, S) \
        const uint32_t *codes = w + (1 + 4 * half) * PANEL, *in = x + 4 + 8 * half; \
        for (int u = 0; u < 4; u++, codes += PANEL, in += 2) { STREAMS##S(LOAD_CODES, 0) ROWS##R(CODES_ROW, S) } \
        STREAMS##S(LOAD_GROUP, 0) \
        ROWS##R(ADD, S) \
    }
#define KERNEL(R, S) \
    static __attribute__((noinline, noclone)) void kernel_##R##_##S(const uint32_t *x, int64_t stride, const uint32_t *w, \
            int64_t apart, int64_t units, int first, total *out, int64_t out_stride) { \
        (void)apart; \
        ROWS##R(BEGIN_ROW, S) \
        for (; units; units -= BLOCK_OF_UNITS, w += BLOCK_OF_UNITS * PANEL, x += BLOCK_OF_WORDS) { \
            HALF(R, S, 0, FIRST_ROW) \
            HALF(R, S, 1, SECOND_ROW) \
        } \
        ROWS##R(END_ROW, S) \
    }

/* Many rows meet blocks that were taken apart before: scales and zeros of both groups, and codes as bytes. */
#define WIDENED(units) ((units) / BLOCK_OF_UNITS * BLOCK_OF_WORDS)
static void widen(const uint32_t *w, int64_t units, uint32_t *out) {
    for (; units; units -= BLOCK_OF_UNITS)
        for (int unit = 0; unit < BLOCK_OF_UNITS; unit++, w += PANEL) {
            for (int64_t i = 0; i < PANEL; i += LANES) {
                uvec own = *(const uvec *)(w + i);
                for (int half = 0; half < 2; half++) {
                    *(uvec *)(out + half * PANEL + i) = unit ? (uvec)(own >> 4 * half & 0x0f0f0f0fu)
                                                             : (uvec)scales_of(own, half);
                    if (!unit) *(uvec *)(out + (2 + half) * PANEL + i) = zeros_of(own, half);
                }
            }
            out += unit ? 2 * PANEL : 4 * PANEL;
        }
}
#if defined(__AVX2__) && LANES == 8
#define HOLD(x) __asm__ volatile("" : "+x"(x)); /* one row after the other: else GCC 12 runs out of registers */
#else
#define HOLD(x)
#endif
#define WIDE_CODES(r, S) { word in = LOAD_WORD(x + r * stride + at); da##r##_0 = DOT(da##r##_0, wa, in); \
    db##r##_0 = DOT(db##r##_0, wb, in); HOLD(da##r##_0) HOLD(db##r##_0) }
#define WIDE_GROUP(r, S) { \
        vec *to = (vec *)OUT(r, 0); \
        to[0] = add_group(to[0], da##r##_0, scale[0], zero[0], x + r * stride, half); \
        to[1] = add_group(to[1], db##r##_0, scale[1], zero[1], x + r * stride, half); \
    }
#define WIDE_BEGIN(r, S) if (first) ((vec *)OUT(r, 0))[0] = ((vec *)OUT(r, 0))[1] = (vec){0};
#define WIDE_KERNEL(R) \
    static __attribute__((noinline, noclone)) void wide_##R(const uint32_t *x, int64_t stride, const uint32_t *w, \
            int64_t apart, int64_t units, int first, total *out, int64_t out_stride) { \
        (void)apart; \
        ROWS##R(WIDE_BEGIN, 1) \
        for (; units; units -= BLOCK_OF_UNITS, w += BLOCK_OF_WORDS * PANEL, x += BLOCK_OF_WORDS) \
            for (int half = 0; half < 2; half++) { \
                ROWS##R(DOTS_ROW, 1) \
                for (int at = 4 + 8 * half; at < 12 + 8 * half; at++) { \
                    uvec wa = ((const uvec *)(w + at * PANEL))[0], wb = ((const uvec *)(w + at * PANEL))[1]; \
                    ROWS##R(WIDE_CODES, 1) \
                } \
                const vec *scale = (const vec *)(w + half * PANEL); \
                const uvec *zero = (const uvec *)(w + (2 + half) * PANEL); \
                ROWS##R(WIDE_GROUP, 1) \
            } \
    }
