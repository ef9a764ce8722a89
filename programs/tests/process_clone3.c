// clone3: sizes of its structure that are not ours, and what does not fit in it.

#include "test.h"

struct arguments {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
    uint64_t set_tid, set_tid_size, cgroup;
    uint64_t unknown[8];
};

enum { KNOWN = 88, FIRST = 64 };

static char *end; // of memory, with a hole behind

// A child that ends at once: its number or the error.
static long make(const void *at, size_t size) {
    long child = syscall(SYS_clone3, at, size);
    if (child == 0)
        _exit(0);
    if (child > 0)
        STEP_EQUAL(test_wait(child), 0);
    return child;
}

// With the structure right in front of the hole.
static long at_end(const struct arguments *arguments, size_t there, size_t size) {
    return make(memcpy(end - there, arguments, there), size);
}

static long with(struct arguments arguments) { return make(&arguments, KNOWN); }

// By clone, which has one place for a number and a descriptor.
static long old_way(unsigned long flags, int *place) {
    long child = syscall(SYS_clone, flags, 0, place, 0, 0);
    if (child == 0)
        _exit(0);
    return child;
}

int main(void) {
    test_start();
    char *memory = test_map(3 * PAGE);
    munmap(memory + 2 * PAGE, PAGE);
    end = memory + 2 * PAGE;
    struct arguments plain = {.exit_signal = SIGCHLD};

    CHECK(make(&plain, FIRST) > 0, "the first size of all");
    CHECK(at_end(&plain, FIRST, FIRST) > 0, "of which no more is read");
    CHECK(make(&plain, KNOWN) > 0, "the size that is known");
    CHECK(make(&plain, 68) > 0, "a size between");
    FAILS(make(&plain, FIRST - 1), EINVAL, "a byte less than the first size");
    FAILS(make(&plain, 0), EINVAL, "no size");
    FAILS(make(0, 0), EINVAL, "whatever the address");
    CHECK(make(&plain, sizeof plain) > 0, "a larger size with zeroes");
    CHECK(make(memcpy(memory, &plain, sizeof plain), PAGE) > 0, "a page");
    FAILS(make(memory, PAGE + 1), E2BIG, "more than a page");
    FAILS(make(0, PAGE + 1), E2BIG, "whatever the address");
    struct arguments more = plain;
    more.unknown[7] = 1;
    FAILS(make(&more, sizeof more), E2BIG, "a larger size, and not zero");
    more.flags = ~0ULL;
    FAILS(make(&more, sizeof more), E2BIG, "which is looked at before the flags");
    CHECK(make(&more, sizeof more - 8) < 0 && errno == EINVAL, "the flags come then");
    *((char *)memset(memory, 0, PAGE) + PAGE - 1) = 1;
    FAILS(make(memory, PAGE), E2BIG, "the last byte of a page counts");
    FAILS(at_end(&plain, FIRST, FIRST + 8), EFAULT, "the structure ends in a hole");
    FAILS(at_end(&plain, KNOWN, KNOWN + 8), EFAULT, "its unknown part is a hole");
    FAILS(make(test_wild(8), KNOWN), EFAULT, "there is no structure");
    FAILS(make(test_wild(-8L), KNOWN), EFAULT, "nor at the end of all addresses");

    struct arguments odd = plain;
    odd.set_tid_size = 1;
    FAILS(with(odd), EINVAL, "numbers without a place");
    odd = plain, odd.cgroup = 99;
    CHECK(with(odd) > 0, "a control group that is not asked for is not looked at");
    odd = plain, odd.exit_signal = 65;
    FAILS(with(odd), EINVAL, "no such signal");
    odd = plain, odd.exit_signal = (1ULL << 32) + SIGCHLD;
    FAILS(with(odd), EINVAL, "a signal of more than 32 bits");
    odd = plain, odd.flags = SIGCHLD;
    FAILS(with(odd), EINVAL, "a signal among the flags");
    odd = plain, odd.flags = 0x8000; // CLONE_PARENT
    FAILS(with(odd), EINVAL, "a sibling with a signal of its own");
    odd = plain, odd.flags = 0x400000; // CLONE_DETACHED
    FAILS(with(odd), EINVAL, "CLONE_DETACHED");
    odd = plain, odd.stack_size = PAGE;
    FAILS(with(odd), EINVAL, "the size of a stack that is nowhere");
    odd = plain, odd.stack = (uintptr_t)memory;
    FAILS(with(odd), EINVAL, "a stack without a size");

    enum { BOTH = 0x1000 | 0x100000 }; // CLONE_PIDFD, CLONE_PARENT_SETTID
    int places[2];
    odd = plain, odd.flags = BOTH, odd.pidfd = odd.parent_tid = (uintptr_t)&places[0];
    FAILS(with(odd), EINVAL, "one place for a descriptor and a number");
    odd.pidfd = (uintptr_t)&places[1];
    CHECK(with(odd) > 0, "a place for each");
    FAILS(old_way(BOTH | SIGCHLD, places), EINVAL, "clone has only one place for both");
    return test_end();
}
