/* A vision transformer on a CPU, one image at a time: patches as inputs of a product, pre-norm blocks and, where there
 * is one, a final norm. A class token is the last row, after the patches: attention does not know an order but that of
 * rotary positions. Where there are windows, their patches stand together. The stream between the blocks is floats.
 * Each patch's sums are made in one order, so that an image's result has the same bits with any number of threads.
 * Compiled by tower.py, once for each weight type (WEIGHT_BITS 32: float, 16: bfloat16, 8: int8 with one scale an
 * output).
 */
#include "full_attention.h"

typedef struct {
    const float *weight, *bias; /* without a bias it is an RMS norm, without a weight none */
} Norm;

typedef struct {
    Matrix q, k, v, out, gate, fc1, fc2; /* gate: of SwiGLU; without panels where there is none */
    Norm before_attention, before_mlp;
    const float *attention_scale, *mlp_scale; /* (width,), padded to whole panels, or NULL: of what is added */
    int64_t windowed, tapped;                 /* attention within windows; an output as well */
} Block;

typedef struct {
    int64_t layers, width, heads, inner;
    int64_t outputs; /* of a patch: those of tapped blocks, and the last one */
    int64_t exact_gelu;
    float eps;
    Matrix embedding;       /* (width, numbers of a patch) */
    const float *class_row; /* (width,): the class token with its position, or NULL */
    Norm last;
    const Block *block;
} Tower;

typedef struct {
    int64_t patches;
    const float *inputs;         /* (patches, numbers of a patch) */
    const float *positions;      /* (patches, width): what is added to their embeddings, or NULL */
    const float *cosine, *sine;  /* (patches, D_h) of rotary positions, or NULL */
    int64_t windows, longest;    /* rows of the longest one */
    const Segment *window;
} Image;

typedef struct {
    float *x, *inputs, *wide_inputs, *own;
    element *q, *k, *v, *wide;
    uint32_t *key_panels, *value_panels;
    int64_t q_stride; /* elements, of q, k and v */
    int64_t panels;   /* of keys, of one head */
    int64_t own_floats;
} Scratch;

static int64_t rows_of(const Tower *m, const Image *t) { return t->patches + (m->class_row != NULL); }

static int64_t lay_out(const Tower *m, const Image *t, int64_t threads, float *base, Scratch *s) {
    int64_t n = rows_of(m, t), dim = m->width / m->heads, columns = m->embedding.columns, at = 0;
    int64_t first = input_floats(n, columns), other = input_floats(n, m->width);
    #define TAKE(floats) (at += round_up(floats, 16), base ? base + at - round_up(floats, 16) : NULL)
    s->x = TAKE(n * m->width);
    s->inputs = TAKE(first > other ? first : other);
    s->wide_inputs = TAKE(input_floats(n, m->inner));
    int64_t widest = m->inner > m->width ? m->inner : m->width;
    s->wide = WEIGHT_BITS == 8 ? (element *)TAKE(round_up(n * widest, PAIR) / PAIR) : NULL;
    s->q_stride = round_up(m->width, 32) + 32;
    int64_t heads_floats = round_up(n, QUERIES) * s->q_stride / PAIR;
    s->q = (element *)TAKE(heads_floats);
    s->k = (element *)TAKE(heads_floats);
    s->v = (element *)TAKE(heads_floats);
    s->panels = n / PANEL + t->windows + 1; /* each segment's end in a panel that is not full */
    s->key_panels = (uint32_t *)TAKE(m->heads * key_panel_words(s->panels * PANEL, dim));
    s->value_panels = (uint32_t *)TAKE(m->heads * value_panel_words(s->panels * PANEL, dim));
    int64_t row = columns > widest ? columns : widest, attention = attention_floats(dim);
    s->own_floats = round_up(row > attention ? row : attention, 16);
    s->own = TAKE(threads * s->own_floats);
    #undef TAKE
    return at;
}

/* Floats of scratch that an image needs. */
int64_t ocelli_tower_floats(const Tower *m, const Image *t, int64_t threads) {
    Scratch scratch;
    return lay_out(m, t, threads, NULL, &scratch) + 32;
}

static __attribute__((noinline)) void put_normed(const float *x, Norm norm, float eps, int64_t n, float *y) {
    float mean = norm.bias ? sum_of(x, n) / n : 0;
    vec squares = {0}, middle = all(mean);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec far = load_f32(x + i) - middle;
        squares = multiply_add(far, far, squares);
    }
    float total = sum_lanes(squares);
    for (; i < n; i++) total += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / sqrtf(total / n + eps);
    if (norm.bias)
        for (i = 0; i < n; i++) y[i] = (x[i] - mean) * factor * norm.weight[i] + norm.bias[i];
    else
        for (i = 0; i < n; i++) y[i] = x[i] * factor * norm.weight[i];
}

/* Where a product's outputs go that are the inputs of the next one: into them, but for int8 weights, whose inputs need
 * a scale of the whole row: these go to `wide`, and `complete` turns this thread's rows into inputs. */
static Output outputs_for(Inputs in, element *wide, int64_t columns) {
#if WEIGHT_BITS == 8
    (void)in;
    return (Output){.y = (float *)wide, .stride = columns, .half = HALF_ATTENTION};
#else
    (void)wide, (void)columns;
    return as_output(in);
#endif
}
static void complete(Inputs in, const element *wide, int64_t columns, int64_t from, int64_t to, float *row) {
    for (int64_t i = from; i < to; i++) {
#if WEIGHT_BITS == 8 && HALF_ATTENTION
        for (int64_t j = 0; j < columns; j++) row[j] = bf16_to_float(wide[i * columns + j]);
        set_input(in, i, row, columns);
#elif WEIGHT_BITS == 8
        (void)row;
        set_input(in, i, wide + i * columns, columns);
#else
        (void)wide, (void)row;
        end_input(in, i, columns);
#endif
    }
}

/* One head of segment number `index`. Its panels begin where those of the segments before it end at the latest. */
static Head head_of(const Tower *m, const Image *t, const Scratch *s, Segment segment, int64_t index, int64_t head) {
    int64_t dim = m->width / m->heads, panel = segment.first / PANEL + index, at = segment.first * s->q_stride + head * dim;
    return (Head){
        .dim = dim, .stride = s->q_stride, .count = segment.count, .q = s->q + at, .k = s->k + at, .v = s->v + at,
        .key_panels = s->key_panels + key_panel_words((head * s->panels + panel) * PANEL, dim),
        .value_panels = s->value_panels + value_panel_words((head * s->panels + panel) * PANEL, dim),
        .cosine = t->cosine ? t->cosine + segment.first * dim : NULL, .sine = t->cosine ? t->sine + segment.first * dim : NULL,
    };
}

/* All heads within each of `count` segments, of at most `longest` rows. Units of work are as they lie in memory: all
 * heads of some rows for packing, all rows of a head for what reads its panels. */
static int attend(const Tower *m, const Image *t, const Scratch *s, const Segment *segment, int64_t count, int64_t longest,
                  float *room, Output out, Member *me) {
    int64_t panels = (longest + PANEL - 1) / PANEL, blocks = (longest + QUERY_BLOCK - 1) / QUERY_BLOCK, unit;
    while ((unit = next_unit(me, count * panels * m->heads)) >= 0) {
        int64_t head = unit % m->heads, index = unit / m->heads / panels, from = unit / m->heads % panels * PANEL;
        const Head one = head_of(m, t, s, segment[index], index, head);
        if (from < one.count) pack_keys(&one, from);
    }
    if (!regroup(me)) return 0;
    while ((unit = next_unit(me, m->heads * count * blocks)) >= 0) {
        int64_t head = unit / blocks / count, index = unit / blocks % count, from = unit % blocks * QUERY_BLOCK;
        const Head one = head_of(m, t, s, segment[index], index, head);
        int64_t to = from + QUERY_BLOCK < one.count ? from + QUERY_BLOCK : one.count;
        if (from < to) attend_all(&one, from, to, room, out, segment[index].first * out.stride + head * one.dim);
    }
    return regroup(me);
}

/* Normed rows [from, to) of the stream as the inputs of the next products. row: (width,), room. */
static void norm_inputs(const Tower *m, const Scratch *s, Inputs in, Norm norm, int64_t from, int64_t to, float *row) {
    for (int64_t i = from; i < to; i++) {
        put_normed(s->x + i * m->width, norm, m->eps, m->width, row);
        set_input(in, i, row, m->width);
    }
}

/* What each thread does of an image. */
static void encode(const Tower *m, const Image *t, const Scratch *s, float *y, Member *me) {
    int64_t n = rows_of(m, t), width = m->width, columns = m->embedding.columns, from, to, taps = 0;
    const Segment whole = {0, n};
    Output onto_x = {.y = s->x, .stride = width, .add = 1};
    const enum curve gelu = m->exact_gelu ? ERF_GELU : TANH_GELU;
    float *own = s->own + me->id * s->own_floats;
    Inputs in = inputs_at(s->inputs, t->patches, columns, PRECISE_HALVES), wide = inputs_at(s->wide_inputs, n, m->inner, 1);
    for (int64_t i; (i = next_unit(me, n)) >= 0;) {
        if (width / m->heads % PAIR) s->q[i * s->q_stride + width] = 0; /* the last unit's second half, times zero */
        const float *begin = i == t->patches ? m->class_row : t->positions ? t->positions + i * width : NULL;
        if (begin) memcpy(s->x + i * width, begin, width * sizeof(float));
        else memset(s->x + i * width, 0, width * sizeof(float));
        if (i < t->patches) set_input(in, i, t->inputs + i * columns, columns);
    }
    if (!regroup_and_share(me, n, &from, &to)) return;
    product(m->embedding, in, onto_x, me);
    if (!regroup_and_share(me, n, &from, &to)) return;
    in = inputs_at(s->inputs, n, width, 1);
    for (const Block *b = m->block; b < m->block + m->layers; b++) {
        norm_inputs(m, s, in, b->before_attention, from, to, own);
        if (!regroup_and_share(me, n, &from, &to)) return;
        product(b->q, in, (Output){.y = (float *)s->q, .stride = s->q_stride, .half = HALF_ATTENTION}, me);
        product(b->k, in, (Output){.y = (float *)s->k, .stride = s->q_stride, .half = HALF_ATTENTION}, me);
        product(b->v, in, (Output){.y = (float *)s->v, .stride = s->q_stride, .half = HALF_ATTENTION}, me);
        if (!regroup_and_share(me, n, &from, &to)) return;
        const Output attended = outputs_for(in, s->wide, width);
        if (!(b->windowed ? attend(m, t, s, t->window, t->windows, t->longest, own, attended, me)
                          : attend(m, t, s, &whole, 1, n, own, attended, me))) return;
        share(me, n, &from, &to);
        complete(in, s->wide, width, from, to, own);
        if (!regroup_and_share(me, n, &from, &to)) return;
        onto_x.factor = b->attention_scale;
        product(b->out, in, onto_x, me);
        if (!regroup_and_share(me, n, &from, &to)) return;
        norm_inputs(m, s, in, b->before_mlp, from, to, own);
        if (!regroup_and_share(me, n, &from, &to)) return;
        Output inside = outputs_for(wide, s->wide, m->inner);
        if (b->gate.panels) {
            inside.curve = SILU;
            product(b->gate, in, inside, me);
            if (!regroup_and_share(me, n, &from, &to)) return;
        }
        inside.curve = b->gate.panels ? NO_CURVE : gelu;
        inside.times = b->gate.panels != NULL;
        product(b->fc1, in, inside, me);
        if (!regroup_and_share(me, n, &from, &to)) return;
        complete(wide, s->wide, m->inner, from, to, own);
        if (!regroup_and_share(me, n, &from, &to)) return;
        onto_x.factor = b->mlp_scale;
        product(b->fc2, wide, onto_x, me);
        if (!regroup_and_share(me, n, &from, &to)) return;
        for (int64_t i = from; b->tapped && i < to && i < t->patches; i++)
            memcpy(y + (i * m->outputs + taps) * width, s->x + i * width, width * sizeof(float));
        taps += b->tapped;
    }
    for (int64_t i = from; i < to && i < t->patches; i++) {
        float *features = y + (i * m->outputs + taps) * width;
        if (m->last.weight) put_normed(s->x + i * width, m->last, m->eps, width, features);
        else memcpy(features, s->x + i * width, width * sizeof(float));
    }
}

/* y (patches, outputs, width): the features of one image. */
void ocelli_tower(const Tower *m, const Image *t, Pass *pass, float *base, float *y) {
    int64_t n = rows_of(m, t);
    Scratch s;
    lay_out(m, t, pass->threads, (float *)(((uintptr_t)base + 63) / 64 * 64), &s);
    memset(s.q + n * s.q_stride, 0, (round_up(n, QUERIES) - n) * s.q_stride * sizeof(element));
    WITH_TEAM(pass, encode(m, t, &s, y, &me))
}
