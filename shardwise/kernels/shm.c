/* barrier, wait and post on 32-bit words that processes share: a short spin, then sleep in the kernel (futex).
 *
 * The spin is short because ranks often share cores: a longer one keeps the very process from running that is waited for.
 * Words only ever count upwards and wrap around, so they are compared by their difference.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Sleeps until the word is no longer seen, or for the seconds left, or for no reason at all. */
static void sleep_while(uint32_t *word, uint32_t seen, double left) {
#if defined(__linux__)
    struct timespec time = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, NULL, 0);
#else
    (void)word, (void)seen, (void)left;
    sched_yield();
#endif
}

static void wake_all(uint32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Waits until *word has reached at_least. 0, or -1 when the time is up. */
int sw_wait(uint32_t *word, uint32_t at_least, uint32_t spin, double timeout_s) {
    double deadline = 0;
    for (uint32_t tries = 0;; tries++) {
        uint32_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if ((int32_t)(seen - at_least) >= 0) return 0;
        if (tries < spin) {
            pause_briefly();
            continue;
        }
        double time = now();
        if (deadline == 0) deadline = time + timeout_s;
        if (time >= deadline) return -1;
        sleep_while(word, seen, deadline - time < 3600 ? deadline - time : 3600);
    }
}

/* Publishes value, and what was written before it. */
void sw_post(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    wake_all(word);
}

/* Waits until size processes are here. 0, or -1 when the time is up; after a timeout the barrier is broken. */
int sw_barrier(uint32_t *count, uint32_t *generation, uint32_t size, uint32_t spin, double timeout_s) {
    uint32_t next = __atomic_load_n(generation, __ATOMIC_ACQUIRE) + 1;
    if (__atomic_add_fetch(count, 1, __ATOMIC_ACQ_REL) < size) return sw_wait(generation, next, spin, timeout_s);
    __atomic_store_n(count, 0, __ATOMIC_RELAXED);
    sw_post(generation, next);
    return 0;
}
