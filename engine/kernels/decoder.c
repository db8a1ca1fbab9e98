// The layers of a decoder, one after the other.
#include "kernels.h"

static void run_layer(Pool *pool, const Model *model, size_t number, const Step *step) {
    const Layer *layer = &model->layers[number];
    norm_rows(pool, step->states, layer->input_norm, step->normed, step->num_tokens, model->hidden, model->eps);
    linear(pool, &layer->qkv, step->normed, step->num_tokens, step->qkv, PLAIN);
    store_kv(pool, model, layer, step, step->caches[number]);
    if (step->stored) step->stored(number + 1);
    attend(pool, model, layer, step, step->caches[number]);
    linear(pool, &layer->output, step->mixed, step->num_tokens, step->states, RESIDUAL);
    norm_rows(pool, step->states, layer->post_norm, step->normed, step->num_tokens, model->hidden, model->eps);
    linear(pool, &layer->gate_up, step->normed, step->num_tokens, step->gated, GATED);
    linear(pool, &layer->down, step->gated, step->num_tokens, step->states, RESIDUAL);
}

static void decode(Pool *pool, const void *context) {
    const Step *step = context;
    const Model *model = step->model;
    embed(pool, model, step);
    for (size_t layer = 0; layer < model->num_layers; layer++) run_layer(pool, model, layer, step);
    norm_rows(pool, step->states, model->final_norm, step->normed, step->num_tokens, model->hidden, model->eps);
}

// Begin: tokens become the layers' result, normed, in step->normed when kvbaton_wait returns.
void kvbaton_launch(Pool *pool, const Step *step) { pool_launch(pool, decode, step); }

size_t kvbaton_scratch_bytes(const Model *model) { return attention_scratch(model); }

int kvbaton_is_served_here(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}
