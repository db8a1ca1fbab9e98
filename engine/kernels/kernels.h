// What the C files of this folder share. bf16 numbers are kept as uint16_t; sums are float32.
//
// Every row of a batch is computed in an order of its own that does not depend on the other rows: whatever runs
// beside a request, and however its prompt is cut, its numbers are the same, bit by bit.
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

enum { PANEL = 32, MAX_ROWS = 12, KEYS = 64 };  // outputs of a packed panel, rows of a register tile, keys at once
enum { NUMBERS = 2 * PANEL };  // of a pair of inputs in a panel

// Threads that share one piece of work after the other; the caller is one of them.
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

enum { NUM_CODES = 16, TWO_PAIRS = 3 * NUMBERS };  // of upper bytes; bytes of two compressed pairs

typedef struct {
    uint32_t place, number;  // in its panel; bf16
} Other;

// A linear layer whose weights are packed by kvbaton_pack, and compressed as compressed.c says.
typedef struct {
    uint8_t *weight;   // [panels][inputs / 4][TWO_PAIRS]
    uint8_t *uppers;   // [NUM_CODES]: the upper bytes that codes stand for
    uint32_t *starts;  // [panels + 1]: where each panel's others begin
    Other *others;     // the numbers whose upper byte has no code
    const bf16 *bias;  // [panels * PANEL], or NULL
    size_t inputs, outputs;
} Linear;

static inline size_t num_panels_of(const Linear *layer) { return (layer->outputs + PANEL - 1) / PANEL; }

// Store; store as float32; add to what is there; store silu(first half) * second half.
typedef enum { PLAIN, WIDE, RESIDUAL, GATED } Ending;

void linear(Pool *pool, const Linear *layer, const bf16 *input, size_t num_rows, void *output, Ending ending);

// sums[r][0..31] (+)= the products of rows of pairs with a packed panel, pair by pair. At most MAX_ROWS rows.
// ahead: NULL, or compressed pairs, as many, that the second cache is to have meanwhile.
void multiply(const uint32_t *pairs, size_t stride, size_t num_rows, const bf16 *panel, size_t num_pairs, float *sums,
              size_t sums_stride, int adds, const uint8_t *ahead);

// As `multiply` with two panels at once, for so few rows (at most TWO_ROWS) that one instruction would wait for the one before.
enum { TWO_ROWS = 6 };
void multiply_two(const uint32_t *pairs, size_t stride, size_t num_rows, const bf16 *panels, size_t num_pairs, float *sums,
                  size_t sums_stride, int adds);

// How far a compressed panel is read.
typedef struct {
    const uint8_t *next, *uppers;
    const Other *other, *end;
    size_t pair;
} Reader;

// As `multiply` with a compressed panel's next pairs, an even number of them; sums are [num_rows][PANEL]. expanded: NULL,
// or gets the packed pairs that were read.
void multiply_compressed(const uint32_t *pairs, size_t stride, size_t num_rows, Reader *reader, size_t num_pairs, float *sums,
                         int adds, bf16 *expanded);

typedef struct {
    const bf16 *input_norm, *post_norm, *query_norm, *key_norm;  // the last two [head_dim], or NULL
    Linear qkv, output, gate_up, down;
    size_t window;  // how many tokens a token sees; 0: all
} Layer;

typedef struct Model {
    size_t hidden, intermediate, num_heads, num_kv_heads, head_dim, num_layers;
    float eps, scale;
    const Layer *layers;
    const bf16 *final_norm, *embedding;  // [hidden], [vocab_size][hidden]
    const bf16 *cosines, *sines;  // of each position: [max_positions][head_dim / 2]
} Model;

// One forward pass. Arrays over tokens and requests are those of PreparedInputs.
typedef struct {
    size_t num_tokens, num_requests, block_size, table_stride;
    const int32_t *input_ids, *positions, *query_start, *seq_lens, *num_wanted, *block_table;
    const int64_t *slots;
    bf16 *const *caches;             // of each layer: [num_blocks][2][num_kv_heads][block_size][head_dim]
    size_t block_stride;             // elements from a block to the next, in each of them
    bf16 *states, *normed, *qkv, *mixed, *gated;
    char *scratch;                   // attention_scratch() bytes for each thread
    const struct Model *model;
    void (*stored)(size_t num_layers);  // called when the KV of so many layers is written; may be NULL
    int may_be_interrupted;            // between two layers, when kvbaton_interrupt is called meanwhile
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

static inline __m512 rounded(__m512 values) {  // to bf16 and back
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16));
}

#define LOG2_E 1.44269504f

// For x <= 0 (and -infinity): 2 to the power of what x is rounded down to, times a polynomial of the rest.
static inline __m512 power_of_2(__m512 x) {
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(1.867130282e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017029777e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579991266e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401644439e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931512952e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}
