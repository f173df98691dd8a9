/* Weights that are small whole numbers, the codes, with scales of their groups (generation/codes.py), and the kernels that
 * multiply them: those of quantized files as they are, and our own of four bits (quantize.h).
 *
 * A panel has 2 * bits units for each block of 64 columns. The first 8 have the lowest four bits of the codes: of four
 * columns in the low halves of a unit's bytes, of the next four in the high halves. Of five bits two units follow, whose
 * bytes have a bit of each of eight columns that are four apart; of six bits four units, with two bits of each of four. Codes
 * of eight bits are 16 units of bytes. Words and coarse words lie beside the panels, PANEL together, as many for each output
 * as a row has.
 *
 * Activations are bytes with one scale a group of 32. A block of them is 24 words: the two groups' scales; the scaled
 * sums of both, then of each of the four sixteens; and 16 words of bytes. A block of each token lies beside the other
 * tokens'. What is summed within a group is exact. */
#pragma once

#define GROUP 32
#define OPENED 4 /* blocks whose groups are opened at a time */
enum form { HALF_ZERO = 1, HALF_LEAST, BF16_ZERO, BF16_LEAST, FLOAT_ZERO, SUPER, SIXTEENTHS, FP8, HALVES, EIGHTHS };

/* DOT: the products of four codes of each lane with four bytes, and of four more with `next`, added to sums, which TOTAL
 * makes integers. bits: of the codes. Those of eight bits are signed where the machine does not multiply others. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SIGNED_CODES 0
typedef vec dots; /* of integers: as __m512i, GCC 12 copies them at each step */
typedef __m512i word;
#define LOAD_WORD(x) _mm512_set1_epi32(*(const int *)(x))
#define DOT(d, code, more, in, next, bits) (vec)_mm512_dpbusd_epi32( \
    _mm512_dpbusd_epi32((__m512i)(d), (__m512i)(code), in), (__m512i)(more), next)
#define TOTAL(d, bits) (ivec)(d)
#elif defined(__AVX2__)
#define SIGNED_CODES 1
typedef __m256i dots;
typedef __m256i word;
#define LOAD_WORD(x) _mm256_set1_epi32(*(const int *)(x))
#define ONES _mm256_set1_epi16(1)
#define TIMES(code, in) _mm256_maddubs_epi16((__m256i)(code), in) /* 2 * 2 * 63 * 127 < 2^15 */
#define TIMES_SIGNED(code, in) \
    _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)(code)), _mm256_sign_epi8(in, (__m256i)(code))), ONES)
INLINE dots DOT(dots d, uvec code, uvec more, word in, word next, int bits) {
    if (bits == 8) return _mm256_add_epi32(_mm256_add_epi32(d, TIMES_SIGNED(code, in)), TIMES_SIGNED(more, next));
    if (bits == 4) /* sums of 16 bits: 8 * 2 * 15 * 127 < 2^15 */
        return _mm256_add_epi16(_mm256_add_epi16(d, TIMES(code, in)), TIMES(more, next));
    return _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_add_epi16(TIMES(code, in), TIMES(more, next)), ONES));
}
#define TOTAL(d, bits) (ivec)((bits) == 4 ? _mm256_madd_epi16(d, ONES) : (d))
#else
#define SIGNED_CODES 1
typedef ivec dots;
typedef int32_t word;
#define LOAD_WORD(x) (*(const int32_t *)(x))
#if !defined(__ARM_FEATURE_DOTPROD)
INLINE ivec add_bytes(ivec sums, ivec bytes, int32_t in) {
    return sums + (bytes << 24 >> 24) * (in << 24 >> 24) + (bytes << 16 >> 24) * (in << 16 >> 24) +
           (bytes << 8 >> 24) * (in << 8 >> 24) + (bytes >> 24) * (in >> 24);
}
#endif
#define DOT(d, code, more, in, next, bits) add_bytes(add_bytes(d, (ivec)(code), in), (ivec)(more), next)
#define TOTAL(d, bits) (d)
#endif
#if defined(__AVX2__)
#define HOLD(x) __asm__ volatile("" : "+v"(x)); /* one row after the other: else GCC 12 runs out of registers */
#else
#define HOLD(x)
#endif

/* ---------------------------------------------------------------------------------------------- scales of groups */

/* The float that 16 bits are (finite), and those of a byte that is E4M3. */
static inline vec half(uvec bits) {
#if LANES == 16 && defined(__F16C__)
    return (vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif LANES == 8 && defined(__F16C__)
    __m256i own = (__m256i)bits;
    return (vec)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(own), _mm256_extracti128_si256(own, 1)));
#else
    return (vec)((uvec)((vec)((bits & 0x7fff) << 13) * all(0x1p112f)) | (bits & 0x8000) << 16);
#endif
}
static inline vec fp8(uvec bits) {
    return (vec)((uvec)((vec)((bits & 0x7f) << 20) * all(0x1p120f)) | (bits & 0x80) << 24);
}
static inline vec floats_of(uvec bits) { return __builtin_convertvector((ivec)bits, vec); }

static inline int groups_of(const Matrix *m) { return m->form == SIXTEENTHS ? 4 : 2; } /* of a block */
static inline int64_t blocks_of(const Matrix *m) { return (m->columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS; }

/* Scale of group `group` of a block, and what code 0 stands for, by the words of LANES outputs. */
INLINE void open_group(enum form form, int bits, int group, uvec word, uvec coarse, vec *scale, vec *least) {
    uvec own = word >> 16 * (group & 1);
    vec first = half(coarse & 0xffff), low = (vec)word;
    if (form == HALF_ZERO || form == HALF_LEAST) low = half(word & 0xffff);
    if (form == BF16_ZERO || form == BF16_LEAST) low = (vec)(word << 16);
    *least = (vec){0};
    switch (form) {
    case HALF_ZERO: case BF16_ZERO: *least = -(low * floats_of(word >> 16)); break;
    case HALF_LEAST: *least = half(word >> 16); break;
    case BF16_LEAST: *least = (vec)(word & 0xffff0000u); break;
    case FLOAT_ZERO: *least = low * all(-128); break;
    case SUPER: low = first * floats_of(own & 0xff), *least = -(half(coarse >> 16) * floats_of(own >> 8 & 0xff)); break;
    case SIXTEENTHS: low = first * floats_of((uvec)((ivec)(word << (24 - 8 * group)) >> 24)); break;
    case HALVES: low = half(own & 0xffff); break;
    case EIGHTHS:
        low = (vec)(((own & 0x1ff) << 18) + (112u << 23));
        *least = floats_of(own >> 9 & 0x7f) * (vec)((uvec)low + 0x7e800000u); /* low / -8 */
    default: break;
    }
    *scale = low;
    if (form == HALVES || form == SIXTEENTHS) *least = low * all(-(1 << (bits - 1)));
    if (SIGNED_CODES && bits == 8 && form != FP8) *least += low * all(128);
}

/* `count` blocks' scales and then least weights of each group (groups, PANEL), 0 beyond the matrix. */
INLINE void open_form(const Matrix *m, enum form form, int64_t panel, int64_t block, int64_t count, float *out) {
    int groups = form == SIXTEENTHS ? 4 : 2, fine = form == SUPER || form == SIXTEENTHS, shared = fine || form >= HALVES;
    uint32_t span = shared ? BLOCK_COLUMNS : (uint32_t)m->span, columns = (uint32_t)m->columns, bits = (uint32_t)m->bits;
    const uint32_t *words = m->words + panel * ((columns + span - 1) / span) * PANEL;
    for (int64_t end = block + count; block < end; block++, out += 2 * groups * PANEL) {
        const uint32_t *coarse = fine ? m->coarse + (panel * (columns / 256) + block / 4) * PANEL : words;
        EACH(g, groups) {
            uint32_t column = (uint32_t)block * BLOCK_COLUMNS + (shared ? 0 : g * GROUP);
            const uint32_t *own = words + column / span * PANEL;
            __builtin_prefetch(own + OPENED * PANEL + g * 16);
            EACH(p, 2) {
                vec *scale = (vec *)(out + g * PANEL) + p, *least = (vec *)(out + (groups + g) * PANEL) + p;
                *scale = *least = (vec){0};
                if (column >= columns) continue;
                open_group(form, bits, g, ((const uvec *)own)[p], ((const uvec *)coarse)[p], scale, least);
            }
        }
    }
}
#define OPEN(form) case form: open_form(m, form, panel, block, count, out); break;
static __attribute__((noinline)) void open_groups(const Matrix *m, int64_t panel, int64_t block, int64_t count, float *out) {
    switch (m->form) {
        OPEN(HALF_ZERO) OPEN(HALF_LEAST) OPEN(BF16_ZERO) OPEN(BF16_LEAST) OPEN(FLOAT_ZERO) OPEN(SUPER) OPEN(SIXTEENTHS)
        OPEN(FP8) OPEN(HALVES) OPEN(EIGHTHS)
    }
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* LANES outputs' codes of eight columns: pair `u` of quarter `q` of a block, as bytes. */
INLINE void open_codes(const uint32_t *w, int bits, int q, int u, uvec *code, uvec *more) {
    #define AT(unit) (*(const uvec *)(w + (unit) * PANEL))
    if (bits == 8) {
        *code = AT(4 * q + 2 * u) ^ (SIGNED_CODES ? 0x80808080u : 0);
        *more = AT(4 * q + 2 * u + 1) ^ (SIGNED_CODES ? 0x80808080u : 0);
        return;
    }
    uvec both = AT(2 * q + u);
    *code = both & 0x0f0f0f0fu, *more = both >> 4 & 0x0f0f0f0fu;
    if (bits == 5) {
        uvec plane = AT(8 + q / 2) << (q & 1 ? 0 : 4) >> 2 * u;
        *code |= plane & 0x10101010u, *more |= plane >> 1 & 0x10101010u;
    }
    if (bits == 6) {
        uvec plane = AT(8 + q);
        *code |= (u ? plane : plane << 4) & 0x30303030u, *more |= (u ? plane >> 2 : plane << 2) & 0x30303030u;
    }
    #undef AT
}

/* `blocks` blocks of a panel's codes as bytes, 16 units each; of E4M3 as floats, 64 units. */
INLINE void widen_bits(const uint32_t *w, int bits, int64_t blocks, uint32_t *out) {
    for (; blocks; blocks--, w += 2 * bits * PANEL)
        for (int q = 0; q < 4; q++) {
            for (int i = 0; i < 2 * bits * PANEL / 4; i += 16) /* what comes after */
                __builtin_prefetch(w + (2 * bits * OPENED + q * bits / 2) * PANEL + i);
            EACH(u, 2) EACH(p, 2) {
                uvec *to = (uvec *)(out + (2 * u) * PANEL) + p;
                open_codes(w + p * LANES, bits, q, u, to, (uvec *)((uint32_t *)to + PANEL));
            }
            out += 4 * PANEL;
        }
}
static __attribute__((noinline)) void widen(const Matrix *m, const uint32_t *w, int64_t blocks, uint32_t *out) {
    if (m->form == FP8)
        for (int64_t unit = 0; unit < blocks * 16; unit++, w += PANEL)
            for (int j = 0; j < 4; j++, out += PANEL)
                EACH(p, 2) ((vec *)out)[p] = fp8(((const uvec *)w)[p] >> 8 * j & 0xff);
    else if (m->bits == 4) widen_bits(w, 4, blocks, out);
    else if (m->bits == 5) widen_bits(w, 5, blocks, out);
    else if (m->bits == 6) widen_bits(w, 6, blocks, out);
    else widen_bits(w, 8, blocks, out);
}

/* Kernels: rows of activations, a block of each after the other, meet `blocks` blocks of `streams` panels, `apart` words apart;
 * their next blocks are `stride` words on. scales: of OPENED blocks of each panel. out: (rows, streams, PANEL). */
#define CODED const uint32_t *x, int64_t stride, const uint32_t *w, int64_t apart, int64_t blocks, int groups, \
        const float *scales, const uint32_t *words, const uint32_t *coarse, int first, float *out
/* What the products of a group add to a sum: its scale and what code 0 stands for, and the row's block. */
INLINE vec add_group(vec sum, dots dot, int bits, vec scale, vec least, const uint32_t *x, int groups, int g) {
    (void)bits;
    const float *in = (const float *)x;
    vec exact = __builtin_convertvector(TOTAL(dot, bits), vec);
    sum = multiply_add(least, all(in[(groups == 2 ? 2 : 4) + g]), sum);
    return multiply_add(exact * scale, all(in[groups == 2 ? g : g / 2]), sum);
}

/* Few rows meet codes as they lie. With a `form`, words are opened where they are needed. */
INLINE void meet_few(CODED, enum form form, int bits, int rows, int streams) {
    vec sums[3][2][2];
    groups = form == SIXTEENTHS ? 4 : 2;
    EACH(r, rows) EACH(s, streams) EACH(p, 2) sums[r][s][p] = first ? (vec){0} : ((vec *)out)[(r * streams + s) * 2 + p];
    for (int64_t b = 0; b < blocks; b++, w += 2 * bits * PANEL, x += stride, scales += 4 * PANEL, words += PANEL)
        EACH(g, groups) {
            dots dot[3][2][2];
            EACH(r, rows) EACH(s, streams) EACH(p, 2) dot[r][s][p] = (dots){0};
            for (int q = g * 4 / groups; q < (g + 1) * 4 / groups; q++) EACH(u, 2) {
                uvec code[2][2], more[2][2];
                EACH(s, streams) EACH(p, 2) {
                    const uint32_t *own = w + s * apart + p * LANES;
                    open_codes(own, bits, q, u, &code[s][p], &more[s][p]);
                    for (int i = u; (LANES == 16 || !p) && i < bits / 2; i += 2) /* each line once */
                        __builtin_prefetch(own + (bits * q / 2 + i) * PANEL + AHEAD);
                }
                EACH(r, rows) {
                    const uint32_t *in = x + r * BLOCK_OF_WORDS + 8 + 4 * q + 2 * u;
                    word four = LOAD_WORD(in), next = LOAD_WORD(in + 1);
                    EACH(s, streams) EACH(p, 2) dot[r][s][p] = DOT(dot[r][s][p], code[s][p], more[s][p], four, next, bits);
                    EACH(s, streams) { HOLD(dot[r][s][0]) HOLD(dot[r][s][1]) }
                }
            }
            EACH(s, streams) EACH(p, 2) {
                const uvec *word = (const uvec *)(words + s * (apart / (2 * bits))) + p;
                const uvec *rough = (const uvec *)(coarse + s * (apart / (8 * bits)) + b / 4 * PANEL) + p;
                const vec *opened = (const vec *)(scales + (s * OPENED * 8 + g) * PANEL) + p;
                vec scale, least;
                if (form) open_group(form, bits, g, *word, *rough, &scale, &least);
                else scale = opened[0], least = opened[4];
                if (form && !p) __builtin_prefetch((const uint32_t *)word + OPENED * PANEL + g * 16);
                EACH(r, rows)
                    sums[r][s][p] = add_group(sums[r][s][p], dot[r][s][p], bits, scale, least, x + r * BLOCK_OF_WORDS, groups, g);
            }
        }
    EACH(r, rows) EACH(s, streams) EACH(p, 2) ((vec *)out)[(r * streams + s) * 2 + p] = sums[r][s][p];
}

/* Many rows meet one panel's codes as bytes. */
INLINE void meet_wide(CODED, int bits, int rows) {
    (void)apart, (void)words, (void)coarse;
    int quarters = groups == 4 ? 1 : 2; /* of a block, that a group has */
    if (first) EACH(r, rows) EACH(p, 2) ((vec *)out)[2 * r + p] = (vec){0};
    for (; blocks; blocks--, w += 16 * PANEL, x += stride, scales += 2 * groups * PANEL)
        for (int g = 0, q = 0; g < groups; g++) {
            dots dot[12][2];
            EACH(r, rows) EACH(p, 2) dot[r][p] = (dots){0};
            for (int end = q + quarters; q < end; q++) EACH(u, 2) {
                uvec code[2], more[2];
                EACH(p, 2) {
                    const uvec *own = (const uvec *)(w + (4 * q + 2 * u) * PANEL) + p;
                    if (bits < 8) code[p] = own[0], more[p] = own[2];
                    else open_codes(w + p * LANES, 8, q, u, &code[p], &more[p]);
                }
                EACH(r, rows) {
                    const uint32_t *in = x + r * BLOCK_OF_WORDS + 8 + 4 * q + 2 * u;
                    word four = LOAD_WORD(in), next = LOAD_WORD(in + 1);
                    EACH(p, 2) dot[r][p] = DOT(dot[r][p], code[p], more[p], four, next, bits);
                    HOLD(dot[r][0]) HOLD(dot[r][1])
                }
            }
            EACH(p, 2) {
                const vec *own = (const vec *)(scales + g * PANEL) + p;
                vec scale = own[0], least = own[2 * groups], *sum = (vec *)out + p;
                EACH(r, rows)
                    sum[2 * r] = add_group(sum[2 * r], dot[r][p], bits, scale, least, x + r * BLOCK_OF_WORDS, groups, g);
            }
            __asm__ volatile("" ::: "memory"); /* else GCC 12 keeps sums in a second place */
        }
}

/* The same of one panel of codes that are floats. */
INLINE void meet_floats(CODED, int rows) {
    (void)apart, (void)groups, (void)words, (void)coarse;
    if (first) EACH(r, rows) EACH(p, 2) ((vec *)out)[2 * r + p] = (vec){0};
    for (; blocks; blocks--, x += stride, scales += 4 * PANEL)
        for (int g = 0; g < 2; g++) {
            vec sum[6][2] = {{{0}}};
            for (int j = 0; j < GROUP; j++, w += PANEL) EACH(r, rows) {
                vec in = all(((const int8_t *)(x + r * BLOCK_OF_WORDS + 8))[GROUP * g + j]);
                EACH(p, 2) sum[r][p] = multiply_add(((const vec *)w)[p], in, sum[r][p]);
            }
            EACH(r, rows) EACH(p, 2) {
                vec *to = (vec *)out + 2 * r + p, scale = all(((const float *)(x + r * BLOCK_OF_WORDS))[g]);
                *to = multiply_add(sum[r][p] * ((const vec *)(scales + g * PANEL))[p], scale, *to);
            }
        }
}
typedef void (*Coded)(CODED);
#define KERNEL(name, work, ...) static __attribute__((noinline, noclone)) void name(CODED) { \
    work(x, stride, w, apart, blocks, groups, scales, words, coarse, first, out, __VA_ARGS__); \
}
/* Of few rows, which meet codes as they lie: one with two panels, that memory reads in turn, or one, two or three with one. */
#define FEW(name, form, bits) \
    KERNEL(name##_0, meet_few, form, bits, 1, 2) KERNEL(name##_1, meet_few, form, bits, 1, 1) \
    KERNEL(name##_2, meet_few, form, bits, 2, 1) KERNEL(name##_3, meet_few, form, bits, 3, 1)
#define NAME_FEW(name) {name##_0, name##_1, name##_2, name##_3}
FEW(few_4, 0, 4) FEW(few_5, 0, 5) FEW(few_6, 0, 6) FEW(few_8, 0, 8)
FEW(eighths, EIGHTHS, 4) FEW(halves, HALVES, 4) FEW(halves_5, HALVES, 5) FEW(halves_8, HALVES, 8)
FEW(super, SUPER, 4) FEW(super_5, SUPER, 5) FEW(sixteenths, SIXTEENTHS, 6)
static const Coded few_rows[][9][4] = { /* by forms, the commonest ones, and bits; 0: any other */
    {[4] = NAME_FEW(few_4), NAME_FEW(few_5), NAME_FEW(few_6), [8] = NAME_FEW(few_8)}, [EIGHTHS][4] = NAME_FEW(eighths),
    [HALVES] = {[4] = NAME_FEW(halves), NAME_FEW(halves_5), [8] = NAME_FEW(halves_8)},
    [SUPER] = {[4] = NAME_FEW(super), NAME_FEW(super_5)}, [SIXTEENTHS][6] = NAME_FEW(sixteenths)};
#define MOST_FEW 3
#define MOST_ROWS (LANES == 16 ? 12 : 6)
#if LANES == 16
#define EACH_ROWS TO_12
#else
#define EACH_ROWS TO_6
#endif
#define WIDE_4(R) KERNEL(wide_4_##R, meet_wide, 4, R)
#define WIDE_6(R) KERNEL(wide_6_##R, meet_wide, 6, R)
#define BYTES(R) KERNEL(bytes_##R, meet_wide, 8, R)
#define FLOATS(R) KERNEL(floats_##R, meet_floats, R)
EACH_ROWS(WIDE_4) EACH_ROWS(WIDE_6) EACH_ROWS(BYTES) TO_6(FLOATS)
#define NAME_4(R) wide_4_##R,
#define NAME_6(R) wide_6_##R,
#define NAME_BYTES(R) bytes_##R,
#define NAME_FLOATS(R) floats_##R,
static const Coded wide_4[] = {0, EACH_ROWS(NAME_4)}, wide_6[] = {0, EACH_ROWS(NAME_6)}, bytes[] = {0, EACH_ROWS(NAME_BYTES)},
                   floats[] = {0, TO_6(NAME_FLOATS)};

/* --------------------------------------------------------------------------------------- activations and products */

/* x (columns,) as the inputs of one token. */
static void set_input(Inputs in, int64_t token, const float *x, int64_t columns) {
    uint32_t *row = in.x + token * BLOCK_OF_WORDS;
    for (int64_t from = 0; from < columns; from += BLOCK_COLUMNS, row += in.tokens * BLOCK_OF_WORDS)
        for (int half = 0; half < 2; half++) {
            int64_t begin = from + half * GROUP, count = columns - begin;
            count = count < 0 ? 0 : count < GROUP ? count : GROUP;
            int8_t *out = (int8_t *)(row + 8 + 8 * half);
            float largest = count ? largest_of(x + begin, count, 1) : 0, *scales = (float *)row;
            int known = largest <= FLT_MAX, sum[2] = {0}; /* NaN and infinity: all outputs become NaN */
            float by = known && largest > 1e-30f ? 127.0f / largest : 0, scale = known ? largest / 127.0f : NAN;
            for (int64_t i = 0; i < count; i++) out[i] = (int8_t)(known ? (int)nearbyintf(x[begin + i] * by) : 0);
            memset(out + count, 0, GROUP - count);
            for (int i = 0; i < GROUP; i++) sum[i / 16] += out[i];
            scales[half] = scale;
            scales[2 + half] = (float)(sum[0] + sum[1]) * scale;
            for (int i = 0; i < 2; i++) scales[4 + 2 * half + i] = (float)sum[i] * scale;
        }
}

/* Row `id` of a table, (columns,). */
static void embed(Matrix m, int64_t id, float *x) {
    float scales[8 * PANEL] __attribute__((aligned(64)));
    uint32_t opened[64 * PANEL] __attribute__((aligned(64)));
    int64_t units = 2 * m.bits, groups = groups_of(&m);
    for (int64_t i = 0; i < m.columns; i++) {
        int64_t block = i / BLOCK_COLUMNS, at = i % BLOCK_COLUMNS, group = at * groups / BLOCK_COLUMNS;
        if (!at) {
            open_groups(&m, id / PANEL, block, 1, scales);
            widen(&m, m.panels + (id / PANEL * blocks_of(&m) + block) * units * PANEL, 1, opened);
        }
        const uint32_t *own = opened + id % PANEL;
        uint32_t byte = own[at / 4 * PANEL] >> at % 4 * 8 & 255;
        float code = SIGNED_CODES ? (float)(int8_t)byte : (float)byte, *scale = scales + id % PANEL;
        if (m.form == FP8) memcpy(&code, own + at * PANEL, 4);
        x[i] = (code * scale[group * PANEL] + scale[(groups + group) * PANEL]) * (m.scale ? m.scale[id] : 1);
    }
}

/* Outputs of `streams` panels, `apart` panels from each other, for rows [first, first + count), at most BLOCK_ROWS. */
static void product_of_panels(Matrix m, Inputs in, int64_t panel, int64_t apart, int streams, int64_t first, int64_t count,
                              Output out) {
    total c[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    float scales[2 * OPENED * 8 * PANEL] __attribute__((aligned(64)));
    uint32_t widened[OPENED * 64 * PANEL] __attribute__((aligned(64)));
    int64_t blocks = blocks_of(&m), size = 2 * m.bits * PANEL, most = m.form == FP8 ? 6 : MOST_ROWS;
    int few = m.form != FP8 && count <= MOST_FEW, wide = !few && (m.form == FP8 || m.bits < 8);
    int known = few && few_rows[m.form][m.bits][0];
    const Coded *kernels = m.form == FP8 ? floats : few ? few_rows[known ? m.form : 0][m.bits]
                         : m.bits == 4 ? wide_4 : wide ? wide_6 : bytes;
    const uint32_t *words = m.words + panel * blocks * PANEL;
    const uint32_t *coarse = m.coarse ? m.coarse + panel * (blocks / 4) * PANEL : words;
    int64_t length = known ? blocks : OPENED;
    for (int64_t b = 0; b < blocks; b += length) {
        int64_t here = blocks - b < length ? blocks - b : length;
        const uint32_t *w = m.panels + (panel * blocks + b) * size;
        for (int s = 0; s < streams && !known; s++)
            open_groups(&m, panel + s * apart, b, here, scales + s * OPENED * 8 * PANEL);
        if (wide) widen(&m, w, here, widened), w = widened;
        for (int64_t r = 0, rows; r < count; r += most) {
            rows = count - r < most ? count - r : most;
            kernels[rows - (streams > 1)](in.x + (b * in.tokens + first + r) * BLOCK_OF_WORDS, in.tokens * BLOCK_OF_WORDS, w,
                                          apart * blocks * size, here, groups_of(&m), scales, words, coarse, b == 0,
                                          c + r * streams * PANEL);
        }
    }
    for (int64_t r = 0; r < count; r++)
        for (int s = 0; s < streams; s++)
            finish(m, in, first + r, panel + s * apart, c + (r * streams + s) * PANEL, PANEL, out);
}
#define PRODUCT_OF_FEW(panel, apart, streams) product_of_panels(m, in, panel, apart, streams, 0, rows, out)
#define PRODUCT_OF_MANY(panel, coming, first, count) product_of_panels(m, in, panel, 0, 1, first, count, out)
#define PANELS_OF_FEW (m.form != FP8 && rows == 1 ? 2 : 1)
