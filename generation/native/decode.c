/* One decode step of a Llama-style decoder on a CPU: a token for each row in, its logits out.
 *
 * At batch 1 a step reads every weight once, so the aim is to read memory as fast as the machine can and
 * to wait for nothing in between: one parallel region for the whole step, weights streamed in the precision
 * they are stored in, activations in float32 (in 16-bit integers where they meet int8 weights). Compiled by generation/native/build.py, once for each
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
#define UNROLL 4
#define PREFETCH 2048 /* bytes ahead */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

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

#if WEIGHT_BITS == 8
/* int8 weights meet activations rounded to 16 bits, with one scale a vector: an error of 1.5e-5 of the largest
 * activation, and twice the weights an instruction that floats would allow. */
typedef int16_t input;
#define SEGMENT 16384 /* columns whose 32-bit sums cannot overflow: 127 * 32767 * 2 * SEGMENT / 64 < 2^31 */

static float to_input(const float *x, int64_t n, input *out) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
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

/* Sums over the lanes of count vectors, scaled. */
static inline void sum_each(const vec *sums, int64_t count, float scale, float *out) {
    int64_t s = 0;
#if LANES == 8 && defined(__AVX__)
    for (; s + 8 <= count; s += 8) { /* eight at a time: a transposition's worth of horizontal additions */
        const __m256 *v = (const __m256 *)(sums + s);
        __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
        __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
        __m256 both = _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
        _mm256_storeu_ps(out + s, _mm256_mul_ps(both, _mm256_set1_ps(scale)));
    }
#endif
    for (; s < count; s++) out[s] = sum_lanes(sums[s]) * scale;
}

/* Attention of `heads` (at most 4) query heads over `count` positions of the key head that they share, each
 * key and value read and converted once: unnormalised sums, with the maximum and the weight that
 * `merge_chunks` needs to join the chunks. partial: (heads, D_h + 2). */
static inline __attribute__((always_inline)) void attend_heads(const float *q, const cached *key,
                                                               const cached *value, int64_t count, int heads,
                                                               int64_t dim, float *partial) {
    vec sums[4][CHUNK] __attribute__((aligned(64)));
    float scores[4][CHUNK], scale = 1.0f / sqrtf((float)dim);
    int64_t s = 0, i;
    for (; s < count; s += 2) { /* two positions at a time, so that the additions need not wait for each other */
        const cached *k0 = key + s * dim, *k1 = s + 1 < count ? k0 + dim : k0;
        vec a[4] = {{0}}, b[4] = {{0}};
        for (i = 0; i < 2 * dim; i += 64 / (int64_t)sizeof(cached)) { /* values are walked in columns: have them near */
            __builtin_prefetch(value + s * dim + i);
            __builtin_prefetch((const char *)(k0 + i) + PREFETCH);
        }
        for (i = 0; i + LANES <= dim; i += LANES) {
            vec x = LOAD_CACHED(k0 + i), y = LOAD_CACHED(k1 + i);
            for (int g = 0; g < heads; g++) {
                vec w = load_f32(q + g * dim + i);
                a[g] += w * x;
                b[g] += w * y;
            }
        }
        for (; i < dim; i++)
            for (int g = 0; g < heads; g++) {
                a[g][0] += q[g * dim + i] * CACHED_VALUE(k0[i]);
                b[g][0] += q[g * dim + i] * CACHED_VALUE(k1[i]);
            }
        for (int g = 0; g < heads; g++) sums[g][s] = a[g], sums[g][s + 1] = b[g];
    }
    for (int g = 0; g < heads; g++) {
        float *out = partial + g * (dim + 2), largest, total = 0;
        sum_each(sums[g], count, scale, scores[g]);
        largest = scores[g][0];
        for (s = 1; s < count; s++) largest = scores[g][s] > largest ? scores[g][s] : largest;
        for (s = 0; s < count; s++) scores[g][s] = exp_negative(scores[g][s] - largest);
        for (s = 0; s < count; s++) total += scores[g][s];
        out[dim] = largest;
        out[dim + 1] = total;
    }
    const int block = heads < 4 ? 4 : 2; /* vectors of the result kept in registers */
    for (i = 0; i + block * LANES <= dim; i += block * LANES) {
        vec sum[4][4] = {{{0}}};
        for (s = 0; s < count; s++)
            for (int v = 0; v < block; v++) {
                vec x = LOAD_CACHED(value + s * dim + i + v * LANES);
                for (int g = 0; g < heads; g++) sum[g][v] += scores[g][s] * x;
            }
        for (int g = 0; g < heads; g++)
            for (int v = 0; v < block; v++) *(vec *)(partial + g * (dim + 2) + i + v * LANES) = sum[g][v];
    }
    for (; i < dim; i++)
        for (int g = 0; g < heads; g++) {
            float sum = 0;
            for (s = 0; s < count; s++) sum += scores[g][s] * CACHED_VALUE(value[s * dim + i]);
            partial[g * (dim + 2) + i] = sum;
        }
}

/* `attend_heads` for every query head of a group. */
static void attend_chunk(const float *q, const cached *key, const cached *value, int64_t count, int64_t group,
                         int64_t dim, float *partial) {
    for (; group > 0; group -= 4, q += 4 * dim, partial += 4 * (dim + 2)) {
        if (group == 1) attend_heads(q, key, value, count, 1, dim, partial);
        else if (group == 2) attend_heads(q, key, value, count, 2, dim, partial);
        else if (group == 3) attend_heads(q, key, value, count, 3, dim, partial);
        else attend_heads(q, key, value, count, 4, dim, partial);
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
                      int64_t capacity, int64_t longest, const float *cosine, const float *sine, float *q,
                      float *k, float *v, float *partial, float *out) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, chunk_stride = group * (dim + 2);
    int64_t most = (longest + CHUNK - 1) / CHUNK;
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
            int64_t first = (unit * capacity + from) * dim;
            attend_chunk(q + unit * group * dim, layer->key + first, layer->value + first, to - from, group, dim,
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
            attention(m, layer, position, batch, capacity, longest, cosine, sine, q, k, v, partial, mixed);
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
