/* A short convolution: models/short_convolution.py. */
#pragma once
#include "layers.h"

typedef struct {
    Matrix mix; /* gives two gates and values, D of each */
    int64_t taps;
    const float *convolution, *conv_bias; /* (taps, D), the last tap is the token's own; (D,) or NULL */
    cached *conv; /* (B, S, D): what was convolved */
} Convolution;

static int64_t convolution_floats(const void *mixer, const Tokens *t) {
    return t->count * ((const Convolution *)mixer)->mix.rows;
}
static int64_t convolution_own_floats(const void *mixer) { return (void)mixer, 0; }

/* A short convolution of tokens from … to - 1, out (T, D). What lies before this pass is in the cache, into which the
 * inputs of the tokens write … written - 1 go. */
static void convolve(const Work *w, const Convolution *c, int64_t from, int64_t to, int64_t write, int64_t written,
                     float *out) {
    const Tokens *t = w->t;
    const float *triple = w->s->made;
    int64_t width = w->m->width, last = c->taps - 1;
    for (int64_t i = write; i < written; i++) {
        const float *gate = triple + 3 * i * width, *value = gate + 2 * width;
        cached *slot = c->conv + (t->row[i] * w->capacity + t->position[i]) * width;
        for (int64_t j = 0; j < width; j++) slot[j] = TO_CACHED(gate[j] * value[j]);
    }
    for (int64_t i = from; i < to; i++) {
        const float *gate = triple + 3 * i * width, *value = gate + 2 * width, *tap = c->convolution + last * width;
        float *y = out + i * width;
        for (int64_t j = 0; j < width; j++) y[j] = gate[j] * value[j] * tap[j];
        for (int64_t back = 1; back <= last && back <= t->position[i]; back++) {
            tap -= width;
            if (i >= back && t->row[i - back] == t->row[i]) { /* as the cache will have it, which others write */
                const float *before = gate - 3 * back * width, *its = before + 2 * width;
                for (int64_t j = 0; j < width; j++) y[j] += CACHED_VALUE(TO_CACHED(before[j] * its[j])) * tap[j];
            } else {
                const cached *slot = c->conv + (t->row[i] * w->capacity + t->position[i] - back) * width;
                for (int64_t j = 0; j < width; j++) y[j] += CACHED_VALUE(slot[j]) * tap[j];
            }
        }
        for (int64_t j = 0; c->conv_bias && j < width; j++) y[j] += c->conv_bias[j];
        for (int64_t j = 0; j < width; j++) y[j] *= gate[width + j];
    }
}

static const float *mix_convolution(Work *w, const void *mixer, Inputs in) {
    const Convolution *c = mixer;
    int64_t from, to;
    make(w, c->mix, in, w->s->made);
    if (!meet(w)) return NULL;
    float *out = w->alone ? w->mixed : w->s->mixed;
    share(w->me, w->t->count, &from, &to);
    convolve(w, c, w->mine, w->end, from, to, out);
    return out;
}

#define CONVOLUTION {convolution_floats, convolution_own_floats, mix_convolution}
