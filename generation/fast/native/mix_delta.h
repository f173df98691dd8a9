/* The gated delta rule: models/gated_delta.py, also for what the cache holds. */
#pragma once
#include "delta.h"
#include "layers.h"

typedef struct {
    Matrix mix, z, b, a; /* what is convolved, of C numbers, gates, rates and decays of each head */
    int64_t taps;
    const float *convolution;       /* (taps, C), the last tap is the token's own */
    const float *a_scale, *a_bias;  /* (H_d,): -e^A_log, dt_bias */
    const float *value_norm;        /* (D_v,) */
    float *state, *recent, *inputs; /* (B, H_d, 2, D_k * D_v), (B, H_d, RING, D_k + D_v + 1), (B, RING, C) */
    int64_t keys, heads, key_dim, value_dim; /* heads of keys and of values, and their numbers */
} Delta;

static int64_t delta_floats(const void *mixer, const Tokens *t) {
    const Delta *d = mixer;
    return t->count * (d->mix.rows + d->z.rows + 2 * d->heads);
}

/* Keys, queries and values of a window's tokens, their rates and decays, and what the rule needs. */
static int64_t delta_own_floats(const void *mixer) {
    const Delta *d = mixer;
    return WINDOW * (2 * d->key_dim + d->value_dim + 2) + rule_floats(d->key_dim, d->value_dim);
}

/* silu of the convolution of `count` channels, whole vectors, from `channel` on of token i, whose row begins in this pass
 * with token `first`: (count,). What lies before that is in the cache. */
static void convolve_channels(const Work *w, const Delta *d, int64_t first, int64_t i, int64_t channel, int64_t count,
                              float *out) {
    int64_t wide = d->mix.rows, at = w->t->position[i], taps = smaller(at + 1, d->taps);
    const float *tap = d->convolution + (d->taps - 1) * wide + channel, *before[WINDOW];
    for (int64_t back = 0; back < taps; back++)
        before[back] = i - back >= first ? w->s->made + (i - back) * wide + channel
                                         : d->inputs + (w->t->row[i] * RING + (at - back) % RING) * wide + channel;
    for (int64_t j = 0; j < count; j += LANES) {
        vec sum = load_f32(before[0] + j) * load_f32(tap + j);
        for (int64_t back = 1; back < taps; back++)
            sum = multiply_add(load_f32(before[back] + j), load_f32(tap - back * wide + j), sum);
        *(vec *)(out + j) = curve_of(sum, SILU, 0);
    }
}

/* x (n,) as a vector of this length. */
static inline void set_length(float *x, int64_t n, float length) {
    float factor = length / sqrtf(squares_of(x, n) + 1e-6f);
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

/* The rule of a row's tokens [first, end) for the value heads of one key head; the result (T, H_d * D_v). A window at a
 * time, and nobody else reads or writes these channels and heads. */
static void apply_delta(const Work *w, const Delta *d, int64_t first, int64_t end, int64_t head) {
    const Tokens *t = w->t;
    int64_t kd = d->key_dim, vd = d->value_dim, each = d->heads / d->keys, wide = d->mix.rows;
    int64_t row = t->row[first], entry = kd + vd + 1, keys = d->keys * kd, values = d->heads * vd;
    const float *made = w->s->made, *gates = made + t->count * wide, *rates = gates + t->count * values;
    const float *decays = rates + t->count * d->heads;
    float *x = w->mixing, *value = x + RING * kd, *decay = value + WINDOW * vd, *rate = decay + WINDOW, *rest = rate + WINDOW;
    for (int64_t i = first, to; i < end; i = to) {
        int64_t window = t->position[i] / WINDOW, place = t->position[i] % WINDOW;
        to = smaller(i + WINDOW - place, end);
        for (int64_t j = i; j < to; j++) {
            float *key = x + 2 * (j - i) * kd, *query = key + kd;
            convolve_channels(w, d, first, j, keys + head * kd, kd, key);
            convolve_channels(w, d, first, j, head * kd, kd, query);
            set_length(key, kd, 1);
            set_length(query, kd, 1 / sqrtf((float)kd));
        }
        for (int64_t h = head * each; h < (head + 1) * each; h++) {
            for (int64_t j = i; j < to; j++) {
                float a = decays[j * d->heads + h] + d->a_bias[h];
                convolve_channels(w, d, first, j, 2 * keys + h * vd, vd, value + (j - i) * vd);
                decay[j - i] = d->a_scale[h] * (a > 20 ? a : log1pf(expf(a)));
                rate[j - i] = 1 / (1 + expf(-rates[j * d->heads + h]));
            }
            int64_t unit = row * d->heads + h;
            float *matrix = d->state + 2 * unit * kd * vd, *mixed = w->s->mixed + h * vd;
            Rule rule = {kd, vd, entry, window ? matrix + window % 2 * kd * vd : NULL, matrix + (window + 1) % 2 * kd * vd,
                         d->recent + (unit * RING + window % 2 * WINDOW) * entry};
            delta_rule(&rule, place, to - i, x, value, decay, rate, rest, mixed + i * values, values);
            for (int64_t j = i; j < to; j++) {
                float *out = mixed + j * values;
                const float *z = gates + j * values + h * vd;
                rms_norm(out, d->value_norm, w->m->eps, vd, out);
                for (int64_t c = 0; c < vd; c++) out[c] *= z[c] / (1.0f + exponential(-z[c]));
            }
        }
    }
    int64_t from[3] = {head * kd, keys + head * kd, 2 * keys + head * each * vd}, count[3] = {kd, kd, each * vd};
    for (int64_t i = larger(first, end - RING); i < end; i++)
        for (int part = 0; part < 3; part++)
            memcpy(d->inputs + (row * RING + t->position[i] % RING) * wide + from[part], made + i * wide + from[part],
                   count[part] * sizeof(float));
}

static const float *mix_delta(Work *w, const void *mixer, Inputs in) {
    const Delta *d = mixer;
    float *made = w->s->made, *z = made + in.tokens * d->mix.rows, *b = z + in.tokens * d->z.rows;
    make(w, d->mix, in, made);
    make(w, d->z, in, z);
    make(w, d->b, in, b);
    make(w, d->a, in, b + in.tokens * d->heads);
    if (!meet(w)) return NULL;
    for (int64_t unit; (unit = next_unit(w->me, w->s->rows * d->keys)) >= 0;) {
        const int64_t *row = w->s->row + unit / d->keys;
        apply_delta(w, d, row[0], row[1], unit % d->keys);
    }
    return meet(w) ? w->s->mixed : NULL;
}

#define DELTA {delta_floats, delta_own_floats, mix_delta}
