// Random sampling of tokens as in engine/sampling/sampler.py, one row per item, without a copy of the scores.
//
// Probabilities are integers (2^40 for the best token), so that their sums are exact in every order. Thresholds are found by
// selection, not by sorting: the k-th best score for top-k, and the smallest kept weight for top-p.
#include <math.h>
#include "kernels.h"

enum { WEIGHT_BITS = 40, UNIFORM_BITS = 53, LANES = 8, FEWEST = 1024 };
#define NOTHING -29.0  // an exponent whose weight rounds to 0

typedef struct {
    const float *scores;
    uint64_t seed[2], position;  // see engine/sampling/randomness.py
    double temperature, min_p, top_p;
    size_t top_k;  // 0: all
} Draw;

typedef struct {
    const Draw *draws;
    size_t size;
    int64_t *scratch;  // draw_scratch() numbers per thread
    int64_t *tokens;
} Drawing;

// Values above `least` are kept, and the first `num_equal` values that equal it.
typedef struct {
    float least;
    size_t num_equal;
} ScoreCut;

typedef struct {
    int64_t least;
    size_t num_equal;
} WeightCut;

static size_t draw_scratch(size_t size) { return 2 * size + 4 * LANES; }  // weights, and candidates with padding after each

static inline size_t at_most(size_t one, size_t other) { return one < other ? one : other; }

static inline __mmask8 known_of(size_t left) { return left >= LANES ? 0xff : (__mmask8)((1u << left) - 1); }

// Returns bits of the first word of Philox 4x64 with 10 rounds; the counter begins as in NumPy.
static uint64_t uniform_bits(const Draw *draw) {
    uint64_t c[4] = {draw->position + 1, draw->position == UINT64_MAX, 0, 0}, key[2] = {draw->seed[0], draw->seed[1]};
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * c[0];
        unsigned __int128 second = (unsigned __int128)0xCA5A826395121157u * c[2];
        uint64_t next[4] = {(uint64_t)(second >> 64) ^ c[1] ^ key[0], (uint64_t)second,
                            (uint64_t)(first >> 64) ^ c[3] ^ key[1], (uint64_t)first};
        for (int word = 0; word < 4; word++) c[word] = next[word];
        key[0] += 0x9E3779B97F4A7C15u;
        key[1] += 0xBB67AE8584CAA73Bu;
    }
    return c[0] >> (64 - UNIFORM_BITS);
}

static float highest(const float *scores, size_t size) {
    __m512 low = _mm512_set1_ps(-INFINITY), top[4] = {low, low, low, low};
    for (size_t from = 0; from < size; from += 64)
        for (size_t v = 0, at = from; v < 4 && at < size; v++, at += 16) {
            __mmask16 known = size - at >= 16 ? 0xffff : (__mmask16)((1u << (size - at)) - 1);
            __m512 score = _mm512_mask_loadu_ps(low, known, scores + at);
            top[v] = _mm512_mask_max_ps(top[v], _mm512_cmp_ps_mask(score, top[v], _CMP_GT_OQ), score, top[v]);
        }
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
}

// Moves the k highest of n values to the front, the lowest of them to k - 1 (Hoare 1961).
static float select_highest(float *values, size_t n, size_t k) {
    size_t low = 0, high = n - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        size_t i = low, j = high;
        for (;;) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i >= j) break;
            float value = values[i];
            values[i++] = values[j];
            values[j--] = value;
        }
        if (k - 1 <= j) high = j;
        else low = j + 1;
    }
    return values[k - 1];
}

// Candidates are the scores above the k-th best so far; when there are many, all but k are dropped.
static ScoreCut cut_scores(const float *scores, size_t size, size_t k, float *candidates) {
    size_t n = 0, most = at_most(2 * size, 2 * k > FEWEST ? 2 * k : FEWEST);
    float least = -INFINITY;
    for (size_t at = 0; at < size; at += 16) {
        __mmask16 known = size - at >= 16 ? 0xffff : (__mmask16)((1u << (size - at)) - 1);
        __m512 score = _mm512_maskz_loadu_ps(known, scores + at);
        __mmask16 is_above = _mm512_mask_cmp_ps_mask(known, score, _mm512_set1_ps(least), _CMP_GT_OQ);
        if (!is_above) continue;
        _mm512_storeu_ps(candidates + n, _mm512_maskz_compress_ps(is_above, score));
        n += (size_t)__builtin_popcount(is_above);
        if (n < most || n < k) continue;
        least = select_highest(candidates, n, k);
        n = k;
    }
    if (n < k) return (ScoreCut){-INFINITY, 0};
    ScoreCut cut = {select_highest(candidates, n, k), k};
    for (size_t i = 0; i < k; i++) cut.num_equal -= candidates[i] > cut.least;
    return cut;
}

// Returns the lowest `*left` set bits of the mask, and reduces `*left` by their number.
static inline __mmask8 first_of(__mmask8 mask, size_t *left) {
    __mmask8 taken = 0;
    for (; mask && *left; mask &= (__mmask8)(mask - 1), (*left)--) taken |= mask & (__mmask8)-mask;
    return taken;
}

// Returns e^x * 2^WEIGHT_BITS as integers, for x from -29 to 0.
static inline __m512i weight_of(__m512d x) {
    __m512d whole = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), _MM_FROUND_TO_NEAREST_INT);
    __m512d r = _mm512_fnmadd_pd(whole, _mm512_set1_pd(6.93147180369123816490e-01), x), p = _mm512_set1_pd(1.0 / 6227020800);
    r = _mm512_fnmadd_pd(whole, _mm512_set1_pd(1.90821492927058770002e-10), r);
    static const double FACTORIALS[] = {479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
#pragma GCC unroll 13
    for (int i = 0; i < 13; i++) p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / FACTORIALS[i]));
    return _mm512_cvtpd_epi64(_mm512_scalef_pd(p, _mm512_add_pd(whole, _mm512_set1_pd(WEIGHT_BITS))));
}

static int64_t weigh(const Draw *draw, size_t size, float top, ScoreCut cut, int64_t *weights) {
    __m512d zero = _mm512_set1_pd((double)top), temperature = _mm512_set1_pd(draw->temperature);
    __m512i total = _mm512_setzero_si512(), least = _mm512_set1_epi64(llrint(draw->min_p * (double)(1ll << WEIGHT_BITS)));
    __m256 edge = _mm256_set1_ps(cut.least);
    for (size_t at = 0; at < size; at += LANES) {
        __mmask8 known = known_of(size - at);
        __m256 score = _mm256_maskz_loadu_ps(known, draw->scores + at);
        __mmask8 is_kept = _mm256_mask_cmp_ps_mask(known, score, edge, _CMP_GT_OQ);
        if (cut.num_equal) is_kept |= first_of(_mm256_mask_cmp_ps_mask(known, score, edge, _CMP_EQ_OQ), &cut.num_equal);
        __m512i weight = _mm512_setzero_si512();
        if (is_kept) {
            __m512d x = _mm512_div_pd(_mm512_sub_pd(_mm512_cvtps_pd(score), zero), temperature);
            is_kept = _mm512_mask_cmp_pd_mask(is_kept, x, _mm512_set1_pd(NOTHING), _CMP_GT_OQ);
            if (is_kept) weight = _mm512_maskz_mov_epi64(is_kept, weight_of(x));
            weight = _mm512_maskz_mov_epi64(_mm512_cmpge_epi64_mask(weight, least), weight);
        }
        total = _mm512_add_epi64(total, weight);
        _mm512_mask_storeu_epi64(weights + at, known, weight);
    }
    return _mm512_reduce_add_epi64(total);
}

// Moves the weights above (or below) the pivot to the front and returns their number. Complete vectors are stored, and the
// next store overwrites the unused rest, because some processors are much slower at compressing stores.
static size_t keep_side(int64_t *weights, size_t n, __m512i pivot, const int is_heavier) {
    size_t kept = 0;
    for (size_t at = 0; at < n; at += LANES) {
        __mmask8 known = known_of(n - at);
        __m512i weight = _mm512_maskz_loadu_epi64(known, weights + at);
        __mmask8 stays = is_heavier ? _mm512_mask_cmpgt_epi64_mask(known, weight, pivot)
                                    : _mm512_mask_cmplt_epi64_mask(known, weight, pivot);
        _mm512_storeu_si512(weights + kept, _mm512_maskz_compress_epi64(stays, weight));
        kept += (size_t)__builtin_popcount(stays);
    }
    return kept;
}

static int64_t middle_of(int64_t a, int64_t b, int64_t c) {
    return a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
}

// Returns the cut of top-p: a weight is kept if the sum of all larger weights, and of equal ones before it, is below `limit`.
// `candidates`: all n weights that may be kept.
static WeightCut cut_weights(int64_t *candidates, size_t n, double limit) {
    for (int64_t above = 0;;) {  // the sum of all weights larger than the candidates
        int64_t middle = middle_of(candidates[0], candidates[n / 2], candidates[n - 1]);
        __m512i pivot = _mm512_set1_epi64(middle), sum = _mm512_setzero_si512();
        size_t num_equal = 0, num_heavier = 0;
        for (size_t at = 0; at < n; at += LANES) {
            __mmask8 known = known_of(n - at);
            __m512i weight = _mm512_maskz_loadu_epi64(known, candidates + at);
            __mmask8 is_heavier = _mm512_cmpgt_epi64_mask(weight, pivot);
            sum = _mm512_mask_add_epi64(sum, is_heavier, sum, weight);
            num_heavier += (size_t)__builtin_popcount(is_heavier);
            num_equal += (size_t)__builtin_popcount(_mm512_cmpeq_epi64_mask(weight, pivot));
        }
        int64_t heavier = _mm512_reduce_add_epi64(sum), equal = (int64_t)num_equal * middle;
        if ((double)(above + heavier) >= limit) {
            n = keep_side(candidates, n, pivot, 1);
        } else if (num_heavier + num_equal < n && (double)(above + heavier + equal) < limit) {
            above += heavier + equal;
            n = keep_side(candidates, n, pivot, 0);
        } else {
            size_t num_kept = 1;
            while (num_kept < num_equal && (double)(above + heavier + (int64_t)num_kept * middle) < limit) num_kept++;
            return (WeightCut){middle, num_kept};
        }
    }
}

// Weights below the average of the weight that may be dropped cannot be kept, so they are not candidates.
static int64_t keep_top_p(double top_p, size_t size, int64_t total, int64_t *weights, int64_t *candidates) {
    double lost = (1.0 - top_p) * (double)total / (double)size;
    __m512i least = _mm512_set1_epi64(lost < 1.0 ? 1 : (int64_t)lost);
    size_t n = 0;
    for (size_t at = 0; at < size; at += LANES) {
        __mmask8 known = known_of(size - at);
        __m512i weight = _mm512_maskz_loadu_epi64(known, weights + at);
        __mmask8 may_stay = _mm512_mask_cmpge_epi64_mask(known, weight, least);
        _mm512_storeu_si512(candidates + n, _mm512_maskz_compress_epi64(may_stay, weight));
        n += (size_t)__builtin_popcount(may_stay);
    }
    WeightCut cut = cut_weights(candidates, n, top_p * (double)total);
    __m512i edge = _mm512_set1_epi64(cut.least), kept = _mm512_setzero_si512();
    for (size_t at = 0; at < size; at += LANES) {
        __mmask8 known = known_of(size - at);
        __m512i weight = _mm512_maskz_loadu_epi64(known, weights + at);
        __mmask8 stays = _mm512_cmpgt_epi64_mask(weight, edge);
        if (cut.num_equal) stays |= first_of(_mm512_cmpeq_epi64_mask(weight, edge), &cut.num_equal);
        weight = _mm512_maskz_mov_epi64(stays, weight);
        kept = _mm512_add_epi64(kept, weight);
        _mm512_mask_storeu_epi64(weights + at, known, weight);
    }
    return _mm512_reduce_add_epi64(kept);
}

// Returns the first index at which the cumulative sum of the weights exceeds `target`.
static size_t find_place(const int64_t *weights, size_t size, int64_t target) {
    size_t at = 0;
    for (; at + LANES <= size; at += LANES) {
        int64_t sum = _mm512_reduce_add_epi64(_mm512_loadu_si512(weights + at));
        if (sum > target) break;
        target -= sum;
    }
    while (at + 1 < size && weights[at] <= target) target -= weights[at++];
    return at;
}

static void draw_row(const void *context, size_t row, size_t thread) {
    const Drawing *job = context;
    const Draw *draw = &job->draws[row];
    int64_t *weights = job->scratch + thread * draw_scratch(job->size), *candidates = weights + job->size + LANES;
    float top = highest(draw->scores, job->size);
    job->tokens[row] = 0;
    if (!isfinite(top)) return;
    ScoreCut cut = {-INFINITY, 0};
    if (draw->top_k && draw->top_k < job->size)
        cut = cut_scores(draw->scores, job->size, draw->top_k, (float *)candidates);
    int64_t total = weigh(draw, job->size, top, cut, weights);
    if (draw->top_p < 1.0) total = keep_top_p(draw->top_p, job->size, total, weights, candidates);
    uint64_t target = (uint64_t)((unsigned __int128)uniform_bits(draw) * (uint64_t)total >> UNIFORM_BITS);
    job->tokens[row] = (int64_t)find_place(weights, job->size, (int64_t)target);
}

// Samples a token from each row of `size` scores; token 0 if the best score is not finite. Without a pool, the caller's
// thread samples all rows.
void kvbaton_draw(Pool *pool, const Draw *draws, size_t num_draws, size_t size, int64_t *scratch, int64_t *tokens) {
    Drawing job = {draws, size, scratch, tokens};
    if (pool) pool_run(pool, num_draws, draw_row, &job);
    else
        for (size_t row = 0; row < num_draws; row++) draw_row(&job, row, 0);
}

// Returns the size of the scratch memory per thread, in int64 numbers.
size_t kvbaton_draw_scratch(size_t size) { return draw_scratch(size); }
