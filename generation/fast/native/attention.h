/* Attention of one token to the keys and values in the cache, in chunks that are joined afterwards. */
#pragma once
#include "activations.h"

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

/* One of the two vectors of the next 2 * LANES numbers of a key or a value. Of 16 bits these are the numbers at even and
 * at odd places, which need not be spread first; `arrange` puts a query into that order. */
INLINE vec load_half(const cached *p, int half) {
#if CACHE_BITS == 16
    uvec both = *(const uvec *)p;
    return half ? (vec)(both & 0xffff0000u) : (vec)(both << 16);
#else
    return load_f32(p + half * LANES);
#endif
}

/* Where number i of a head of `dim` stands in that order. */
static inline int64_t arranged(int64_t i, int64_t dim) {
    if (CACHE_BITS == 32 || i >= dim - dim % (2 * LANES)) return i;
    return i - i % (2 * LANES) + i % 2 * LANES + i % (2 * LANES) / 2;
}
static inline void arrange(const float *x, int64_t dim, float *out) {
    for (int64_t i = 0; i < dim; i++) out[arranged(i, dim)] = x[i];
}

/* Sums of `count` values, weighed with each head's scores: `vectors` vectors of the result of each head. */
INLINE void mix_values(float scores[4][MOST_CHUNK], const cached *value, int64_t count, int heads, int vectors,
                       int64_t dim, float *partial) {
    vec sum[4][4] = {{{0}}};
    for (int64_t s = 0; s < count; s++)
        for (int v = 0; v < vectors; v++) {
            vec x = load_half(value + s * dim + v / 2 * 2 * LANES, v % 2);
            IN_REGISTER(x);
            for (int g = 0; g < heads; g++) sum[g][v] = multiply_add(all(scores[g][s]), x, sum[g][v]);
        }
    for (int g = 0; g < heads; g++)
        for (int v = 0; v < vectors; v++) *(vec *)(partial + g * (dim + 2) + v * LANES) = sum[g][v];
}

/* Attention of `heads` (at most 4) query heads, arranged, over `count` positions of the key head that they share, each
 * key and value read and converted once: unnormalised sums, arranged, with the maximum, in powers of two, and the weight
 * that `merge_chunks` needs to join the chunks. partial: (heads, D_h + 2). */
INLINE void attend_heads(const float *q, const cached *key, const cached *value, int64_t count, int heads,
                         int64_t dim, float *partial) {
    /* Keys that meet the queries at a time: so many that additions need not wait for each other, and few enough for their
     * sums to stay in registers. They lie apart, since memory is read faster in several places at once. */
    const int keys = heads == 1 ? 8 : heads == 2 || LANES == 16 ? 4 : heads == 3 ? 3 : 2;
    const int vectors = heads > 2 && LANES == 8 ? 2 : 4;
    const int64_t apart = (count + keys - 1) / keys;
    vec sums[4][MOST_CHUNK + 8] __attribute__((aligned(64)));
    float scores[4][MOST_CHUNK];
    int64_t s, i;
    for (s = 0; s < apart; s++) {
        const cached *k[8];
        vec sum[8][4] = {{{0}}};
        for (int j = 0; j < keys; j++) {
            k[j] = key + (s + j * apart < count ? s + j * apart : s) * dim;
            for (i = 0; i < dim; i += 64 / (int64_t)sizeof(cached)) /* values are walked in columns: have them near */
                __builtin_prefetch(value + (k[j] - key) + i);
        }
        for (i = 0; i + 2 * LANES <= dim; i += 2 * LANES)
            for (int half = 0; half < 2; half++) {
                vec x[8];
                for (int j = 0; j < keys; j++) {
                    x[j] = load_half(k[j] + i, half);
                    IN_REGISTER(x[j]);
                }
                for (int g = 0; g < heads; g++) {
                    vec w = load_f32(q + g * dim + i + half * LANES);
                    for (int j = 0; j < keys; j++) sum[j][g] = multiply_add(w, x[j], sum[j][g]);
                }
            }
        for (; i < dim; i++)
            for (int j = 0; j < keys; j++)
                for (int g = 0; g < heads; g++)
                    sum[j][g][0] = multiply_add_one(q[g * dim + i], CACHED_VALUE(k[j][i]), sum[j][g][0]);
        for (int j = 0; j < keys; j++)
            for (int g = 0; g < heads; g++) sums[g][s + j * apart] = sum[j][g];
    }
    for (int g = 0; g < heads; g++) {
        float *out = partial + g * (dim + 2);
        sum_each(sums[g], count, LOG2E / sqrtf((float)dim), scores[g]);
        out[dim] = largest_of(scores[g], count, 0);
        for (s = count; s % LANES; s++) scores[g][s] = -INFINITY;
        for (s = 0; s < count; s += LANES)
            *(vec *)(scores[g] + s) = power_of_two(load_f32(scores[g] + s) - all(out[dim]), 0);
        out[dim + 1] = sum_of(scores[g], count);
    }
    for (i = 0; i + vectors * LANES <= dim; i += vectors * LANES)
        mix_values(scores, value + i, count, heads, vectors, dim, partial + i);
    for (; i + 2 * LANES <= dim; i += 2 * LANES) mix_values(scores, value + i, count, heads, 2, dim, partial + i);
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

/* Join the chunks of one query head. `partial` steps by `stride` from chunk to chunk. room: (D_h,). */
static void merge_chunks(const float *partial, int64_t chunks, int64_t stride, int64_t dim, float *room, float *out) {
    float largest = -INFINITY, total = 0;
    for (int64_t c = 0; c < chunks; c++)
        largest = partial[c * stride + dim] > largest ? partial[c * stride + dim] : largest;
    memset(room, 0, dim * sizeof(float));
    for (int64_t c = 0; c < chunks; c++) {
        float factor = power_of_two(all(partial[c * stride + dim] - largest), 0)[0];
        total += factor * partial[c * stride + dim + 1];
        for (int64_t i = 0; i < dim; i++) room[i] += factor * partial[c * stride + i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] = room[arranged(i, dim)] / total;
}

/* Turn `pairs` pairs of numbers, which lie `apart`. */
static __attribute__((noinline)) void rotate(float *x, const float *cosine, const float *sine, int64_t pairs, int64_t apart) {
    for (int64_t i = 0; i < pairs; i++) {
        float a = x[i], b = x[i + apart];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + apart] = b * cosine[i] + a * sine[i];
    }
}
