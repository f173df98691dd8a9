/* A vision transformer on a CPU, one tile at a time: patches as inputs of a product, pre-norm blocks and a final norm.
 * A class token is the last row, after the patches: attention does not know an order. The stream between the blocks is floats. Each patch's sums are made in one order, so that a tile's
 * result has the same bits with any number of threads. Compiled by tower.py, once for each weight type (WEIGHT_BITS
 * 32: float, 16: bfloat16, 8: int8 with one scale an output).
 */
#include "full_attention.h"

typedef struct {
    const float *weight, *bias; /* without a bias it is an RMS norm, without a weight none */
} Norm;

typedef struct {
    Matrix q, k, v, out, fc1, fc2;
    Norm before_attention, before_mlp;
    const float *attention_scale, *mlp_scale; /* (width,), padded to whole panels, or NULL: of what is added */
} Block;

typedef struct {
    int64_t layers, width, heads, inner, channels, patch; /* patch: pixels along a side */
    int64_t exact_gelu;
    float eps;
    Matrix embedding;       /* (width, channels * patch * patch) */
    const float *positions; /* (places, width), of patches */
    const float *class_row; /* (width,): the class token with its position, or NULL */
    Norm last;
    const Block *block;
} Tower;

typedef struct {
    const float *pixels; /* (channels, H, W) */
    int64_t height, width;
    const int64_t *position; /* (patches,): rows of the table */
    int64_t keys;
    const int64_t *key; /* (keys,): the rows that all of them look at */
} Tile;

typedef struct {
    float *x, *inputs, *wide_inputs, *own;
    element *q, *k, *v, *wide;
    uint32_t *key_panels, *value_panels;
    int64_t q_stride; /* elements, of q, k and v */
    int64_t own_floats;
} Scratch;

static int64_t patches_of(const Tower *m, const Tile *t) { return (t->height / m->patch) * (t->width / m->patch); }
static int64_t rows_of(const Tower *m, const Tile *t) { return patches_of(m, t) + (m->class_row != NULL); }

static int64_t lay_out(const Tower *m, const Tile *t, int64_t threads, float *base, Scratch *s) {
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
    s->key_panels = (uint32_t *)TAKE(m->heads * key_panel_words(t->keys, dim));
    s->value_panels = (uint32_t *)TAKE(m->heads * value_panel_words(t->keys, dim));
    int64_t row = columns > widest ? columns : widest, attention = attention_floats(t->keys);
    s->own_floats = round_up(row > attention ? row : attention, 16);
    s->own = TAKE(threads * s->own_floats);
    #undef TAKE
    return at;
}

/* Floats of scratch that a tile needs. */
int64_t ocelli_tower_floats(const Tower *m, const Tile *t, int64_t threads) {
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

/* The pixels of one patch, (channels, patch, patch). */
static void unfold(const Tower *m, const Tile *t, int64_t index, float *out) {
    int64_t across = t->width / m->patch;
    const float *corner = t->pixels + index / across * m->patch * t->width + index % across * m->patch;
    for (int64_t c = 0; c < m->channels; c++)
        for (int64_t i = 0; i < m->patch; i++, out += m->patch)
            memcpy(out, corner + (c * t->height + i) * t->width, m->patch * sizeof(float));
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

/* What each thread does of a tile. */
static void encode(const Tower *m, const Tile *t, const Scratch *s, float *y, Member *me) {
    int64_t n = rows_of(m, t), patches = patches_of(m, t), width = m->width, columns = m->embedding.columns, from, to;
    const Heads heads = {m->heads, width / m->heads, n, s->q_stride, t->keys, t->key, s->q, s->k, s->v,
                         s->key_panels, s->value_panels};
    Output onto_x = {.y = s->x, .stride = width, .add = 1};
    const enum gelu gelu = m->exact_gelu ? ERF_GELU : TANH_GELU;
    float *own = s->own + me->id * s->own_floats;
    #define REGROUP \
        if (!regroup(me)) return; \
        share(me, n, &from, &to);
    Inputs in = inputs_at(s->inputs, patches, columns, PRECISE_HALVES), wide = inputs_at(s->wide_inputs, n, m->inner, 1);
    for (int64_t i; (i = next_unit(me, n)) >= 0;) {
        if (heads.dim % PAIR) s->q[i * s->q_stride + width] = 0; /* the last unit's second half, times zero */
        const float *begin = i < patches ? m->positions + t->position[i] * width : m->class_row;
        memcpy(s->x + i * width, begin, width * sizeof(float));
        if (i == patches) continue;
        unfold(m, t, i, own);
        set_input(in, i, own, columns);
    }
    REGROUP
    product(m->embedding, in, onto_x, me);
    REGROUP
    in = inputs_at(s->inputs, n, width, 1);
    for (const Block *b = m->block; b < m->block + m->layers; b++) {
        for (int64_t i = from; i < to; i++) {
            put_normed(s->x + i * width, b->before_attention, m->eps, width, own);
            set_input(in, i, own, width);
        }
        REGROUP
        product(b->q, in, (Output){.y = (float *)s->q, .stride = s->q_stride, .half = HALF_ATTENTION}, me);
        product(b->k, in, (Output){.y = (float *)s->k, .stride = s->q_stride, .half = HALF_ATTENTION}, me);
        product(b->v, in, (Output){.y = (float *)s->v, .stride = s->q_stride, .half = HALF_ATTENTION}, me);
        REGROUP
        int64_t unit, panels = (t->keys + PANEL - 1) / PANEL, blocks = (n + QUERY_BLOCK - 1) / QUERY_BLOCK;
        while ((unit = next_unit(me, panels * m->heads)) >= 0) /* all heads of some patches: as they lie in memory */
            pack_keys(&heads, unit % m->heads, unit / m->heads * PANEL);
        REGROUP
        const Output attended = outputs_for(in, s->wide, width);
        while ((unit = next_unit(me, m->heads * blocks)) >= 0) {
            int64_t row = unit % blocks * QUERY_BLOCK;
            attend_all(&heads, unit / blocks, row, row + QUERY_BLOCK < n ? row + QUERY_BLOCK : n, own, attended);
        }
        REGROUP
        complete(in, s->wide, width, from, to, own);
        REGROUP
        onto_x.factor = b->attention_scale;
        product(b->out, in, onto_x, me);
        REGROUP
        for (int64_t i = from; i < to; i++) {
            put_normed(s->x + i * width, b->before_mlp, m->eps, width, own);
            set_input(in, i, own, width);
        }
        REGROUP
        Output inside = outputs_for(wide, s->wide, m->inner);
        inside.gelu = gelu;
        product(b->fc1, in, inside, me);
        REGROUP
        complete(wide, s->wide, m->inner, from, to, own);
        REGROUP
        onto_x.factor = b->mlp_scale;
        product(b->fc2, wide, onto_x, me);
        REGROUP
    }
    for (int64_t i = from; i < to && i < patches; i++) {
        if (m->last.weight) put_normed(s->x + i * width, m->last, m->eps, width, y + i * width);
        else memcpy(y + i * width, s->x + i * width, width * sizeof(float));
    }
}

/* y (patches, width): the features of one tile. */
void ocelli_tower(const Tower *m, const Tile *t, Pass *pass, float *base, float *y) {
    int64_t n = rows_of(m, t);
    Scratch s;
    lay_out(m, t, pass->threads, (float *)(((uintptr_t)base + 63) / 64 * 64), &s);
    memset(s.q + n * s.q_stride, 0, (round_up(n, QUERIES) - n) * s.q_stride * sizeof(element));
    WITH_TEAM(pass, encode(m, t, &s, y, &me))
}
