/* Attention, grouped-query, of any width of heads. */
#pragma once
#include "attention.h"
#include "layers.h"

typedef struct {
    Matrix q, k, v; /* k and v have no rows where another layer writes the keys and values that this one reads */
    const float *q_norm, *k_norm, *v_norm; /* (D_h,), of each head before it is rotated; NULL where there are none */
    cached *key, *value; /* (B, H_kv, S, D_h), contiguous along D_h and S */
    int64_t heads, kv_heads, head_dim;
    int64_t gated;  /* queries come with gates, head by head */
    int64_t window; /* how many positions a token sees, its own included; 0: all */
    int64_t first, pairs, apart; /* `pairs` frequencies from `first` on turn numbers of a head, which lie `apart` */
} Attention;

/* Attention's chunks of one token: small ones while threads have little to share, then long ones, which memory reads
 * faster. By the token's own position: its result does not depend on the tokens beside it. */
static inline int64_t chunk_of(int64_t length) { return length <= 512 ? 32 : MOST_CHUNK; }

/* The first position that a token sees, and the chunk that has it. */
static inline int64_t seen_from(const Attention *a, int64_t position) {
    return a->window && position >= a->window ? position + 1 - a->window : 0;
}
static inline int64_t first_chunk(const Attention *a, int64_t position) {
    return seen_from(a, position) / chunk_of(position + 1);
}

/* Chunks that tokens see which are at most `RUN` places apart. */
static inline int64_t most_chunks(const Attention *a, const Tokens *t) {
    int64_t most = 1;
    for (int64_t i = 0; i < t->count; i++) {
        int64_t position = t->position[i], least = larger(0, position + 1 - RUN), size = chunk_of(position + 1);
        most = larger(most, position / size - seen_from(a, least) / size + 1);
    }
    return most;
}

static int64_t attention_floats(const void *mixer, const Tokens *t) {
    const Attention *a = mixer;
    int64_t keys = a->kv_heads * a->head_dim, chunked = a->heads * most_chunks(a, t) * (a->head_dim + 2);
    return t->count * (a->q.rows + 2 * keys + chunked);
}

static int64_t attention_own_floats(const void *mixer) {
    const Attention *a = mixer;
    return RUN * (a->heads / a->kv_heads) * (2 * a->head_dim + 2);
}

/* What its products make of the tokens of a pass, and the chunks' results. */
typedef struct {
    const Attention *a;
    float *q, *k, *v, *partial;
    int64_t most_chunks;
} Attended;

/* Norm, where the model has one, and rotate one head of a token, in place. */
static inline void turn(const Work *w, const Attention *a, int64_t token, const float *norm, float *head) {
    int64_t at = token * w->m->frequencies + a->first;
    if (norm) rms_norm(head, norm, w->m->eps, a->head_dim, head);
    rotate(head, w->s->cosine + at, w->s->sine + at, a->pairs, a->apart);
}

/* Turn the key of one token's head, and write it and its value into the cache. */
static void write_cache(const Work *w, const Attended *of, int64_t token, int64_t head) {
    const Attention *a = of->a;
    const Tokens *t = w->t;
    int64_t dim = a->head_dim, unit = token * a->kv_heads + head;
    float *key = of->k + unit * dim, *value = of->v + unit * dim;
    int64_t slot = ((t->row[token] * a->kv_heads + head) * w->capacity + t->position[token]) * dim;
    turn(w, a, token, a->k_norm, key);
    if (a->v_norm) rms_norm(value, a->v_norm, w->m->eps, dim, value);
    for (int64_t i = 0; i < dim; i++) {
        a->key[slot + i] = TO_CACHED(key[i]);
        a->value[slot + i] = TO_CACHED(value[i]);
    }
}

/* Attention of the tokens of a run over one chunk of their row's key head, the `nth` that the first of them sees. */
static void attend_unit(const Work *w, const Attended *of, int64_t run, int64_t head, int64_t nth) {
    const Attention *a = of->a;
    const Tokens *t = w->t;
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads, first = w->s->run[run], end = w->s->run[run + 1];
    int64_t longest = t->position[end - 1] + 1, size = chunk_of(longest), stride = dim + 2;
    int64_t chunk = first_chunk(a, t->position[first]) + nth, from = chunk * size, to = smaller(from + size, longest);
    if (from >= longest) return;
    if (!w->s->separate && to == longest && a->k.rows) write_cache(w, of, first, head);
    int64_t at = (t->row[first] * a->kv_heads + head) * w->capacity;
    float *q = w->mixing, *out = q + RUN * group * dim; /* a config may ask for more heads than fit on a stack */
    while (first < end && t->position[first] < from) first++;
    while (first < end && seen_from(a, t->position[end - 1]) >= to) end--;
    for (int64_t i = first; i < end; i++) {
        float *own = q + (i - first) * group * dim;
        const float *queries = of->q + (i * a->kv_heads + head) * group * dim * (1 + a->gated);
        for (int64_t g = 0; g < group; g++) {
            memcpy(out, queries + g * dim * (1 + a->gated), dim * sizeof(float));
            turn(w, a, i, a->q_norm, out);
            arrange(out, dim, own + g * dim);
        }
    }
    for (int64_t i = first, next; i < end; i = next) { /* tokens that see the same of the chunk */
        int64_t begin = larger(from, seen_from(a, t->position[i])), seen = smaller(t->position[i] + 1, to);
        next = i + 1;
        while (next < end && smaller(t->position[next] + 1, to) == seen &&
               larger(from, seen_from(a, t->position[next])) == begin) next++;
        attend_chunk(q + (i - first) * group * dim, a->key + (at + begin) * dim, a->value + (at + begin) * dim,
                     seen - begin, (next - i) * group, dim, out);
        for (int64_t j = 0; j < (next - i) * group; j++) {
            int64_t token = i + j / group, unit = (token * a->kv_heads + head) * group + j % group;
            int64_t place = unit * of->most_chunks + chunk - first_chunk(a, t->position[token]);
            memcpy(of->partial + place * stride, out + j * stride, stride * sizeof(float));
        }
    }
}

static const float *mix_attention(Work *w, const void *mixer, Inputs in) {
    const Attention *a = mixer;
    const Scratch *s = w->s;
    int64_t dim = a->head_dim, n = w->t->count, keys = n * a->kv_heads * dim, stride = dim + 2, unit, most = most_chunks(a, w->t);
    Attended of = {a, s->made, s->made + n * a->q.rows, .most_chunks = most};
    of.v = of.k + keys, of.partial = of.v + keys;
    make(w, a->q, in, of.q);
    if (a->k.rows) {
        make(w, a->k, in, of.k);
        make(w, a->v, in, of.v);
    }
    if (!meet(w)) return NULL;
    if (s->separate && a->k.rows) {
        while ((unit = next_unit(w->me, n * a->kv_heads)) >= 0) write_cache(w, &of, unit / a->kv_heads, unit % a->kv_heads);
        if (!regroup(w->me)) return NULL;
    }
    while ((unit = next_unit(w->me, s->runs * a->kv_heads * most)) >= 0)
        attend_unit(w, &of, unit / most / a->kv_heads, unit / most % a->kv_heads, unit % most);
    if (!regroup(w->me)) return NULL;
    int64_t from = 0, to = n * a->heads;
    int together = !w->alone || to * most > 256; /* else merging is quicker than waiting */
    float *out = together ? s->mixed : w->mixed;
    if (together) share(w->me, n * a->heads, &from, &to);
    for (int64_t head = from; head < to; head++) {
        float *merged = out + head * dim;
        int64_t position = w->t->position[head / a->heads];
        int64_t chunks = position / chunk_of(position + 1) - first_chunk(a, position) + 1;
        merge_chunks(of.partial + head * most * stride, chunks, stride, dim, w->mixing, merged);
        const float *gate = of.q + (2 * head + 1) * dim;
        for (int64_t i = 0; a->gated && i < dim; i++) merged[i] /= 1.0f + exponential(-gate[i]);
    }
    return together && !meet(w) ? NULL : out;
}

#define ATTENTION {attention_floats, attention_own_floats, mix_attention}
