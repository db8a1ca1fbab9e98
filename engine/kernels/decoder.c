// The layers of a decoder, in order.
#include <string.h>
#include "kernels.h"

static void store_layer(Pool *pool, const Model *model, size_t number, const Step *step) {
    const Layer *layer = &model->layers[number];
    norm_rows(pool, step->states, layer->input_norm, step->normed, step->num_tokens, model->hidden, model->eps);
    linear(pool, &layer->qkv, step->normed, step->num_tokens, step->qkv, PLAIN);
    store_kv(pool, model, layer, step, step->caches[number]);
    if (step->stored) step->stored(number + 1);
}

static void mix_layer(Pool *pool, const Model *model, size_t number, const Step *step) {
    const Layer *layer = &model->layers[number];
    attend(pool, model, layer, step, step->caches[number]);
    linear(pool, &layer->output, step->mixed, step->num_tokens, step->states, RESIDUAL);
    norm_rows(pool, step->states, layer->post_norm, step->normed, step->num_tokens, model->hidden, model->eps);
    linear(pool, &layer->gate_up, step->normed, step->num_tokens, step->gated, GATED);
    linear(pool, &layer->down, step->gated, step->num_tokens, step->states, RESIDUAL);
}

static void copy_rows(bf16 *rows, size_t size, size_t to, size_t from, size_t num_rows) {
    if (to != from) memmove(rows + to * size, rows + from * size, num_rows * size * sizeof *rows);
}

// Returns the step reduced to the requested tokens, whose rows are moved to the front. starts: [num_requests + 1], the new
// first row of each request.
static Step gather(const Model *model, const Step *step, int32_t *starts) {
    size_t qkv_size = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    Step few = *step;
    few.num_tokens = 0;
    few.query_start = starts;
    for (size_t request = 0; request < step->num_requests; request++) {
        size_t count = (size_t)step->num_wanted[request], from = (size_t)step->query_start[request + 1] - count;
        starts[request] = (int32_t)few.num_tokens;
        copy_rows(step->states, model->hidden, few.num_tokens, from, count);
        copy_rows(step->qkv, qkv_size, few.num_tokens, from, count);
        few.num_tokens += count;
    }
    starts[step->num_requests] = (int32_t)few.num_tokens;
    return few;
}

// Moves the results of `few` to the rows of their tokens in the complete step.
static void scatter(const Model *model, const Step *step, const Step *few) {
    for (size_t request = step->num_requests; request-- > 0;) {
        size_t count = (size_t)step->num_wanted[request];
        copy_rows(step->normed, model->hidden, (size_t)step->query_start[request + 1] - count, (size_t)few->query_start[request], count);
    }
}

static void decode(Pool *pool, const void *context) {
    const Step *step = context;
    const Model *model = step->model;
    size_t last = model->num_layers - 1;
    int32_t starts[step->num_requests + 1];
    embed(pool, model, step);
    for (size_t layer = 0; layer < last; layer++) {
        if (step->may_be_interrupted && pool_ends_early(pool)) return;
        store_layer(pool, model, layer, step);
        mix_layer(pool, model, layer, step);
    }
    store_layer(pool, model, last, step);
    Step few = gather(model, step, starts);  // after the last keys and values, only the requested tokens are needed
    mix_layer(pool, model, last, &few);
    norm_rows(pool, few.states, model->final_norm, few.normed, few.num_tokens, model->hidden, model->eps);
    scatter(model, step, &few);
}

// Starts a step. When kvbaton_wait returns 1, step->normed has the normed result of the layers, for the requested tokens.
void kvbaton_launch(Pool *pool, const Step *step) { pool_launch(pool, decode, step); }

size_t kvbaton_scratch_bytes(const Model *model) { return attention_scratch(model); }

int kvbaton_is_served_here(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}
