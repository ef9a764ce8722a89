// Bad programs: overflow of the stack by recursion, by a large step, in a
// thread, after a limit; and that deep but allowed recursion works.

#include "test.h"

#include <pthread.h>
#include <sys/resource.h>

static int recurse(volatile char *above, int depth) {
    volatile char space[1000];
    space[0] = above[0];
    space[999] = 1;
    if (depth == 0)
        return 0;
    return recurse(space, depth - 1) + space[999];
}

static void *overflow(void *argument) {
    char start = 0;
    recurse(&start, 100000000);
    return argument;
}

int main(void) {
    test_start();
    char start = 0;
    EQUAL(recurse(&start, 5000), 5000, "recursion of 5 MB works");
    DIES(SIGSEGV, "endless recursion", recurse(&start, 100000000));
    DIES(SIGSEGV, "endless recursion again", recurse(&start, 100000000));
    DIES(SIGSEGV, "endless recursion in a thread", {
        pthread_t thread;
        STEP_EQUAL(pthread_create(&thread, 0, overflow, 0), 0);
        pthread_join(thread, 0);
    });
    DIES(SIGSEGV, "a step of 64 MiB below the stack",
         *(volatile char *)((char *)__builtin_frame_address(0) - (64 << 20)) = 1);
    EXITS(0, "a step of 1 MiB below the stack is allowed",
          *(volatile char *)((char *)__builtin_frame_address(0) - (1 << 20)) = 1);
    DIES(SIGSEGV, "a stack limit of 512 KiB", {
        struct rlimit limit = {512 << 10, 512 << 10};
        STEP_EQUAL(setrlimit(RLIMIT_STACK, &limit), 0);
        recurse(&start, 7000);
    });
    EXITS(0, "a stack limit is kept below", {
        struct rlimit limit = {4 << 20, 4 << 20};
        STEP_EQUAL(setrlimit(RLIMIT_STACK, &limit), 0);
        STEP_EQUAL(recurse(&start, 200), 200);
    });
    DIES(SIGSEGV, "a stack pointer to nowhere", {
#define NOWHERE "0x10"
#if defined(__x86_64__)
        __asm__ volatile("mov $" NOWHERE ", %%rsp\n push %%rax" ::: "memory");
#elif defined(__aarch64__)
        __asm__ volatile("mov sp, %0\n str xzr, [sp, #-16]!" ::"r"(0x1000ul) : "memory");
#endif
    });
    DIES(SIGSEGV, "a signal with a stack pointer to nowhere", {
        signal(SIGUSR1, SIG_IGN);
        struct sigaction action = {.sa_handler = test_watchdog};
        sigaction(SIGUSR1, &action, 0);
        pid_t self = getpid();
        if (fork() == 0) {
            for (int round = 0; round < 200; round++) {
                test_sleep(10);
                kill(self, SIGUSR1);
            }
            _exit(0);
        }
#if defined(__x86_64__)
        __asm__ volatile("mov $" NOWHERE ", %%rsp\n 1: pause\n jmp 1b" ::: "memory");
#elif defined(__aarch64__)
        __asm__ volatile("mov sp, %0\n 1: b 1b" ::"r"(0x1000ul) : "memory");
#endif
    });
    if (getpid() == 1)
        while (wait(0) > 0)
            ;
    EQUAL(recurse(&start, 5000), 5000, "the parent's stack works on");
    return test_end();
}
