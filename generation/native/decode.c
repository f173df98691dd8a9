/* One decode step of a Llama-style decoder on a CPU: a token for each row in, its logits out.
 *
 * At batch 1 a step reads every weight once, so the aim is to read memory as fast as the machine can and
 * to wait for nothing in between: one parallel region for the whole step, weights streamed in the precision
 * they are stored in, activations in float32. Compiled by generation/native/build.py, once for each
 * weight type (WEIGHT_BITS 32: float, 16: bfloat16, 8: int8 with one scale an output row) and cache type
 * (CACHE_BITS 32 or 16). Vectors are GCC's generic ones: the compiler picks the instruction set.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16 /* floats in a vector: one register (on NEON, two) */
#else
#define LANES 8
#endif
#define CHUNK 64     /* cache positions that one unit of attention work covers */
#define MAX_GROUP 16 /* query heads to a key head */
#define UNROLL 4
#define PREFETCH 2048 /* bytes ahead */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

static inline vec load_f32(const float *p) { return *(const vec *)p; }
static inline vec load_bf16(const uint16_t *p) {
    return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16);
}
static inline vec load_i8(const int8_t *p) {
#if defined(__AVX2__) && !defined(__AVX512F__) /* GCC 12 takes this conversion apart */
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bvec *)p, ivec), vec);
#endif
}
static inline float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t float_to_bf16(float value) { /* round to nearest even, as PyTorch does */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if WEIGHT_BITS == 32
typedef float weight;
#define LOAD_WEIGHT load_f32
#define WEIGHT_VALUE(w) (w)
#elif WEIGHT_BITS == 16
typedef uint16_t weight;
#define LOAD_WEIGHT load_bf16
#define WEIGHT_VALUE bf16_to_float
#else
typedef int8_t weight;
#define LOAD_WEIGHT load_i8
#define WEIGHT_VALUE(w) ((float)(w))
#endif

#if CACHE_BITS == 32
typedef float cached;
#define LOAD_CACHED load_f32
#define CACHED_VALUE(c) (c)
#define TO_CACHED(v) (v)
#else
typedef uint16_t cached;
#define LOAD_CACHED load_bf16
#define CACHED_VALUE bf16_to_float
#define TO_CACHED float_to_bf16
#endif

/* A matrix (rows, columns) with one scale a row (int8) or none. */
typedef struct {
    const weight *data;
    const float *scale;
} Matrix;

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm;
    cached *key, *value; /* (B, H_kv, S, D_h), contiguous along D_h and S */
} Layer;

typedef struct {
    int64_t layers, width, heads, kv_heads, head_dim, inner, vocab;
    float eps;
    Matrix embedding, head;
    const float *final_norm;
    const float *inv_freq; /* (D_h / 2,) */
    Layer *layer;
} Model;

static inline float sum_lanes(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

/* <w, x> of one weight row, read front to back: memory likes one long stream better than several short ones. */
static inline float dot_row(const weight *w, const float *x, int64_t n) {
    vec sums[UNROLL] = {{0}};
    int64_t i = 0;
    for (; i + UNROLL * LANES <= n; i += UNROLL * LANES) {
        __builtin_prefetch((const char *)(w + i) + PREFETCH);
        for (int u = 0; u < UNROLL; u++) sums[u] += LOAD_WEIGHT(w + i + u * LANES) * load_f32(x + i + u * LANES);
    }
    for (; i + LANES <= n; i += LANES) sums[0] += LOAD_WEIGHT(w + i) * load_f32(x + i);
    vec sum = sums[0];
    for (int u = 1; u < UNROLL; u++) sum += sums[u];
    float total = sum_lanes(sum);
    for (; i < n; i++) total += WEIGHT_VALUE(w[i]) * x[i];
    return total;
}

/* The same for `batch` (at most 4) inputs: the row is read and converted once. */
static inline __attribute__((always_inline)) void dot_rows(const weight *w, const float *x, int64_t n, int batch,
                                                           float *out) {
    vec sums[4] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec row = LOAD_WEIGHT(w + i);
        for (int b = 0; b < batch; b++) sums[b] += row * load_f32(x + b * n + i);
    }
    for (int b = 0; b < batch; b++) {
        out[b] = sum_lanes(sums[b]);
        for (int64_t j = i; j < n; j++) out[b] += WEIGHT_VALUE(w[j]) * x[b * n + j];
    }
}

/* y[b, r] = scale[r] * <w[r], x[b]> for the rows [from, to) of one thread. */
static void multiply_rows(Matrix m, int64_t from, int64_t to, int64_t columns, const float *x, int batch,
                          float *y, int64_t y_stride) {
    if (batch == 1) {
        for (int64_t r = from; r < to; r++)
            y[r] = dot_row(m.data + r * columns, x, columns) * (m.scale ? m.scale[r] : 1.0f);
        return;
    }
    for (int b0 = 0; b0 < batch; b0 += 4) {
        int bs = batch - b0 < 4 ? batch - b0 : 4;
        const float *inputs = x + b0 * columns;
        float out[4];
        for (int64_t r = from; r < to; r++) {
            const weight *w = m.data + r * columns;
            if (bs == 4) dot_rows(w, inputs, columns, 4, out);
            else if (bs == 3) dot_rows(w, inputs, columns, 3, out);
            else if (bs == 2) dot_rows(w, inputs, columns, 2, out);
            else dot_rows(w, inputs, columns, 1, out);
            for (int b = 0; b < bs; b++) y[(b0 + b) * y_stride + r] = out[b] * (m.scale ? m.scale[r] : 1.0f);
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

/* e^x for x <= 0, to about 2 ulp: 2^k * polynomial (the coefficients are Cephes' expf). */
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float k = floorf(x * 1.44269504f + 0.5f);
    x -= k * 0.693359375f;
    x -= k * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    int32_t bits = ((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return y * scale;
}

static inline float dot_cached(const float *q, const cached *k, int64_t n) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sums += load_f32(q + i) * LOAD_CACHED(k + i);
    float total = sum_lanes(sums);
    for (; i < n; i++) total += q[i] * CACHED_VALUE(k[i]);
    return total;
}

/* Attention of one group of query heads over positions [from, to) of one key head: unnormalised sums, with
 * the maximum and the weight that `merge_chunks` needs to join the chunks. partial: (group, D_h + 2). */
static void attend_chunk(const float *q, const cached *key, const cached *value, int64_t from, int64_t to,
                         int64_t group, int64_t dim, float *partial) {
    float scores[MAX_GROUP][CHUNK];
    float scale = 1.0f / sqrtf((float)dim);
    int64_t count = to - from;
    for (int64_t s = 0; s < count; s++)
        for (int64_t g = 0; g < group; g++)
            scores[g][s] = scale * dot_cached(q + g * dim, key + (from + s) * dim, dim);
    for (int64_t g = 0; g < group; g++) {
        float *out = partial + g * (dim + 2), largest = scores[g][0], total = 0;
        for (int64_t s = 1; s < count; s++) largest = scores[g][s] > largest ? scores[g][s] : largest;
        for (int64_t s = 0; s < count; s++) scores[g][s] = exp_negative(scores[g][s] - largest);
        for (int64_t s = 0; s < count; s++) total += scores[g][s];
        memset(out, 0, dim * sizeof(float));
        out[dim] = largest;
        out[dim + 1] = total;
    }
    for (int64_t s = 0; s < count; s++) {
        const cached *v = value + (from + s) * dim;
        for (int64_t g = 0; g < group; g++) {
            float *out = partial + g * (dim + 2), p = scores[g][s];
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES) *(vec *)(out + i) += p * LOAD_CACHED(v + i);
            for (; i < dim; i++) out[i] += p * CACHED_VALUE(v[i]);
        }
    }
}

/* Join the chunks of one query head. `partial` steps by `stride` from chunk to chunk. */
static void merge_chunks(const float *partial, int64_t chunks, int64_t stride, int64_t dim, float *out) {
    float largest = -INFINITY, total = 0;
    for (int64_t c = 0; c < chunks; c++)
        largest = partial[c * stride + dim] > largest ? partial[c * stride + dim] : largest;
    memset(out, 0, dim * sizeof(float));
    for (int64_t c = 0; c < chunks; c++) {
        float factor = exp_negative(partial[c * stride + dim] - largest);
        total += factor * partial[c * stride + dim + 1];
        for (int64_t i = 0; i < dim; i++) out[i] += factor * partial[c * stride + i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] /= total;
}

static void rotate(float *x, const float *cosine, const float *sine, int64_t dim) {
    for (int64_t i = 0, half = dim / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* Floats of scratch that a step needs, for the caller to allocate once. */
int64_t ocelli_scratch_floats(const Model *m, int64_t batch, int64_t capacity) {
    int64_t chunks = (capacity + CHUNK - 1) / CHUNK, all_heads = m->heads + 2 * m->kv_heads;
    return batch * (4 * m->width + (all_heads + m->heads) * m->head_dim + 2 * m->inner + m->head_dim +
                    m->heads * chunks * (m->head_dim + 2)) + 64;
}

/* Attention of every row: rotate, write this token's key and value, attend. Ends without a barrier. */
static void attention(const Model *m, const Layer *layer, const int64_t *position, int64_t batch,
                      int64_t capacity, const float *cosine, const float *sine, float *q, float *k, float *v,
                      float *partial, float *out) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, chunk_stride = group * (dim + 2);
    int64_t most = (capacity + CHUNK - 1) / CHUNK;
    #pragma omp for schedule(static)
    for (int64_t unit = 0; unit < batch * m->kv_heads; unit++) {
        int64_t b = unit / m->kv_heads, h = unit % m->kv_heads;
        const float *c = cosine + b * dim / 2, *s = sine + b * dim / 2;
        float *new_key = k + (b * m->kv_heads + h) * dim, *new_value = v + (b * m->kv_heads + h) * dim;
        rotate(new_key, c, s, dim);
        for (int64_t g = 0; g < group; g++) rotate(q + (b * m->heads + h * group + g) * dim, c, s, dim);
        int64_t slot = (unit * capacity + position[b]) * dim;
        for (int64_t i = 0; i < dim; i++) {
            layer->key[slot + i] = TO_CACHED(new_key[i]);
            layer->value[slot + i] = TO_CACHED(new_value[i]);
        }
    }
    #pragma omp for schedule(dynamic) collapse(2)
    for (int64_t unit = 0; unit < batch * m->kv_heads; unit++)
        for (int64_t c = 0; c < most; c++) {
            int64_t b = unit / m->kv_heads, length = position[b] + 1, from = c * CHUNK;
            if (from >= length) continue;
            int64_t to = from + CHUNK < length ? from + CHUNK : length;
            attend_chunk(q + unit * group * dim, layer->key + unit * capacity * dim,
                         layer->value + unit * capacity * dim, from, to, group, dim,
                         partial + (unit * most + c) * chunk_stride);
        }
    #pragma omp for schedule(static)
    for (int64_t head = 0; head < batch * m->heads; head++) {
        int64_t unit = head / group, g = head % group, length = position[unit / m->kv_heads] + 1;
        merge_chunks(partial + unit * most * chunk_stride + g * (dim + 2), (length + CHUNK - 1) / CHUNK,
                     chunk_stride, dim, out + head * dim);
    }
}

/* token, position: (B,). logits: (B, V). Every row's cache holds `position` entries and gains one. */
void ocelli_decode(const Model *m, const int64_t *token, const int64_t *position, int64_t batch,
                   int64_t capacity, int64_t threads, float *scratch, float *logits) {
    int64_t width = m->width, dim = m->head_dim, q_width = m->heads * dim, kv_width = m->kv_heads * dim;
    float *x = scratch, *normed = x + batch * width, *added = normed + batch * width;
    float *q = added + batch * width, *k = q + batch * q_width, *v = k + batch * kv_width;
    float *mixed = v + batch * kv_width, *gate = mixed + batch * q_width, *up = gate + batch * m->inner;
    float *cosine = up + batch * m->inner, *sine = cosine + batch * dim / 2, *partial = sine + batch * dim / 2;
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; b++) {
        const weight *row = m->embedding.data + token[b] * width;
        float scale = m->embedding.scale ? m->embedding.scale[token[b]] : 1.0f;
        for (int64_t i = 0; i < width; i++) x[b * width + i] = WEIGHT_VALUE(row[i]) * scale;
        for (int64_t i = 0; i < dim / 2; i++) {
            cosine[b * dim / 2 + i] = cosf((float)position[b] * m->inv_freq[i]);
            sine[b * dim / 2 + i] = sinf((float)position[b] * m->inv_freq[i]);
        }
        longest = position[b] + 1 > longest ? position[b] + 1 : longest;
    }
    #pragma omp parallel num_threads((int)threads)
    {
        int64_t from, to;
        for (int64_t l = 0; l < m->layers; l++) {
            const Layer *layer = m->layer + l;
            #pragma omp single
            rms_norm(x, layer->input_norm, m->eps, width, batch, normed);
            multiply(layer->q, q_width, width, normed, batch, q);
            multiply(layer->k, kv_width, width, normed, batch, k);
            multiply(layer->v, kv_width, width, normed, batch, v);
            #pragma omp barrier
            attention(m, layer, position, batch, capacity, cosine, sine, q, k, v, partial, mixed);
            multiply(layer->o, width, q_width, mixed, batch, added);
            #pragma omp barrier
            #pragma omp single
            {
                for (int64_t i = 0; i < batch * width; i++) x[i] += added[i];
                rms_norm(x, layer->post_norm, m->eps, width, batch, normed);
            }
            share(m->inner, &from, &to);
            multiply_rows(layer->gate, from, to, width, normed, batch, gate, m->inner);
            multiply_rows(layer->up, from, to, width, normed, batch, up, m->inner);
            for (int64_t b = 0; b < batch; b++)
                for (int64_t i = b * m->inner + from; i < b * m->inner + to; i++)
                    gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
            #pragma omp barrier
            multiply(layer->down, width, m->inner, gate, batch, added);
            #pragma omp barrier
            #pragma omp single
            for (int64_t i = 0; i < batch * width; i++) x[i] += added[i];
        }
        #pragma omp single
        rms_norm(x, m->final_norm, m->eps, width, batch, normed);
        multiply(m->head, m->vocab, width, normed, batch, logits);
    }
}
