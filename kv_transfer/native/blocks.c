/* Copies many blocks of one pool into another by one call, through the processor's caches or past them.
 *
 * A copy past the caches does not read the target's lines first, and does not evict what Python and the model hold there.
 * memcpy() does this only for sizes near that of the cache, which no block reaches.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void copy_function(char *to, const char *from, size_t size);

static void copy_through_caches(char *to, const char *from, size_t size) { memcpy(to, from, size); }

#ifdef __x86_64__
#include <immintrin.h>

enum { LINE = 64, MIN_STREAMED = 2048, AHEAD = 4096 };

/* Copies whole cache lines; the target is aligned to one. */
static void stream_16(char *to, const char *from, size_t size) {
    for (; size; to += LINE, from += LINE, size -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a), _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c), _mm_stream_si128(target + 3, d);
    }
}

__attribute__((target("avx2"))) static void stream_32(char *to, const char *from, size_t size) {
    for (; size; to += LINE, from += LINE, size -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)from + 1);
        _mm256_stream_si256((__m256i *)to, a), _mm256_stream_si256((__m256i *)to + 1, b);
    }
}

static void copy_past_caches(char *to, const char *from, size_t size) {
    if (size < MIN_STREAMED) {
        memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to % LINE, tail = (size - head) % LINE, middle = size - head - tail;
    memcpy(to, from, head);
    (__builtin_cpu_supports("avx2") ? stream_32 : stream_16)(to + head, from + head, middle);
    memcpy(to + head + middle, from + head + middle, tail);
}
#else
static void copy_past_caches(char *to, const char *from, size_t size) { memcpy(to, from, size); }
#endif

/* Copies the same `size` bytes of `count` blocks, from blocks `from_ids` to blocks `to_ids`.
 *
 * `to` and `from` point to those bytes in block 0 of each pool; blocks of both pools are `step` bytes apart. On return all
 * bytes are visible to every thread, and later reads of the caller are ordered after the last of them. */
void kvbaton_copy_blocks(char *to, const int64_t *to_ids, const char *from, const int64_t *from_ids, size_t count,
                         size_t step, size_t size, int past_caches) {
    copy_function *copy = past_caches ? copy_past_caches : copy_through_caches;
    for (size_t i = 0; i < count; i++) copy(to + to_ids[i] * step, from + from_ids[i] * step, size);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
