/* Weights times activations, and norms: what reads every weight once a token. */
#pragma once
#include "vectors.h"

#define STREAMS (WEIGHT_BITS == 8 ? 4 : 6) /* places at which a matrix is read at once */
#define MOST_SUMS 12                       /* dot products at a time, each in registers of its own */
#define BLOCK_BYTES 65536                  /* of weights that several groups of inputs meet in turn */

/* A matrix (rows, columns) with one scale a row (int8) or none. */
typedef struct {
    const weight *data;
    const float *scale;
} Matrix;

#if WEIGHT_BITS == 8
/* int8 weights meet activations rounded to 16 bits, with one scale a vector: an error of 1.5e-5 of the largest
 * activation, and twice the weights an instruction that floats would allow. */
typedef int16_t input;
#define SEGMENT 4096 /* columns whose 32-bit sums cannot overflow: 128 * 32767 * 2 * SEGMENT / 16 < 2^31 */

static float to_input(const float *x, int64_t n, input *out) {
    float largest = largest_of(x, n, 1);
    if (!(largest <= FLT_MAX)) { /* NaN and infinity keep their meaning */
        memset(out, 0, n * sizeof(input));
        return NAN;
    }
    float factor = largest > 0 ? 32767.0f / largest : 0;
    for (int64_t i = 0; i < n; i++) out[i] = (input)(int32_t)nearbyintf(x[i] * factor);
    return largest / 32767.0f;
}

#ifdef __AVX2__
static inline float sum_int32(__m256i v) {
    float lanes[8], total = 0;
    _mm256_storeu_ps(lanes, _mm256_cvtepi32_ps(v));
    for (int l = 0; l < 8; l++) total += lanes[l];
    return total;
}
#endif

/* out[k, b] = <w[k * apart], x[b]> for `streams` weight rows and `batch` inputs. */
static inline __attribute__((always_inline)) void dot_rows(const weight *w, int64_t apart, int streams,
                                                           const input *x, int64_t n, int batch, float *out) {
    for (int o = 0; o < streams * batch; o++) out[o] = 0;
    for (int64_t from = 0; from < n; from += SEGMENT) {
        int64_t to = from + SEGMENT < n ? from + SEGMENT : n, i = from;
#ifdef __AVX2__
        __m256i sums[MOST_SUMS] = {{0}};
        for (; i + 16 <= to; i += 16)
            for (int k = 0; k < streams; k++) {
                __m256i row = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + k * apart + i)));
                for (int b = 0; b < batch; b++) {
                    __m256i in = _mm256_loadu_si256((const __m256i *)(x + b * n + i));
                    sums[k * batch + b] = _mm256_add_epi32(sums[k * batch + b], _mm256_madd_epi16(row, in));
                }
            }
        for (int o = 0; o < streams * batch; o++) out[o] += sum_int32(sums[o]);
#endif
        for (int o = 0; o < streams * batch; o++) { /* what is left; without AVX2, all of it */
            const weight *row = w + o / batch * apart;
            const input *in = x + o % batch * n;
            for (int64_t begin = i; begin < to; begin += 256) { /* pieces small enough for 32 bits */
                int32_t sum = 0;
                int64_t end = begin + 256 < to ? begin + 256 : to;
                for (int64_t j = begin; j < end; j++) sum += (int32_t)row[j] * in[j];
                out[o] += (float)sum;
            }
        }
    }
}
#else
typedef float input;

/* out[k, b] = <w[k * apart], x[b]> for `streams` weight rows and `batch` inputs. */
static inline __attribute__((always_inline)) void dot_rows(const weight *w, int64_t apart, int streams,
                                                           const input *x, int64_t n, int batch, float *out) {
    vec sums[MOST_SUMS] = {{0}}; /* one each, whatever their number: a product is the same in any company */
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < streams; k++) {
            vec row = LOAD_WEIGHT(w + k * apart + i);
            for (int b = 0; b < batch; b++)
                sums[k * batch + b] = multiply_add(row, load_f32(x + b * n + i), sums[k * batch + b]);
        }
    for (int o = 0; o < streams * batch; o++) {
        const weight *row = w + o / batch * apart;
        const float *in = x + o % batch * n;
        out[o] = sum_lanes(sums[o]);
        for (int64_t j = i; j < n; j++) out[o] = fmaf(WEIGHT_VALUE(row[j]), in[j], out[o]);
    }
}
#endif

/* Rows [from, to) and those `apart`, 2 * apart, ... further on. */
static inline __attribute__((always_inline)) void walk(Matrix m, int64_t from, int64_t to, int64_t apart, int streams,
                                                       int64_t columns, const input *x, const float *x_scale,
                                                       int batch, float *y, int64_t y_stride) {
    float out[MOST_SUMS];
    for (int64_t r = from; r < to; r++) {
        dot_rows(m.data + r * columns, apart * columns, streams, x, columns, batch, out);
        for (int k = 0; k < streams; k++) {
            int64_t row = r + k * apart;
            float scale = m.scale ? m.scale[row] : 1.0f;
            for (int b = 0; b < batch; b++) y[b * y_stride + row] = out[k * batch + b] * (scale * x_scale[b]);
        }
    }
}

/* What a thread multiplies with: `batch` vectors of `columns` inputs, each with its scale. */
typedef struct {
    const input *x;
    const float *scale;
    int64_t columns;
    int batch;
} Inputs;

/* x (batch, columns) as inputs. room: for what has to be kept, INPUT_FLOATS of it. */
#define INPUT_FLOATS(batch, columns) ((batch) * ((columns) / 2 + 2))
static Inputs prepare(const float *x, int64_t columns, int64_t batch, float *room) {
    Inputs in = {(const input *)x, room, columns, (int)batch};
#if WEIGHT_BITS == 8
    input *rounded = (input *)(room + batch);
    for (int64_t b = 0; b < batch; b++) room[b] = to_input(x + b * columns, columns, rounded + b * columns);
    in.x = rounded;
#else
    for (int64_t b = 0; b < batch; b++) room[b] = 1.0f;
#endif
    return in;
}

/* y[b, r] = scale[r] * <w[r], x[b]> for the rows [from, to) and at most 4 inputs. The rows are walked in several
 * places at once: memory gives a core a third more for six streams than for one. */
static void multiply_few(Matrix m, int64_t from, int64_t to, Inputs in, float *y, int64_t y_stride) {
    int64_t apart, rest;
    #define WALK(streams, batch) \
        apart = (to - from) / (streams), rest = from + apart * (streams); \
        walk(m, from, from + apart, apart, streams, in.columns, in.x, in.scale, batch, y, y_stride); \
        walk(m, rest, to, 0, 1, in.columns, in.x, in.scale, batch, y, y_stride)
    if (in.batch == 1) { WALK(STREAMS, 1); }
    else if (in.batch == 2) { WALK(4, 2); }
    else if (in.batch == 3) { WALK(3, 3); }
    else { WALK(2, 4); }
    #undef WALK
}

/* The same for any number of inputs: a block of rows that stays in the cache meets all of them. (Of twelve rows or
 * twice, thrice, ... that: then no walk leaves any over.) */
static void multiply_rows(Matrix m, int64_t from, int64_t to, Inputs in, float *y, int64_t y_stride) {
    int64_t block = in.batch > 4 ? (BLOCK_BYTES / (in.columns * (int64_t)sizeof(weight)) / 12 + 1) * 12 : to - from;
    for (int64_t r = from; r < to; r += block)
        for (int b = 0; b < in.batch; b += 4) {
            Inputs few = {in.x + b * in.columns, in.scale + b, in.columns, in.batch - b < 4 ? in.batch - b : 4};
            multiply_few(m, r, r + block < to ? r + block : to, few, y + b * y_stride, y_stride);
        }
}

/* The share of `rows` that is this thread's. */
static void share(int64_t rows, int64_t *from, int64_t *to) {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    *from = rows * me / threads;
    *to = rows * (me + 1) / threads;
}

/* y (batch, rows) = x (batch, columns) W^T, this thread's rows of it. */
static void multiply(Matrix m, int64_t rows, Inputs in, float *y) {
    int64_t from, to;
    share(rows, &from, &to);
    multiply_rows(m, from, to, in, y, rows);
}

static void rms_norm(const float *x, const float *w, float eps, int64_t n, int batch, float *y) {
    for (int b = 0; b < batch; b++, x += n, y += n) {
        vec squares = {0};
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) squares += load_f32(x + i) * load_f32(x + i);
        float total = sum_lanes(squares);
        for (; i < n; i++) total += x[i] * x[i];
        float factor = 1.0f / sqrtf(total / n + eps);
        for (i = 0; i < n; i++) y[i] = w[i] * (x[i] * factor);
    }
}
