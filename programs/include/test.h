// Shared parts of the programs under programs/tests: checks that print one line
// each, a watchdog, children whose end is checked, and probes that survive a
// fault.
//
// A program starts with test_start() and ends with `return test_end()`. It
// prints only through write(2), so that a fork never prints a line twice.

#ifndef BINDERY_TEST_H
#define BINDERY_TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Numbers that the headers of older libcs lack; they are the same on every
// architecture.
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif
#ifndef SYS_mseal
#define SYS_mseal 462
#endif
#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 0x08
#endif

// Not every cross compiler brings <linux/futex.h>.
enum {
    FUTEX_WAIT = 0,
    FUTEX_WAKE = 1,
    FUTEX_REQUEUE = 3,
    FUTEX_CMP_REQUEUE = 4,
    FUTEX_WAKE_OP = 5,
    FUTEX_LOCK_PI = 6,
    FUTEX_WAIT_BITSET = 9,
    FUTEX_WAKE_BITSET = 10,
    FUTEX_PRIVATE = 128,
    FUTEX_REALTIME = 256,
};

#define UNUSED __attribute__((unused))
#define PAGE ((size_t)4096)

enum { TEST_SECONDS = 60 };

static int test_failures;

UNUSED static void test_print(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

UNUSED static void test_print(const char *format, ...) {
    int saved = errno;
    char line[600];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    for (int done = 0; done < length;) {
        ssize_t count = write(1, line + done, length - done);
        if (count < 0 && errno != EINTR)
            break;
        if (count > 0)
            done += count;
    }
    errno = saved;
}

static void test_watchdog(int signal) {
    (void)signal;
    static const char line[] = "FAIL the watchdog: the program hangs\n";
    ssize_t ignored UNUSED = write(1, line, sizeof line - 1);
    _exit(124);
}

// Arms the watchdog anew: also for programs that used SIGALRM themselves.
UNUSED static void test_arm_watchdog(void) {
    struct sigaction action = {.sa_handler = test_watchdog};
    sigaction(SIGALRM, &action, 0);
    alarm(TEST_SECONDS);
}

UNUSED static void test_start(void) { test_arm_watchdog(); }

UNUSED static int test_end(void) {
    if (test_failures)
        test_print("%d failed", test_failures);
    return test_failures != 0;
}

UNUSED static int test_check(int good, int loud, const char *file, int line,
                             const char *expression, const char *text) {
    if (!good) {
        test_failures++;
        test_print("FAIL %s:%d: %s: expected %s (errno %d, %s)", file, line, text,
                   expression, errno, strerror(errno));
    } else if (loud) {
        test_print("ok  %s", text);
    }
    return good;
}

UNUSED static int test_equal(long long got, long long expected, int loud, const char *file,
                             int line, const char *expression, const char *text) {
    int good = got == expected;
    if (!good) {
        test_failures++;
        test_print("FAIL %s:%d: %s: %s: expected %lld (0x%llx), got %lld (0x%llx), errno %d (%s)",
                   file, line, text, expression, expected, expected, got, got, errno,
                   strerror(errno));
    } else if (loud) {
        test_print("ok  %s", text);
    }
    return good;
}

UNUSED static int test_fails(long long got, int error, int loud, const char *file, int line,
                             const char *expression, const char *text) {
    int found = errno;
    int good = got == -1 && found == error;
    if (!good) {
        test_failures++;
        if (got == -1)
            test_print("FAIL %s:%d: %s: %s: expected errno %d (%s), got %d (%s)", file, line,
                       text, expression, error, strerror(error), found, strerror(found));
        else
            test_print("FAIL %s:%d: %s: %s: expected errno %d (%s), got result %lld", file,
                       line, text, expression, error, strerror(error), got);
    } else if (loud) {
        test_print("ok  %s", text);
    }
    return good;
}

// One checked thing each: a line `ok` or `FAIL`.
#define CHECK(condition, text) test_check((condition) != 0, 1, __FILE__, __LINE__, #condition, text)
#define EQUAL(got, expected, text) \
    test_equal((long long)(got), (long long)(expected), 1, __FILE__, __LINE__, #got, text)
#define WORKS(call, text) test_check((long long)(call) != -1, 1, __FILE__, __LINE__, #call " != -1", text)
#define FAILS(call, error, text) \
    (errno = 0, test_fails((long long)(call), error, 1, __FILE__, __LINE__, #call, text))

// Steps towards one checked thing: they print on failure only.
#define STEP(condition) test_check((condition) != 0, 0, __FILE__, __LINE__, #condition, "a step")
#define STEP_EQUAL(got, expected) \
    test_equal((long long)(got), (long long)(expected), 0, __FILE__, __LINE__, #got, "a step")
#define STEP_FAILS(call, error) \
    (errno = 0, test_fails((long long)(call), error, 0, __FILE__, __LINE__, #call, "a step"))

// A condition that the rest of the program requires.
#define NEED(condition)                                                                  \
    do {                                                                                 \
        if (!test_check((condition) != 0, 0, __FILE__, __LINE__, #condition, "needed"))  \
            _exit(1);                                                                    \
    } while (0)

// Prints `ok text` if no step failed since `int before = test_failures`.
#define ALL_STEPS(before, text) \
    test_check(test_failures == (before), 1, __FILE__, __LINE__, "all steps to succeed", text)

UNUSED static int test_wait(pid_t child) {
    int status = -1;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return status;
}

// Runs the block in a child, which exits with 0 if none of its checks failed.
#define CHILD(...)                    \
    ({                                \
        pid_t test_child = fork();    \
        if (test_child == 0) {        \
            test_failures = 0;        \
            __VA_ARGS__;              \
            _exit(test_failures != 0); \
        }                             \
        test_child;                   \
    })

UNUSED static int test_ended(int status, int exited, int killed, int loud, const char *file,
                             int line, const char *text) {
    int good = killed ? status != -1 && WIFSIGNALED(status) && WTERMSIG(status) == killed
                      : status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == exited;
    if (!good) {
        test_failures++;
        test_print("FAIL %s:%d: %s: expected %s %d, got %s %d", file, line, text,
                   killed ? "signal" : "exit", killed ? killed : exited,
                   status == -1          ? "no status"
                   : WIFSIGNALED(status) ? "signal"
                   : WIFSTOPPED(status)  ? "stop"
                                         : "exit",
                   WIFSIGNALED(status)  ? WTERMSIG(status)
                   : WIFSTOPPED(status) ? WSTOPSIG(status)
                                        : WEXITSTATUS(status));
    } else if (loud) {
        test_print("ok  %s", text);
    }
    return good;
}

// The block runs in a child: how must the child end?
#define EXITS(code, text, ...) \
    test_ended(test_wait(CHILD(__VA_ARGS__)), code, 0, 1, __FILE__, __LINE__, text)
#define DIES(signal, text, ...) \
    test_ended(test_wait(CHILD(__VA_ARGS__)), 0, signal, 1, __FILE__, __LINE__, text)
#define STEP_DIES(signal, text, ...) \
    test_ended(test_wait(CHILD(__VA_ARGS__)), 0, signal, 0, __FILE__, __LINE__, text)

// A fault taken by one access; signal 0 if the access succeeded.
struct test_fault {
    int signal;
    int code;
    void *address;
};

static struct test_fault test_last_fault;
static sigjmp_buf test_fault_return;

static void test_fault_handler(int signal, siginfo_t *info, void *context) {
    (void)context;
    test_last_fault = (struct test_fault){signal, info->si_code, info->si_addr};
    siglongjmp(test_fault_return, 1);
}

enum test_access { LOAD, STORE };

UNUSED static struct test_fault test_access(volatile void *address, enum test_access access) {
    struct sigaction action = {.sa_sigaction = test_fault_handler, .sa_flags = SA_SIGINFO};
    struct sigaction segv, bus;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    test_last_fault = (struct test_fault){0, 0, 0};
    if (sigsetjmp(test_fault_return, 1) == 0) {
        if (access == LOAD)
            (void)*(volatile char *)address;
        else
            *(volatile char *)address = *(volatile char *)address;
    }
    sigaction(SIGSEGV, &segv, 0);
    sigaction(SIGBUS, &bus, 0);
    return test_last_fault;
}

// The signal that the access raises, 0 for none.
#define LOADS(address) (test_access((void *)(address), LOAD).signal)
#define STORES(address) (test_access((void *)(address), STORE).signal)

UNUSED static void test_sleep(long milliseconds) {
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&rest, &rest) < 0 && errno == EINTR)
        ;
}

UNUSED static long long test_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Reads a whole (small) file into the buffer as text: its length, or -1.
UNUSED static ssize_t test_read_file(const char *path, char *buffer, size_t size) {
    int file = open(path, O_RDONLY);
    if (file < 0)
        return -1;
    size_t length = 0;
    ssize_t count;
    while (length < size - 1 && (count = read(file, buffer + length, size - 1 - length)) > 0)
        length += count;
    buffer[length] = 0;
    close(file);
    return length;
}

UNUSED static long test_futex(volatile int *word, int operation, int value, const void *time,
                              volatile int *second, int third) {
    return syscall(SYS_futex, word, operation, value, time, second, third);
}

// A pointer that the compiler knows nothing about.
UNUSED static void *test_wild(uintptr_t address) {
    volatile uintptr_t hidden = address;
    return (void *)hidden;
}

// A private anonymous mapping, readable and writable.
UNUSED static char *test_map(size_t length) {
    void *mapping =
        mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(mapping != MAP_FAILED);
    return mapping;
}

#endif
