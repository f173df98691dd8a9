/* One decode step of a Llama-style decoder on a CPU: a token for each row in, its logits out.
 *
 * At batch 1 a step reads every weight once, so the aim is to read memory as fast as the machine can and
 * to wait for nothing in between: one parallel region for the whole step, weights streamed in the precision
 * they are stored in, activations in float32 (in 16-bit integers where they meet int8 weights). Compiled by
 * step.py, once for each weight type (WEIGHT_BITS 32: float, 16: bfloat16, 8: int8 with one scale an output
 * row) and cache type (CACHE_BITS 32 or 16).
 */
#include "attention.h"
#include "products.h"

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

/* What threads share, and what each has for itself: computing a norm twice is quicker than waiting for it. */
typedef struct {
    float *added, *q, *k, *v, *gate, *up, *cosine, *sine, *mixed, *partial, *own;
    int64_t own_floats; /* of each thread: hidden states, normed ones, what attention mixed */
} Scratch;

/* Attention's chunks of one row: small ones while threads have little to share, then long ones, which memory
 * reads faster. By the row's own length: its result does not depend on the rows beside it. */
static inline int64_t chunk_of(int64_t length) { return length <= 512 ? 32 : MOST_CHUNK; }
static inline int64_t chunks_of(int64_t length) { return (length + chunk_of(length) - 1) / chunk_of(length); }
#define MOST_CHUNKS(length) (16 + (length) / MOST_CHUNK)

static int64_t lay_out(const Model *m, int64_t batch, int64_t capacity, int64_t threads, float *base, Scratch *s) {
    int64_t q_width = m->heads * m->head_dim, kv_width = m->kv_heads * m->head_dim;
    int64_t at = 0;
    #define TAKE(floats) (at += ((floats) + 15) / 16 * 16, base + at - ((floats) + 15) / 16 * 16)
    s->added = TAKE(batch * m->width);
    s->q = TAKE(batch * q_width);
    s->k = TAKE(batch * kv_width);
    s->v = TAKE(batch * kv_width);
    s->gate = TAKE(batch * m->inner);
    s->up = TAKE(batch * m->inner);
    s->cosine = TAKE(batch * m->head_dim / 2);
    s->sine = TAKE(batch * m->head_dim / 2);
    s->mixed = TAKE(batch * q_width);
    s->partial = TAKE(batch * m->heads * MOST_CHUNKS(capacity) * (m->head_dim + 2));
    int64_t widest = m->inner > q_width ? m->inner : q_width;
    widest = m->width > widest ? m->width : widest;
    s->own_floats = (batch * (2 * m->width + q_width) + INPUT_FLOATS(batch, widest) + 31) / 16 * 16;
    s->own = TAKE(threads * s->own_floats);
    #undef TAKE
    return at;
}

/* Floats of scratch that a step needs, for the caller to allocate once. */
int64_t ocelli_scratch_floats(const Model *m, int64_t batch, int64_t capacity, int64_t threads) {
    Scratch scratch;
    return lay_out(m, batch, capacity, threads, (float *)0 + 16, &scratch) + 32;
}

/* Attention over one chunk of one row's key head. The last chunk writes this token's key and value first. */
static void attend_unit(const Model *m, const Layer *layer, const Scratch *s, int64_t unit, int64_t chunk,
                        int64_t length, int64_t capacity, float *partial) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, b = unit / m->kv_heads;
    int64_t size = chunk_of(length), from = chunk * size, to = from + size < length ? from + size : length;
    const float *cosine = s->cosine + b * dim / 2, *sine = s->sine + b * dim / 2;
    float q[group * dim];
    memcpy(q, s->q + unit * group * dim, group * dim * sizeof(float));
    for (int64_t g = 0; g < group; g++) rotate(q + g * dim, cosine, sine, dim);
    if (to == length) {
        float *key = s->k + unit * dim, *value = s->v + unit * dim;
        int64_t slot = (unit * capacity + length - 1) * dim;
        rotate(key, cosine, sine, dim);
        for (int64_t i = 0; i < dim; i++) {
            layer->key[slot + i] = TO_CACHED(key[i]);
            layer->value[slot + i] = TO_CACHED(value[i]);
        }
    }
    int64_t first = (unit * capacity + from) * dim;
    attend_chunk(q, layer->key + first, layer->value + first, to - from, group, dim, partial);
}

/* Attention of every row. Returns where the result (B, H * D_h) is, for the thread that asks. */
static const float *attention(const Model *m, const Layer *layer, const Scratch *s, const int64_t *position,
                              int64_t batch, int64_t capacity, int64_t most, float *own) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, units = batch * m->kv_heads;
    int64_t stride = group * (dim + 2);
    #pragma omp for schedule(dynamic) collapse(2)
    for (int64_t unit = 0; unit < units; unit++)
        for (int64_t c = 0; c < most; c++) {
            int64_t length = position[unit / m->kv_heads] + 1;
            if (c < chunks_of(length))
                attend_unit(m, layer, s, unit, c, length, capacity, s->partial + (unit * most + c) * stride);
        }
    int64_t from = 0, to = batch * m->heads, together = to * most > 256; /* else merging is quicker than waiting */
    float *out = together ? s->mixed : own;
    if (together) share(batch * m->heads, &from, &to);
    for (int64_t head = from; head < to; head++) {
        int64_t unit = head / group, length = position[unit / m->kv_heads] + 1;
        merge_chunks(s->partial + unit * most * stride + head % group * (dim + 2), chunks_of(length),
                     stride, dim, out + head * dim);
    }
    if (together) {
        #pragma omp barrier
    }
    return out;
}

static void embed(const Model *m, const int64_t *token, int64_t batch, float *x) {
    for (int64_t b = 0; b < batch; b++) {
        const weight *row = m->embedding.data + token[b] * m->width;
        float scale = m->embedding.scale ? m->embedding.scale[token[b]] : 1.0f;
        for (int64_t i = 0; i < m->width; i++) x[b * m->width + i] = WEIGHT_VALUE(row[i]) * scale;
    }
}

/* token, position: (B,). logits: (B, V). Every row's cache holds `position` entries and gains one. */
void ocelli_decode(const Model *m, const int64_t *token, const int64_t *position, int64_t batch,
                   int64_t capacity, int64_t threads, float *base, float *logits) {
    int64_t width = m->width, dim = m->head_dim, q_width = m->heads * dim, kv_width = m->kv_heads * dim;
    int64_t most = 0; /* chunks of a row */
    Scratch s;
    lay_out(m, batch, capacity, threads, (float *)(((uintptr_t)base + 63) / 64 * 64), &s);
    for (int64_t b = 0; b < batch; b++) {
        for (int64_t i = 0; i < dim / 2; i++) {
            s.cosine[b * dim / 2 + i] = cosf((float)position[b] * m->inv_freq[i]);
            s.sine[b * dim / 2 + i] = sinf((float)position[b] * m->inv_freq[i]);
        }
        int64_t chunks = chunks_of(position[b] + 1);
        most = chunks > most ? chunks : most;
    }
    #pragma omp parallel num_threads((int)threads)
    {
        float *x = s.own + omp_get_thread_num() * s.own_floats, *normed = x + batch * width;
        float *mixed = normed + batch * width, *room = mixed + batch * q_width;
        Inputs in;
        int64_t from, to;
        embed(m, token, batch, x);
        for (int64_t l = 0; l < m->layers; l++) {
            const Layer *layer = m->layer + l;
            rms_norm(x, layer->input_norm, m->eps, width, batch, normed);
            in = prepare(normed, width, batch, room);
            multiply(layer->q, q_width, in, s.q);
            multiply(layer->k, kv_width, in, s.k);
            multiply(layer->v, kv_width, in, s.v);
            #pragma omp barrier
            const float *attended = attention(m, layer, &s, position, batch, capacity, most, mixed);
            multiply(layer->o, width, prepare(attended, q_width, batch, room), s.added);
            #pragma omp barrier
            for (int64_t i = 0; i < batch * width; i++) x[i] += s.added[i];
            rms_norm(x, layer->post_norm, m->eps, width, batch, normed);
            share(m->inner, &from, &to);
            in = prepare(normed, width, batch, room);
            multiply_rows(layer->gate, from, to, in, s.gate, m->inner);
            multiply_rows(layer->up, from, to, in, s.up, m->inner);
            for (int64_t b = 0; b < batch; b++)
                for (int64_t i = b * m->inner + from; i < b * m->inner + to; i++)
                    s.gate[i] = s.gate[i] / (1.0f + exponential(-s.gate[i])) * s.up[i];
            #pragma omp barrier
            multiply(layer->down, width, prepare(s.gate, m->inner, batch, room), s.added);
            #pragma omp barrier
            for (int64_t i = 0; i < batch * width; i++) x[i] += s.added[i];
        }
        rms_norm(x, m->final_norm, m->eps, width, batch, normed);
        multiply(m->head, m->vocab, prepare(normed, width, batch, room), logits);
    }
}
