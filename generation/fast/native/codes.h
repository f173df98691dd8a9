/* Weights with the codes and the scales of quantized files (generation/codes.py): what their words mean, and the
 * kernels. They meet activations as groups.h has them.
 *
 * A panel of codes has 8 units of four bits, or 16 of eight, for each block of 64 columns. Its words and coarse words
 * lie beside it, PANEL together, as many for each output as a row has. A part of a panel is opened first, whatever its
 * form is, and all rows of activations meet that: of each block PANEL scales of each group, then what code 0 stands
 * for in it, then 16 units of bytes, which are signed where the machine multiplies such. */
#pragma once

enum form { HALF_ZERO = 1, HALF_LEAST, BF16_ZERO, BF16_LEAST, FLOAT_ZERO, SUPER, SIXTEENTHS, FP8 };
#define OPENED 4 /* blocks that are opened at a time */
#define MOST_OPENED (68 * PANEL) /* words of a block */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SIGNED_CODES 0
typedef vec byte_dots; /* of integers */
#define ADD_BYTES(d, codes, in) (vec)_mm512_dpbusd_epi32((__m512i)(d), (__m512i)(codes), in)
#elif defined(__AVX2__)
#define SIGNED_CODES 1
typedef __m256i byte_dots;
#define ADD_BYTES(d, codes, in) _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_maddubs_epi16( \
    _mm256_abs_epi8((__m256i)(codes)), _mm256_sign_epi8(in, (__m256i)(codes))), _mm256_set1_epi16(1)))
#else
#define SIGNED_CODES 1
typedef ivec byte_dots;
#if defined(__ARM_FEATURE_DOTPROD)
#define ADD_BYTES(d, codes, in) add_bytes(d, (ivec)(codes), in)
#else
#define ADD_BYTES(d, codes, in) ((d) + ((ivec)(codes) << 24 >> 24) * ((in) << 24 >> 24) + \
    ((ivec)(codes) << 16 >> 24) * ((in) << 16 >> 24) + ((ivec)(codes) << 8 >> 24) * ((in) << 8 >> 24) + \
    ((ivec)(codes) >> 24) * ((in) >> 24))
#endif
#endif

/* The float that 16 bits are (finite), and those of a byte that is E4M3. */
static inline vec half(uvec bits) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__F16C__)
    __m256i own = (__m256i)bits;
    return (vec)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(own), _mm256_extracti128_si256(own, 1)));
#else
    return (vec)((uvec)((vec)((bits & 0x7fff) << 13) * all(0x1p112f)) | (bits & 0x8000) << 16);
#endif
}
static inline vec fp8(uvec bits) {
    return (vec)((uvec)((vec)((bits & 0x7f) << 20) * all(0x1p120f)) | (bits & 0x80) << 24);
}
static inline vec signed_float(uvec bits, int shift) { /* of a byte */
    return __builtin_convertvector((ivec)(bits << (24 - shift)) >> 24, vec);
}
static inline vec unsigned_float(uvec bits) { return __builtin_convertvector((ivec)bits, vec); }

static inline int groups_of(Matrix m) { return m.form == SIXTEENTHS ? 4 : 2; }

/* Scale and least of group `group` of a block, by the words of LANES outputs. */
INLINE void open_group(enum form form, int group, uvec word, uvec coarse, vec *scale, vec *least) {
    vec first = half(coarse & 0xffff), low = (vec)word;
    if (form == HALF_ZERO || form == HALF_LEAST) low = half(word & 0xffff);
    if (form == BF16_ZERO || form == BF16_LEAST) low = (vec)(word << 16);
    if (form == SUPER) low = first * unsigned_float(word >> 16 * group & 0xff);
    if (form == SIXTEENTHS) low = first * signed_float(word, 8 * group);
    *scale = low;
    switch (form) {
    case HALF_ZERO: case BF16_ZERO: *least = -(low * unsigned_float(word >> 16)); break;
    case HALF_LEAST: *least = half(word >> 16); break;
    case BF16_LEAST: *least = (vec)(word & 0xffff0000u); break;
    case FLOAT_ZERO: *least = low * all(-128); break;
    case SUPER: *least = -(half(coarse >> 16) * unsigned_float(word >> (16 * group + 8) & 0xff)); break;
    case SIXTEENTHS: *least = low * all(-32); break;
    default: *least = (vec){0};
    }
}

/* `count` blocks of a panel, as the kernels take them. Returns the words of each. */
INLINE int64_t open_form(const Matrix *m, enum form form, int bits, int64_t panel, int64_t block, int64_t count, uint32_t *out) {
    int64_t units = bits == 4 ? 8 : 16, blocks = (m->columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    int groups = form == SIXTEENTHS ? 4 : 2, shared = form == SUPER || form == SIXTEENTHS; /* a word of all groups */
    uint32_t span = shared ? BLOCK_COLUMNS : (uint32_t)m->span;
    int64_t size = (2 * groups + (form == FP8 ? 64 : 16)) * PANEL;
    const uint32_t *w = m->panels + (panel * blocks + block) * units * PANEL;
    const uint32_t *words = m->words + panel * (((uint32_t)m->columns + span - 1) / span) * PANEL;
    for (int64_t end = block + count; block < end; block++, out += size) {
        const uint32_t *coarse = shared ? m->coarse + (panel * (m->columns / 256) + block / 4) * PANEL : words;
        for (int g = 0; g < groups; g++) {
            uint32_t column = (uint32_t)block * BLOCK_COLUMNS + (shared ? 0 : g * GROUP);
            const uint32_t *own = words + column / span * PANEL;
            for (int64_t i = 0; i < PANEL; i += LANES) {
                vec *scale = (vec *)(out + g * PANEL + i), *least = (vec *)(out + (groups + g) * PANEL + i);
                *scale = *least = (vec){0};
                if (column < m->columns) open_group(form, g, *(const uvec *)(own + i), *(const uvec *)(coarse + i), scale, least);
                if (SIGNED_CODES && bits == 8 && form != FP8) *least += *scale * all(128);
            }
        }
        uint32_t *to = out + 2 * groups * PANEL;
        for (int64_t unit = 0; unit < units; unit++)
            for (int64_t i = 0; i < PANEL; i += LANES, w += LANES) {
                uvec own = *(const uvec *)w;
                if (bits == 4) {
                    *(uvec *)(to + 2 * unit * PANEL + i) = own & 0x0f0f0f0fu;
                    *(uvec *)(to + (2 * unit + 1) * PANEL + i) = own >> 4 & 0x0f0f0f0fu;
                } else if (form == FP8)
                    for (int j = 0; j < 4; j++) *(vec *)(to + (4 * unit + j) * PANEL + i) = fp8(own >> 8 * j & 0xff);
                else *(uvec *)(to + unit * PANEL + i) = own ^ (SIGNED_CODES ? 0x80808080u : 0);
            }
    }
    return size;
}
#define OPEN(form) case form: return m->bits == 4 ? open_form(m, form, 4, panel, block, count, out) \
                                                  : open_form(m, form, 8, panel, block, count, out);
static __attribute__((noinline)) int64_t open_codes(const Matrix *m, int64_t panel, int64_t block, int64_t count, uint32_t *out) {
    switch (m->form) {
        OPEN(HALF_ZERO) OPEN(HALF_LEAST) OPEN(BF16_ZERO) OPEN(BF16_LEAST) OPEN(FLOAT_ZERO) OPEN(SUPER) OPEN(SIXTEENTHS) OPEN(FP8)
    }
    return 0;
}

/* The sum of a row's bytes in a group: see set_input. */
INLINE float sum_of_group(const uint32_t *x, int g, int groups) {
    const int16_t *sums = (const int16_t *)(x + 2);
    return groups == 2 ? sums[g] : g % 2 ? sums[g / 2] - sums[2 + g / 2] : sums[2 + g / 2];
}

/* Rows of activations meet `units` opened blocks of `apart` words. */
INLINE void meet_codes(OPERANDS, int rows, int groups) {
    if (first) EACH(r, rows) EACH(p, 2) ((vec *)OUT(r, 0))[p] = (vec){0};
    for (; units; units--, w += apart, x += BLOCK_OF_WORDS)
        for (int g = 0; g < groups; g++) {
            byte_dots dot[6][2];
            EACH(r, rows) EACH(p, 2) dot[r][p] = (byte_dots){0};
            for (int at = 4 + g * 16 / groups; at < 4 + (g + 1) * 16 / groups; at++) {
                const uvec *own = (const uvec *)(w + (2 * groups + at - 4) * PANEL), codes[2] = {own[0], own[1]};
                EACH(r, rows) {
                    word in = LOAD_WORD(x + r * stride + at);
                    EACH(p, 2) dot[r][p] = ADD_BYTES(dot[r][p], codes[p], in);
                    HOLD(dot[r][0]) HOLD(dot[r][1])
                }
            }
            const vec *scale = (const vec *)(w + g * PANEL), *least = (const vec *)(w + (groups + g) * PANEL);
            EACH(r, rows) EACH(p, 2) {
                vec *to = (vec *)OUT(r, 0) + p, base = least[p] * all(sum_of_group(x + r * stride, g, groups));
                vec sum = multiply_add(__builtin_convertvector((ivec)dot[r][p], vec), scale[p], base);
                *to = multiply_add(sum, all(((const float *)(x + r * stride))[g * 2 / groups]), *to);
            }
        }
}
/* The same of codes that are floats. */
INLINE void meet_floats(OPERANDS, int rows, int groups) {
    if (first) EACH(r, rows) EACH(p, 2) ((vec *)OUT(r, 0))[p] = (vec){0};
    for (; units; units--, w += apart, x += BLOCK_OF_WORDS)
        for (int g = 0; g < groups; g++) EACH(r, rows) {
            const int8_t *in = (const int8_t *)(x + r * stride + 4) + GROUP * g;
            vec sum[2] = {{0}};
            for (int j = 0; j < GROUP; j++)
                EACH(p, 2) sum[p] = multiply_add(((const vec *)(w + (4 + GROUP * g + j) * PANEL))[p], all(in[j]), sum[p]);
            EACH(p, 2) {
                vec *to = (vec *)OUT(r, 0) + p;
                *to = multiply_add(sum[p] * ((const vec *)(w + g * PANEL))[p], all(((const float *)(x + r * stride))[g]), *to);
            }
        }
}
#define DEFINE_32(R) DEFINE(coded_32, meet_codes, R, 2)
#define DEFINE_16(R) DEFINE(coded_16, meet_codes, R, 4)
#define NAME_32(R) coded_32_##R,
#define NAME_16(R) coded_16_##R,
TO_6(DEFINE_32)
TO_6(DEFINE_16)
DEFINE(coded_float, meet_floats, 1, 2)
static const Kernel coded_32[] = {0, TO_6(NAME_32)}, coded_16[] = {0, TO_6(NAME_16)}, coded_float[] = {0, coded_float_1};

/* Row `id` of a table, (columns,). */
static void embed_codes(Matrix m, int64_t id, float *x) {
    uint32_t opened[MOST_OPENED] __attribute__((aligned(64)));
    int groups = groups_of(m);
    for (int64_t i = 0; i < m.columns; i++) {
        if (i % BLOCK_COLUMNS == 0) open_codes(&m, id / PANEL, i / BLOCK_COLUMNS, 1, opened);
        const uint32_t *own = opened + id % PANEL;
        int at = i % BLOCK_COLUMNS, group = at * groups / BLOCK_COLUMNS;
        uint32_t byte = own[(2 * groups + at / 4) * PANEL] >> at % 4 * 8 & 255;
        float code = SIGNED_CODES ? (float)(int8_t)byte : (float)byte;
        if (m.form == FP8) memcpy(&code, own + (2 * groups + at) * PANEL, 4);
        x[i] = code * ((const float *)own)[group * PANEL] + ((const float *)own)[(groups + group) * PANEL];
    }
}
