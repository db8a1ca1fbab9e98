// A pool of threads that processes one piece of work at a time, divided into items.
//
// Each thread has a share of consecutive items, because memory is read fastest in order, and takes items from the other
// shares when its own is empty. Work is complete when all items are done, so no thread waits for one that has not started.
// A thread that the system has preempted delays a step by its current item only, not by its share.
//
// A thread sometimes yields its core between items: a thread that waits for the core has little work (such as sending a
// token to a client), but would otherwise wait for the system's next tick, up to 4 ms. If no thread waits, yielding is
// cheap.
//
// A task, which consists of many pieces of work, can be launched: thread 1 leads it from piece to piece. Thread 0, which
// launched it, can do other work meanwhile, and joins in when it waits for the task.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "kernels.h"

enum { LINE = 64, SPINS = 4000 };  // bytes of a cache line; pauses before an idle thread sleeps (about 50 microseconds)
enum { STRETCH = 1 << 20 };  // time stamps (0.2 to 0.5 ms) for which a thread keeps its core

typedef struct {
    _Alignas(LINE) atomic_long left;  // items that no thread has taken; 0 or less: none
    size_t end;
    _Alignas(LINE) atomic_long done;  // items of all shares that this share's thread has done
    uint64_t gave_way;                // time stamp of the last yield
} Share;

struct Pool {
    _Alignas(LINE) _Atomic uint32_t turn;  // number of the piece of work; idle threads wait for a change
    atomic_int sleepers, is_ending;
    _Alignas(LINE) Work work;  // this and the shares' ends are constant until all items are done
    const void *context;
    size_t leader;  // the thread that starts the pieces of work
    Task task;
    const void *task_context;
    atomic_int is_launched, is_under_way;
    atomic_int shall_end_early;
    int has_ended_early;
    size_t num_threads;
    pthread_t *threads;
    Share *shares;
};

typedef struct {
    Pool *pool;
    size_t number;
    int core;
} Birth;

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

static inline void give_way(Share *own) {
    uint64_t now = __rdtsc();
    if (now - own->gave_way < STRETCH) return;
    own->gave_way = now;
    sched_yield();
}

static void take_items(Pool *pool, size_t thread) {
    Share *own = &pool->shares[thread];
    for (size_t next = 0; next < pool->num_threads; next++) {
        Share *share = &pool->shares[(thread + next) % pool->num_threads];
        while (atomic_load_explicit(&share->left, memory_order_relaxed) > 0) {
            long left = atomic_fetch_sub(&share->left, 1);
            if (left <= 0) break;
            pool->work(pool->context, share->end - (size_t)left, thread);
            atomic_fetch_add(&own->done, 1);
            give_way(own);
        }
    }
}

static void wait_for_turn(Pool *pool, uint32_t last) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&pool->turn, memory_order_acquire) != last) return;
        _mm_pause();
    }
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->turn) == last) futex_wait(&pool->turn, last);
    atomic_fetch_sub(&pool->sleepers, 1);
}

static void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET((size_t)core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

static void wake(Pool *pool) {
    atomic_fetch_add(&pool->turn, 1);
    if (atomic_load(&pool->sleepers)) futex_wake(&pool->turn);
}

static void lead(Pool *pool) {
    pool->task(pool, pool->task_context);
    pool->leader = 0;
    atomic_store(&pool->is_under_way, 0);
    wake(pool);
}

static void *live(void *argument) {
    Birth birth = *(Birth *)argument;
    free(argument);
    if (birth.core >= 0) pin(birth.core);
    for (uint32_t last = 0; !atomic_load(&birth.pool->is_ending);) {
        wait_for_turn(birth.pool, last);
        last = atomic_load(&birth.pool->turn);
        if (birth.number == 1 && atomic_exchange(&birth.pool->is_launched, 0)) lead(birth.pool);
        else take_items(birth.pool, birth.number);
    }
    return NULL;
}

// Creates a pool. cores: cores of threads 1, 2, ...; -1: not pinned; thread 0 is the caller. Returns NULL if memory or
// threads are exhausted.
Pool *kvbaton_pool(size_t num_threads, const int *cores) {
    Pool *pool = aligned_alloc(LINE, sizeof *pool);
    if (!pool) return NULL;
    *pool = (Pool){.num_threads = 1, .threads = calloc(num_threads, sizeof(pthread_t))};
    pool->shares = aligned_alloc(LINE, num_threads * sizeof(Share));
    if (pool->shares) memset(pool->shares, 0, num_threads * sizeof(Share));
    for (size_t number = 1; pool->threads && pool->shares && number < num_threads; number++) {
        Birth *birth = malloc(sizeof *birth);
        if (birth) *birth = (Birth){pool, number, cores[number - 1]};
        if (!birth || pthread_create(&pool->threads[number], NULL, live, birth)) {
            free(birth);
            break;
        }
        pool->num_threads++;
    }
    if (pool->shares && pool->num_threads == num_threads) return pool;
    kvbaton_end_pool(pool);
    return NULL;
}

// Ends a pool, after its running task has ended.
void kvbaton_end_pool(Pool *pool) {
    if (pool->num_threads > 1) kvbaton_wait(pool);
    atomic_store(&pool->is_ending, 1);
    wake(pool);
    for (size_t number = 1; number < pool->num_threads; number++) pthread_join(pool->threads[number], NULL);
    free(pool->threads);
    free(pool->shares);
    free(pool);
}

size_t pool_threads(const Pool *pool) { return pool->num_threads; }

static long num_done(const Pool *pool) {
    long sum = 0;
    for (size_t thread = 0; thread < pool->num_threads; thread++)
        sum += atomic_load_explicit(&pool->shares[thread].done, memory_order_acquire);
    return sum;
}

// Runs a piece of work; returns when all items are done.
void pool_run(Pool *pool, size_t num_items, Work work, const void *context) {
    if (pool->num_threads == 1 || num_items < 2) {
        for (size_t item = 0; item < num_items; item++) {
            work(context, item, 0);
            give_way(&pool->shares[pool->leader]);
        }
        return;
    }
    pool->work = work;
    pool->context = context;
    for (size_t thread = 0; thread < pool->num_threads; thread++) {
        pool->shares[thread].end = num_items * (thread + 1) / pool->num_threads;
        atomic_store_explicit(&pool->shares[thread].done, 0, memory_order_relaxed);
    }
    for (size_t thread = 0, from = 0; thread < pool->num_threads; from = pool->shares[thread++].end)
        atomic_store(&pool->shares[thread].left, (long)(pool->shares[thread].end - from));
    wake(pool);
    take_items(pool, pool->leader);
    for (int spin = 0; num_done(pool) < (long)num_items; spin++) {
        if (spin < SPINS) _mm_pause();
        else sched_yield();  // the thread with the last item may be waiting for this core
    }
}

// Starts a task. It has ended when kvbaton_wait returns; until then the pool must not be used for anything else.
void pool_launch(Pool *pool, Task task, const void *context) {
    pool->task = task;
    pool->task_context = context;
    atomic_store(&pool->shall_end_early, 0);
    pool->has_ended_early = 0;
    atomic_store(&pool->is_under_way, 1);
    if (pool->num_threads == 1) return;
    pool->leader = 1;
    atomic_store(&pool->is_launched, 1);
    wake(pool);
}

// Interrupts the launched task, from any thread, because its result is no longer needed. Has no effect if no task is running.
void kvbaton_interrupt(Pool *pool) { atomic_store(&pool->shall_end_early, 1); }

// Called by the task, which returns at once if the result is 1.
int pool_ends_early(Pool *pool) {
    if (atomic_load_explicit(&pool->shall_end_early, memory_order_relaxed)) pool->has_ended_early = 1;
    return pool->has_ended_early;
}

// Helps with the launched task, if there is one, until it ends; a pool of one thread runs all of it here. Returns 0 if the
// task was interrupted.
int kvbaton_wait(Pool *pool) {
    if (pool->num_threads == 1 && atomic_load(&pool->is_under_way)) lead(pool);
    for (;;) {
        uint32_t turn = atomic_load(&pool->turn);
        if (!atomic_load(&pool->is_under_way)) return !pool->has_ended_early;
        take_items(pool, 0);
        wait_for_turn(pool, turn);
    }
}
