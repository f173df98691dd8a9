/* The threads of a pass: one that leads, the caller's, and others that help it for as long as that pays.
 *
 *     WITH_TEAM(pass, work(..., &me))
 *
 * Where threads meet, all wait for the last one, and one whose processor has other work as well is late by a time
 * slice, which is longer than many a pass. So the leader does not wait for helpers that have not begun, and counts how
 * long it waits for the others. When that is more than they bring, half of them leave the pass, and the rest share
 * what follows. How work is shared changes no sum, so neither does who is there.
 *
 * `work` returns as soon as `regroup` gives 0. How many they are is known from the first `regroup` on: before it, work is
 * shared by `next_unit` alone.
 */
#pragma once
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* What passes.py asks for, and what it learns. */
typedef struct {
    int64_t threads; /* at most */
    double stake;    /* seconds that the leader may wait, and half as long as it has worked beside */
    double lost;     /* seconds that it waited beyond that; 0: the helpers have been worth it */
} Pass;

#define PATIENCE 1e-4 /* seconds to wait with open eyes, and then asleep */
#define SEALED (1 << 20)

typedef struct { /* what several write to lies in lines of the cache of its own */
    _Alignas(64) _Atomic uint32_t joined;  /* threads that have begun; SEALED more when it is too late to */
    _Alignas(64) _Atomic uint32_t arrived; /* times that a helper came to where they meet */
    _Atomic uint32_t leader_sleeps;
    _Alignas(64) _Atomic uint32_t turn;    /* 2^16 * times that they met + threads from then on */
    _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic int64_t units;    /* taken since they last met */
    _Alignas(64) Pass *pass;               /* from here on the leader's alone */
    uint32_t due;                          /* what `arrived` is when all are there */
    double since, waited;                  /* the team's last change; seconds that the leader has waited since then */
    pthread_t leader; /* not asked of OpenMP: clang's and PyTorch's may both be there, and the other one would answer */
} Team;

typedef struct {
    Team *team;
    int64_t id, threads; /* 0 leads; 0 threads: not known yet */
    int64_t unit, loops; /* taken for a loop that follows, or -1; units of the loops since they last met */
    uint32_t turn;
} Member;

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Sleep if *word is `value`, until it is woken. */
static void sleep_at(_Atomic uint32_t *word, uint32_t value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)word, (void)value;
    nanosleep(&(struct timespec){0, 50000}, NULL);
#endif
}
static void wake_at(_Atomic uint32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Whether the thread is in time to take part. */
static int join(Team *t, Member *me) {
    *me = (Member){.team = t, .unit = -1};
    if (!pthread_equal(pthread_self(), t->leader)) return (me->id = atomic_fetch_add(&t->joined, 1)) < SEALED;
    me->threads = t->pass->threads > 1 ? 0 : 1;
    return 1;
}

/* The next unit of a loop over `count` that is this thread's, or -1 at its end. All threads run all loops. */
static inline int64_t next_unit(Member *me, int64_t count) {
    if (me->unit < 0) me->unit = atomic_fetch_add_explicit(&me->team->units, 1, memory_order_relaxed);
    int64_t unit = me->unit - me->loops;
    if (unit >= count) {
        me->loops += count;
        return -1;
    }
    me->unit = -1;
    return unit;
}

/* The part of `count` that is this thread's. */
static inline void share(const Member *me, int64_t count, int64_t *from, int64_t *to) {
    *from = count * me->id / me->threads;
    *to = count * (me->id + 1) / me->threads;
}

/* Wait until *word is `value`, or with `other` until it is not, for at most so many seconds: with open eyes, and then
 * asleep. Returns the seconds. */
static double wait_at(_Atomic uint32_t *word, uint32_t value, int other, _Atomic uint32_t *sleepers, double most) {
    for (int i = 0; i < 64; i++, breathe())
        if ((atomic_load(word) != value) == other) return 0;
    double from = now(), to = from;
    for (; (atomic_load(word) != value) != other && to - from < most; to = now()) {
        if (to - from < PATIENCE) {
            for (int i = 0; i < 16; i++) breathe();
            continue;
        }
        atomic_fetch_add(sleepers, 1);
        uint32_t seen = atomic_load(word);
        if ((seen != value) != other) sleep_at(word, seen);
        atomic_fetch_sub(sleepers, 1);
    }
    return to - from;
}

/* Whether the leader has waited for longer than helpers are worth it; then it begins to count anew. */
static int waited_too_long(Team *t) {
    double present = now(), worked = present - t->since - t->waited;
    if (t->waited <= t->pass->stake + worked / 2) return 0;
    t->pass->lost += t->waited;
    t->waited = 0;
    t->since = present;
    return 1;
}

static __attribute__((noinline)) void lead(Member *me) {
    Team *t = me->team;
    if (!me->threads) {
        double most = t->pass->stake < PATIENCE ? t->pass->stake : PATIENCE;
        t->waited += wait_at(&t->joined, (uint32_t)t->pass->threads, 0, &t->leader_sleeps, most);
        me->threads = atomic_fetch_add(&t->joined, SEALED);
    }
    t->due += (uint32_t)me->threads - 1;
    t->waited += wait_at(&t->arrived, t->due, 0, &t->leader_sleeps, INFINITY);
    if (me->threads > 1 && t->waited > t->pass->stake && waited_too_long(t)) me->threads /= 2;
    if (me->loops) atomic_store(&t->units, 0);
    me->turn = ((me->turn >> 16) + 1) << 16 | (uint32_t)me->threads;
    atomic_store(&t->turn, me->turn);
    if (atomic_load(&t->sleepers)) wake_at(&t->turn);
}

static __attribute__((noinline)) void follow(Member *me) {
    Team *t = me->team;
    atomic_fetch_add(&t->arrived, 1);
    if (atomic_load(&t->leader_sleeps)) wake_at(&t->arrived);
    wait_at(&t->turn, me->turn, 1, &t->sleepers, INFINITY);
    me->turn = atomic_load(&t->turn);
    me->threads = me->turn & 0xffff;
}

/* Wait for the others: what they wrote before is there afterwards. 0 if this thread is no longer needed. */
static inline int regroup(Member *me) {
    if (me->id) follow(me);
    else if (me->threads != 1) lead(me);
    else if (me->loops) atomic_store_explicit(&me->team->units, 0, memory_order_relaxed);
    me->unit = -1, me->loops = 0;
    return me->id < me->threads;
}

/* `regroup`, and then the part of `count` that is this thread's. */
static inline int regroup_and_share(Member *me, int64_t count, int64_t *from, int64_t *to) {
    if (!regroup(me)) return 0;
    share(me, count, from, to);
    return 1;
}

/* `work`, an expression, is run by each member, which it knows as `me`. At the end all wait for all. */
#define WITH_TEAM(at, work) \
    Team team = {.joined = 1, .pass = at, .leader = pthread_self(), .since = now()}; \
    _Pragma("omp parallel num_threads((int)team.pass->threads)") \
    { \
        Member me; \
        if (join(&team, &me)) work; \
        if (!me.id) team.waited -= now(); \
    } \
    team.waited += now(); \
    waited_too_long(&team);
