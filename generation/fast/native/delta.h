/* The gated delta rule of models/gated_delta.py, of one row's tokens and one head, from and into what a cache holds.
 *
 * A token reads its window's matrix, and what the window's tokens before it added; only the last token of a window
 * writes a matrix, the next window's. Each token's sums are made in one order, whether it is computed alone or with
 * others of its window. */
#pragma once
#include "activations.h"
#include "attention.h"

#define WINDOW 16 /* generation.kv_cache.STATE_WINDOW */
#define RING (2 * WINDOW)
#define STREAMS 4
#define COLUMNS 4 /* vectors of a result that are kept in registers */

/* The numbers of a head: D_k a multiple of 16, D_v of 32. Of a token in the window: its key, u and decay, `entry`
 * floats. */
typedef struct {
    int64_t key_dim, value_dim, entry;
    const float *matrix; /* (D_k, D_v) where the window begins, NULL before the first */
    float *next;         /* where the next window's goes */
    float *window;       /* (WINDOW, entry) */
} Rule;

/* Floats that `delta_rule` needs: of the tokens of a window what the matrix says of their keys and queries, and keys
 * again. */
static inline int64_t rule_floats(int64_t key_dim, int64_t value_dim) { return RING * value_dim + WINDOW * key_dim; }

/* out (2, D_v) = x (2, D_k) times the matrix, which comes from memory: its rows one after the other, in STREAMS places at
 * once, which memory gives faster. Sums over its rows are made in this order. */
static void read_rows(const float *x, const Rule *r, float *out) {
    int64_t part = r->key_dim / STREAMS;
    memset(out, 0, 2 * r->value_dim * sizeof(float));
    for (int64_t d = 0; d < part; d++) {
        const float *from = r->matrix + d * r->value_dim;
        vec key[STREAMS], query[STREAMS];
        for (int s = 0; s < STREAMS; s++) key[s] = all(x[s * part + d]), query[s] = all(x[r->key_dim + s * part + d]);
        for (int64_t column = 0; column < r->value_dim; column += LANES) {
            vec a = load_f32(out + column), b = load_f32(out + r->value_dim + column);
            for (int s = 0; s < STREAMS; s++) {
                vec w = load_f32(from + s * part * r->value_dim + column);
                IN_REGISTER(w);
                a = multiply_add(key[s], w, a);
                b = multiply_add(query[s], w, b);
            }
            *(vec *)(out + column) = a;
            *(vec *)(out + r->value_dim + column) = b;
        }
    }
}

/* The same for `rows` of x, `block` vectors of columns at a time: the matrix is near. */
INLINE void read_block(const float *x, const Rule *r, int64_t column, int rows, int block, float *out) {
    vec sum[6][2] = {{{0}}};
    int64_t part = r->key_dim / STREAMS;
    for (int64_t d = 0; d < part; d++)
        for (int s = 0; s < STREAMS; s++) {
            const float *from = r->matrix + (s * part + d) * r->value_dim + column;
            for (int v = 0; v < block; v++) {
                vec w = load_f32(from + v * LANES);
                IN_REGISTER(w);
                for (int i = 0; i < rows; i++)
                    sum[i][v] = multiply_add(all(x[i * r->key_dim + s * part + d]), w, sum[i][v]);
            }
        }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < block; v++) *(vec *)(out + i * r->value_dim + column + v * LANES) = sum[i][v];
}

/* out (rows, D_v) = x (rows, D_k) times the matrix, for keys and queries of some tokens. */
static __attribute__((noinline)) void read_matrix(const float *x, const Rule *r, int64_t rows, float *out) {
    if (!r->matrix) {
        memset(out, 0, rows * r->value_dim * sizeof(float));
        return;
    }
    if (rows == 2) {
        read_rows(x, r, out);
        return;
    }
    for (int64_t column = 0; column < r->value_dim; column += 2 * LANES) {
        int64_t i = 0;
        for (; i + 6 <= rows; i += 6) read_block(x + i * r->key_dim, r, column, 6, 2, out + i * r->value_dim);
        for (; i < rows; i += 2) read_block(x + i * r->key_dim, r, column, 2, 2, out + i * r->value_dim);
    }
}

/* The matrix where the next window begins. left (WINDOW,): of what each token added, at the end of theirs; of_matrix: of
 * the matrix. key (WINDOW, D_k): room. */
static __attribute__((noinline)) void fold(const Rule *r, const float *left, float of_matrix, float *key) {
    int64_t part = r->key_dim / STREAMS;
    for (int64_t j = 0; j < WINDOW; j++)
        for (int64_t d = 0; d < r->key_dim; d++) key[j * r->key_dim + d] = r->window[j * r->entry + d] * left[j];
    for (int64_t d = 0; d < part; d++)
        for (int64_t column = 0; column < r->value_dim; column += 2 * LANES) {
            vec a[STREAMS] = {{0}}, b[STREAMS] = {{0}};
            int64_t at = d * r->value_dim + column, apart = part * r->value_dim;
            for (int s = 0; r->matrix && s < STREAMS; s++) {
                a[s] = all(of_matrix) * load_f32(r->matrix + at + s * apart);
                b[s] = all(of_matrix) * load_f32(r->matrix + at + s * apart + LANES);
            }
            for (int64_t j = 0; j < WINDOW; j++) {
                const float *added = r->window + j * r->entry + r->key_dim + column;
                vec u = load_f32(added), v = load_f32(added + LANES);
                for (int s = 0; s < STREAMS; s++) {
                    vec k = all(key[j * r->key_dim + s * part + d]);
                    a[s] = multiply_add(k, u, a[s]);
                    b[s] = multiply_add(k, v, b[s]);
                }
            }
            for (int s = 0; s < STREAMS; s++) {
                *(vec *)(r->next + at + s * apart) = a[s];
                *(vec *)(r->next + at + s * apart + LANES) = b[s];
            }
        }
}

/* What each earlier token of the window is to a token's key and query, (2, WINDOW). */
static inline void meet_keys(const Rule *r, const float *key, const float *query, int64_t count, float *products) {
    vec sums[RING] __attribute__((aligned(64)));
    for (int64_t j = 0; j < count; j++) {
        const float *other = r->window + j * r->entry;
        vec a = {0}, b = {0};
        for (int64_t d = 0; d < r->key_dim; d += LANES) {
            vec x = load_f32(other + d);
            a = multiply_add(load_f32(key + d), x, a);
            b = multiply_add(load_f32(query + d), x, b);
        }
        sums[j] = a, sums[WINDOW + j] = b;
    }
    sum_each(sums, count, 1, products);
    sum_each(sums + WINDOW, count, 1, products + WINDOW);
}

/* u and the result of a token, `block` vectors of them. weight: what is left of each token, times its product with this
 * one's key and query; of_matrix: what is left of the matrix; read (2, D_v): its product with both. */
INLINE void add_block(const Rule *r, int64_t place, const float *weight, float of_matrix, float rate,
                      const float *read, const float *value, int64_t column, int block, float *out) {
    vec new[COLUMNS], result[COLUMNS];
    for (int v = 0; v < block; v++) {
        new[v] = load_f32(value + column + v * LANES) - all(of_matrix) * load_f32(read + column + v * LANES);
        result[v] = all(of_matrix) * load_f32(read + r->value_dim + column + v * LANES);
    }
    float *added = r->window + r->key_dim + column;
    for (int64_t j = 0; j < place; j++, added += r->entry)
        for (int v = 0; v < block; v++) {
            vec u = load_f32(added + v * LANES);
            new[v] = multiply_add(all(-weight[j]), u, new[v]);
            result[v] = multiply_add(all(weight[WINDOW + j]), u, result[v]);
        }
    for (int v = 0; v < block; v++) {
        new[v] *= all(rate);
        *(vec *)(added + v * LANES) = new[v];
        *(vec *)(out + column + v * LANES) = multiply_add(all(weight[WINDOW + place]), new[v], result[v]);
    }
}

/* `count` tokens from place `place` of a window on. x: of each its key and its query (D_k,), then the next one's;
 * value (count, D_v); decay, in logarithms, and rate (count,); out: rows `stride` apart. room: rule_floats. */
static void delta_rule(const Rule *r, int64_t place, int64_t count, const float *x, const float *value, const float *decay,
                       const float *rate, float *room, float *out, int64_t stride) {
    float total[WINDOW] = {0}, left[WINDOW], weight[RING], since = 0, of_matrix = 1;
    float *read = room, *keys = room + RING * r->value_dim;
    for (int64_t j = 0; j < place; j++) total[j] = since += r->window[j * r->entry + r->entry - 1];
    read_matrix(x, r, 2 * count, read);
    for (int64_t i = 0; i < count; i++, place++, out += stride) {
        const float *key = x + 2 * i * r->key_dim, *query = key + r->key_dim, *seen = read + 2 * i * r->value_dim;
        float *own = r->window + place * r->entry;
        memcpy(own, key, r->key_dim * sizeof(float));
        own[r->entry - 1] = decay[i];
        total[place] = since += decay[i];
        const vec log2e = all(1.44269504f);
        for (int64_t j = 0; j < WINDOW; j += LANES)
            *(vec *)(left + j) = power_of_two(at_most(all(0.0f), (all(since) - load_f32(total + j)) * log2e), 0);
        of_matrix = power_of_two(all(since) * log2e, 0)[0];
        meet_keys(r, key, query, place + 1, weight);
        for (int64_t j = 0; j <= place; j++) weight[j] *= left[j], weight[WINDOW + j] *= left[j];
        int64_t column = 0;
        for (; column + 4 * LANES <= r->value_dim; column += 4 * LANES)
            add_block(r, place, weight, of_matrix, rate[i], seen, value + i * r->value_dim, column, 4, out);
        for (; column < r->value_dim; column += LANES)
            add_block(r, place, weight, of_matrix, rate[i], seen, value + i * r->value_dim, column, 1, out);
    }
    if (place == WINDOW) fold(r, left, of_matrix, keys);
}
