// alarm, setitimer of all three clocks, getitimer.

#include "test.h"

#include <sys/time.h>

static volatile int alarms, virtuals, profiles;
static void count(int signal) {
    alarms += signal == SIGALRM;
    virtuals += signal == SIGVTALRM;
    profiles += signal == SIGPROF;
}

// Works for a while; gives up after 30 seconds.
static int work_until(volatile int *counter, int wanted) {
    long long start = test_now();
    volatile long sum = 0;
    while (*counter < wanted && test_now() - start < 30000000000LL)
        for (int round = 0; round < 1000; round++)
            sum += round;
    return *counter >= wanted;
}

int main(void) {
    test_start();
    struct sigaction action = {.sa_handler = count};
    sigaction(SIGALRM, &action, 0);
    sigaction(SIGVTALRM, &action, 0);
    sigaction(SIGPROF, &action, 0);
    alarm(0);
    EQUAL(alarm(100), 0, "alarm: none before");
    EXITS(0, "a child has no alarm", STEP_EQUAL(alarm(0), 0));
    unsigned left = alarm(0);
    CHECK(left > 90 && left <= 100, "alarm: the time that is left");
    long long start = test_now();
    alarm(1);
    FAILS(pause(), EINTR, "alarm ends a pause");
    EQUAL(alarms, 1, "by SIGALRM");
    CHECK(test_now() - start >= 990000000, "after a second");

    struct itimerval timer = {{0, 10000}, {0, 5000}}, old;
    alarms = 0;
    WORKS(setitimer(ITIMER_REAL, &timer, 0), "setitimer: real time");
    while (alarms < 5)
        pause();
    CHECK(alarms >= 5, "comes again and again");
    STEP_EQUAL(getitimer(ITIMER_REAL, &old), 0);
    CHECK(old.it_interval.tv_usec == 10000 && old.it_value.tv_sec == 0, "getitimer");
    timer = (struct itimerval){{0, 0}, {0, 0}};
    WORKS(setitimer(ITIMER_REAL, &timer, &old), "setitimer: off");
    EQUAL(old.it_interval.tv_usec, 10000, "the old one is told");
    int before = alarms;
    test_sleep(40);
    EQUAL(alarms, before, "it is off");

    timer.it_value.tv_usec = 20000;
    timer.it_interval.tv_usec = 20000;
    WORKS(setitimer(ITIMER_VIRTUAL, &timer, 0), "setitimer: virtual time");
    CHECK(work_until(&virtuals, 2), "SIGVTALRM comes while the process works");
    timer.it_value.tv_usec = timer.it_interval.tv_usec = 0;
    STEP_EQUAL(setitimer(ITIMER_VIRTUAL, &timer, 0), 0);
    timer.it_value.tv_usec = 500000;
    STEP_EQUAL(setitimer(ITIMER_VIRTUAL, &timer, 0), 0);
    before = virtuals;
    test_sleep(1000);
    EQUAL(virtuals, before, "and not while it sleeps");
    timer.it_value.tv_usec = 0;
    STEP_EQUAL(setitimer(ITIMER_VIRTUAL, &timer, 0), 0);
    timer.it_value.tv_usec = 20000;
    timer.it_interval.tv_usec = 20000;
    WORKS(setitimer(ITIMER_PROF, &timer, 0), "setitimer: profiling time");
    CHECK(work_until(&profiles, 2), "SIGPROF comes while the process works");
    timer.it_value.tv_usec = timer.it_interval.tv_usec = 0;
    STEP_EQUAL(setitimer(ITIMER_PROF, &timer, 0), 0);
    FAILS(setitimer(7, &timer, 0), EINVAL, "setitimer: unknown clock");
    timer.it_value.tv_usec = 1000000;
    FAILS(setitimer(ITIMER_REAL, &timer, 0), EINVAL, "setitimer: a bad time");
    FAILS(syscall(SYS_setitimer, ITIMER_REAL, test_wild(8), 0), EFAULT, "setitimer: a bad pointer");

    timer = (struct itimerval){{0, 0}, {1000, 0}};
    FAILS(syscall(SYS_setitimer, ITIMER_REAL, &timer, test_wild(8)), EFAULT, "setitimer: the old one has no place");
    STEP_EQUAL(getitimer(ITIMER_REAL, &old), 0);
    CHECK(old.it_value.tv_sec >= 900, "the timer runs all the same");
    timer.it_value.tv_sec = 0;
    STEP_EQUAL(setitimer(ITIMER_REAL, &timer, 0), 0);

    DIES(SIGALRM, "SIGALRM kills by default", {
        signal(SIGALRM, SIG_DFL);
        struct itimerval once = {{0, 0}, {0, 1000}};
        setitimer(ITIMER_REAL, &once, 0);
        for (;;)
            pause();
    });
    DIES(SIGALRM, "even a process that spins", {
        signal(SIGALRM, SIG_DFL);
        struct itimerval once = {{0, 0}, {0, 1000}};
        setitimer(ITIMER_REAL, &once, 0);
        for (;;)
            __asm__ volatile("" ::: "memory");
    });
    test_arm_watchdog();
    return test_end();
}
