/* The forward pass of a Llama-style decoder on a CPU, for any number of tokens: one of a row that is decoded, one of
 * each row of a batch, several of a row that are checked at once, or a prompt.
 *
 * With few tokens a pass reads every weight once, so the aim is to read memory as fast as the machine can and to wait
 * for nothing in between: one parallel region for the whole pass, weights in the precision that they are stored in.
 * With many it multiplies as fast as the machine can. Each token's sums are made in one order, so its result does not
 * depend on the tokens beside it. Compiled by step.py, once for each weight type (WEIGHT_BITS 32: float, 16: bfloat16,
 * 8: int8 with one scale an output, 4: four bits with one scale a group) and cache type (CACHE_BITS 32 or 16).
 */
#include "mix_attention.h"
#include "mix_convolution.h"
#include "mix_delta.h"

/* In the order of `_MIXERS` in step.py. */
static const Mixer mixers[] = {ATTENTION, CONVOLUTION, DELTA};

static int64_t lay_out(const Model *m, const Tokens *t, int64_t threads, float *base, Scratch *s) {
    int64_t n = t->count, at = 0, inner = m->own, made = 0, mixing = 0, mixed = m->width;
    for (int64_t l = 0; l < m->layers; l++) {
        const Layer *layer = m->layer + l;
        made = larger(made, mixers[layer->kind].floats(layer->mixer, t));
        mixing = larger(mixing, mixers[layer->kind].own_floats(layer->mixer));
        mixed = larger(mixed, layer->o.columns);
        inner = larger(inner, layer->gate.rows);
    }
    s->mixed_width = mixed, s->widest = larger(inner, mixed), s->mixing_floats = round_up(mixing, 16);
    #define TAKE(floats) (at += round_up(floats, 16), base ? base + at - round_up(floats, 16) : NULL)
    s->x = TAKE(n * m->width);
    s->added = TAKE(n * m->width);
    s->gate = TAKE(n * inner);
    s->up = TAKE(n * inner);
    s->made = TAKE(made);
    s->cosine = TAKE(n * m->frequencies);
    s->sine = TAKE(n * m->frequencies);
    s->mixed = TAKE(n * mixed);
    s->owns = TAKE(n * m->layers * m->own);
    s->run = (int64_t *)TAKE(2 * (n + 1));
    s->row = (int64_t *)TAKE(2 * (n + 1));
    int64_t few = n <= ALONE ? n : 0;
    s->shared_inputs = TAKE(input_floats(n, s->widest));
    s->own_floats = round_up(few * (m->width + mixed) + s->widest + input_floats(few, s->widest), 16) + 16;
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

/* What is given of token i, from number `part` on: its embedding, and then what is added after each of the first layers,
 * or its own numbers for each layer. */
static inline const float *given(const Model *m, const Tokens *t, int64_t i, int64_t part) {
    return t->embedding + i * ((1 + t->deep) * m->width + m->layers * m->own) + part;
}

/* The hidden state that token i begins with. */
static void begin_token(const Model *m, const Tokens *t, int64_t i, float *x) {
    if (t->id) embed(m->embedding, t->id[i], x + i * m->width);
    else memcpy(x + i * m->width, given(m, t, i, 0), m->width * sizeof(float));
}

/* gate = silu(gate) * up, or with gelu */
static __attribute__((noinline)) void gated(float *gate, const float *up, int64_t from, int64_t to, int64_t gelu) {
    if (!gelu) {
        for (int64_t i = from; i < to; i++) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
        return;
    }
    for (int64_t i = from; i < to; i += LANES) {
        float own[LANES] = {0};
        int64_t count = smaller(LANES, to - i);
        memcpy(own, gate + i, count * sizeof(float));
        *(vec *)own = curve_of(*(vec *)own, TANH_GELU, 0);
        for (int64_t j = 0; j < count; j++) gate[i + j] = own[j] * up[i + j];
    }
}

/* x = (x + what was added) * scale, of what is added its norm where there is one */
static void add_to_x(const Work *w, const float *norm, float scale) {
    int64_t width = w->m->width;
    for (int64_t i = w->mine; i < w->end; i++) {
        const float *added = w->s->added + i * width;
        if (norm) rms_norm(added, norm, w->m->eps, width, w->normed), added = w->normed;
        for (int64_t j = 0; j < width; j++) w->x[i * width + j] = (w->x[i * width + j] + added[j]) * scale;
    }
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

/* added = W x of every token, x (T, columns). 0 if this thread is no longer needed. */
static int add_product(Work *w, Matrix m, const float *x) {
    Inputs in = inputs_at(w->room, w->t->count, m.columns, PRECISE_HALVES);
    set_inputs(in, w->mine, w->end, x, m.columns);
    if (!meet_unless_alone(w)) return 0;
    make(w, m, in, w->s->added);
    return meet(w);
}

/* added = down(silu(gate) * up). 0 if this thread is no longer needed. */
static int feed_forward(Work *w, const Layer *layer, Inputs in) {
    const Scratch *s = w->s;
    int64_t inner = layer->gate.rows, n = w->t->count, from, to;
    make(w, layer->gate, in, s->gate);
    make(w, layer->up, in, s->up);
    if (evenly_shared(in)) { /* this thread made both */
        share(w->me, panels_of(layer->gate), &from, &to);
        to = smaller(to * PANEL, inner);
        for (int64_t i = 0; i < n; i++) gated(s->gate + i * inner, s->up + i * inner, from * PANEL, to, w->m->gelu);
    } else {
        if (!meet(w)) return 0;
        share(w->me, n * inner, &from, &to);
        gated(s->gate, s->up, from, to, w->m->gelu);
    }
    return meet(w) && add_product(w, layer->down, s->gate);
}

/* The tokens' own numbers for each layer: those that are given, and the normed product of their embedding. The scale of
 * that, width^-0.5, is in its epsilon. 0 if this thread is no longer needed. */
static int make_owns(Work *w) {
    const Model *m = w->m;
    int64_t width = m->width, unit;
    Inputs in = inputs_at(w->room, w->t->count, width, PRECISE_HALVES);
    set_inputs(in, w->mine, w->end, w->x, width);
    if (!meet_unless_alone(w)) return 0;
    make(w, m->own_projection, in, w->s->owns);
    if (!meet(w)) return 0;
    while ((unit = next_unit(w->me, w->t->count * m->layers)) >= 0) {
        float *own = w->s->owns + unit * m->own;
        const float *other = given(m, w->t, unit / m->layers, width + unit % m->layers * m->own);
        rms_norm(own, m->own_norm, m->eps * width, m->own, own);
        for (int64_t j = 0; j < m->own; j++) own[j] = (own[j] + other[j]) * 0.70710678f;
    }
    return meet(w);
}

/* added = projection(gelu(gate(x)) * own numbers for layer `l`). 0 if this thread is no longer needed. */
static int add_owns(Work *w, const Layer *layer, int64_t l) {
    int64_t own = w->m->own, n = w->t->count, width = w->m->width;
    Inputs in = inputs_at(w->room, n, width, PRECISE_HALVES);
    set_inputs(in, w->mine, w->end, w->x, width);
    if (!meet_unless_alone(w)) return 0;
    make(w, layer->own_gate, in, w->s->gate);
    if (!meet(w)) return 0;
    in = inputs_at(w->room, n, own, PRECISE_HALVES);
    for (int64_t i = w->mine; i < w->end; i++) {
        memcpy(w->normed, w->s->gate + i * own, own * sizeof(float));
        gated(w->normed, w->s->owns + (i * w->m->layers + l) * own, 0, own, 1);
        set_input(in, i, w->normed, own);
    }
    if (!meet_unless_alone(w)) return 0;
    make(w, layer->own_projection, in, w->s->added);
    return meet(w);
}

/* What each thread does of a pass. */
static void forward(const Model *m, const Tokens *t, const Scratch *s, int64_t capacity, float *logits, Member *me) {
    int64_t width = m->width, n = t->count;
    float *own = s->own + me->id * s->own_floats;
    Work w = {m, t, s, me, capacity, .end = n, .alone = n <= ALONE, .x = s->x, .normed = own, .room = s->shared_inputs};
    w.mixing = own + s->own_floats - s->mixing_floats;
    if (w.alone) {
        w.x = own, w.mixed = own + n * width, w.normed = own + n * (width + s->mixed_width);
        w.room = w.normed + round_up(s->widest, 16);
    }
    for (int64_t i; (i = next_unit(me, n)) >= 0;) {
        for (int64_t j = 0; j < m->frequencies; j++) {
            float angle = (float)t->place[i * t->axes + (t->axes > 1 ? m->axis[j] : 0)] * m->inv_freq[j];
            s->cosine[i * m->frequencies + j] = cosf(angle);
            s->sine[i * m->frequencies + j] = sinf(angle);
        }
        if (!w.alone) begin_token(m, t, i, w.x);
    }
    for (int64_t i = 0; w.alone && i < n; i++) begin_token(m, t, i, w.x);
    if (!meet(&w) || (m->own && !make_owns(&w))) return;
    for (int64_t l = 0; l < m->layers; l++) {
        const Layer *layer = m->layer + l;
        float scale = layer->own_gate.rows ? 1 : layer->scale;
        Inputs in = norm_inputs(&w, layer->input_norm);
        if (!meet_unless_alone(&w)) return;
        const float *mixed = mixers[layer->kind].mix(&w, layer->mixer, in);
        if (!mixed || !add_product(&w, layer->o, mixed)) return;
        add_to_x(&w, layer->mixed_norm, 1);
        in = norm_inputs(&w, layer->mlp_norm);
        if (!meet_unless_alone(&w) || !feed_forward(&w, layer, in)) return;
        add_to_x(&w, layer->fed_norm, scale);
        if (layer->own_gate.rows) {
            if (!add_owns(&w, layer, l)) return;
            add_to_x(&w, layer->own_norm, layer->scale);
        }
        for (int64_t i = w.mine; l < t->deep && i < w.end; i++)
            for (int64_t j = 0; j < width; j++) w.x[i * width + j] += given(m, t, i, (l + 1) * width)[j];
    }
    if (!meet_unless_alone(&w) || !t->outputs) return;
    Inputs in = inputs_at(w.room, t->outputs, width, PRECISE_HALVES); /* at most as many as tokens */
    w.mine = 0, w.end = t->outputs;
    if (!w.alone) share(me, t->outputs, &w.mine, &w.end);
    for (int64_t i = w.mine; i < w.end; i++) {
        rms_norm(w.x + t->output[i] * width, m->final_norm, m->eps, width, w.normed);
        set_input(in, i, w.normed, width);
    }
    if (meet_unless_alone(&w)) make(&w, m->head, in, logits);
}

/* logits: (outputs, V). Each token's key and value are written into the cache at its position. */
void ocelli_forward(const Model *m, const Tokens *t, int64_t capacity, Pass *pass, float *base, float *logits) {
    Scratch s;
    lay_out(m, t, pass->threads, (float *)(((uintptr_t)base + 63) / 64 * 64), &s);
    find_runs(t, &s);
    WITH_TEAM(pass, forward(m, t, &s, capacity, logits, &me))
}
