/* A decoder, the tokens of a pass, and the interface of its mixers, which mix the tokens of a row: one header each
 * (mix_attention.h, mix_convolution.h, mix_delta.h), with a struct of its own and a row in `mixers` of decode.c. */
#pragma once
#include "linear.h"

typedef struct {
    int64_t kind;      /* of its mixer: the place in `mixers` */
    const void *mixer; /* its struct: weights, sizes, and where it keeps what in the cache */
    Matrix o;          /* multiplies what was mixed, (T, columns of `o`) */
    Matrix gate, up, down;
    const float *input_norm, *mlp_norm;
    const float *mixed_norm, *fed_norm; /* (D,), of what mixer and MLP add to hidden states; NULL: as it is */
    /* A gate of hidden states multiplies the token's own numbers for this layer, and their product is normed and added.
     * Without rows where the model has no such numbers. */
    Matrix own_gate, own_projection;
    const float *own_norm;
    float scale; /* of the hidden states at its end */
} Layer;

typedef struct {
    int64_t layers, width, vocab;
    int64_t gelu; /* in its tanh form, in place of silu */
    float eps;
    Matrix embedding, head;
    const float *final_norm;
    int64_t frequencies;   /* of all kinds of attention, one after the other */
    const float *inv_freq; /* (frequencies,) */
    const int64_t *axis;   /* (frequencies,): which of a token's three places each frequency turns by */
    int64_t own;           /* numbers that a token has for each layer: given ones, and a product of its embedding */
    Matrix own_projection; /* (layers * own, D) */
    const float *own_norm; /* (own,), of that product for each layer */
    Layer *layer;
} Model;

/* The tokens of a pass. Those of one row follow each other, with ascending positions, after what its cache holds. */
typedef struct {
    int64_t count;
    const int64_t *id;       /* (T,), or NULL: then their embeddings are given */
    int64_t deep;            /* how many layers, from the first on, are followed by a part of the embeddings */
    const float *embedding;  /* (T, (1 + deep) * D + layers * own) */
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
    float *x, *added, *gate, *up, *cosine, *sine, *made, *mixed, *owns, *shared_inputs, *own;
    int64_t widest;     /* numbers of a token that a layer's product takes, at most; */
    int64_t mixed_width; /* and of those, numbers that it mixed */
    int64_t own_floats;    /* of each thread: hidden states, a normed row, inputs, */
    int64_t mixing_floats; /* and at the end a mixer's own */
    int64_t *run;       /* (runs + 1,): the first token of each run */
    int64_t *row;       /* (rows + 1,): the first token of each row */
    int64_t runs, rows;
    int separate;       /* some row has several tokens: their keys are written before any attends */
} Scratch;

/* A thread's part in a pass. With few tokens (`alone`) every thread has hidden states and inputs of its own, and makes all
 * of them; else those of tokens [mine, end). */
typedef struct {
    const Model *m;
    const Tokens *t;
    const Scratch *s;
    Member *me;
    int64_t capacity, mine, end;
    int alone;
    float *x, *mixed, *normed, *mixing, *room; /* mixed: NULL where they share it */
} Work;

/* A kind of mixer. floats: that all threads share in a pass, `made` in Scratch, for what its products make; own_floats: of
 * each thread, `mixing` in Work. mix: from normed hidden states to what is mixed, or NULL if this thread is no longer
 * needed; with `w->alone` the result is all tokens', else that of tokens [mine, end) at least. */
typedef struct {
    int64_t (*floats)(const void *mixer, const Tokens *t);
    int64_t (*own_floats)(const void *mixer);
    const float *(*mix)(Work *w, const void *mixer, Inputs in);
} Mixer;

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Wait for the others. 0 if this thread is no longer needed. */
static int meet(Work *w) {
    return w->alone ? regroup(w->me) : regroup_and_share(w->me, w->t->count, &w->mine, &w->end);
}
static int meet_unless_alone(Work *w) { return w->alone || meet(w); }

static __attribute__((noinline)) void rms_norm(const float *x, const float *w, float eps, int64_t n, float *y) {
    float factor = 1.0f / sqrtf(squares_of(x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = w[i] * (x[i] * factor);
}

/* A product whose rows (T, rows) all threads read afterwards. */
static inline void make(Work *w, Matrix m, Inputs in, float *y) { product(m, in, (Output){y, m.rows, 0}, w->me); }
