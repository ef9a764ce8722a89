// A timer for a thread that has ended sends no signal.

#include "test.h"

#include <pthread.h>

static volatile int number;

static void *run(void *unused) {
    (void)unused;
    number = syscall(SYS_gettid);
    test_sleep(50);
    return 0;
}

int main(void) {
    test_start();
    pthread_t thread;
    NEED(pthread_create(&thread, 0, run, 0) == 0);
    while (number == 0)
        test_sleep(1);
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    // The offset of the field with the thread's number: after value, signal and kind.
    memcpy((char *)&event + 16, (const int *)&number, sizeof number);
    int timer;
    EQUAL(syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer), 0, "timer_create for a thread");
    struct itimerspec when = {.it_value = {0, 200000000}};
    EQUAL(syscall(SYS_timer_settime, timer, 0, &when, 0), 0, "timer_settime");
    NEED(pthread_join(thread, 0) == 0);
    // SIGUSR1 has no handler: were it sent to the process, it would die.
    test_sleep(500);
    CHECK(1, "the process lives");
    EQUAL(syscall(SYS_timer_delete, timer), 0, "timer_delete");
    return test_end();
}
