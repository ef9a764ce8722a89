// sigaltstack: handlers on their own stack, overflow of the main stack,
// errors.

#include "test.h"

#define SIZE 32768

static volatile uintptr_t handler_stack;
static volatile int overflows, nested;
static sigjmp_buf out;
static stack_t inside;

static void note_stack(int signal) {
    char here;
    handler_stack = (uintptr_t)&here;
    sigaltstack(0, &inside);
    if (signal == SIGUSR1)
        raise(SIGUSR2);
    else
        nested++;
}

static void overflow(int signal, siginfo_t *info, void *context) {
    char here;
    (void)signal;
    (void)info;
    (void)context;
    handler_stack = (uintptr_t)&here;
    overflows++;
    siglongjmp(out, 1);
}

static int recurse(volatile char *above, int depth) {
    volatile char space[3000];
    space[0] = above[0];
    space[2999] = depth;
    if (depth > 1000000)
        return 0;
    return recurse(space, depth + 1) + space[2999] + space[0];
}

int main(void) {
    test_start();
    stack_t stack, old;
    STEP_EQUAL(sigaltstack(0, &old), 0);
    CHECK(old.ss_flags & SS_DISABLE, "at the start there is no other stack");
    char *memory = test_map(SIZE);
    stack = (stack_t){.ss_sp = memory, .ss_size = SIZE};
    WORKS(sigaltstack(&stack, 0), "sigaltstack");
    STEP_EQUAL(sigaltstack(0, &old), 0);
    CHECK(old.ss_sp == memory && old.ss_size == SIZE && old.ss_flags == 0, "it is told back");

    struct sigaction action = {.sa_handler = note_stack, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, 0);
    sigaction(SIGUSR2, &action, 0);
    raise(SIGUSR1);
    CHECK(handler_stack >= (uintptr_t)memory && handler_stack < (uintptr_t)memory + SIZE,
          "a handler runs on it");
    CHECK(inside.ss_flags & SS_ONSTACK, "and knows it");
    EQUAL(nested, 1, "a second handler nests on it");
    STEP_EQUAL(sigaltstack(0, &old), 0);
    EQUAL(old.ss_flags, 0, "afterwards it is free");
    action.sa_flags = 0;
    sigaction(SIGUSR2, &action, 0);
    raise(SIGUSR2);
    CHECK(handler_stack < (uintptr_t)memory || handler_stack >= (uintptr_t)memory + SIZE,
          "without SA_ONSTACK a handler runs on the main stack");

    struct sigaction fault = {.sa_sigaction = overflow, .sa_flags = SA_ONSTACK | SA_SIGINFO};
    sigaction(SIGSEGV, &fault, 0);
    char start = 1;
    for (int round = 0; round < 3; round++)
        if (sigsetjmp(out, 1) == 0)
            recurse(&start, 0);
    EQUAL(overflows, 3, "an overflow of the stack is handled, three times");
    CHECK(handler_stack >= (uintptr_t)memory && handler_stack < (uintptr_t)memory + SIZE,
          "on the other stack");
    char grown[200000];
    memset(grown, 1, sizeof grown);
    EQUAL(grown[199999], 1, "the main stack works on");

    DIES(SIGSEGV, "an overflow with a handler but no stack for it kills", {
        stack.ss_flags = SS_DISABLE;
        sigaltstack(&stack, 0);
        recurse(&start, 0);
    });
    DIES(SIGSEGV, "an overflow with a stack that is not mapped kills", {
        stack.ss_flags = 0;
        stack.ss_sp = test_wild(0x10000);
        STEP_EQUAL(sigaltstack(&stack, 0), 0);
        recurse(&start, 0);
    });
    EXITS(0, "a child has the parent's stack", {
        STEP_EQUAL(sigaltstack(0, &old), 0);
        STEP(old.ss_sp == memory);
        if (sigsetjmp(out, 1) == 0)
            recurse(&start, 0);
        STEP_EQUAL(overflows, 4);
    });
    stack = (stack_t){.ss_sp = memory, .ss_size = 100};
    FAILS(sigaltstack(&stack, 0), ENOMEM, "too small a stack");
    stack = (stack_t){.ss_sp = memory, .ss_size = SIZE, .ss_flags = 0x40};
    FAILS(sigaltstack(&stack, 0), EINVAL, "unknown flags");
    FAILS(syscall(SYS_sigaltstack, test_wild(8), 0), EFAULT, "a bad pointer");
    stack = (stack_t){.ss_flags = SS_DISABLE};
    WORKS(sigaltstack(&stack, &old), "switching it off");
    CHECK(old.ss_sp == memory, "the old one is told");
    return test_end();
}
