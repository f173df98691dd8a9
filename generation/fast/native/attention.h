/* Attention of one token to the keys and values in the cache, in chunks that are joined afterwards. */
#pragma once
#include "vectors.h"

#if LANES == 16
#define KEYS 4 /* whose products with the queries are summed at a time */
#else
#define KEYS 2
#endif

/* Sums over the lanes of count vectors, scaled. sums has room up to a multiple of 8. */
static inline void sum_each(vec *sums, int64_t count, float scale, float *out) {
#ifdef __AVX__
    for (int64_t s = count; s % 8; s++) sums[s] = (vec){0};
    for (int64_t s = 0; s < count; s += 8) { /* eight at a time: a transposition's worth of horizontal additions */
        __m256 v[8];
        for (int i = 0; i < 8; i++) {
#if LANES == 16
            __m512 both = (__m512)sums[s + i];
            v[i] = _mm256_add_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1));
#else
            v[i] = (__m256)sums[s + i];
#endif
        }
        __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
        __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
        __m256 total = _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
        _mm256_storeu_ps(out + s, _mm256_mul_ps(total, _mm256_set1_ps(scale)));
    }
#else
    for (int64_t s = 0; s < count; s++) out[s] = sum_lanes(sums[s]) * scale;
#endif
}

/* Sums of `count` values, weighed with each head's scores: `block` vectors of the result of each head. */
static inline __attribute__((always_inline)) void mix_values(float scores[4][MOST_CHUNK], const cached *value,
                                                             int64_t count, int heads, int block, int64_t dim,
                                                             float *partial) {
    vec sum[4][4] = {{{0}}};
    for (int64_t s = 0; s < count; s++)
        for (int v = 0; v < block; v++) {
            vec x = LOAD_CACHED(value + s * dim + v * LANES);
            IN_REGISTER(x);
            for (int g = 0; g < heads; g++) sum[g][v] = multiply_add(all(scores[g][s]), x, sum[g][v]);
        }
    for (int g = 0; g < heads; g++)
        for (int v = 0; v < block; v++) *(vec *)(partial + g * (dim + 2) + v * LANES) = sum[g][v];
}

/* Attention of `heads` (at most 4) query heads over `count` positions of the key head that they share, each
 * key and value read and converted once: unnormalised sums, with the maximum and the weight that
 * `merge_chunks` needs to join the chunks. partial: (heads, D_h + 2). */
static inline __attribute__((always_inline)) void attend_heads(const float *q, const cached *key,
                                                               const cached *value, int64_t count, int heads,
                                                               int64_t dim, float *partial) {
    vec sums[4][MOST_CHUNK] __attribute__((aligned(64)));
    float scores[4][MOST_CHUNK], scale = 1.0f / sqrtf((float)dim);
    int64_t s = 0, i;
    for (; s < count; s += KEYS) { /* several at a time, so that the additions need not wait for each other */
        const cached *k[KEYS];
        vec sum[KEYS][4] = {{{0}}};
        for (int j = 0; j < KEYS; j++) k[j] = key + (s + j < count ? s + j : s) * dim;
        for (i = 0; i < KEYS * dim; i += 64 / (int64_t)sizeof(cached)) { /* values are walked in columns: have them near */
            __builtin_prefetch(value + s * dim + i);
            __builtin_prefetch((const char *)(k[0] + i) + PREFETCH);
        }
        for (i = 0; i + LANES <= dim; i += LANES) {
            vec x[KEYS];
            for (int j = 0; j < KEYS; j++) {
                x[j] = LOAD_CACHED(k[j] + i);
                IN_REGISTER(x[j]);
            }
            for (int g = 0; g < heads; g++) {
                vec w = load_f32(q + g * dim + i);
                for (int j = 0; j < KEYS; j++) sum[j][g] = multiply_add(w, x[j], sum[j][g]);
            }
        }
        for (; i < dim; i++)
            for (int j = 0; j < KEYS; j++)
                for (int g = 0; g < heads; g++)
                    sum[j][g][0] = multiply_add_one(q[g * dim + i], CACHED_VALUE(k[j][i]), sum[j][g][0]);
        for (int j = 0; j < KEYS; j++)
            for (int g = 0; g < heads; g++) sums[g][s + j] = sum[j][g];
    }
    for (int g = 0; g < heads; g++) {
        float *out = partial + g * (dim + 2), largest, total;
        sum_each(sums[g], count, scale, scores[g]);
        largest = largest_of(scores[g], count, 0);
        for (s = 0; s < count; s++) scores[g][s] = exponential(scores[g][s] - largest);
        total = sum_of(scores[g], count);
        out[dim] = largest;
        out[dim + 1] = total;
    }
    /* Vectors of the result that are kept in registers: four of them, then one. */
    for (i = 0; i + 4 * LANES <= dim; i += 4 * LANES) mix_values(scores, value + i, count, heads, 4, dim, partial + i);
    for (; i + LANES <= dim; i += LANES) mix_values(scores, value + i, count, heads, 1, dim, partial + i);
    for (; i < dim; i++)
        for (int g = 0; g < heads; g++) {
            float sum = 0;
            for (s = 0; s < count; s++) sum = multiply_add_one(scores[g][s], CACHED_VALUE(value[s * dim + i]), sum);
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
        float factor = exponential(partial[c * stride + dim] - largest);
        total += factor * partial[c * stride + dim + 1];
        for (int64_t i = 0; i < dim; i++) out[i] += factor * partial[c * stride + i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] /= total;
}

static __attribute__((noinline)) void rotate(float *x, const float *cosine, const float *sine, int64_t dim) {
    for (int64_t i = 0, half = dim / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}
