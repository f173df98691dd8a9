/* Weights times activations, and norms: what reads every weight once a token. */
#pragma once
#include "vectors.h"

/* A matrix (rows, columns) with one scale a row (int8) or none. */
typedef struct {
    const weight *data;
    const float *scale;
} Matrix;

#if WEIGHT_BITS == 8
/* int8 weights meet activations rounded to 16 bits, with one scale a vector: an error of 1.5e-5 of the largest
 * activation, and twice the weights an instruction that floats would allow. */
typedef int16_t input;
#define SEGMENT 8192 /* columns whose 32-bit sums cannot overflow: 127 * 32767 * 2 * SEGMENT / 32 < 2^31 */

static float to_input(const float *x, int64_t n, input *out) {
    float largest = 0;
    int broken = 0;
    for (int64_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    for (int64_t i = 0; i < n; i++) broken |= !(fabsf(x[i]) <= FLT_MAX);
    if (broken) { /* NaN and infinity keep their meaning */
        memset(out, 0, n * sizeof(input));
        return NAN;
    }
    float factor = largest > 0 ? 32767.0f / largest : 0;
    for (int64_t i = 0; i < n; i++) out[i] = (input)lrintf(x[i] * factor);
    return largest / 32767.0f;
}

/* <w, x> of one weight row for `batch` (at most 4) inputs: the row is read and widened once. */
static inline __attribute__((always_inline)) void dot_rows(const weight *w, const input *x, int64_t n, int batch,
                                                           float *out) {
    for (int b = 0; b < batch; b++) out[b] = 0;
    for (int64_t from = 0; from < n; from += SEGMENT) {
        int64_t to = from + SEGMENT < n ? from + SEGMENT : n, i = from;
#ifdef __AVX2__
        __m256i sums[4][4] = {{{0}}};
        for (; i + 64 <= to; i += 64) {
            __builtin_prefetch((const char *)(w + i) + PREFETCH);
            for (int u = 0; u < 4; u++) {
                __m256i row = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + i + 16 * u)));
                for (int b = 0; b < batch; b++) {
                    __m256i in = _mm256_loadu_si256((const __m256i *)(x + b * n + i + 16 * u));
                    sums[b][u % (8 / batch < 4 ? 8 / batch : 4)] =
                        _mm256_add_epi32(sums[b][u % (8 / batch < 4 ? 8 / batch : 4)], _mm256_madd_epi16(row, in));
                }
            }
        }
        for (int b = 0; b < batch; b++)
            for (int u = 0; u < 4; u++) {
                float lanes[8];
                _mm256_storeu_ps(lanes, _mm256_cvtepi32_ps(sums[b][u]));
                for (int l = 0; l < 8; l++) out[b] += lanes[l];
            }
#endif
        for (int b = 0; b < batch; b++) {
            float rest = 0; /* also the whole row, in pieces small enough for 32 bits, where there is no AVX2 */
            for (int64_t begin = i; begin < to; begin += 256) {
                int32_t sum = 0;
                int64_t end = begin + 256 < to ? begin + 256 : to;
                for (int64_t j = begin; j < end; j++) sum += (int32_t)w[j] * x[b * n + j];
                rest += (float)sum;
            }
            out[b] += rest;
        }
    }
}
#else
typedef float input;

/* <w, x> of one weight row for `batch` (at most 4) inputs, read front to back: memory likes one long stream
 * better than several short ones. The row is read and converted once. */
static inline __attribute__((always_inline)) void dot_rows(const weight *w, const input *x, int64_t n, int batch,
                                                           float *out) {
    const int parts = batch == 1 ? 4 : batch == 2 ? 2 : 1; /* sums to an input: enough of them to hide latency */
    vec sums[4][4] = {{{0}}};
    int64_t i = 0;
    for (; i + UNROLL * LANES <= n; i += UNROLL * LANES) {
        __builtin_prefetch((const char *)(w + i) + PREFETCH);
        for (int u = 0; u < UNROLL; u++) {
            vec row = LOAD_WEIGHT(w + i + u * LANES);
            for (int b = 0; b < batch; b++) sums[b][u % parts] += row * load_f32(x + b * n + i + u * LANES);
        }
    }
    for (; i + LANES <= n; i += LANES)
        for (int b = 0; b < batch; b++) sums[b][0] += LOAD_WEIGHT(w + i) * load_f32(x + b * n + i);
    for (int b = 0; b < batch; b++) {
        vec sum = sums[b][0];
        for (int p = 1; p < parts; p++) sum += sums[b][p];
        out[b] = sum_lanes(sum);
        for (int64_t j = i; j < n; j++) out[b] += WEIGHT_VALUE(w[j]) * x[b * n + j];
    }
}
#endif

/* y[b, r] = scale[r] * <w[r], x[b]> for the rows [from, to) of one thread. */
static void multiply_rows(Matrix m, int64_t from, int64_t to, int64_t columns, const float *x, int batch,
                          float *y, int64_t y_stride) {
    for (int b0 = 0; b0 < batch; b0 += 4) {
        int bs = batch - b0 < 4 ? batch - b0 : 4;
        float out[4];
#if WEIGHT_BITS == 8
        input inputs[bs * columns];
        float input_scale[4];
        for (int b = 0; b < bs; b++)
            input_scale[b] = to_input(x + (b0 + b) * columns, columns, inputs + b * columns);
#else
        const input *inputs = x + b0 * columns;
        const float input_scale[4] = {1, 1, 1, 1};
#endif
        for (int64_t r = from; r < to; r++) {
            const weight *w = m.data + r * columns;
            if (bs == 1) dot_rows(w, inputs, columns, 1, out);
            else if (bs == 2) dot_rows(w, inputs, columns, 2, out);
            else if (bs == 3) dot_rows(w, inputs, columns, 3, out);
            else dot_rows(w, inputs, columns, 4, out);
            float scale = m.scale ? m.scale[r] : 1.0f;
            for (int b = 0; b < bs; b++) y[(b0 + b) * y_stride + r] = out[b] * (scale * input_scale[b]);
        }
    }
}

/* The share of `rows` that is this thread's. */
static void share(int64_t rows, int64_t *from, int64_t *to) {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    *from = rows * me / threads;
    *to = rows * (me + 1) / threads;
}

static void multiply(Matrix m, int64_t rows, int64_t columns, const float *x, int batch, float *y) {
    int64_t from, to;
    share(rows, &from, &to);
    multiply_rows(m, from, to, columns, x, batch, y, rows);
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
