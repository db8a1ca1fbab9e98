// Operations on single tokens: norms, rotary positions, and storing keys and values.
#include <string.h>
#include "kernels.h"

enum { TOKENS_PER_ITEM = 4 };

// Rounds at the same points as the reference: the normed row to bf16, then its product with the weight.
void norm_row(const bf16 *input, const bf16 *weight, bf16 *output, size_t size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (size_t i = 0; i < size; i += 16) {
        __m512 x = widen(input + i);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / (float)size + eps;
    __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean));
    for (size_t i = 0; i < size; i += 16)
        narrow(output + i, _mm512_mul_ps(widen(weight + i), rounded(_mm512_mul_ps(widen(input + i), scale))));
}

typedef struct {
    const bf16 *input, *weight;
    bf16 *output;
    size_t num_rows, size;
    float eps;
} Norms;

static void norm_some(const void *context, size_t item, size_t thread) {
    (void)thread;
    const Norms *job = context;
    for (size_t row = item * TOKENS_PER_ITEM; row < (item + 1) * TOKENS_PER_ITEM && row < job->num_rows; row++)
        norm_row(job->input + row * job->size, job->weight, job->output + row * job->size, job->size, job->eps);
}

void norm_rows(Pool *pool, const bf16 *input, const bf16 *weight, bf16 *output, size_t num_rows, size_t size, float eps) {
    Norms job = {input, weight, output, num_rows, size, eps};
    pool_run(pool, (num_rows + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, norm_some, &job);
}

typedef struct {
    const Model *model;
    const Step *step;
} Embeds;

static void embed_some(const void *context, size_t item, size_t thread) {
    (void)thread;
    const Embeds *job = context;
    size_t size = job->model->hidden;
    for (size_t token = item * TOKENS_PER_ITEM; token < (item + 1) * TOKENS_PER_ITEM && token < job->step->num_tokens; token++)
        memcpy(job->step->states + token * size, job->model->embedding + (size_t)job->step->input_ids[token] * size, size * sizeof(bf16));
}

void embed(Pool *pool, const Model *model, const Step *step) {
    Embeds job = {model, step};
    pool_run(pool, (step->num_tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, embed_some, &job);
}

static void rotate(bf16 *head, const bf16 *cosines, const bf16 *sines, size_t size) {
    for (size_t i = 0; i < size / 2; i += 16) {
        __m512 first = widen(head + i), second = widen(head + size / 2 + i);
        __m512 cosine = widen(cosines + i), sine = widen(sines + i);
        narrow(head + i, _mm512_sub_ps(rounded(_mm512_mul_ps(first, cosine)), rounded(_mm512_mul_ps(second, sine))));
        narrow(head + size / 2 + i, _mm512_add_ps(rounded(_mm512_mul_ps(second, cosine)), rounded(_mm512_mul_ps(first, sine))));
    }
}

typedef struct {
    const Model *model;
    const Layer *layer;
    const Step *step;
    bf16 *cache;
} Stores;

static void clear_rest(const Stores *job, bf16 *block, size_t from) {
    size_t size = job->model->head_dim, slots = job->step->block_size;
    for (size_t head = 0; head < 2 * job->model->num_kv_heads; head++)
        memset(block + (head * slots + from) * size, 0, (slots - from) * size * sizeof *block);
}

static void store_token(const Stores *job, size_t token) {
    const Model *model = job->model;
    const Step *step = job->step;
    size_t size = model->head_dim, row_size = (model->num_heads + 2 * model->num_kv_heads) * size;
    bf16 *row = step->qkv + token * row_size;
    size_t angles = (size_t)step->positions[token] * size / 2;
    for (size_t head = 0; head < model->num_heads + model->num_kv_heads; head++) {
        const bf16 *weight = head < model->num_heads ? job->layer->query_norm : job->layer->key_norm;
        if (weight) norm_row(row + head * size, weight, row + head * size, size, model->eps);
        rotate(row + head * size, model->cosines + angles, model->sines + angles, size);
    }
    size_t slot = (size_t)step->slots[token], offset = slot % step->block_size;
    bf16 *block = job->cache + slot / step->block_size * step->block_stride;
    for (size_t head = 0; head < 2 * model->num_kv_heads; head++)
        memcpy(block + (head * step->block_size + offset) * size, row + (model->num_heads + head) * size, size * sizeof *row);
}

static void store_some(const void *context, size_t item, size_t thread) {
    (void)thread;
    const Stores *job = context;
    for (size_t token = item * TOKENS_PER_ITEM; token < (item + 1) * TOKENS_PER_ITEM && token < job->step->num_tokens; token++)
        store_token(job, token);
}

// Clears each block that is first used in this step after the request's last token, so that data of an earlier owner
// (possibly NaN) is neither read together with the new tokens nor sent to another process.
static void clear_begun(const Stores *job) {
    const Step *step = job->step;
    for (size_t request = 0; request < step->num_requests; request++) {
        size_t last = (size_t)step->query_start[request + 1] - 1, first = (size_t)step->query_start[request];
        size_t slot = (size_t)step->slots[last], offset = slot % step->block_size;
        if (last - first >= offset)
            clear_rest(job, job->cache + slot / step->block_size * step->block_stride, offset + 1);
    }
}

void store_kv(Pool *pool, const Model *model, const Layer *layer, const Step *step, bf16 *cache) {
    Stores job = {model, layer, step, cache};
    clear_begun(&job);
    pool_run(pool, (step->num_tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, store_some, &job);
}
