/* The answers of decode.c for a small model with fixed pseudo-random weights: one number a line. First those of a matrix alone. What a compiler makes
 * of it for a processor is compared with what another makes for another (test_native_compilers.py). */
#include "decode.c"
#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;
static float number(void) { /* -1 to 1 */
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * 0x1p-31f;
}
static float *numbers(int64_t count, float size, float offset) { /* and zeros up to the end of a panel */
    float *made = calloc(round_up(count, 64), sizeof(float));
    for (int64_t i = 0; i < count; i++) made[i] = number() * size + offset;
    return made;
}

static float *unset(int64_t count) { return memset(malloc(count * sizeof(float)), 0xff, count * sizeof(float)); } /* NaN */

static Matrix matrix(int64_t rows, int64_t columns) {
    int64_t padded = round_up(rows, PANEL);
    float *weight = numbers(rows * columns, 0.4f, 0), *scale = calloc(padded, sizeof(float));
    uint32_t *panels = aligned_alloc(64, padded * units_of(columns) * 4);
    uint32_t *words = calloc(padded * (columns / 64 + 1), 4);
    int32_t *sum = calloc(padded, 4);
    Pass pass = {.threads = 2, .stake = 1};
#if WEIGHT_BITS == 4
    float importance[columns + 64];
    for (int64_t i = 0; i < columns + 64; i++) importance[i] = 0.5f + i % 5 / 4.0f;
    ocelli_quantize(weight, importance, rows, columns, panels, words, scale, &pass);
#elif WEIGHT_BITS == 8
    int8_t *codes = malloc(rows * columns);
    for (int64_t r = 0; r < rows; r++) {
        scale[r] = 0.4f / 127;
        for (int64_t i = r * columns; i < (r + 1) * columns; i++) sum[r] += codes[i] = (int8_t)nearbyintf(weight[i] / scale[r]);
    }
    ocelli_pack((char *)codes, rows, columns, panels, &pass);
#elif WEIGHT_BITS == 16
    uint16_t *halves = malloc(rows * columns * 2);
    for (int64_t i = 0; i < rows * columns; i++) halves[i] = float_to_bf16(weight[i]);
    ocelli_pack((char *)halves, rows, columns, panels, &pass);
#else
    ocelli_pack((char *)weight, rows, columns, panels, &pass);
#endif
    return (Matrix){panels, scale, sum, numbers(rows, 0.1f, 0), rows, columns, words, .form = 10, .bits = 4, .span = 64};
}

int main(void) {
    enum { OUTPUTS = 50, INPUTS = 200, MANY = 20 }; /* a matrix by itself: not rounded twice */
    Matrix one = matrix(OUTPUTS, INPUTS);
    for (int64_t count = 1; count <= MANY; count += MANY - 1) {
        float *x = numbers(count * INPUTS, 1, 0), *y = numbers(count * OUTPUTS, 0, 0);
        Pass pass = {.threads = 2, .stake = 1};
        ocelli_linear(&one, x, count, &pass, unset(ocelli_linear_floats(&one, count)), y);
        for (int i = 0; i < count * OUTPUTS; i++) printf("%.6f\n", y[i]);
    }
    enum { LAYERS = 2, WIDTH = 72, HEADS = 4, PAIRS = 2, DIM = 20, INNER = 100, VOCAB = 90, ROOM = 96 };
    Layer layer[LAYERS] = {0};
    Attention attention[LAYERS] = {0};
    for (int l = 0; l < LAYERS; l++) { /* the second one as Gemma 4 has them */
        Layer *one = layer + l;
        Attention *a = attention + l;
        a->q = matrix(HEADS * DIM, WIDTH), a->k = matrix(PAIRS * DIM, WIDTH), a->v = matrix(PAIRS * DIM, WIDTH);
        a->key = calloc(PAIRS * ROOM * DIM, sizeof(cached)), a->value = calloc(PAIRS * ROOM * DIM, sizeof(cached));
        a->heads = HEADS, a->kv_heads = PAIRS, a->head_dim = DIM, a->pairs = a->apart = DIM / 2, one->mixer = a;
        one->o = matrix(WIDTH, HEADS * DIM), one->gate = matrix(INNER, WIDTH), one->up = matrix(INNER, WIDTH);
        one->down = matrix(WIDTH, INNER), one->scale = 1;
        one->input_norm = numbers(WIDTH, 0.2f, 1), one->mlp_norm = numbers(WIDTH, 0.2f, 1);
        if (l) one->mixed_norm = one->fed_norm = numbers(WIDTH, 0.2f, 1), one->scale = 0.8f;
        if (l) a->q_norm = a->v_norm = numbers(DIM, 0.2f, 1), a->window = 41, a->pairs = DIM / 4;
    }
    int64_t axis[DIM / 2] = {0}, id[ROOM], row[ROOM] = {0}, position[ROOM];
    Model model = {.layers = LAYERS, .width = WIDTH, .vocab = VOCAB, .eps = 1e-5f, .frequencies = DIM / 2,
                   .embedding = matrix(VOCAB, WIDTH), .head = matrix(VOCAB, WIDTH),
                   .final_norm = numbers(WIDTH, 0.2f, 1), .inv_freq = numbers(DIM / 2, 0.3f, 0.5f), .axis = axis,
                   .layer = layer};
    for (int64_t i = 0; i < ROOM; i++) id[i] = i * 37 % VOCAB, position[i] = i;
    for (int64_t done = 0, count = 70; done + count <= 76; done += count, count = count == 70 ? 5 : 1) {
        int64_t last = count - 1;
        Tokens tokens = {.count = count, .id = id + done, .row = row, .position = position + done, .axes = 1,
                         .place = position + done, .outputs = 1, .output = &last};
        Pass pass = {.threads = 2, .stake = 1};
        float logits[VOCAB + PANEL], *room = unset(ocelli_scratch_floats(&model, &tokens, 2));
        ocelli_forward(&model, &tokens, ROOM, &pass, room, logits);
        for (int i = 0; i < VOCAB; i++) printf("%.6f\n", logits[i]);
    }
}
