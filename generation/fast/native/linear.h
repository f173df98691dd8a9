/* Panels by themselves: packing weights into them, linear layers and embeddings. */
#pragma once
#include "panels.h"

/* Outputs in a panel, and units that it has of each. */
int64_t ocelli_panel(void) { return PANEL; }
int64_t ocelli_units(int64_t columns) { return units_of(columns); }

#if WEIGHT_BITS == 4
#include "quantize.h"
#else
/* weight (rows, columns) of WEIGHT_BITS each -> panels; see Matrix. */
static void pack(const char *weight, int64_t rows, int64_t columns, uint32_t *panels, Member *me) {
    int64_t units = units_of(columns), bytes = columns * WEIGHT_BITS / 8, whole = columns / UNIT;
    for (int64_t panel; (panel = next_unit(me, (rows + PANEL - 1) / PANEL)) >= 0;) {
        uint32_t *out = panels + panel * units * PANEL;
        int64_t count = rows - panel * PANEL < PANEL ? rows - panel * PANEL : PANEL;
        if (count < PANEL || whole < units) memset(out, 0, units * PANEL * 4);
        for (int64_t begin = 0; begin < whole; begin += 16) /* as much of each row as a line of the cache has */
            for (int64_t r = 0; r < count; r++) {
                const char *row = weight + (panel * PANEL + r) * bytes;
                for (int64_t u = begin; u < begin + 16 && u < whole; u++) memcpy(out + u * PANEL + r, row + u * 4, 4);
            }
        if (whole < units)
            for (int64_t r = 0; r < count; r++)
                memcpy(out + whole * PANEL + r, weight + (panel * PANEL + r) * bytes + whole * 4, bytes - whole * 4);
    }
}
void ocelli_pack(const char *weight, int64_t rows, int64_t columns, uint32_t *panels, Pass *pass) {
    WITH_TEAM(pass, pack(weight, rows, columns, panels, &me))
}
#endif

/* y (count, rows) = x (count, columns) W^T + b, with ocelli_linear_floats of room. */
int64_t ocelli_linear_floats(const Matrix *m, int64_t count) { return input_floats(count, m->columns) + 16; }
static void linear(const Matrix *m, const float *x, int64_t count, float *room, float *y, Member *me) {
    Inputs in = inputs_at((float *)(((uintptr_t)room + 63) / 64 * 64), count, m->columns, PRECISE_HALVES);
    for (int64_t i; (i = next_unit(me, count)) >= 0;) set_input(in, i, x + i * m->columns, m->columns);
    if (regroup(me)) product(*m, in, (Output){y, m->rows, 0}, me);
}
void ocelli_linear(const Matrix *m, const float *x, int64_t count, Pass *pass, float *room, float *y) {
    WITH_TEAM(pass, linear(m, x, count, room, y, &me))
}

/* x (count, columns) = rows `id` of a table. */
void ocelli_embed(const Matrix *m, const int64_t *id, int64_t count, float *x) {
    for (int64_t i = 0; i < count; i++) embed(*m, id[i], x + i * m->columns);
}
