/* A vision transformer on a CPU, one image at a time: patches as inputs of a product, pre-norm blocks and, where there
 * is one, a final norm. A class token is the last row, after the patches: attention does not know an order but that of
 * rotary positions. Where there are windows, their patches stand together. The stream between the blocks is floats.
 * Parts that a network does not have are NULL, or have no weights.
 * Each patch's sums are made in one order, so that an image's result has the same bits with any number of threads.
 * Compiled by tower.py, once for each weight type (WEIGHT_BITS 32: float, 16: bfloat16, 8: int8 with one scale an
 * output).
 */
#include "full_attention.h"

typedef struct {
    const float *weight, *bias; /* without a bias it is an RMS norm, without a weight none */
} Norm;

typedef struct {
    Matrix matrix;
    const float *bounds; /* the least and the largest of its inputs, and of its outputs */
} Linear;

typedef struct {
    Linear q, k, v, out, gate, fc1, fc2; /* gate: its curve's values are factors of fc1's outputs */
    Norm before_attention, before_mlp;
    Norm of_q, of_k, of_v;           /* of each head, or none */
    Norm after_attention, after_mlp; /* of what is added to the stream, or none */
    const float *attention_scale, *mlp_scale; /* (width,), padded to whole panels: of what is added */
    int64_t windowed, tapped;                 /* attention within windows; an output as well */
} Block;

typedef struct {
    int64_t layers, width, heads, inner;
    int64_t outputs; /* of a patch: those of tapped blocks, and the last one */
    int64_t axes;    /* parts of a head that are rotated each by itself */
    int64_t curve;   /* an `enum curve`: gate's, or without one fc1's */
    float eps, scale; /* of norms; of attention's scores */
    Matrix embedding;       /* (width, numbers of a patch); without columns there is none */
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
        .turned = dim / m->axes, .scale = m->scale,
    };
}

/* A row of a head, normed in its place. room: (dim,). */
static void norm_head(const Tower *m, element *x, Norm norm, int64_t dim, float *room) {
    for (int64_t i = 0; i < dim; i++) room[i] = VALUE_OF(x[i]);
    put_normed(room, norm, m->eps, dim, room);
    for (int64_t i = 0; i < dim; i++) x[i] = ELEMENT_OF(room[i]);
}

/* All heads within each of `count` segments, of at most `longest` rows. Units of work are as they lie in memory: all
 * heads of some rows for packing, all rows of a head for what reads its panels. */
static int attend(const Tower *m, const Image *t, const Scratch *s, const Block *b, const Segment *segment, int64_t count,
                  int64_t longest, float *room, Output out, Member *me) {
    int64_t panels = (longest + PANEL - 1) / PANEL, blocks = (longest + QUERY_BLOCK - 1) / QUERY_BLOCK, unit;
    while ((unit = next_unit(me, count * panels * m->heads)) >= 0) {
        int64_t head = unit % m->heads, index = unit / m->heads / panels, from = unit / m->heads % panels * PANEL;
        const Head one = head_of(m, t, s, segment[index], index, head);
        for (int64_t j = from; b->of_q.weight && j < from + PANEL && j < one.count; j++) {
            norm_head(m, one.q + j * one.stride, b->of_q, one.dim, room);
            norm_head(m, one.k + j * one.stride, b->of_k, one.dim, room);
            norm_head(m, one.v + j * one.stride, b->of_v, one.dim, room);
        }
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

/* The outputs of a linear layer of the stream's normed rows. They are its inputs already where those of `before`, which
 * met them last, have the same bounds. row: (width,), room. */
static int meet_normed(const Tower *m, const Scratch *s, Inputs in, Norm norm, const Linear *before, const Linear *layer,
                       Output out, float *row, Member *me) {
    const float *bounds = layer->bounds;
    if (!before || (bounds && memcmp(bounds, before->bounds, 2 * sizeof(float)))) {
        int64_t from, to;
        if (before && !regroup(me)) return 0;
        share(me, in.tokens, &from, &to);
        for (int64_t i = from; i < to; i++) {
            put_normed(s->x + i * m->width, norm, m->eps, m->width, row);
            for (int64_t j = 0; bounds && j < m->width; j += LANES) *(vec *)(row + j) = bounded(load_f32(row + j), bounds);
            set_input(in, i, row, m->width);
        }
        if (!regroup(me)) return 0;
    }
    out.first = bounds ? bounds + 2 : NULL;
    product(layer->matrix, in, out, me);
    return 1;
}

/* A linear layer whose outputs are added to the stream; where they are normed before that, they take the place of q and
 * k, which lie together and have been used. */
static int add_product(const Tower *m, const Scratch *s, Inputs in, const Linear *layer, const float *factor, Norm norm,
                       float *row, Member *me) {
    int64_t from, to, width = m->width;
    Output out = {.y = s->x, .stride = width, .add = 1, .factor = factor};
    float *added = (float *)s->q;
    if (norm.weight) out = (Output){.y = added, .stride = s->q_stride, .first = layer->bounds ? layer->bounds + 2 : NULL};
    product(layer->matrix, in, out, me);
    if (!regroup_and_share(me, in.tokens, &from, &to)) return 0;
    for (int64_t i = from; norm.weight && i < to; i++) {
        put_normed(added + i * s->q_stride, norm, m->eps, width, row);
        for (int64_t j = 0; j < width; j++) s->x[i * width + j] += row[j];
    }
    return 1;
}

/* What each thread does of an image. */
static void encode(const Tower *m, const Image *t, const Scratch *s, float *y, Member *me) {
    int64_t n = rows_of(m, t), width = m->width, columns = m->embedding.columns, from, to, taps = 0;
    const Segment whole = {0, n};
    float *own = s->own + me->id * s->own_floats;
    Inputs in = inputs_at(s->inputs, t->patches, columns, PRECISE_HALVES), wide = inputs_at(s->wide_inputs, n, m->inner, 1);
    for (int64_t i; (i = next_unit(me, n)) >= 0;) {
        if (width / m->heads % PAIR) s->q[i * s->q_stride + width] = 0; /* the last unit's second half, times zero */
        const float *begin = i == t->patches ? m->class_row : t->positions ? t->positions + i * width : NULL;
        if (begin) memcpy(s->x + i * width, begin, width * sizeof(float));
        else memset(s->x + i * width, 0, width * sizeof(float));
        if (i < t->patches && columns) set_input(in, i, t->inputs + i * columns, columns);
    }
    if (!regroup_and_share(me, n, &from, &to)) return;
    if (columns) product(m->embedding, in, (Output){.y = s->x, .stride = width, .add = 1}, me);
    if (!regroup_and_share(me, n, &from, &to)) return;
    in = inputs_at(s->inputs, n, width, 1);
    for (const Block *b = m->block; b < m->block + m->layers; b++) {
        Output heads = {.y = (float *)s->q, .stride = s->q_stride, .half = HALF_ATTENTION};
        if (!meet_normed(m, s, in, b->before_attention, NULL, &b->q, heads, own, me)) return;
        heads.y = (float *)s->k;
        if (!meet_normed(m, s, in, b->before_attention, &b->q, &b->k, heads, own, me)) return;
        heads.y = (float *)s->v;
        if (!meet_normed(m, s, in, b->before_attention, &b->k, &b->v, heads, own, me) || !regroup(me)) return;
        Output attended = outputs_for(in, s->wide, width);
        attended.last = b->out.bounds;
        if (!(b->windowed ? attend(m, t, s, b, t->window, t->windows, t->longest, own, attended, me)
                          : attend(m, t, s, b, &whole, 1, n, own, attended, me))) return;
        share(me, n, &from, &to);
        complete(in, s->wide, width, from, to, own);
        if (!regroup(me)) return;
        if (!add_product(m, s, in, &b->out, b->attention_scale, b->after_attention, own, me)) return;
        const Linear *gate = b->gate.matrix.panels ? &b->gate : NULL;
        Output inside = outputs_for(wide, s->wide, m->inner);
        inside.curve = (enum curve)m->curve;
        if (gate) {
            if (!meet_normed(m, s, in, b->before_mlp, NULL, gate, inside, own, me) || !regroup(me)) return;
            inside.curve = NO_CURVE;
            inside.times = 1;
        }
        inside.last = b->fc2.bounds;
        if (!meet_normed(m, s, in, b->before_mlp, gate, &b->fc1, inside, own, me)) return;
        if (!regroup_and_share(me, n, &from, &to)) return;
        complete(wide, s->wide, m->inner, from, to, own);
        if (!regroup(me)) return;
        if (!add_product(m, s, wide, &b->fc2, b->mlp_scale, b->after_mlp, own, me)) return;
        share(me, n, &from, &to);
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
