// Attention over the paged cache: each block is read once for all query heads and all tokens of a tile.
//
// The rows of a tile are some tokens of one request, at all query heads of one KV head. A tile iterates over the request's
// keys, 64 at a time (from position 0, so that a row's sums do not depend on its tile). It packs the keys and their values
// into panels and multiplies them with the kernel of the linear layers. The softmax is computed online as in
// FlashAttention (arXiv:2205.14135).
#include <math.h>
#include <string.h>
#include "kernels.h"

enum { ROWS_PER_TILE = 192, LINE = 64 };

typedef struct {
    const Model *model;
    const Layer *layer;
    const Step *step;
    const bf16 *cache;
    size_t group, tile_tokens;  // query heads per KV head; tokens of a full tile
    size_t to_values;           // distance from a key to its value, in elements
    const size_t *first_tiles;  // first tile of each request, then the total number of tiles
    char *scratch;
    size_t scratch_bytes;
} Job;

typedef struct {  // buffers of one thread
    bf16 *queries, *keys, *values, *weights;
    float *scores, *mixed, *top, *total;
} Desk;

typedef struct {
    size_t request, first_token, num_tokens, kv_head, num_rows, first_position;
} Tile;

static size_t padded(size_t num_bytes) { return (num_bytes + LINE - 1) / LINE * LINE; }

static size_t lay_out(const Model *model, char *at, Desk *desk) {
    size_t group = model->num_heads / model->num_kv_heads, size = model->head_dim;
    size_t rows = group > ROWS_PER_TILE ? group : ROWS_PER_TILE;
    char *start = at;
    desk->queries = (bf16 *)at, at += padded(rows * size * sizeof(bf16));
    desk->keys = (bf16 *)at, at += padded(KEYS * size * sizeof(bf16));
    desk->values = (bf16 *)at, at += padded(KEYS * size * sizeof(bf16));
    desk->weights = (bf16 *)at, at += padded(MAX_ROWS * KEYS * sizeof(bf16));
    desk->scores = (float *)at, at += padded(MAX_ROWS * KEYS * sizeof(float));
    desk->mixed = (float *)at, at += padded(rows * size * sizeof(float));
    desk->top = (float *)at, at += padded(rows * sizeof(float));
    desk->total = (float *)at, at += padded(rows * sizeof(float));
    return (size_t)(at - start);
}

size_t attention_scratch(const Model *model) {
    Desk desk;
    return lay_out(model, NULL, &desk);
}

// Transposes 16 rows of 16 words in place.
static void transpose(__m512i *row) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        row[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
}

static const bf16 NOTHING[1024];

// Packs 16 keys into a panel; prefetches the keys in `next`.
static void pack_keys(const bf16 *const *keys, const bf16 *const *next, bf16 *packed, size_t size) {
    for (size_t dim = 0; dim < size; dim += 32) {
        __m512i words[16];
        for (int i = 0; i < 16; i++) {
            _mm_prefetch((const char *)(next[i] + dim), _MM_HINT_T0);
            words[i] = _mm512_loadu_si512(keys[i] + dim);
        }
        transpose(words);
        for (size_t i = 0; i < 16; i++) _mm512_storeu_si512(packed + (dim / 2 + i) * PANEL * 2, words[i]);
    }
}

static void pack_values(const bf16 *const *keys, const bf16 *const *next, size_t to_values, bf16 *packed, size_t size) {
    const __m512i step = _mm512_set1_epi32(0x00010001);
    __m512i low = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007, 0x280008,
                                    0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
    __m512i high = _mm512_add_epi32(low, _mm512_slli_epi32(step, 4));
    for (size_t key = 0; key < KEYS; key += 2) {
        const bf16 *values[2];
        for (size_t i = 0; i < 2; i++) values[i] = keys[key + i] == NOTHING ? NOTHING : keys[key + i] + to_values;
        for (size_t dim = 0; dim < size; dim += 32) {
            for (size_t i = 0; i < 2; i++) _mm_prefetch((const char *)(next[key + i] + to_values + dim), _MM_HINT_T0);
            __m512i even = _mm512_loadu_si512(values[0] + dim), odd = _mm512_loadu_si512(values[1] + dim);
            bf16 *to = packed + (dim / PANEL * (KEYS / 2) + key / 2) * PANEL * 2;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

// Finds the keys at positions from..from + 63 of the tile's request; NOTHING after its end.
static void find_keys(const Job *job, const Tile *tile, size_t from, const bf16 **keys) {
    const Step *step = job->step;
    size_t size = job->model->head_dim, length = (size_t)step->seq_lens[tile->request], slots = step->block_size;
    const int32_t *entry = step->block_table + tile->request * step->table_stride + from / slots;
    size_t num_keys = length <= from ? 0 : length - from < KEYS ? length - from : KEYS, offset = from % slots;
    for (size_t i = 0; i < num_keys; offset = 0, entry++) {
        size_t now = slots - offset < num_keys - i ? slots - offset : num_keys - i;
        const bf16 *head = job->cache + (size_t)*entry * step->block_stride + (tile->kv_head * slots + offset) * size;
        for (size_t end = i + now; i < end; i++, head += size) keys[i] = head;
    }
    for (size_t i = num_keys; i < KEYS; i++) keys[i] = NOTHING;
}

// Packs keys and their values into panels; prefetches the corresponding line of the next keys with each line read.
static void pack(const Job *job, const bf16 *const *keys, const bf16 *const *next, const Desk *desk) {
    size_t size = job->model->head_dim;
    for (size_t from = 0; from < KEYS; from += 16)
        pack_keys(keys + from, next + from, desk->keys + (from / PANEL * size / 2 * PANEL + from % PANEL) * 2, size);
    pack_values(keys, next, job->to_values, desk->values, size);
}

// Multiplies rows with panels of num_pairs pairs each.
static void multiply_panels(const bf16 *rows, size_t num_rows, const bf16 *panels, size_t num_panels, size_t num_pairs, float *sums,
                            size_t stride, int adds) {
    const uint32_t *pairs = (const uint32_t *)rows;
    size_t i = 0;
    if (num_rows <= TWO_ROWS)
        for (; i + 1 < num_panels; i += 2)
            multiply_two(pairs, num_pairs, num_rows, panels + i * num_pairs * NUMBERS, num_pairs, sums + i * PANEL, stride, adds);
    for (; i < num_panels; i++)
        multiply(pairs, num_pairs, num_rows, panels + i * num_pairs * NUMBERS, num_pairs, sums + i * PANEL, stride, adds, NULL);
}

// Returns a mask of the 64 keys beginning at `from` that a token at `position` attends to.
static uint64_t visible(size_t position, size_t from, size_t window) {
    if (position < from) return 0;
    uint64_t seen = position - from >= KEYS - 1 ? ~0ull : (1ull << (position - from + 1)) - 1;
    if (window && position >= window && position - window + 1 > from) {
        size_t hidden = position - window + 1 - from;
        seen &= hidden >= KEYS ? 0 : ~0ull << hidden;
    }
    return seen;
}

// Updates the online softmax of some rows: turns scores into weights, and rescales the mixed values to the new maxima.
// Each loop iterates over all rows, so that the latencies of different rows overlap.
static void weigh_rows(const Job *job, const Desk *desk, const Tile *tile, size_t first, size_t end, size_t from) {
    size_t size = job->model->head_dim;
    __m512 scale = _mm512_set1_ps(job->model->scale * LOG2_E), sum[MAX_ROWS];
    float tops[MAX_ROWS], shrink[MAX_ROWS];
    for (size_t row = first; row < end; row++) {
        uint64_t seen = visible(tile->first_position + row / job->group, from, job->layer->window);
        float *scores = desk->scores + (row - first) * KEYS, old_top = desk->top[row];
        __m512 top = _mm512_set1_ps(seen ? old_top : 0);  // rows that attend to none of these keys get weights of 0
        for (int v = 0; v < 4; v++) {
            __mmask16 mask = (__mmask16)(seen >> (16 * v));
            __m512 score = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), mask, _mm512_loadu_ps(scores + v * 16), scale);
            _mm512_storeu_ps(scores + v * 16, score);
            top = _mm512_max_ps(top, score);
        }
        float new_top = tops[row - first] = _mm512_reduce_max_ps(top);
        shrink[row - first] = seen ? old_top - new_top : 0;
        desk->top[row] = seen ? new_top : old_top;
    }
    for (size_t row = 0; row < end - first; row++) {
        sum[row] = _mm512_setzero_ps();
        for (int v = 0; v < 4; v++) {
            __m512 score = _mm512_loadu_ps(desk->scores + row * KEYS + v * 16);
            __m512 weight = power_of_2(_mm512_sub_ps(score, _mm512_set1_ps(tops[row])));
            sum[row] = _mm512_add_ps(sum[row], weight);
            narrow(desk->weights + row * KEYS + v * 16, weight);
        }
    }
    for (size_t row = first; row < end; row++) {
        float own = _mm512_reduce_add_ps(sum[row - first]);
        if (shrink[row - first] == 0) {
            desk->total[row] += own;
            continue;
        }
        __m512 share = power_of_2(_mm512_set1_ps(shrink[row - first]));
        desk->total[row] = desk->total[row] * _mm512_cvtss_f32(share) + own;
        for (size_t i = 0; i < size; i += 16) {
            float *mixed = desk->mixed + row * size + i;
            _mm512_storeu_ps(mixed, _mm512_mul_ps(_mm512_loadu_ps(mixed), share));
        }
    }
}

static void take_queries(const Job *job, const Tile *tile, const Desk *desk) {
    const Model *model = job->model;
    size_t size = model->head_dim, row_size = (model->num_heads + 2 * model->num_kv_heads) * size;
    for (size_t token = 0; token < tile->num_tokens; token++) {
        const bf16 *from = job->step->qkv + (tile->first_token + token) * row_size + tile->kv_head * job->group * size;
        memcpy(desk->queries + token * job->group * size, from, job->group * size * sizeof *from);
    }
    for (size_t row = 0; row < tile->num_rows; row++) desk->top[row] = -INFINITY, desk->total[row] = 0;
    memset(desk->mixed, 0, tile->num_rows * size * sizeof *desk->mixed);
}

static void give_mixed(const Job *job, const Tile *tile, const Desk *desk) {
    const Model *model = job->model;
    size_t size = model->head_dim;
    for (size_t row = 0; row < tile->num_rows; row++) {
        size_t token = tile->first_token + row / job->group, head = tile->kv_head * job->group + row % job->group;
        bf16 *to = job->step->mixed + (token * model->num_heads + head) * size;
        __m512 share = _mm512_set1_ps(1.0f / desk->total[row]);
        for (size_t i = 0; i < size; i += 16) narrow(to + i, _mm512_mul_ps(_mm512_loadu_ps(desk->mixed + row * size + i), share));
    }
}

static size_t first_key(const Job *job, const Tile *tile) {
    size_t window = job->layer->window, lowest = window && tile->first_position >= window ? tile->first_position - window + 1 : 0;
    return lowest / KEYS * KEYS;
}

// Computes rows first..end - 1 with 64 packed keys; the tile's tokens attend to at most the first num_panels * 32 of them.
static void attend_rows(const Job *job, const Tile *tile, const Desk *desk, size_t first, size_t end, size_t from, size_t num_panels) {
    size_t size = job->model->head_dim;
    multiply_panels(desk->queries + first * size, end - first, desk->keys, num_panels, size / 2, desk->scores, KEYS, 0);
    weigh_rows(job, desk, tile, first, end, from);
    multiply_panels(desk->weights, end - first, desk->values, size / PANEL, KEYS / 2, desk->mixed + first * size, size, 1);
}

// follower: the tile that this thread probably computes next; its first keys are prefetched during the last iteration.
static void attend_tile(const Job *job, const Tile *tile, const Desk *desk, const Tile *follower) {
    size_t last = tile->first_position + tile->num_tokens - 1, num_parts = (tile->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const bf16 *keys[KEYS], *next[KEYS];
    find_keys(job, tile, first_key(job, tile), keys);
    take_queries(job, tile, desk);
    for (size_t from = first_key(job, tile); from <= last; from += KEYS) {
        if (from + KEYS <= last) find_keys(job, tile, from + KEYS, next);
        else if (follower) find_keys(job, follower, first_key(job, follower), next);
        else for (size_t i = 0; i < KEYS; i++) next[i] = NOTHING;
        pack(job, keys, next, desk);
        for (size_t part = 0, row = 0; part < num_parts; part++) {
            size_t end = tile->num_rows * (part + 1) / num_parts;
            attend_rows(job, tile, desk, row, end, from, last - from < PANEL ? 1 : KEYS / PANEL);
            row = end;
        }
        memcpy(keys, next, sizeof keys);
    }
    give_mixed(job, tile, desk);
}

static size_t tiles_of(const Job *job, size_t request) {
    size_t num_tokens = (size_t)(job->step->query_start[request + 1] - job->step->query_start[request]);
    return (num_tokens + job->tile_tokens - 1) / job->tile_tokens;
}

static size_t request_of(const Job *job, size_t tile) {
    size_t low = 0, high = job->step->num_requests;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (job->first_tiles[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}

static Tile tile_of(const Job *job, size_t item) {
    const Step *step = job->step;
    size_t number = item / job->model->num_kv_heads, request = request_of(job, number);
    size_t start = (size_t)step->query_start[request], from = start + (number - job->first_tiles[request]) * job->tile_tokens;
    size_t left = (size_t)step->query_start[request + 1] - from, now = left < job->tile_tokens ? left : job->tile_tokens;
    return (Tile){request, from, now, item % job->model->num_kv_heads, now * job->group, (size_t)step->seq_lens[request] - left};
}

static void attend_item(const void *context, size_t item, size_t thread) {
    const Job *job = context;
    Tile tile = tile_of(job, item), follower;
    int is_last = item + 1 == job->first_tiles[job->step->num_requests] * job->model->num_kv_heads;
    if (!is_last) follower = tile_of(job, item + 1);
    Desk desk;
    lay_out(job->model, job->scratch + thread * job->scratch_bytes, &desk);
    attend_tile(job, &tile, &desk, is_last ? NULL : &follower);
}

void attend(Pool *pool, const Model *model, const Layer *layer, const Step *step, const bf16 *cache) {
    size_t group = model->num_heads / model->num_kv_heads, tokens = ROWS_PER_TILE / group;
    size_t first_tiles[step->num_requests + 1];
    Job job = {model, layer, step, cache, group, tokens ? tokens : 1, model->num_kv_heads * step->block_size * model->head_dim,
               first_tiles, step->scratch, attention_scratch(model)};
    first_tiles[0] = 0;
    for (size_t request = 0; request < step->num_requests; request++)
        first_tiles[request + 1] = first_tiles[request] + tiles_of(&job, request);
    pool_run(pool, first_tiles[step->num_requests] * model->num_kv_heads, attend_item, &job);
}
