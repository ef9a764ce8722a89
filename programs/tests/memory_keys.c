// Protection keys: pkey_alloc, pkey_free, pkey_mprotect, the effect of a
// thread's rights on its accesses, and the inheritance of rights. Without keys
// (AArch64, and processors without them), only that they are refused.

#include "test.h"

#include <pthread.h>

#ifndef SEGV_PKUERR
#define SEGV_PKUERR 4
#endif
enum { NO_ACCESS = 1, NO_WRITE = 2 };

static int key_alloc(unsigned long flags, unsigned long rights) {
    return (int)syscall(SYS_pkey_alloc, flags, rights);
}

static int key_free(int key) { return (int)syscall(SYS_pkey_free, key); }

static int key_protect(void *at, size_t length, int protection, int key) {
    return (int)syscall(SYS_pkey_mprotect, at, length, protection, key);
}

static const int both = PROT_READ | PROT_WRITE;

static void refusals(void) {
    char *memory = test_map(2 * PAGE);
    FAILS(key_alloc(1, 0), EINVAL, "pkey_alloc: flags");
    FAILS(key_alloc(0, 16), EINVAL, "pkey_alloc: unknown rights");
    FAILS(key_free(1), EINVAL, "pkey_free: a key that is not taken");
    FAILS(key_free(16), EINVAL, "pkey_free: a key that cannot be");
    FAILS(key_protect(memory, PAGE, both, 1), EINVAL, "pkey_mprotect: a key that is not taken");
    FAILS(key_protect(memory, PAGE, both, 100), EINVAL, "pkey_mprotect: a key that cannot be");
    FAILS(key_protect(memory, PAGE, both, -2), EINVAL, "pkey_mprotect: a negative key");
    FAILS(key_protect(memory + 1, PAGE, both, -1), EINVAL, "pkey_mprotect: a crooked address");
    WORKS(key_protect(memory, 0, both, 100), "pkey_mprotect: no length");
    WORKS(key_protect(memory, PAGE, PROT_READ, -1), "pkey_mprotect: no key, as mprotect");
    EQUAL(STORES(memory), SIGSEGV, "which protects");
    WORKS(key_protect(memory, PAGE, both, 0), "pkey_mprotect: key 0");
    EQUAL(STORES(memory), 0, "which protects again");
}

#if defined(__x86_64__)

static unsigned rights(void) {
    unsigned low, high;
    __asm__ volatile(".byte 0x0f, 0x01, 0xee" : "=a"(low), "=d"(high) : "c"(0)); // rdpkru
    return low;
}

static void set_rights(unsigned value) {
    __asm__ volatile(".byte 0x0f, 0x01, 0xef" : : "a"(value), "c"(0), "d"(0) : "memory"); // wrpkru
}

static void forbid(int key, unsigned what) {
    set_rights((rights() & ~(3u << (2 * key))) | what << (2 * key));
}

static struct {
    volatile int signal, code;
    volatile unsigned key, rights;
    void *volatile address;
} seen;

static int repaired;

static void note(int signal, siginfo_t *info, void *context) {
    (void)context;
    seen.signal = signal;
    seen.code = info->si_code;
    seen.address = info->si_addr;
    memcpy((void *)&seen.key, (char *)info + 32, 4);
    seen.rights = rights();
    siglongjmp(test_fault_return, 1);
}

// The thread's rights in the signal frame: at the offset that CPUID reports.
static unsigned *saved_rights(ucontext_t *context) {
    unsigned a = 13, b, c = 9, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (unsigned *)((char *)context->uc_mcontext.fpregs + b);
}

static void repair(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    repaired++;
    *saved_rights(context) = 0;
}

static void catch_with(void (*handler)(int, siginfo_t *, void *)) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGSEGV, &action, 0) == 0);
}

static void is(int code, void *address, int key, const char *text) {
    CHECK(seen.signal == SIGSEGV && seen.code == code && seen.address == address &&
              (code != SEGV_PKUERR || seen.key == (unsigned)key), text);
    seen.signal = seen.code = 0;
}

#define TRY if (sigsetjmp(test_fault_return, 1) == 0)

static volatile int turn;

static void *other_thread(void *page) {
    // Born with its creator's rights.
    unsigned born = rights();
    set_rights(0);
    *(volatile char *)page = 't';
    turn = 1;
    while (turn == 1)
        sched_yield();
    return (void *)(uintptr_t)(rights() == 0 ? born : ~0u);
}

// Whether smaps says that the mapping at an address has this key.
static int shows(void *at, int key) {
    char line[256], start[32];
    snprintf(start, sizeof start, "%lx-", (unsigned long)at);
    FILE *smaps = fopen("/proc/self/smaps", "r");
    NEED(smaps != 0);
    int inside = 0, found = -1;
    while (fgets(line, sizeof line, smaps)) {
        if (strstr(line, start) == line)
            inside = 1;
        else if (inside && sscanf(line, "ProtectionKey: %d", &found) == 1)
            break;
    }
    fclose(smaps);
    return found == key;
}

static void keys(void) {
    catch_with(note);
    EQUAL(rights(), 0x55555554, "a program begins with access by key 0 alone");
    int key = key_alloc(0, NO_WRITE);
    EQUAL(key, 1, "pkey_alloc: the lowest key");
    EQUAL(rights() >> 2 & 3, NO_WRITE, "pkey_alloc gives the thread the rights that it asked for");
    volatile char *page = test_map(4 * PAGE);
    page[0] = 'a';
    WORKS(key_protect((char *)page, 2 * PAGE, both, key), "pkey_mprotect");
    CHECK(shows((char *)page, key) && shows((char *)page + 2 * PAGE, 0), "smaps shows the keys");
    EQUAL(page[0], 'a', "loads go on");
    TRY page[0] = 1;
    is(SEGV_PKUERR, (void *)page, key, "a store to a page that is there");
    EQUAL(seen.rights, 0x55555554, "a handler begins with the rights of a new program");
    EQUAL(rights() >> 2 & 3, NO_ACCESS, "which a jump out of it leaves");
    forbid(key, NO_WRITE);
    TRY page[PAGE] = 1;
    is(SEGV_PKUERR, (void *)(page + PAGE), key, "a store to a page that is not there yet");
    forbid(key, NO_ACCESS);
    TRY (void)page[0];
    is(SEGV_PKUERR, (void *)page, key, "a load");
    forbid(key, 0);
    page[0] = 'b';
    page[PAGE] = 'c';
    EQUAL(page[0] + page[PAGE], 'b' + 'c', "what is allowed again");
    STEP_EQUAL(mprotect((char *)page, PAGE, PROT_READ), 0);
    TRY page[0] = 1;
    is(SEGV_ACCERR, (void *)page, 0, "mprotect counts as well, and leaves the key");
    forbid(key, NO_ACCESS);
    STEP_EQUAL(mprotect((char *)page, PAGE, both), 0);
    TRY (void)page[0];
    is(SEGV_PKUERR, (void *)page, key, "the key after mprotect");

    char *moved = mremap((char *)page, 2 * PAGE, 4 * PAGE, MREMAP_MAYMOVE);
    NEED(moved != MAP_FAILED);
    page = moved;
    TRY page[3 * PAGE] = 1;
    is(SEGV_PKUERR, moved + 3 * PAGE, key, "the key after mremap");

    forbid(key, NO_ACCESS);
    catch_with(repair);
    page[1] = 'r';
    EQUAL(repaired, 1, "a handler gives rights by the frame");
    EQUAL(rights(), 0, "which the thread has afterwards");
    catch_with(note);

    forbid(key, NO_ACCESS);
    unsigned mine = rights();
    pthread_t thread;
    NEED(pthread_create(&thread, 0, other_thread, moved) == 0);
    while (turn == 0)
        sched_yield();
    EQUAL(rights(), mine, "each thread has its own rights");
    turn = 2;
    void *born;
    pthread_join(thread, &born);
    EQUAL((uintptr_t)born, mine, "a thread is born with its creator's");
    forbid(key, 0);
    EQUAL(page[0], 't', "the other thread has written");

    EXITS(0, "a child has keys, rights and mappings of its parent", {
        forbid(key, NO_ACCESS);
        TRY (void)page[0];
        STEP_EQUAL(seen.code, SEGV_PKUERR);
        STEP_EQUAL(key_free(key), 0);
    });
    // Only the mapping restricts the kernel's copies; see docs/kernel.md.
    WORKS(key_free(key), "pkey_free");
    FAILS(key_free(key), EINVAL, "pkey_free: twice");
    FAILS(key_protect(moved, PAGE, both, key), EINVAL, "pkey_mprotect: a key that was given back");
    int count = 0;
    while (key_alloc(0, 0) > 0)
        count++;
    CHECK(count >= 14 && errno == ENOSPC, "pkey_alloc: until there are none left");
}

#endif

int main(void) {
    test_start();
    refusals();
    int key = key_alloc(0, NO_ACCESS);
    if (key < 0) {
        EQUAL(errno, ENOSPC, "pkey_alloc: a machine without keys");
        return test_end();
    }
    NEED(key_free(key) == 0);
#if defined(__x86_64__)
    keys();
#endif
    return test_end();
}
