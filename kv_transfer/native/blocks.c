/* Many blocks of one pool into another, by one call.
 *
 * Blocks that are copied are read next by something else: another core, the network, a later step. So where the processor
 * can, they are written past its caches: the lines of the target are not read first, and what Python and the model have in
 * the caches stays there. libc does so only for one copy that is larger than most of the cache, and no block is.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, MIN_STREAMED = 2048 };

static void copy_block(char *to, const char *from, size_t size) {
    if (size < MIN_STREAMED) {
        memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to % LINE;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a), _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c), _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, size);
}
#else
static void copy_block(char *to, const char *from, size_t size) { memcpy(to, from, size); }
#endif

/* The same `size` bytes of `count` blocks: from where `from_ids` says to where `to_ids` says.
 *
 * `to` and `from` are where those bytes are in block 0 of each pool, and `step` is from one block to the next, in both.
 * Behind it all bytes are there for every thread, and whatever the caller reads next was read after the last of them. */
void kvbaton_copy_blocks(char *to, const int64_t *to_ids, const char *from, const int64_t *from_ids, size_t count,
                         size_t step, size_t size) {
    for (size_t i = 0; i < count; i++) copy_block(to + to_ids[i] * step, from + from_ids[i] * step, size);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
