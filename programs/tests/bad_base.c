// Bad programs: registers that hold the base of a segment, set to what is no
// address. A processor refuses that, an emulator may not; the machine lives.
// Elsewhere than on x86-64 there are none.

#include "test.h"

#if defined(__x86_64__)
#include <sys/auxv.h>

static void set_and_fork(void) {
    unsigned long none = 1ul << 63;
    __asm__ volatile("wrgsbase %0" ::"r"(none));
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    test_wait(child);
    test_sleep(20);
}

static void set_and_call(void) {
    unsigned long none = 1ul << 63, base;
    // Without a base of FS the C library does not work: calls by hand, and back.
    __asm__ volatile("rdfsbase %0\n\t"
                     "wrfsbase %1\n\t"
                     "mov $24, %%eax\n\t"
                     "syscall\n\t"
                     "wrfsbase %0"
                     : "=&r"(base)
                     : "r"(none)
                     : "rax", "rcx", "r11", "memory");
}

int main(void) {
    test_start();
    // Bit 1: the kernel lets programs use these instructions.
    if (getauxval(AT_HWCAP2) & 2) {
        test_wait(CHILD(set_and_fork()));
        CHECK(1, "a base of GS that is none");
        test_wait(CHILD(set_and_call()));
        CHECK(1, "a base of FS that is none");
    }
    EXITS(0, "the machine works on", _exit(0));
    return test_end();
}
#else
int main(void) {
    test_start();
    CHECK(1, "no such registers");
    return test_end();
}
#endif
