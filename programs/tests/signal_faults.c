// Faults as signals: number, si_code and si_addr, and that the program can
// repair the cause and go on.

#include "test.h"

static volatile struct test_fault seen;
static volatile int repairs;
static char *page;

static void note(int signal, siginfo_t *info, void *context) {
    (void)context;
    seen.signal = signal;
    seen.code = info->si_code;
    seen.address = info->si_addr;
    siglongjmp(test_fault_return, 1);
}

static void repair(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)context;
    repairs++;
    mprotect((void *)((uintptr_t)info->si_addr & ~(PAGE - 1)), PAGE, PROT_READ | PROT_WRITE);
}

static void install(void (*handler)(int, siginfo_t *, void *)) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    for (int index = 0; index < 5; index++)
        NEED(sigaction(signals[index], &action, 0) == 0);
}

static void is(int signal, int code, void *address, const char *text) {
    test_check(seen.signal == signal && seen.code == code && seen.address == address, 1, __FILE__,
               __LINE__, "signal, code and address", text);
    if (seen.signal != signal || seen.code != code || seen.address != address)
        test_print("  expected signal %d code %d at %p, got signal %d code %d at %p", signal, code,
                   address, seen.signal, seen.code, seen.address);
    seen = (struct test_fault){0, 0, 0};
}

#define TRY if (sigsetjmp(test_fault_return, 1) == 0)

int main(void) {
    test_start();
    install(note);
    volatile char *place = test_wild(0x1234);
    TRY *place;
    is(SIGSEGV, SEGV_MAPERR, test_wild(0x1234), "SEGV_MAPERR: a load from nowhere");
    TRY *place = 1;
    is(SIGSEGV, SEGV_MAPERR, test_wild(0x1234), "SEGV_MAPERR: a store to nowhere");
    page = mmap(0, 3 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(page != MAP_FAILED);
    place = page + PAGE + 77;
    TRY *place = 1;
    is(SIGSEGV, SEGV_ACCERR, (void *)place, "SEGV_ACCERR: a store to read-only memory");
    (void)*place;
    TRY *place = 1;
    is(SIGSEGV, SEGV_ACCERR, (void *)place, "SEGV_ACCERR: the same after a load");
    NEED(mprotect(page, PAGE, PROT_NONE) == 0);
    place = page + 5;
    TRY *place;
    is(SIGSEGV, SEGV_ACCERR, (void *)place, "SEGV_ACCERR: a load without PROT_READ");
    TRY((void (*)(void))(page + PAGE))();
    is(SIGSEGV, SEGV_ACCERR, page + PAGE, "SEGV_ACCERR: execution of data");
    munmap(page + 2 * PAGE, PAGE);
    TRY((void (*)(void))(page + 2 * PAGE))();
    is(SIGSEGV, SEGV_MAPERR, page + 2 * PAGE, "SEGV_MAPERR: execution of nothing");
    place = page + 2 * PAGE;
    TRY *place;
    is(SIGSEGV, SEGV_MAPERR, (void *)place, "SEGV_MAPERR: after munmap");

    int memory = memfd_create("faults", 0);
    NEED(memory >= 0 && ftruncate(memory, PAGE + 10) == 0);
    page = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    NEED(page != MAP_FAILED);
    place = page + 2 * PAGE + 3;
    TRY *place;
    is(SIGBUS, BUS_ADRERR, (void *)place, "BUS_ADRERR: a load behind the end of a file");
    TRY *place = 1;
    is(SIGBUS, BUS_ADRERR, (void *)place, "BUS_ADRERR: a store behind the end of a file");
    place = page + PAGE + 100;
    *place = 1;
    CHECK(*place == 1, "the rest of the last page can be used");
    place = page;
    *place = 1;
    NEED(ftruncate(memory, 0) == 0);
    TRY *place;
    is(SIGBUS, BUS_ADRERR, (void *)place, "BUS_ADRERR: the file is cut short");
    munmap(page, 4 * PAGE);

    // An access across two pages faults where the second one begins.
    page = test_map(2 * PAGE);
    munmap(page + PAGE, PAGE);
    volatile uint64_t *across = (volatile uint64_t *)(page + PAGE - 4);
    TRY *across;
    CHECK(seen.signal == SIGSEGV && (char *)seen.address >= page + PAGE - 4 &&
              (char *)seen.address < page + PAGE + 4,
          "an access across the end faults");
    seen.signal = 0;

#if defined(__x86_64__)
    volatile uint64_t *wild = test_wild(0x8000000000000000);
    TRY *wild;
    is(SIGSEGV, SI_KERNEL, 0, "SI_KERNEL: a non-canonical address");
    wild = test_wild(0xffffffff80000000);
    TRY *wild;
    is(SIGSEGV, SEGV_MAPERR, test_wild(0xffffffff80000000), "SEGV_MAPERR: a kernel address");
    volatile int zero = 0, one = 1;
    void *at = 0;
    TRY {
        __asm__ volatile("lea 1f(%%rip), %0\n mov %0, %1\n 1: idivl %2"
                         : "=&r"(at), "=m"(page)
                         : "m"(zero), "a"(one), "d"(0)
                         : "cc");
    }
    EQUAL(seen.signal, SIGFPE, "SIGFPE: division by zero");
    EQUAL(seen.code, FPE_INTDIV, "SIGFPE: FPE_INTDIV");
    EQUAL((uintptr_t)seen.address, (uintptr_t)page, "SIGFPE: the address of the instruction");
    TRY __asm__ volatile("ud2");
    EQUAL(seen.signal, SIGILL, "SIGILL: ud2");
    EQUAL(seen.code, ILL_ILLOPN, "SIGILL: ILL_ILLOPN");
    CHECK(seen.address != 0, "SIGILL: an address");
    TRY __asm__ volatile("int3");
    EQUAL(seen.signal, SIGTRAP, "SIGTRAP: int3");
    EQUAL(seen.code, SI_KERNEL, "SIGTRAP: SI_KERNEL");
    TRY __asm__ volatile("hlt");
    EQUAL(seen.signal, SIGSEGV, "SIGSEGV: a privileged instruction");
#elif defined(__aarch64__)
    volatile uint64_t *wild = test_wild(0xffffffc000000000);
    TRY *wild;
    EQUAL(seen.signal, SIGSEGV, "SIGSEGV: a kernel address");
    EQUAL(seen.code, SEGV_MAPERR, "SEGV_MAPERR: a kernel address");
    TRY __asm__ volatile("udf #0");
    EQUAL(seen.signal, SIGILL, "SIGILL: udf");
    EQUAL(seen.code, ILL_ILLOPC, "SIGILL: ILL_ILLOPC");
    CHECK(seen.address != 0, "SIGILL: an address");
    TRY __asm__ volatile("brk #1");
    EQUAL(seen.signal, SIGTRAP, "SIGTRAP: brk");
    EQUAL(seen.code, TRAP_BRKPT, "SIGTRAP: TRAP_BRKPT");
    TRY __asm__ volatile("msr ttbr0_el1, xzr");
    EQUAL(seen.signal, SIGILL, "SIGILL: a privileged instruction");
#endif

    install(repair);
    page = mmap(0, 100 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(page != MAP_FAILED);
    int sum = 0;
    for (int index = 0; index < 100; index++)
        page[index * PAGE + 9] = index;
    for (int index = 0; index < 100; index++)
        sum += page[index * PAGE + 9];
    EQUAL(sum, 4950, "a handler repairs the mapping and the access goes on");
    EQUAL(repairs, 100, "once for each page");

    signal(SIGSEGV, SIG_DFL);
    DIES(SIGSEGV, "without a handler a fault kills", *(volatile char *)test_wild(16));
    DIES(SIGSEGV, "ignoring SIGSEGV does not help against a fault", {
        signal(SIGSEGV, SIG_IGN);
        *(volatile char *)test_wild(16);
    });
    DIES(SIGSEGV, "nor does blocking it", {
        sigset_t mask;
        sigfillset(&mask);
        install(repair);
        sigprocmask(SIG_BLOCK, &mask, 0);
        *(volatile char *)test_wild(16);
    });
    return test_end();
}
