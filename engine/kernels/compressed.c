// Lossless compression of weights from 16 to 12 bits each: a step reads three quarters of the memory.
//
// The upper byte of a bfloat16 number contains its sign and all but the last bit of its exponent. Nearly all weights of a
// layer have one of 16 upper bytes: if they are normally distributed, all but one in ten thousand. Such a weight is stored
// as a code of 4 bits for the upper byte, and the unchanged lower byte. The other weights ("others") are stored in a list.
// Two pairs of inputs of a panel (128 numbers) become 192 bytes: the lower bytes of the first pair, those of the second,
// and the codes, with those of the first pair in the lower half of each byte.
#include <stdatomic.h>
#include <string.h>
#include "kernels.h"

enum { SAMPLED = 7 };  // one of this many pairs is counted

typedef struct {
    const bf16 *panels;
    const Linear *layer;
    atomic_size_t *counts;  // by upper byte
} Compression;

static size_t num_pairs_of(const Linear *layer) { return layer->inputs / 2; }

static const bf16 *panel_of(const Compression *job, size_t panel) {
    return job->panels + panel * num_pairs_of(job->layer) * NUMBERS;
}

static void count_panel(const void *context, size_t panel, size_t thread) {
    (void)thread;
    const Compression *job = context;
    const bf16 *from = panel_of(job, panel);
    size_t counts[256] = {0};
    for (size_t pair = 0; pair < num_pairs_of(job->layer); pair += SAMPLED)
        for (size_t place = 0; place < NUMBERS; place++) counts[from[pair * NUMBERS + place] >> 8]++;
    for (size_t upper = 0; upper < 256; upper++)
        if (counts[upper]) atomic_fetch_add(&job->counts[upper], counts[upper]);
}

static void choose_uppers(const atomic_size_t *counts, uint8_t *uppers) {
    uint8_t is_chosen[256] = {0};
    for (size_t code = 0; code < NUM_CODES; code++) {
        size_t best = 0;
        while (is_chosen[best]) best++;
        for (size_t upper = best; upper < 256; upper++)
            if (!is_chosen[upper] && counts[upper] > counts[best]) best = upper;
        is_chosen[best] = 1;
        uppers[code] = (uint8_t)best;
    }
}

// The bytes of a pair, in an order that two instructions can interleave again.
typedef struct {
    __m512i lower, codes;
    __mmask64 has_none;  // numbers without a code
} Coded;

static Coded code_pair(const Linear *layer, const bf16 *pair) {
    __m512i low = _mm512_loadu_si512(pair), high = _mm512_loadu_si512(pair + PANEL), byte = _mm512_set1_epi16(255);
    __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8));
    Coded coded = {_mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte)), _mm512_setzero_si512(), ~0ull};
    for (int code = 0; code < NUM_CODES; code++) {
        __mmask64 has = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8((char)layer->uppers[code]));
        coded.codes = _mm512_mask_mov_epi8(coded.codes, has, _mm512_set1_epi8((char)code));
        coded.has_none &= ~has;
    }
    return coded;
}

static void code_panel(const void *context, size_t panel, size_t thread) {
    (void)thread;
    const Compression *job = context;
    const bf16 *from = panel_of(job, panel);
    size_t num_pairs = num_pairs_of(job->layer);
    uint8_t *to = job->layer->weight + panel * (num_pairs / 2) * TWO_PAIRS;
    uint32_t num_others = 0;
    for (size_t pair = 0; pair < num_pairs; pair += 2, from += 2 * NUMBERS, to += TWO_PAIRS) {
        Coded first = code_pair(job->layer, from), second = code_pair(job->layer, from + NUMBERS);
        _mm512_storeu_si512(to, first.lower);
        _mm512_storeu_si512(to + NUMBERS, second.lower);
        _mm512_storeu_si512(to + 2 * NUMBERS, _mm512_or_si512(first.codes, _mm512_slli_epi16(second.codes, 4)));
        num_others += (uint32_t)(__builtin_popcountll(first.has_none) + __builtin_popcountll(second.has_none));
    }
    job->layer->starts[panel + 1] = num_others;
}

// Fills `layer`, except for the others and the bias, from packed panels, [panels][inputs / 2][PANEL][2]. Returns the number
// of others, which kvbaton_list_others fills in.
size_t kvbaton_compress(Pool *pool, const bf16 *panels, const Linear *layer) {
    atomic_size_t counts[256] = {0};
    Compression job = {panels, layer, counts};
    size_t num_panels = num_panels_of(layer);
    pool_run(pool, num_panels, count_panel, &job);
    choose_uppers(counts, layer->uppers);
    pool_run(pool, num_panels, code_panel, &job);
    layer->starts[0] = 0;
    for (size_t panel = 0; panel < num_panels; panel++) layer->starts[panel + 1] += layer->starts[panel];
    return layer->starts[num_panels];
}

static void list_panel(const void *context, size_t panel, size_t thread) {
    (void)thread;
    const Compression *job = context;
    const bf16 *from = panel_of(job, panel);
    Other *to = job->layer->others + job->layer->starts[panel];
    for (size_t pair = 0; pair < num_pairs_of(job->layer); pair++) {
        if (!code_pair(job->layer, from + pair * NUMBERS).has_none) continue;
        for (size_t place = pair * NUMBERS; place < (pair + 1) * NUMBERS; place++)
            if (!memchr(job->layer->uppers, from[place] >> 8, NUM_CODES)) *to++ = (Other){(uint32_t)place, from[place]};
    }
}

void kvbaton_list_others(Pool *pool, const bf16 *panels, const Linear *layer) {
    Compression job = {panels, layer, NULL};
    pool_run(pool, num_panels_of(layer), list_panel, &job);
}
