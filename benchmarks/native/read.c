#include <stddef.h>
#include <stdint.h>

typedef uint64_t Line __attribute__((vector_size(64), aligned(8)));

enum { AHEAD = 32 };  // lines

/* The exclusive or of num_words 64-bit words, a multiple of 64. In the order in which they lie: left to itself, a compiler
   may load the lines of a few hundred bytes in another one, which halves the speed of some processors. */
uint64_t read_words(const uint64_t *words, size_t num_words) {
    const Line *lines = (const Line *)words;
    Line sum = {0};
    for (size_t line = 0; line < num_words / 8; line++) {
        __builtin_prefetch(lines + line + AHEAD, 0, 2);
        sum ^= lines[line];
    }
    uint64_t all = 0;
    for (size_t lane = 0; lane < 8; lane++) all ^= sum[lane];
    return all;
}
