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
#define BLOCK_UNITS (8 * BLOCK_OF_UNITS)
#define words_of(units) ((units) / BLOCK_OF_UNITS * BLOCK_OF_WORDS)

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
INLINE vec add_group(vec sum, dots d, vec scales, uvec zeros, const uint32_t *in, int half) {
    vec exact = __builtin_convertvector(EIGHTFOLD(d) - TIMES(zeros, LOAD_WORD(in + 2)), vec);
    return multiply_add(exact * scales, all(((const float *)in)[half]), sum);
}

INLINE void meet_panels(OPERANDS, int rows, int streams) {
    vec sum[4][MOST_STREAMS][2];
    EACH(r, rows) EACH(s, streams) EACH(p, 2) sum[r][s][p] = first ? (vec){0} : ((const vec *)OUT(r, s))[p];
    for (; units; units -= BLOCK_OF_UNITS, w += BLOCK_OF_UNITS * PANEL, x += BLOCK_OF_WORDS) EACH(half, 2) {
        dots dot[4][MOST_STREAMS][2];
        EACH(r, rows) EACH(s, streams) EACH(p, 2) dot[r][s][p] = (dots){0};
        const uint32_t *codes = w + (1 + 4 * half) * PANEL, *in = x + 4 + 8 * half;
        for (int u = 0; u < 4; u++, codes += PANEL, in += 2) {
            uvec low[MOST_STREAMS][2], high[MOST_STREAMS][2];
            EACH(s, streams) EACH(p, 2) {
                uvec both = *(const uvec *)(codes + s * apart + p * LANES);
                low[s][p] = both & 0x0f0f0f0fu, high[s][p] = both >> 4 & 0x0f0f0f0fu;
            }
            EACH(r, rows) {
                word four = LOAD_WORD(in + r * stride), next = LOAD_WORD(in + r * stride + 1);
                EACH(s, streams) EACH(p, 2) dot[r][s][p] = DOT(DOT(dot[r][s][p], low[s][p], four), high[s][p], next);
            }
        }
        EACH(r, rows) EACH(s, streams) EACH(p, 2) {
            uvec group = *(const uvec *)(w + s * apart + p * LANES);
            sum[r][s][p] = add_group(sum[r][s][p], dot[r][s][p], scales_of(group, half), zeros_of(group, half),
                                      x + r * stride, half);
        }
    }
    EACH(r, rows) EACH(s, streams) EACH(p, 2) ((vec *)OUT(r, s))[p] = sum[r][s][p];
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
INLINE void meet_wide(OPERANDS, int rows, int streams) {
    (void)apart, (void)streams;
    if (first) EACH(r, rows) EACH(p, 2) ((vec *)OUT(r, 0))[p] = (vec){0};
    for (; units; units -= BLOCK_OF_UNITS, w += BLOCK_OF_WORDS * PANEL, x += BLOCK_OF_WORDS)
        for (int half = 0; half < 2; half++) {
            dots dot[12][2];
            EACH(r, rows) EACH(p, 2) dot[r][p] = (dots){0};
            for (int at = 4 + 8 * half; at < 12 + 8 * half; at++) {
                uvec codes[2] = {((const uvec *)(w + at * PANEL))[0], ((const uvec *)(w + at * PANEL))[1]};
                EACH(r, rows) {
                    word in = LOAD_WORD(x + r * stride + at);
                    EACH(p, 2) dot[r][p] = DOT(dot[r][p], codes[p], in);
                    HOLD(dot[r][0]) HOLD(dot[r][1])
                }
            }
            const vec *scale = (const vec *)(w + half * PANEL);
            const uvec *zero = (const uvec *)(w + (2 + half) * PANEL);
            EACH(r, rows) EACH(p, 2) {
                vec *to = (vec *)OUT(r, 0) + p;
                *to = add_group(*to, dot[r][p], scale[p], zero[p], x + r * stride, half);
            }
        }
}
