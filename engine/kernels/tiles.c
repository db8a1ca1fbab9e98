// Register tiles: products of a few rows with a packed panel. All matrix products of this folder use them.
//
// A panel of 32 outputs is stored in the order in which it is read: 2 vectors of 16 outputs for each pair of inputs. A tile
// of up to 12 rows x 32 outputs needs 24 dot-product instructions, 2 vector loads and 12 broadcasts per pair. Compressed
// pairs are expanded in registers while the next ones are loaded from memory.
#include "kernels.h"

enum { AHEAD = 8192 };  // prefetch distance in bytes

#define INLINE static inline __attribute__((always_inline))
#define EACH_OF_6(TILE) TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#define EACH_OF_12(TILE) EACH_OF_6(TILE) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#define UNROLLED _Pragma("GCC unroll 12")

// num_rows and num_vectors are compile-time constants below, so that the sums are kept in registers.
typedef __m512 Sums[MAX_ROWS][4];

INLINE void load_sums(const int num_rows, const int num_vectors, Sums sum, const float *from, size_t stride, int adds) {
    UNROLLED for (int r = 0; r < num_rows; r++)
        UNROLLED for (int v = 0; v < num_vectors; v++)
            sum[r][v] = adds ? _mm512_loadu_ps(from + r * stride + v * 16) : _mm512_setzero_ps();
}

INLINE void store_sums(const int num_rows, const int num_vectors, Sums sum, float *to, size_t stride) {
    UNROLLED for (int r = 0; r < num_rows; r++)
        UNROLLED for (int v = 0; v < num_vectors; v++) _mm512_storeu_ps(to + r * stride + v * 16, sum[r][v]);
}

typedef const uint32_t *Rows[MAX_ROWS];

INLINE void find_rows(const int num_rows, Rows rows, const uint32_t *pairs, size_t stride) {
    UNROLLED for (int r = 0; r < num_rows; r++) rows[r] = pairs + (size_t)r * stride;
}

INLINE void add_products(const int num_rows, const int num_vectors, Sums sum, Rows rows, size_t pair, const __m512i *weight) {
    UNROLLED for (int r = 0; r < num_rows; r++) {
        __m512bh input = (__m512bh)_mm512_set1_epi32((int)rows[r][pair]);
        UNROLLED for (int v = 0; v < num_vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], input, (__m512bh)weight[v]);
    }
}

typedef void (*Plain)(const uint32_t *, size_t, const bf16 *, size_t, float *, size_t, int, const char *);

// ahead: if `asks`, the same number of compressed pairs to prefetch.
INLINE void multiply_plain(const int num_rows, const int num_panels, const int asks, const uint32_t *pairs, size_t stride,
                           const bf16 *panel, size_t num_pairs, float *sums, size_t sums_stride, int adds, const char *ahead) {
    Sums sum;
    Rows rows;
    find_rows(num_rows, rows, pairs, stride);
    load_sums(num_rows, 2 * num_panels, sum, sums, sums_stride, adds);
    for (size_t pair = 0; pair < num_pairs; pair++, panel += NUMBERS) {
        __m512i weight[4];
        if (asks) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            _mm_prefetch(ahead + 64, _MM_HINT_T1);
            ahead += TWO_PAIRS / 2;
        }
        UNROLLED for (int v = 0; v < 2 * num_panels; v++)
            weight[v] = _mm512_loadu_si512(panel + v / 2 * num_pairs * NUMBERS + v % 2 * PANEL);
        add_products(num_rows, 2 * num_panels, sum, rows, pair, weight);
    }
    store_sums(num_rows, 2 * num_panels, sum, sums, sums_stride);
}

#define PLAIN_TILE(NAME, R, NUM_PANELS, ASKS)                                                                         \
    static void NAME##_##R(const uint32_t *pairs, size_t stride, const bf16 *panel, size_t num_pairs, float *sums,     \
                           size_t sums_stride, int adds, const char *ahead) {                                         \
        multiply_plain(R, NUM_PANELS, ASKS, pairs, stride, panel, num_pairs, sums, sums_stride, adds, ahead);         \
    }
#define ONE(R) PLAIN_TILE(one, R, 1, 0)
#define ASK(R) PLAIN_TILE(ask, R, 1, 1)
#define TWO(R) PLAIN_TILE(two, R, 2, 0)
EACH_OF_12(ONE)
EACH_OF_12(ASK)
EACH_OF_6(TWO)
#define NAME_ONE(R) one_##R,
#define NAME_ASK(R) ask_##R,
#define NAME_TWO(R) two_##R,
static const Plain ONE_OF[] = {EACH_OF_12(NAME_ONE)}, ASK_OF[] = {EACH_OF_12(NAME_ASK)}, TWO_OF[] = {EACH_OF_6(NAME_TWO)};

void multiply(const uint32_t *pairs, size_t stride, size_t num_rows, const bf16 *panel, size_t num_pairs, float *sums,
              size_t sums_stride, int adds, const uint8_t *ahead) {
    (ahead ? ASK_OF : ONE_OF)[num_rows - 1](pairs, stride, panel, num_pairs, sums, sums_stride, adds, (const char *)ahead);
}

void multiply_two(const uint32_t *pairs, size_t stride, size_t num_rows, const bf16 *panels, size_t num_pairs, float *sums,
                  size_t sums_stride, int adds) {
    TWO_OF[num_rows - 1](pairs, stride, panels, num_pairs, sums, sums_stride, adds, NULL);
}

typedef struct {
    __m512i uppers, half;
} Codes;

INLINE Codes codes_of(const Reader *reader) {
    __m128i uppers = _mm_loadu_si128((const __m128i *)reader->uppers);
    return (Codes){_mm512_broadcast_i32x4(uppers), _mm512_set1_epi8(NUM_CODES - 1)};
}

// Expands the first (0) or second (1) of two compressed pairs; see compressed.c.
INLINE void expand(const Codes *codes, const char *from, const int which, __m512i *weight) {
    __m512i lower = _mm512_loadu_si512(from + which * NUMBERS), code = _mm512_loadu_si512(from + 2 * NUMBERS);
    if (which) code = _mm512_srli_epi16(code, 4);
    __m512i upper = _mm512_shuffle_epi8(codes->uppers, _mm512_and_si512(code, codes->half));
    weight[0] = _mm512_unpacklo_epi8(lower, upper);
    weight[1] = _mm512_unpackhi_epi8(lower, upper);
}

INLINE void store_pair(bf16 *to, const __m512i *weight) {
    UNROLLED for (int v = 0; v < 2; v++) _mm512_storeu_si512(to + v * PANEL, weight[v]);
}

// expanded: if `keeps`, the buffer for the expanded pairs.
INLINE void multiply_coded(const int num_rows, const int keeps, const uint32_t *pairs, size_t stride, const Reader *reader,
                           size_t num_pairs, float *sums, int adds, bf16 *expanded) {
    Sums sum;
    Rows rows;
    Codes codes = codes_of(reader);
    const char *from = (const char *)reader->next;
    find_rows(num_rows, rows, pairs, stride);
    load_sums(num_rows, 2, sum, sums, PANEL, adds);
    for (size_t pair = 0; pair < num_pairs; pair += 2, from += TWO_PAIRS) {
        UNROLLED for (int line = 0; line < TWO_PAIRS; line += 64)
            if (keeps) _mm_prefetch(from + AHEAD + line, _MM_HINT_T0);
            else _mm_prefetch(from + AHEAD + line, _MM_HINT_NTA);  // does not evict Python's code and data from the caches
        UNROLLED for (int which = 0; which < 2; which++) {
            __m512i weight[2];
            expand(&codes, from, which, weight);
            if (keeps) store_pair(expanded + (pair + which) * NUMBERS, weight);
            add_products(num_rows, 2, sum, rows, pair + which, weight);
        }
    }
    store_sums(num_rows, 2, sum, sums, PANEL);
}

typedef void (*Coded)(const uint32_t *, size_t, const Reader *, size_t, float *, int, bf16 *);

#define CODED_TILE(NAME, R, KEEPS)                                                                                    \
    static void NAME##_##R(const uint32_t *pairs, size_t stride, const Reader *reader, size_t num_pairs, float *sums,  \
                           int adds, bf16 *expanded) {                                                                \
        multiply_coded(R, KEEPS, pairs, stride, reader, num_pairs, sums, adds, expanded);                             \
    }
#define ONCE(R) CODED_TILE(once, R, 0)
#define KEEP(R) CODED_TILE(keep, R, 1)
EACH_OF_12(ONCE)
EACH_OF_12(KEEP)
#define NAME_ONCE(R) once_##R,
#define NAME_KEEP(R) keep_##R,
static const Coded ONCE_OF[] = {EACH_OF_12(NAME_ONCE)}, KEEP_OF[] = {EACH_OF_12(NAME_KEEP)};

// Expands the next two pairs, including numbers without a code.
static void expand_two(Reader *reader, bf16 *to) {
    Codes codes = codes_of(reader);
    for (int which = 0; which < 2; which++) {
        __m512i weight[2];
        expand(&codes, (const char *)reader->next, which, weight);
        store_pair(to + which * NUMBERS, weight);
    }
    for (size_t end = (reader->pair + 2) * NUMBERS; reader->other < reader->end && reader->other->place < end; reader->other++)
        to[reader->other->place - reader->pair * NUMBERS] = (bf16)reader->other->number;
}

void multiply_compressed(const uint32_t *pairs, size_t stride, size_t num_rows, Reader *reader, size_t num_pairs, float *sums,
                         int adds, bf16 *expanded) {
    Coded multiply_codes = (expanded ? KEEP_OF : ONCE_OF)[num_rows - 1];
    _Alignas(64) bf16 room[2 * NUMBERS];
    for (size_t end = reader->pair + num_pairs, now; reader->pair < end; adds = 1) {
        size_t odd = reader->other < reader->end ? reader->other->place / NUMBERS / 2 * 2 : end;
        if (odd > reader->pair) {
            now = (odd < end ? odd : end) - reader->pair;
            multiply_codes(pairs, stride, reader, now, sums, adds, expanded);
        } else {
            bf16 *two = expanded ? expanded : room;
            now = 2;
            expand_two(reader, two);
            multiply(pairs, stride, num_rows, two, now, sums, PANEL, adds, NULL);
        }
        reader->next += now / 2 * TWO_PAIRS;
        reader->pair += now;
        pairs += now;
        if (expanded) expanded += now * NUMBERS;
    }
}
