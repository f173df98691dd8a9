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
    return (vec)((uvec)((vec)((bits & 0x7fff) << 13) * all(0x1p112f)) | (bits & 0x8000) << 16);
}
static inline vec fp8(uvec bits) {
    return (vec)((uvec)((vec)((bits & 0x7f) << 20) * all(0x1p120f)) | (bits & 0x80) << 24);
}
static inline vec signed_float(uvec bits, int shift) { /* of a byte */
    return __builtin_convertvector((ivec)(bits << (24 - shift)) >> 24, vec);
}
static inline vec unsigned_float(uvec bits) { return __builtin_convertvector((ivec)bits, vec); }

static inline int groups_of(Matrix m) { return m.form == SIXTEENTHS ? 4 : 2; }

/* Scale and least of group `group` of a block, of LANES outputs from `lane` on. */
static inline void open_group(Matrix m, int64_t panel, int64_t block, int group, int64_t lane, vec *scale, vec *least) {
    int64_t column = block * BLOCK_COLUMNS + group * GROUP, span = m.form < SUPER || m.form == FP8 ? m.span : BLOCK_COLUMNS;
    *scale = *least = (vec){0};
    if (m.form != SIXTEENTHS && column >= m.columns) return;
    column = m.form == SIXTEENTHS ? block * BLOCK_COLUMNS : column;
    uvec word = *(const uvec *)(m.words + (panel * ((m.columns + span - 1) / span) + column / span) * PANEL + lane);
    uvec coarse = {0};
    if (m.coarse) coarse = *(const uvec *)(m.coarse + (panel * (m.columns / 256) + block / 4) * PANEL + lane);
    switch (m.form) {
    case HALF_ZERO: *scale = half(word & 0xffff), *least = -(*scale * unsigned_float(word >> 16)); break;
    case HALF_LEAST: *scale = half(word & 0xffff), *least = half(word >> 16); break;
    case BF16_ZERO: *scale = (vec)(word << 16), *least = -(*scale * unsigned_float(word >> 16)); break;
    case BF16_LEAST: *scale = (vec)(word << 16), *least = (vec)(word & 0xffff0000u); break;
    case FLOAT_ZERO: *scale = (vec)word, *least = *scale * all(-128); break;
    case SUPER:
        *scale = half(coarse & 0xffff) * unsigned_float(word >> 16 * group & 0xff);
        *least = -(half(coarse >> 16) * unsigned_float(word >> (16 * group + 8) & 0xff));
        break;
    case SIXTEENTHS: *scale = half(coarse & 0xffff) * signed_float(word, 8 * group), *least = *scale * all(-32); break;
    default: *scale = (vec)word; /* FP8 */
    }
    if (SIGNED_CODES && m.bits == 8 && m.form != FP8) *least += *scale * all(128);
}

/* `count` blocks of a panel, as the kernels take them. Returns the words of each. */
static int64_t open_codes(Matrix m, int64_t panel, int64_t block, int64_t count, uint32_t *out) {
    int64_t units = m.bits == 4 ? 8 : 16, blocks = (m.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, groups = groups_of(m);
    int64_t size = (2 * groups + (m.form == FP8 ? 64 : 16)) * PANEL;
    const uint32_t *w = m.panels + (panel * blocks + block) * units * PANEL;
    for (int64_t end = block + count; block < end; block++, out += size) {
        for (int64_t i = 0; i < PANEL; i += LANES)
            for (int g = 0; g < groups; g++)
                open_group(m, panel, block, g, i, (vec *)(out + g * PANEL + i), (vec *)(out + (groups + g) * PANEL + i));
        uint32_t *to = out + 2 * groups * PANEL;
        for (int64_t unit = 0; unit < units; unit++)
            for (int64_t i = 0; i < PANEL; i += LANES, w += LANES) {
                uvec own = *(const uvec *)w;
                if (m.bits == 4) {
                    *(uvec *)(to + 2 * unit * PANEL + i) = own & 0x0f0f0f0fu;
                    *(uvec *)(to + (2 * unit + 1) * PANEL + i) = own >> 4 & 0x0f0f0f0fu;
                } else if (m.form == FP8)
                    for (int j = 0; j < 4; j++) *(vec *)(to + (4 * unit + j) * PANEL + i) = fp8(own >> 8 * j & 0xff);
                else *(uvec *)(to + unit * PANEL + i) = own ^ (SIGNED_CODES ? 0x80808080u : 0);
            }
    }
    return size;
}

/* kernel: R rows of activations meet `units` opened blocks of `apart` words. N: groups in a block. */
#define CODED_DOTS(r, N) byte_dots da##r = (byte_dots){0}, db##r = (byte_dots){0};
#define CODED_ADD(r, N) { word in = LOAD_WORD(x + r * stride + at); da##r = ADD_BYTES(da##r, wa, in); \
    db##r = ADD_BYTES(db##r, wb, in); HOLD(da##r) HOLD(db##r) }
#define CODED_GROUP(r, N) { \
        vec *to = (vec *)OUT(r, 0), by = all(((const float *)(x + r * stride))[g * 2 / N]), sum = all(sum_of_group(x + r * stride, g, N)); \
        to[0] = multiply_add(multiply_add(__builtin_convertvector((ivec)da##r, vec), scale[0], least[0] * sum), by, to[0]); \
        to[1] = multiply_add(multiply_add(__builtin_convertvector((ivec)db##r, vec), scale[1], least[1] * sum), by, to[1]); \
    }
#define CODED_BEGIN(r, N) if (first) ((vec *)OUT(r, 0))[0] = ((vec *)OUT(r, 0))[1] = (vec){0};
#define CODED_KERNEL(R, N) \
    static __attribute__((noinline, noclone)) void coded_##R##_##N(const uint32_t *x, int64_t stride, const uint32_t *w, \
            int64_t apart, int64_t units, int first, total *out, int64_t out_stride) { \
        ROWS##R(CODED_BEGIN, N) \
        for (; units; units--, w += apart, x += BLOCK_OF_WORDS) \
            for (int g = 0; g < N; g++) { \
                ROWS##R(CODED_DOTS, N) \
                for (int u = g * 16 / N, at = 4 + u; u < (g + 1) * 16 / N; u++, at++) { \
                    const uvec *codes = (const uvec *)(w + (2 * N + u) * PANEL); \
                    uvec wa = codes[0], wb = codes[1]; \
                    ROWS##R(CODED_ADD, N) \
                } \
                const vec *scale = (const vec *)(w + g * PANEL), *least = (const vec *)(w + (N + g) * PANEL); \
                ROWS##R(CODED_GROUP, N) \
            } \
    }
static inline float sum_of_group(const uint32_t *x, int g, int groups) { /* words 2 and 3: see set_input */
    const int16_t *sums = (const int16_t *)(x + 2);
    return groups == 2 ? sums[g] : g % 2 ? sums[g / 2] - sums[2 + g / 2] : sums[2 + g / 2];
}
#define CODED_BOTH(R) CODED_KERNEL(R, 2) CODED_KERNEL(R, 4)
CODED_BOTH(1) CODED_BOTH(2) CODED_BOTH(3) CODED_BOTH(4) CODED_BOTH(5) CODED_BOTH(6)
static const Kernel coded_32[] = {0, coded_1_2, coded_2_2, coded_3_2, coded_4_2, coded_5_2, coded_6_2};
static const Kernel coded_16[] = {0, coded_1_4, coded_2_4, coded_3_4, coded_4_4, coded_5_4, coded_6_4};
#define MOST_CODED 6

/* One row meets blocks of floats. */
static void coded_floats(const uint32_t *x, const uint32_t *w, int64_t apart, int64_t units, int first, total *out) {
    for (int64_t i = 0; i < PANEL; i += LANES) {
        vec to = first ? (vec){0} : load_f32(out + i);
        for (int64_t b = 0; b < units; b++)
            for (int g = 0; g < 2; g++) {
                const int8_t *in = (const int8_t *)(x + b * BLOCK_OF_WORDS + 4 + 8 * g);
                const float *own = (const float *)(w + b * apart) + i;
                vec sum = {0};
                for (int j = 0; j < GROUP; j++) sum = multiply_add(load_f32(own + (4 + GROUP * g + j) * PANEL), all(in[j]), sum);
                to = multiply_add(sum * load_f32(own + g * PANEL), all(((const float *)(x + b * BLOCK_OF_WORDS))[g]), to);
            }
        *(vec *)(out + i) = to;
    }
}

/* Row `id` of a table, (columns,). */
static void embed_codes(Matrix m, int64_t id, float *x) {
    uint32_t opened[MOST_OPENED] __attribute__((aligned(64)));
    int groups = groups_of(m);
    for (int64_t i = 0; i < m.columns; i++) {
        if (i % BLOCK_COLUMNS == 0) open_codes(m, id / PANEL, i / BLOCK_COLUMNS, 1, opened);
        const uint32_t *own = opened + id % PANEL;
        int at = i % BLOCK_COLUMNS, group = at * groups / BLOCK_COLUMNS;
        uint32_t byte = own[(2 * groups + at / 4) * PANEL] >> at % 4 * 8 & 255;
        float code = SIGNED_CODES ? (float)(int8_t)byte : (float)byte;
        if (m.form == FP8) memcpy(&code, own + (2 * groups + at) * PANEL, 4);
        x[i] = code * ((const float *)own)[group * PANEL] + ((const float *)own)[(groups + group) * PANEL];
    }
}
