/* The sums of the digest fold64, which the kernel in engine/kv_cache/triton_kernels.py computes on a device, bit for bit.
 *
 * Word j of a block (64 bits, little-endian) has the key `seed + j * STEP`. The first sum adds the product of the lower and
 * the upper half of each word that was xored with its key; the second one adds the words. Both are modulo 2**64, so the
 * order of words does not matter, but each word's place does. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { WORD = 8, UNROLLED = 4 };
static const uint64_t STEP = 0x9e3779b97f4a7c15;

typedef struct {
    uint64_t products, words;
} Sums;

static Sums fold_words(const char *from, size_t count, uint64_t key) {
    Sums sums = {0, 0};
    for (size_t j = 0; j < count; j++, key += STEP) {
        uint64_t word;
        memcpy(&word, from + j * WORD, WORD);
        uint64_t mixed = word ^ key;
        sums.products += (mixed & 0xffffffff) * (mixed >> 32);
        sums.words += word;
    }
    return sums;
}

#ifdef __x86_64__
#include <immintrin.h>

/* Defines a function like fold_words for vectors of LANES words. */
#define FOLD_VECTORS(NAME, TARGET, VECTOR, LANES, LOAD, XOR, SHIFT, MULTIPLY, ADD, SET)                                  \
    __attribute__((target(TARGET))) static Sums NAME(const char *from, size_t count, uint64_t key) {                    \
        uint64_t keys[LANES], lanes[2][LANES];                                                                          \
        VECTOR key_of[UNROLLED], products[UNROLLED], words[UNROLLED];                                                   \
        for (int i = 0; i < UNROLLED; i++) {                                                                            \
            for (int lane = 0; lane < LANES; lane++) keys[lane] = key + (i * LANES + lane) * STEP;                      \
            key_of[i] = LOAD((const void *)keys);                                                                       \
            products[i] = words[i] = SET(0);                                                                            \
        }                                                                                                               \
        const VECTOR step = SET((long long)(UNROLLED * LANES * STEP));                                                  \
        size_t left = count;                                                                                            \
        for (; left >= UNROLLED * LANES; left -= UNROLLED * LANES)                                                      \
            _Pragma("GCC unroll 4") for (int i = 0; i < UNROLLED; i++, from += LANES * WORD) {                                                  \
                VECTOR word = LOAD((const void *)from), mixed = XOR(word, key_of[i]);                                   \
                products[i] = ADD(products[i], MULTIPLY(mixed, SHIFT(mixed, 32)));                                      \
                words[i] = ADD(words[i], word);                                                                         \
                key_of[i] = ADD(key_of[i], step);                                                                       \
            }                                                                                                           \
        Sums sums = fold_words(from, left, key + (count - left) * STEP);                                                \
        for (int i = 0; i < UNROLLED; i++) {                                                                            \
            memcpy(lanes[0], &products[i], sizeof(VECTOR)), memcpy(lanes[1], &words[i], sizeof(VECTOR));                \
            for (int lane = 0; lane < LANES; lane++) sums.products += lanes[0][lane], sums.words += lanes[1][lane];     \
        }                                                                                                               \
        return sums;                                                                                                    \
    }

FOLD_VECTORS(fold_256, "avx2", __m256i, 4, _mm256_loadu_si256, _mm256_xor_si256, _mm256_srli_epi64, _mm256_mul_epu32,
             _mm256_add_epi64, _mm256_set1_epi64x)
FOLD_VECTORS(fold_512, "avx512f", __m512i, 8, _mm512_loadu_si512, _mm512_xor_si512, _mm512_srli_epi64, _mm512_mul_epu32,
             _mm512_add_epi64, _mm512_set1_epi64)

static Sums fold(const char *from, size_t count, uint64_t key) {
    if (__builtin_cpu_supports("avx512f")) return fold_512(from, count, key);
    return (__builtin_cpu_supports("avx2") ? fold_256 : fold_words)(from, count, key);
}
#else
#define fold fold_words
#endif

/* Adds the sums of `num_words` words from word `first_word` on of each of `count` blocks: products, then words.
 *
 * addresses: of these words, which need not be aligned. */
void kvbaton_fold(uint64_t *sums, const uint64_t *addresses, const uint64_t *seeds, size_t count, uint64_t first_word,
                  size_t num_words) {
    for (size_t i = 0; i < count; i++) {
        Sums found = fold((const char *)addresses[i], num_words, seeds[i] + first_word * STEP);
        sums[i] += found.products;
        sums[count + i] += found.words;
    }
}
