/* The forward pass of a Llama-style decoder on a CPU, for any number of tokens: one of a row that is decoded, one of
 * each row of a batch, several of a row that are checked at once, or a prompt.
 *
 * With few tokens a pass reads every weight once, so the aim is to read memory as fast as the machine can and to wait
 * for nothing in between: one parallel region for the whole pass, weights in the precision that they are stored in.
 * With many it multiplies as fast as the machine can. Each token's sums are made in one order, so its result does not
 * depend on the tokens beside it. Compiled by step.py, once for each weight type (WEIGHT_BITS 32: float, 16: bfloat16,
 * 8: int8 with one scale an output, 4: four bits with one scale a group) and cache type (CACHE_BITS 32 or 16).
 */
#include "attention.h"
#include "delta.h"
#include "linear.h"

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm; /* (D_h,), of each head before it is rotated; NULL where there are none */
    cached *key, *value; /* (B, H_kv, S, D_h), contiguous along D_h and S */
    /* Where `taps` is not 0, a short convolution in place of attention: `mix` gives two gates and values, `o` comes
     * after it. */
    Matrix mix;
    int64_t taps;
    const float *convolution, *conv_bias; /* (taps, D), the last tap is the token's own; (D,) or NULL */
    cached *conv; /* (B, S, D): what was convolved */
    /* Where there is a value norm, the gated delta rule: `mix` gives what is convolved, of C numbers, z gates and b and
     * a rates and decays of each head; see models/gated_delta.py, also for what the cache holds. */
    Matrix z, b, a;
    const float *a_scale, *a_bias;   /* (H_d,): -e^A_log, dt_bias */
    const float *value_norm;         /* (D_v,) */
    float *state, *recent, *inputs;  /* (B, H_d, 2, D_k * D_v), (B, H_d, RING, D_k + D_v + 1), (B, RING, C) */
} Layer;

typedef struct {
    int64_t layers, width, heads, kv_heads, head_dim, inner, vocab;
    int64_t rotated, gated; /* numbers of a head; whether queries come with gates, head by head */
    int64_t mixed;          /* the most outputs of a layer's `mix` */
    int64_t delta_keys, delta_heads, key_dim, value_dim; /* heads of keys and of values, and their numbers */
    float eps;
    Matrix embedding, head;
    const float *final_norm;
    const float *inv_freq; /* (rotated / 2,) */
    const int64_t *axis;   /* (rotated / 2,): which of a token's three places each frequency turns by */
    Layer *layer;
} Model;

/* The tokens of a pass. Those of one row follow each other, with ascending positions, after what its cache holds. */
typedef struct {
    int64_t count;
    const int64_t *id;       /* (T,), or NULL: then their embeddings are given */
    int64_t deep;            /* how many layers, from the first on, are followed by a part of the embeddings */
    const float *embedding;  /* (T, (1 + deep) * D) */
    const int64_t *row;      /* (T,) in the cache */
    const int64_t *position; /* (T,) in the row */
    int64_t axes;            /* 3 or 1 */
    const int64_t *place;    /* (T, axes): what keys and queries are rotated by */
    int64_t outputs;
    const int64_t *output;   /* (outputs,): the tokens whose logits are wanted */
} Tokens;

#define ALONE 4   /* with no more tokens than this each thread computes all norms: quicker than waiting for the others */
#define RUN 8     /* tokens of a row that attend together, so that keys and values are read once for all of them */

typedef struct {
    float *x, *added, *q, *k, *v, *gate, *up, *triple, *z, *b, *a, *cosine, *sine, *mixed, *partial, *shared_inputs, *own;
    int64_t own_floats;    /* of each thread: hidden states, a normed row, inputs, */
    int64_t mixing_floats; /* and at the end what it mixes tokens in: queries and sums of a run, or a window's numbers */
    int64_t *run;       /* (runs + 1,): the first token of each run */
    int64_t *row;       /* (rows + 1,): the first token of each row */
    int64_t runs, rows, most_chunks;
    int separate;       /* some row has several tokens: their keys are written before any attends */
} Scratch;

/* Attention's chunks of one token: small ones while threads have little to share, then long ones, which memory reads
 * faster. By the token's own position: its result does not depend on the tokens beside it. */
static inline int64_t chunk_of(int64_t length) { return length <= 512 ? 32 : MOST_CHUNK; }
static inline int64_t chunks_of(int64_t length) { return (length + chunk_of(length) - 1) / chunk_of(length); }

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Numbers of a token that mixing gives, at most. */
static inline int64_t mixed_width_of(const Model *m) {
    return larger(larger(m->heads * m->head_dim, m->width), m->delta_heads * m->value_dim);
}

/* Floats that `apply_delta` needs: keys, queries and values of a window's tokens, their rates and decays, and what
 * the rule does. */
static inline int64_t delta_floats(const Model *m) {
    return WINDOW * (2 * m->key_dim + m->value_dim + 2) + rule_floats(m->key_dim, m->value_dim);
}

static int64_t lay_out(const Model *m, const Tokens *t, int64_t threads, float *base, Scratch *s) {
    int64_t q_width = m->heads * m->head_dim, kv_width = m->kv_heads * m->head_dim, n = t->count;
    int64_t at = 0, longest = 1, mixed_width = mixed_width_of(m);
    for (int64_t i = 0; i < n; i++) {
        int64_t chunks = chunks_of(t->position[i] + 1);
        longest = chunks > longest ? chunks : longest;
    }
    s->most_chunks = longest;
    #define TAKE(floats) (at += round_up(floats, 16), base ? base + at - round_up(floats, 16) : NULL)
    s->x = TAKE(n * m->width);
    s->added = TAKE(n * m->width);
    s->q = TAKE(n * q_width * (1 + m->gated));
    s->k = TAKE(n * kv_width);
    s->v = TAKE(n * kv_width);
    s->gate = TAKE(n * m->inner);
    s->up = TAKE(n * m->inner);
    s->triple = TAKE(n * m->mixed);
    s->z = TAKE(n * m->delta_heads * m->value_dim);
    s->b = TAKE(n * m->delta_heads);
    s->a = TAKE(n * m->delta_heads);
    s->cosine = TAKE(n * m->rotated / 2);
    s->sine = TAKE(n * m->rotated / 2);
    s->mixed = TAKE(n * mixed_width);
    s->partial = TAKE(n * m->heads * longest * (m->head_dim + 2));
    s->run = (int64_t *)TAKE(2 * (n + 1));
    s->row = (int64_t *)TAKE(2 * (n + 1));
    int64_t widest = larger(m->inner, mixed_width), few = n <= ALONE ? n : 0;
    s->shared_inputs = TAKE(input_floats(n, widest));
    s->mixing_floats = RUN * (m->heads / m->kv_heads) * (2 * m->head_dim + 2);
    s->mixing_floats = round_up(larger(s->mixing_floats, m->delta_heads ? delta_floats(m) : 0), 16);
    s->own_floats = round_up(few * (m->width + mixed_width) + widest + input_floats(few, widest), 16) + 16;
    s->own_floats += s->mixing_floats;
    s->own = TAKE(threads * s->own_floats);
    #undef TAKE
    return at;
}

/* Floats of scratch that a pass needs. */
int64_t ocelli_scratch_floats(const Model *m, const Tokens *t, int64_t threads) {
    Scratch scratch;
    return lay_out(m, t, threads, NULL, &scratch) + 16;
}

static void find_runs(const Tokens *t, Scratch *s) {
    s->runs = s->rows = 0;
    s->separate = 0;
    for (int64_t i = 0; i < t->count; i++) {
        int same_row = i && t->row[i] == t->row[i - 1];
        s->separate |= same_row;
        if (!same_row) s->row[s->rows++] = i;
        int joins = same_row && i - s->run[s->runs - 1] < RUN &&
                    chunk_of(t->position[i] + 1) == chunk_of(t->position[i - 1] + 1);
        if (!joins) s->run[s->runs++] = i;
    }
    s->run[s->runs] = s->row[s->rows] = t->count;
}

static __attribute__((noinline)) void rms_norm(const float *x, const float *w, float eps, int64_t n, float *y) {
    float factor = 1.0f / sqrtf(squares_of(x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = w[i] * (x[i] * factor);
}

/* Norm, where the model has one, and rotate one head of a token, in place. */
static inline void turn(const Model *m, const Scratch *s, int64_t token, const float *norm, float *head) {
    int64_t half = m->rotated / 2;
    if (norm) rms_norm(head, norm, m->eps, m->head_dim, head);
    rotate(head, s->cosine + token * half, s->sine + token * half, m->rotated);
}

/* Turn the key of one token's head, and write it and its value into the cache. */
static void write_cache(const Model *m, const Layer *layer, const Scratch *s, const Tokens *t, int64_t token,
                        int64_t head, int64_t capacity) {
    int64_t dim = m->head_dim, unit = token * m->kv_heads + head;
    float *key = s->k + unit * dim, *value = s->v + unit * dim;
    int64_t slot = ((t->row[token] * m->kv_heads + head) * capacity + t->position[token]) * dim;
    turn(m, s, token, layer->k_norm, key);
    for (int64_t i = 0; i < dim; i++) {
        layer->key[slot + i] = TO_CACHED(key[i]);
        layer->value[slot + i] = TO_CACHED(value[i]);
    }
}

/* Attention of the tokens of a run over one chunk of their row's key head. room: mixing_floats. */
static void attend_unit(const Model *m, const Layer *layer, const Scratch *s, const Tokens *t, int64_t run,
                        int64_t head, int64_t chunk, int64_t capacity, float *room) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, first = s->run[run], end = s->run[run + 1];
    int64_t longest = t->position[end - 1] + 1, size = chunk_of(longest), from = chunk * size;
    int64_t to = from + size < longest ? from + size : longest, stride = dim + 2;
    if (from >= longest) return;
    if (!s->separate && to == longest) write_cache(m, layer, s, t, first, head, capacity);
    int64_t at = ((t->row[first] * m->kv_heads + head) * capacity + from) * dim;
    float *q = room, *out = q + RUN * group * dim; /* a config may ask for more heads than fit on a stack */
    while (first < end && t->position[first] < from) first++;
    for (int64_t i = first; i < end; i++) {
        float *own = q + (i - first) * group * dim;
        const float *queries = s->q + (i * m->kv_heads + head) * group * dim * (1 + m->gated);
        for (int64_t g = 0; g < group; g++) {
            memcpy(out, queries + g * dim * (1 + m->gated), dim * sizeof(float));
            turn(m, s, i, layer->q_norm, out);
            arrange(out, dim, own + g * dim);
        }
    }
    for (int64_t i = first, next; i < end; i = next) { /* tokens that see equally much of the chunk */
        int64_t seen = t->position[i] + 1 < to ? t->position[i] + 1 : to;
        next = i + 1;
        while (next < end && seen == to && t->position[next] + 1 >= to) next++;
        attend_chunk(q + (i - first) * group * dim, layer->key + at, layer->value + at, seen - from, (next - i) * group,
                     dim, out);
        for (int64_t j = 0; j < (next - i) * group; j++) {
            int64_t unit = (i + j / group) * m->kv_heads + head;
            memcpy(s->partial + ((unit * group + j % group) * s->most_chunks + chunk) * stride, out + j * stride,
                   stride * sizeof(float));
        }
    }
}

/* Attention of every token. Returns where the result (T, H * D_h) is, for the thread that asks, or NULL if it is no
 * longer needed. room: mixing_floats. */
static const float *attention(const Model *m, const Layer *layer, const Scratch *s, const Tokens *t, int64_t capacity,
                              float *own, float *room, Member *me) {
    int64_t dim = m->head_dim, n = t->count, stride = dim + 2, unit;
    if (s->separate) {
        while ((unit = next_unit(me, n * m->kv_heads)) >= 0)
            write_cache(m, layer, s, t, unit / m->kv_heads, unit % m->kv_heads, capacity);
        if (!regroup(me)) return NULL;
    }
    while ((unit = next_unit(me, s->runs * m->kv_heads * s->most_chunks)) >= 0) {
        int64_t chunk = unit % s->most_chunks, head = unit / s->most_chunks % m->kv_heads;
        attend_unit(m, layer, s, t, unit / s->most_chunks / m->kv_heads, head, chunk, capacity, room);
    }
    if (!regroup(me)) return NULL;
    int64_t from = 0, to = n * m->heads;
    int together = !own || to * s->most_chunks > 256; /* else merging is quicker than waiting */
    float *out = together ? s->mixed : own;
    if (together) share(me, n * m->heads, &from, &to);
    for (int64_t head = from; head < to; head++) {
        float *merged = out + head * dim;
        merge_chunks(s->partial + head * s->most_chunks * stride, chunks_of(t->position[head / m->heads] + 1), stride,
                     dim, room, merged);
        const float *gate = s->q + (2 * head + 1) * dim;
        for (int64_t i = 0; m->gated && i < dim; i++) merged[i] /= 1.0f + exponential(-gate[i]);
    }
    return together && !regroup(me) ? NULL : out;
}

/* A short convolution of tokens from … to - 1, out (T, D). What lies before this pass is in the cache, into which the
 * inputs of the tokens write … written - 1 go. */
static void convolve(const Model *m, const Layer *layer, const Scratch *s, const Tokens *t, int64_t capacity,
                     int64_t from, int64_t to, int64_t write, int64_t written, float *out) {
    int64_t width = m->width, last = layer->taps - 1;
    for (int64_t i = write; i < written; i++) {
        const float *gate = s->triple + 3 * i * width, *value = gate + 2 * width;
        cached *slot = layer->conv + (t->row[i] * capacity + t->position[i]) * width;
        for (int64_t j = 0; j < width; j++) slot[j] = TO_CACHED(gate[j] * value[j]);
    }
    for (int64_t i = from; i < to; i++) {
        const float *gate = s->triple + 3 * i * width, *value = gate + 2 * width, *tap = layer->convolution + last * width;
        float *y = out + i * width;
        for (int64_t j = 0; j < width; j++) y[j] = gate[j] * value[j] * tap[j];
        for (int64_t back = 1; back <= last && back <= t->position[i]; back++) {
            tap -= width;
            if (i >= back && t->row[i - back] == t->row[i]) { /* as the cache will have it, which others write */
                const float *before = gate - 3 * back * width, *its = before + 2 * width;
                for (int64_t j = 0; j < width; j++) y[j] += CACHED_VALUE(TO_CACHED(before[j] * its[j])) * tap[j];
            } else {
                const cached *slot = layer->conv + (t->row[i] * capacity + t->position[i] - back) * width;
                for (int64_t j = 0; j < width; j++) y[j] += CACHED_VALUE(slot[j]) * tap[j];
            }
        }
        for (int64_t j = 0; layer->conv_bias && j < width; j++) y[j] += layer->conv_bias[j];
        for (int64_t j = 0; j < width; j++) y[j] *= gate[width + j];
    }
}

/* silu of the convolution of `count` channels, whole vectors, from `channel` on of token i, whose row begins in this pass with token
 * `first`: (count,). What lies before that is in the cache. */
static void convolve_channels(const Layer *layer, const Scratch *s, const Tokens *t, int64_t first, int64_t i,
                              int64_t channel, int64_t count, float *out) {
    int64_t wide = layer->mix.rows, at = t->position[i], taps = at + 1 < layer->taps ? at + 1 : layer->taps;
    const float *tap = layer->convolution + (layer->taps - 1) * wide + channel, *before[WINDOW];
    for (int64_t back = 0; back < taps; back++)
        before[back] = i - back >= first ? s->triple + (i - back) * wide + channel
                                         : layer->inputs + (t->row[i] * RING + (at - back) % RING) * wide + channel;
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

/* The gated delta rule of a row's tokens [first, end) for the value heads of one key head; the result (T, H_d * D_v).
 * A window at a time, and nobody else reads or writes these channels and heads. room: mixing_floats. */
static void apply_delta(const Model *m, const Layer *layer, const Scratch *s, const Tokens *t, int64_t first, int64_t end,
                        int64_t head, float *room) {
    int64_t kd = m->key_dim, vd = m->value_dim, each = m->delta_heads / m->delta_keys, wide = layer->mix.rows;
    int64_t row = t->row[first], entry = kd + vd + 1, keys = m->delta_keys * kd, values = m->delta_heads * vd;
    float *x = room, *value = x + RING * kd, *decay = value + WINDOW * vd, *rate = decay + WINDOW, *rest = rate + WINDOW;
    for (int64_t i = first, to; i < end; i = to) {
        int64_t window = t->position[i] / WINDOW, place = t->position[i] % WINDOW;
        to = i + WINDOW - place < end ? i + WINDOW - place : end;
        for (int64_t j = i; j < to; j++) {
            float *key = x + 2 * (j - i) * kd, *query = key + kd;
            convolve_channels(layer, s, t, first, j, keys + head * kd, kd, key);
            convolve_channels(layer, s, t, first, j, head * kd, kd, query);
            set_length(key, kd, 1);
            set_length(query, kd, 1 / sqrtf((float)kd));
        }
        for (int64_t h = head * each; h < (head + 1) * each; h++) {
            for (int64_t j = i; j < to; j++) {
                float a = s->a[j * m->delta_heads + h] + layer->a_bias[h];
                convolve_channels(layer, s, t, first, j, 2 * keys + h * vd, vd, value + (j - i) * vd);
                decay[j - i] = layer->a_scale[h] * (a > 20 ? a : log1pf(expf(a)));
                rate[j - i] = 1 / (1 + expf(-s->b[j * m->delta_heads + h]));
            }
            int64_t unit = row * m->delta_heads + h;
            float *matrix = layer->state + 2 * unit * kd * vd;
            Rule rule = {kd, vd, entry, window ? matrix + window % 2 * kd * vd : NULL, matrix + (window + 1) % 2 * kd * vd,
                         layer->recent + (unit * RING + window % 2 * WINDOW) * entry};
            delta_rule(&rule, place, to - i, x, value, decay, rate, rest, s->mixed + i * values + h * vd, values);
            for (int64_t j = i; j < to; j++) {
                float *out = s->mixed + j * values + h * vd;
                const float *z = s->z + j * values + h * vd;
                rms_norm(out, layer->value_norm, m->eps, vd, out);
                for (int64_t c = 0; c < vd; c++) out[c] *= z[c] / (1.0f + exponential(-z[c]));
            }
        }
    }
    int64_t from[3] = {head * kd, keys + head * kd, 2 * keys + head * each * vd}, count[3] = {kd, kd, each * vd};
    for (int64_t i = larger(first, end - RING); i < end; i++)
        for (int part = 0; part < 3; part++)
            memcpy(layer->inputs + (row * RING + t->position[i] % RING) * wide + from[part], s->triple + i * wide + from[part],
                   count[part] * sizeof(float));
}

/* gate = silu(gate) * up */
static __attribute__((noinline)) void gated(float *gate, const float *up, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

/* What is given of token i: its embedding, and then what is added after each of the first layers. */
static inline const float *given(const Model *m, const Tokens *t, int64_t i, int64_t part) {
    return t->embedding + (i * (1 + t->deep) + part) * m->width;
}

/* The hidden state that token i begins with. */
static void begin_token(const Model *m, const Tokens *t, int64_t i, float *x) {
    if (t->id) embed(m->embedding, t->id[i], x + i * m->width);
    else memcpy(x + i * m->width, given(m, t, i, 0), m->width * sizeof(float));
}

/* A thread's part in a pass. With few tokens (`alone`) every thread has hidden states and inputs of its own, and makes all
 * of them; else those of tokens [mine, end). */
typedef struct {
    const Model *m;
    const Tokens *t;
    const Scratch *s;
    Member *me;
    int64_t capacity, mine, end;
    int alone;
    float *x, *mixed, *normed, *heads, *room; /* mixed: NULL where they share it */
} Work;

/* Wait for the others. 0 if this thread is no longer needed. */
static int meet(Work *w) {
    return w->alone ? regroup(w->me) : regroup_and_share(w->me, w->t->count, &w->mine, &w->end);
}
static int meet_unless_alone(Work *w) { return w->alone || meet(w); }

static void add_to_x(const Work *w) {
    for (int64_t i = w->mine * w->m->width; i < w->end * w->m->width; i++) w->x[i] += w->s->added[i];
}

/* The normed hidden states as inputs of the next products. */
static Inputs norm_inputs(const Work *w, const float *norm) {
    int64_t width = w->m->width;
    Inputs in = inputs_at(w->room, w->t->count, width, PRECISE_HALVES);
    for (int64_t i = w->mine; i < w->end; i++) {
        rms_norm(w->x + i * width, norm, w->m->eps, width, w->normed);
        set_input(in, i, w->normed, width);
    }
    return in;
}

/* What a layer mixes of its tokens, (T, columns of `o`), or NULL if this thread is no longer needed. */
static const float *mix(Work *w, const Layer *layer, Inputs in) {
    const Scratch *s = w->s;
    int64_t from, to;
    if (layer->taps) product(layer->mix, in, (Output){s->triple, layer->mix.rows, 0}, w->me);
    if (layer->value_norm) {
        product(layer->z, in, (Output){s->z, layer->z.rows, 0}, w->me);
        product(layer->b, in, (Output){s->b, layer->b.rows, 0}, w->me);
        product(layer->a, in, (Output){s->a, layer->a.rows, 0}, w->me);
        if (!meet(w)) return NULL;
        for (int64_t unit; (unit = next_unit(w->me, s->rows * w->m->delta_keys)) >= 0;) {
            const int64_t *row = s->row + unit / w->m->delta_keys;
            apply_delta(w->m, layer, s, w->t, row[0], row[1], unit % w->m->delta_keys, w->heads);
        }
        return meet(w) ? s->mixed : NULL;
    }
    if (layer->taps) {
        if (!meet(w)) return NULL;
        float *out = w->alone ? w->mixed : s->mixed;
        share(w->me, w->t->count, &from, &to);
        convolve(w->m, layer, s, w->t, w->capacity, w->mine, w->end, from, to, out);
        return out;
    }
    product(layer->q, in, (Output){s->q, layer->q.rows, 0}, w->me);
    product(layer->k, in, (Output){s->k, layer->k.rows, 0}, w->me);
    product(layer->v, in, (Output){s->v, layer->v.rows, 0}, w->me);
    if (!meet(w)) return NULL;
    const float *attended = attention(w->m, layer, s, w->t, w->capacity, w->mixed, w->heads, w->me);
    if (attended && !w->alone) share(w->me, w->t->count, &w->mine, &w->end);
    return attended;
}

/* added = down(silu(gate) * up). 0 if this thread is no longer needed. */
static int feed_forward(Work *w, const Layer *layer, Inputs in) {
    const Scratch *s = w->s;
    int64_t inner = w->m->inner, n = w->t->count, from, to;
    product(layer->gate, in, (Output){s->gate, inner, 0}, w->me);
    product(layer->up, in, (Output){s->up, inner, 0}, w->me);
    if (evenly_shared(in)) { /* this thread made both */
        share(w->me, panels_of(layer->gate), &from, &to);
        to = to * PANEL < inner ? to * PANEL : inner;
        for (int64_t i = 0; i < n; i++) gated(s->gate + i * inner, s->up + i * inner, from * PANEL, to);
    } else {
        if (!meet(w)) return 0;
        share(w->me, n * inner, &from, &to);
        gated(s->gate, s->up, from, to);
    }
    if (!meet(w)) return 0;
    in = inputs_at(w->room, n, inner, PRECISE_HALVES);
    set_inputs(in, w->mine, w->end, s->gate, inner);
    if (!meet_unless_alone(w)) return 0;
    product(layer->down, in, (Output){s->added, w->m->width, 0}, w->me);
    return meet(w);
}

/* What each thread does of a pass. */
static void forward(const Model *m, const Tokens *t, const Scratch *s, int64_t capacity, float *logits, Member *me) {
    int64_t width = m->width, n = t->count, mixed_width = mixed_width_of(m), widest = larger(m->inner, mixed_width);
    float *own = s->own + me->id * s->own_floats;
    Work w = {m, t, s, me, capacity, .end = n, .alone = n <= ALONE, .x = s->x, .normed = own, .room = s->shared_inputs};
    w.heads = own + s->own_floats - s->mixing_floats;
    if (w.alone) {
        w.x = own, w.mixed = own + n * width, w.normed = own + n * (width + mixed_width);
        w.room = w.normed + round_up(widest, 16);
    }
    for (int64_t i; (i = next_unit(me, n)) >= 0;) {
        for (int64_t j = 0; j < m->rotated / 2; j++) {
            float angle = (float)t->place[i * t->axes + (t->axes > 1 ? m->axis[j] : 0)] * m->inv_freq[j];
            s->cosine[i * m->rotated / 2 + j] = cosf(angle);
            s->sine[i * m->rotated / 2 + j] = sinf(angle);
        }
        if (!w.alone) begin_token(m, t, i, w.x);
    }
    for (int64_t i = 0; w.alone && i < n; i++) begin_token(m, t, i, w.x);
    if (!meet(&w)) return;
    for (int64_t l = 0; l < m->layers; l++) {
        const Layer *layer = m->layer + l;
        Inputs in = norm_inputs(&w, layer->input_norm);
        if (!meet_unless_alone(&w)) return;
        const float *mixed = mix(&w, layer, in);
        if (!mixed) return;
        in = inputs_at(w.room, n, layer->o.columns, PRECISE_HALVES);
        set_inputs(in, w.mine, w.end, mixed, layer->o.columns);
        if (!meet_unless_alone(&w)) return;
        product(layer->o, in, (Output){s->added, width, 0}, me);
        if (!meet(&w)) return;
        add_to_x(&w);
        in = norm_inputs(&w, layer->post_norm);
        if (!meet_unless_alone(&w) || !feed_forward(&w, layer, in)) return;
        add_to_x(&w);
        for (int64_t i = w.mine; l < t->deep && i < w.end; i++)
            for (int64_t j = 0; j < width; j++) w.x[i * width + j] += given(m, t, i, l + 1)[j];
    }
    if (!meet_unless_alone(&w) || !t->outputs) return;
    Inputs in = inputs_at(w.room, t->outputs, width, PRECISE_HALVES); /* at most as many as tokens */
    w.mine = 0, w.end = t->outputs;
    if (!w.alone) share(me, t->outputs, &w.mine, &w.end);
    for (int64_t i = w.mine; i < w.end; i++) {
        rms_norm(w.x + t->output[i] * width, m->final_norm, m->eps, width, w.normed);
        set_input(in, i, w.normed, width);
    }
    if (meet_unless_alone(&w)) product(m->head, in, (Output){logits, m->vocab, 0}, me);
}

/* logits: (outputs, V). Each token's key and value are written into the cache at its position. */
void ocelli_forward(const Model *m, const Tokens *t, int64_t capacity, Pass *pass, float *base, float *logits) {
    Scratch s;
    lay_out(m, t, pass->threads, (float *)(((uintptr_t)base + 63) / 64 * 64), &s);
    find_runs(t, &s);
    WITH_TEAM(pass, forward(m, t, &s, capacity, logits, &me))
}
