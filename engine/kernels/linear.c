// Linear layers with packed and compressed bf16 weights. The limit is memory bandwidth for few rows, arithmetic for many.
#include <math.h>
#include <string.h>
#include "kernels.h"

enum { ITEM_BYTES = 32768, PAIRS_AT_ONCE = 1024, ROWS_AT_ONCE = 192 };

static __m512 silu(__m512 x) {
    __m512 size = _mm512_abs_ps(x), grown = power_of_2(_mm512_mul_ps(size, _mm512_set1_ps(-LOG2_E)));  // e^-|x|
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 top = _mm512_mask_mov_ps(grown, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), one);
    __m512 under = _mm512_add_ps(one, grown), part = _mm512_rcp14_ps(under);
    part = _mm512_mul_ps(part, _mm512_fnmadd_ps(under, part, _mm512_set1_ps(2.0f)));  // one Newton iteration: accurate to 2 ulp
    return _mm512_mul_ps(_mm512_mul_ps(x, top), part);
}

typedef struct {
    const Linear *layer;
    const bf16 *input;
    void *output;
    size_t num_rows, panels_per_item;
    Ending ending;
} Job;

// Rounds at the same points as the reference: the product, and the result of each later operation.
static void finish_row(const Job *job, size_t panel, size_t row, const float *sums) {
    const Linear *layer = job->layer;
    __m512 value[2];
    for (int v = 0; v < 2; v++) {
        value[v] = _mm512_loadu_ps(sums + v * 16);
        if (layer->bias) value[v] = _mm512_add_ps(value[v], widen(layer->bias + panel * PANEL + v * 16));
        value[v] = rounded(value[v]);
    }
    if (job->ending == GATED) {
        bf16 *to = (bf16 *)job->output + row * (layer->outputs / 2) + panel * (PANEL / 2);
        narrow(to, _mm512_mul_ps(rounded(silu(value[0])), value[1]));
        return;
    }
    size_t at = row * layer->outputs + panel * PANEL, left = layer->outputs - panel * PANEL;
    for (size_t v = 0; v < 2 && v * 16 < left; v++, at += 16) {
        __mmask16 known = left - v * 16 >= 16 ? 0xffff : (__mmask16)((1u << (left - v * 16)) - 1);
        bf16 *to = (bf16 *)job->output + at;
        if (job->ending == WIDE) {
            _mm512_mask_storeu_ps((float *)job->output + at, known, value[v]);
            continue;
        }
        if (job->ending == RESIDUAL) value[v] = _mm512_add_ps(widen(to), value[v]);
        _mm256_mask_storeu_epi16(to, known, (__m256i)_mm512_cvtneps_pbh(value[v]));
    }
}

// If there are several tiles of rows, the first one stores its expanded weights for the others, and the second one
// prefetches the next weights.
static void compute_panel(const Job *job, size_t panel, size_t first_row, size_t num_rows) {
    const Linear *layer = job->layer;
    size_t num_pairs = layer->inputs / 2, num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const uint32_t *input = (const uint32_t *)job->input + first_row * num_pairs;
    const Other *others = layer->others + layer->starts[panel], *end = layer->others + layer->starts[panel + 1];
    Reader reader = {layer->weight + panel * (num_pairs / 2) * TWO_PAIRS, layer->uppers, others, end, 0};
    float sums[ROWS_AT_ONCE * PANEL];
    _Alignas(64) bf16 expanded[PAIRS_AT_ONCE * NUMBERS];
    for (size_t pair = 0; pair < num_pairs; pair += PAIRS_AT_ONCE, input += PAIRS_AT_ONCE) {
        size_t now = num_pairs - pair < PAIRS_AT_ONCE ? num_pairs - pair : PAIRS_AT_ONCE, row = num_rows / num_tiles;
        multiply_compressed(input, num_pairs, row, &reader, now, sums, pair > 0, num_tiles > 1 ? expanded : NULL);
        for (size_t tile = 1; tile < num_tiles; tile++) {
            size_t next = num_rows * (tile + 1) / num_tiles;
            multiply(input + row * num_pairs, num_pairs, next - row, expanded, now, sums + row * PANEL, PANEL, pair > 0,
                     tile == 1 ? reader.next : NULL);
            row = next;
        }
    }
    for (size_t row = 0; row < num_rows; row++) finish_row(job, panel, first_row + row, sums + row * PANEL);
}

static void compute_item(const void *context, size_t item, size_t thread) {
    (void)thread;
    const Job *job = context;
    size_t num_panels = num_panels_of(job->layer), from = item * job->panels_per_item;
    for (size_t panel = from; panel < from + job->panels_per_item && panel < num_panels; panel++)
        for (size_t row = 0; row < job->num_rows; row += ROWS_AT_ONCE)
            compute_panel(job, panel, row, job->num_rows - row < ROWS_AT_ONCE ? job->num_rows - row : ROWS_AT_ONCE);
}

void linear(Pool *pool, const Linear *layer, const bf16 *input, size_t num_rows, void *output, Ending ending) {
    size_t num_panels = num_panels_of(layer), panel_bytes = layer->inputs / 4 * TWO_PAIRS;
    size_t per_item = panel_bytes < ITEM_BYTES ? ITEM_BYTES / panel_bytes : 1;
    Job job = {layer, input, output, num_rows, per_item, ending};
    pool_run(pool, (num_panels + per_item - 1) / per_item, compute_item, &job);
}

typedef struct {
    const float *rows;
    size_t size;
    int64_t *best;
} Bests;

static void find_best(const void *context, size_t row, size_t thread) {
    (void)thread;
    const Bests *job = context;
    const float *values = job->rows + row * job->size;
    __m512 low = _mm512_set1_ps(-INFINITY), top[4] = {low, low, low, low};
    __m512i place[4] = {_mm512_setzero_si512()}, lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 nans = 0;
    for (int v = 1; v < 4; v++) place[v] = place[0];
    for (size_t from = 0; from < job->size; from += 64)
        for (size_t v = 0, at = from; v < 4 && at < job->size; v++, at += 16) {
            __mmask16 known = job->size - at >= 16 ? 0xffff : (__mmask16)((1u << (job->size - at)) - 1);
            __m512 value = _mm512_mask_loadu_ps(low, known, values + at);
            __mmask16 is_higher = _mm512_cmp_ps_mask(value, top[v], _CMP_GT_OQ);
            nans |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            top[v] = _mm512_mask_mov_ps(top[v], is_higher, value);
            place[v] = _mm512_mask_add_epi32(place[v], is_higher, lane, _mm512_set1_epi32((int)at));
        }
    float highest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
    int32_t first = INT32_MAX;
    for (int v = 0; v < 4; v++) {
        __mmask16 is_highest = _mm512_cmp_ps_mask(top[v], _mm512_set1_ps(highest), _CMP_EQ_OQ);
        int32_t own = _mm512_mask_reduce_min_epi32(is_highest, place[v]);
        if (own < first) first = own;
    }
    job->best[row] = nans || isinf(highest) ? -1 : first;
}

// Computes a layer; outputs are rounded to bfloat16 and stored as float32. best: NULL, or receives the index of each row's
// highest output, the lowest index of equal ones; -1 if any output is NaN or the highest is infinite.
void kvbaton_linear(Pool *pool, const Linear *layer, const bf16 *input, size_t num_rows, float *output, int64_t *best) {
    linear(pool, layer, input, num_rows, output, WIDE);
    Bests job = {output, layer->outputs, best};
    if (best) pool_run(pool, num_rows, find_best, &job);
}

typedef struct {
    const bf16 *weight;
    bf16 *packed;
    size_t first, num_outputs, inputs, panel_outputs, panel_offset;
} Packing;

static void pack_part(const void *context, size_t item, size_t thread) {
    (void)thread;
    const Packing *job = context;
    size_t from = item * job->panel_outputs, num_pairs = job->inputs / 2;
    for (size_t i = 0; i < job->panel_outputs && from + i < job->num_outputs; i++) {
        size_t output = job->first + from + i, panel = output / job->panel_outputs;
        size_t place = job->panel_offset + output % job->panel_outputs;
        const uint32_t *source = (const uint32_t *)(job->weight + (from + i) * job->inputs);
        uint32_t *target = (uint32_t *)job->packed + panel * num_pairs * PANEL + place;
        for (size_t pair = 0; pair < num_pairs; pair++) target[pair * PANEL] = source[pair];
    }
}

// Packs weights [num_outputs][inputs] into panels as outputs first, first + 1, ... In each panel it fills panel_outputs
// outputs beginning at panel_offset: 32 and 0 for a single layer, 16 and 0 or 16 for the two halves of a GATED one.
void kvbaton_pack(Pool *pool, const bf16 *weight, bf16 *packed, size_t first, size_t num_outputs, size_t inputs,
                  size_t panel_outputs, size_t panel_offset) {
    Packing job = {weight, packed, first, num_outputs, inputs, panel_outputs, panel_offset};
    pool_run(pool, (num_outputs + panel_outputs - 1) / panel_outputs, pack_part, &job);
}
