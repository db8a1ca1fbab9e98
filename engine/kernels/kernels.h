// Shared declarations of the C files in this folder. bf16 numbers are stored as uint16_t; sums are float32.
//
// Every row of a batch is computed in an order that does not depend on the other rows: the results of a request are the
// same bit by bit, whatever else is in the batch and however its prompt is divided into chunks.
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

enum { PANEL = 32, MAX_ROWS = 12, KEYS = 64 };  // outputs of a packed panel; rows of a register tile; keys per iteration
enum { NUMBERS = 2 * PANEL };  // numbers of a pair of inputs in a panel

// A pool of threads that share one piece of work at a time; the caller is one of them.
typedef struct Pool Pool;
typedef void (*Work)(const void *context, size_t item, size_t thread);
Pool *kvbaton_pool(size_t num_threads, const int *cores);
void kvbaton_end_pool(Pool *pool);
size_t pool_threads(const Pool *pool);
void pool_run(Pool *pool, size_t num_items, Work work, const void *context);
typedef void (*Task)(Pool *pool, const void *context);
void pool_launch(Pool *pool, Task task, const void *context);
int kvbaton_wait(Pool *pool);
void kvbaton_interrupt(Pool *pool);
int pool_ends_early(Pool *pool);

enum { NUM_CODES = 16, TWO_PAIRS = 3 * NUMBERS };  // number of upper bytes with a code; bytes of two compressed pairs

typedef struct {
    uint32_t place, number;  // index in its panel; the bf16 number
} Other;

// A linear layer with weights packed by kvbaton_pack and compressed as described in compressed.c.
typedef struct {
    uint8_t *weight;   // [panels][inputs / 4][TWO_PAIRS]
    uint8_t *uppers;   // [NUM_CODES]: the upper byte of each code
    uint32_t *starts;  // [panels + 1]: index of each panel's first other
    Other *others;     // numbers whose upper byte has no code
    const bf16 *bias;  // [panels * PANEL], or NULL
    size_t inputs, outputs;
} Linear;

static inline size_t num_panels_of(const Linear *layer) { return (layer->outputs + PANEL - 1) / PANEL; }

// PLAIN: store. WIDE: store as float32. RESIDUAL: add to the output. GATED: store silu(first half) * second half.
typedef enum { PLAIN, WIDE, RESIDUAL, GATED } Ending;

void linear(Pool *pool, const Linear *layer, const bf16 *input, size_t num_rows, void *output, Ending ending);

// Stores in sums[r][0..31] the products of rows of pairs with a packed panel, or adds them; at most MAX_ROWS rows.
// ahead: NULL, or the same number of compressed pairs to prefetch into the second-level cache.
void multiply(const uint32_t *pairs, size_t stride, size_t num_rows, const bf16 *panel, size_t num_pairs, float *sums,
              size_t sums_stride, int adds, const uint8_t *ahead);

// Like `multiply`, with two panels at once. For at most TWO_ROWS rows: with one panel, each instruction would wait for the
// result of an earlier one.
enum { TWO_ROWS = 6 };
void multiply_two(const uint32_t *pairs, size_t stride, size_t num_rows, const bf16 *panels, size_t num_pairs, float *sums,
                  size_t sums_stride, int adds);

// The read position in a compressed panel.
typedef struct {
    const uint8_t *next, *uppers;
    const Other *other, *end;
    size_t pair;
} Reader;

// Like `multiply`, with the next pairs of a compressed panel, an even number; sums are [num_rows][PANEL]. expanded: NULL,
// or receives the packed pairs that were read.
void multiply_compressed(const uint32_t *pairs, size_t stride, size_t num_rows, Reader *reader, size_t num_pairs, float *sums,
                         int adds, bf16 *expanded);

typedef struct {
    const bf16 *input_norm, *post_norm, *query_norm, *key_norm;  // query_norm, key_norm: [head_dim], or NULL
    Linear qkv, output, gate_up, down;
    size_t window;  // number of tokens that a token attends to; 0: all
} Layer;

typedef struct Model {
    size_t hidden, intermediate, num_heads, num_kv_heads, head_dim, num_layers;
    float eps, scale;
    const Layer *layers;
    const bf16 *final_norm, *embedding;  // [hidden], [vocab_size][hidden]
    const bf16 *cosines, *sines;  // [max_positions][head_dim / 2]
} Model;

// One forward pass. The arrays of tokens and requests are those of PreparedInputs.
typedef struct {
    size_t num_tokens, num_requests, block_size, table_stride;
    const int32_t *input_ids, *positions, *query_start, *seq_lens, *num_wanted, *block_table;
    const int64_t *slots;
    bf16 *const *caches;             // per layer: [num_blocks][2][num_kv_heads][block_size][head_dim]
    size_t block_stride;             // distance between blocks, in elements
    bf16 *states, *normed, *qkv, *mixed, *gated;
    char *scratch;                   // attention_scratch() bytes per thread
    const struct Model *model;
    void (*stored)(size_t num_layers);  // called when the KV of num_layers layers is written; may be NULL
    int may_be_interrupted;          // between two layers, by kvbaton_interrupt
} Step;

size_t attention_scratch(const Model *model);
void store_kv(Pool *pool, const Model *model, const Layer *layer, const Step *step, bf16 *cache);
void attend(Pool *pool, const Model *model, const Layer *layer, const Step *step, const bf16 *cache);
void norm_rows(Pool *pool, const bf16 *input, const bf16 *weight, bf16 *output, size_t num_rows, size_t size, float eps);
void embed(Pool *pool, const Model *model, const Step *step);
void norm_row(const bf16 *input, const bf16 *weight, bf16 *output, size_t size, float eps);

static inline __m512 widen(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

static inline void narrow(bf16 *to, __m512 values) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

static inline __m512 rounded(__m512 values) {  // rounds to bf16
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16));
}

#define LOG2_E 1.44269504f

// Returns 2^x for x <= 0 (and -infinity), as 2^floor(x) times a polynomial of the rest.
static inline __m512 power_of_2(__m512 x) {
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(1.867130282e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017029777e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579991266e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401644439e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931512952e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}
