// mprotect, mlock and its family, mincore, msync, mseal.

#include "test.h"

#include <sys/resource.h>

#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    char *memory = test_map(8 * PAGE);
    memset(memory, 'm', 8 * PAGE);
    WORKS(mprotect(memory + 2 * PAGE, 2 * PAGE, PROT_READ), "mprotect: read-only");
    CHECK(!STORES(memory + 2 * PAGE - 1) && STORES(memory + 2 * PAGE) == SIGSEGV &&
              STORES(memory + 4 * PAGE - 1) == SIGSEGV && !STORES(memory + 4 * PAGE),
          "mprotect: the part and only the part");
    EQUAL(memory[3 * PAGE], 'm', "mprotect: contents stay");
    WORKS(mprotect(memory, 8 * PAGE, PROT_NONE), "mprotect: no access");
    EQUAL(LOADS(memory), SIGSEGV, "mprotect: not even loads");
    WORKS(mprotect(memory, 8 * PAGE, both), "mprotect: back");
    CHECK(memory[0] == 'm' && memory[8 * PAGE - 1] == 'm' && !STORES(memory + 2 * PAGE), "mprotect: all is there");
    WORKS(mprotect(memory, 0, PROT_NONE), "mprotect: no length");
    FAILS(syscall(SYS_mprotect, memory + 1, PAGE, PROT_READ), EINVAL, "mprotect: a crooked address");
    FAILS(syscall(SYS_mprotect, memory, PAGE, 0x80000), EINVAL, "mprotect: unknown protection");
    munmap(memory + 4 * PAGE, PAGE);
    FAILS(mprotect(memory, 8 * PAGE, PROT_READ), ENOMEM, "mprotect: over a hole");
    EQUAL(STORES(memory), SIGSEGV, "mprotect: what lies before the hole is changed");
    EQUAL(STORES(memory + 5 * PAGE), 0, "mprotect: what lies behind is not");
    EXITS(0, "a child changes its own protection", STEP_EQUAL(mprotect(memory, PAGE, PROT_NONE), 0));
    EQUAL(LOADS(memory), 0, "not the parent's");

    unsigned char present[8];
    memory = test_map(8 * PAGE);
    memory[0] = memory[3 * PAGE] = 1;
    EXITS(0, "mincore knows the pages that are present", {
        // Small pages, whatever the host's policy is.
        char *small = test_map(8 * PAGE);
        madvise(small, 8 * PAGE, MADV_NOHUGEPAGE);
        small[0] = small[3 * PAGE] = 1;
        STEP_EQUAL(mincore(small, 8 * PAGE, present), 0);
        for (int index = 0; index < 8; index++)
            STEP_EQUAL(present[index] & 1, index == 0 || index == 3);
    });
    FAILS(mincore(memory + 1, PAGE, present), EINVAL, "mincore: a crooked address");
    FAILS(mincore(memory, PAGE, test_wild(8)), EFAULT, "mincore: a bad pointer");
    FAILS(mincore(test_wild(0x10000), PAGE, present), ENOMEM, "mincore: no mapping");

    WORKS(mlock(memory, 4 * PAGE), "mlock");
    STEP_EQUAL(mincore(memory, 4 * PAGE, present), 0);
    CHECK(present[0] & present[1] & present[2] & present[3] & 1, "mlock brings the pages in");
    WORKS(munlock(memory, 4 * PAGE), "munlock");
    WORKS(syscall(SYS_mlock2, memory, 4 * PAGE, MLOCK_ONFAULT), "mlock2: on fault");
    FAILS(syscall(SYS_mlock2, memory, 4 * PAGE, 16), EINVAL, "mlock2: unknown flags");
    FAILS(mlock(test_wild(0x10000), PAGE), ENOMEM, "mlock: no mapping");
    EXITS(0, "mlockall and munlockall", {
        STEP_EQUAL(mlockall(MCL_CURRENT | MCL_FUTURE), 0);
        char *locked = test_map(4 * PAGE);
        STEP_EQUAL(mincore(locked, 4 * PAGE, present), 0);
        STEP(present[0] & present[3] & 1);
        STEP_EQUAL(munlockall(), 0);
        STEP_FAILS(mlockall(0), EINVAL);
        STEP_FAILS(mlockall(64), EINVAL);
    });

    int file = open("/tmp/memory-protect", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && ftruncate(file, 4 * PAGE) == 0);
    char *shared = mmap(0, 4 * PAGE, both, MAP_SHARED, file, 0);
    NEED(shared != MAP_FAILED);
    memset(shared, 's', 4 * PAGE);
    WORKS(msync(shared, 4 * PAGE, MS_SYNC), "msync: MS_SYNC");
    WORKS(msync(shared, PAGE, MS_ASYNC), "msync: MS_ASYNC");
    WORKS(msync(shared, PAGE, MS_SYNC | MS_INVALIDATE), "msync: MS_INVALIDATE");
    FAILS(msync(shared, PAGE, MS_SYNC | MS_ASYNC), EINVAL, "msync: both ways");
    FAILS(msync(shared + 1, PAGE, MS_SYNC), EINVAL, "msync: a crooked address");
    FAILS(msync(test_wild(0x10000), PAGE, MS_SYNC), ENOMEM, "msync: no mapping");
    char one;
    STEP_EQUAL(pread(file, &one, 1, 3 * PAGE), 1);
    EQUAL(one, 's', "msync: the file has it");
    unlink("/tmp/memory-protect");

    char *sealed = test_map(4 * PAGE);
    sealed[PAGE] = 'S';
    WORKS(syscall(SYS_mseal, sealed + PAGE, 2 * PAGE, 0), "mseal");
    FAILS(munmap(sealed + PAGE, PAGE), EPERM, "mseal: munmap");
    FAILS(munmap(sealed, 4 * PAGE), EPERM, "mseal: munmap of more");
    EQUAL(LOADS(sealed), 0, "mseal: and nothing of it is done");
    FAILS(mprotect(sealed + PAGE, PAGE, PROT_READ), EPERM, "mseal: mprotect");
    FAILS((long)mremap(sealed + PAGE, PAGE, 2 * PAGE, MREMAP_MAYMOVE), EPERM, "mseal: mremap");
    FAILS((long)mmap(sealed + PAGE, PAGE, both, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), EPERM,
          "mseal: MAP_FIXED");
    CHECK(sealed[PAGE] == 'S' && !STORES(sealed + PAGE), "mseal: loads and stores go on");
    WORKS(munmap(sealed, PAGE), "mseal: its neighbor is free");
    FAILS(syscall(SYS_mseal, sealed + PAGE, PAGE, 1), EINVAL, "mseal: unknown flags");
    FAILS(syscall(SYS_mseal, sealed, 2 * PAGE, 0), ENOMEM, "mseal: over a hole");
    EXITS(0, "mseal: a child's copy is sealed", STEP_FAILS(munmap(sealed + PAGE, PAGE), EPERM));
    return test_end();
}
