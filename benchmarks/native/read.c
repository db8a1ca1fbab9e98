#include <stddef.h>
#include <stdint.h>

/* The exclusive or of num_words 64-bit words, a multiple of 64: the compiler makes vector loads of it, and the sum keeps them. */
uint64_t read_words(const uint64_t *words, size_t num_words) {
    uint64_t sums[64] = {0};
    for (size_t start = 0; start < num_words; start += 64)
        for (size_t lane = 0; lane < 64; lane++) sums[lane] ^= words[start + lane];
    uint64_t all = 0;
    for (size_t lane = 0; lane < 64; lane++) all ^= sums[lane];
    return all;
}
