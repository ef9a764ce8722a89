// A timer for a thread that has ended sends no signal. Each timer has a signal of its own, which counts
// the expirations until it is taken.

#include "test.h"

#include <pthread.h>

static volatile int number, may_end;

static void *run(void *unused) {
    (void)unused;
    number = syscall(SYS_gettid);
    while (!may_end)
        test_sleep(1);
    return 0;
}

static int timer_of(int value) {
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    event.sigev_value.sival_int = value;
    int timer;
    NEED(syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer) == 0);
    return timer;
}

static void two_of_one_signal(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    NEED(sigprocmask(SIG_BLOCK, &set, 0) == 0);
    struct timespec none = {0, 0};
    siginfo_t got;
    int timers[2], seen = 0;
    for (int index = 0; index < 2; index++) {
        timers[index] = timer_of(1 << index);
        struct itimerspec when = {.it_value = {0, 1000000}};
        NEED(syscall(SYS_timer_settime, timers[index], 0, &when, 0) == 0);
        do {
            test_sleep(1);
            NEED(syscall(SYS_timer_gettime, timers[index], &when) == 0);
        } while (when.it_value.tv_sec || when.it_value.tv_nsec);
    }
    while (sigtimedwait(&set, &got, &none) == SIGUSR2)
        seen += got.si_value.sival_int;
    EQUAL(seen, 3, "two timers with one signal: each has sent it");

    struct itimerspec when = {{0, 1000000}, {0, 1000000}};
    NEED(syscall(SYS_timer_settime, timers[0], 0, &when, 0) == 0);
    test_sleep(40);
    EQUAL(sigtimedwait(&set, &got, &none), SIGUSR2, "a timer expires again and again");
    CHECK(got.si_overrun >= 20, "and its signal counts how often");
    EQUAL(syscall(SYS_timer_getoverrun, timers[0]), got.si_overrun, "as timer_getoverrun tells");
    test_sleep(40);
    when = (struct itimerspec){{0, 0}, {0, 0}};
    NEED(syscall(SYS_timer_settime, timers[0], 0, &when, 0) == 0);
    FAILS(sigtimedwait(&set, &got, &none), EAGAIN, "a timer that is set anew loses its old signal");
    EQUAL(syscall(SYS_timer_getoverrun, timers[0]), 0, "and its overrun");
    for (int index = 0; index < 2; index++)
        STEP_EQUAL(syscall(SYS_timer_delete, timers[index]), 0);
}

static void clocks(void) {
    static const clockid_t of_timers[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_TAI};
    static const clockid_t others[] = {CLOCK_MONOTONIC_RAW, CLOCK_REALTIME_COARSE,
                                       CLOCK_MONOTONIC_COARSE};
    int timer, before = test_failures;
    for (int index = 0; index < 4; index++) {
        STEP_EQUAL(syscall(SYS_timer_create, of_timers[index], 0, &timer), 0);
        STEP_EQUAL(syscall(SYS_timer_delete, timer), 0);
    }
    for (int index = 0; index < 3; index++)
        STEP_FAILS(syscall(SYS_timer_create, others[index], 0, &timer), EOPNOTSUPP);
    ALL_STEPS(before, "the clocks that timers follow");
}

int main(void) {
    test_start();
    clocks();
    two_of_one_signal();
    pthread_t thread;
    NEED(pthread_create(&thread, 0, run, 0) == 0);
    while (number == 0)
        test_sleep(1);
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    // The offset of the field with the thread's number: after value, signal and kind.
    memcpy((char *)&event + 16, (const int *)&number, sizeof number);
    int timer;
    EQUAL(syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer), 0, "timer_create for a thread");
    may_end = 1;
    NEED(pthread_join(thread, 0) == 0);
    struct itimerspec when = {.it_value = {0, 100000000}};
    EQUAL(syscall(SYS_timer_settime, timer, 0, &when, 0), 0, "timer_settime");
    // SIGUSR1 has no handler: were it sent to the process, it would die.
    test_sleep(500);
    CHECK(1, "the process lives");
    EQUAL(syscall(SYS_timer_delete, timer), 0, "timer_delete");
    return test_end();
}
