// madvise of all kinds, and process_madvise.

#include "test.h"

#include <sys/uio.h>
#include <sys/utsname.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

static unsigned char present[64];

static int count_present(char *memory, int pages) {
    int sum = 0;
    STEP_EQUAL(mincore(memory, pages * PAGE, present), 0);
    for (int index = 0; index < pages; index++)
        sum += present[index] & 1;
    return sum;
}

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    char *memory = test_map(16 * PAGE);
    memset(memory, 'm', 16 * PAGE);
    WORKS(madvise(memory, 16 * PAGE, MADV_NORMAL), "MADV_NORMAL");
    WORKS(madvise(memory, 16 * PAGE, MADV_RANDOM), "MADV_RANDOM");
    WORKS(madvise(memory, 16 * PAGE, MADV_SEQUENTIAL), "MADV_SEQUENTIAL");
    WORKS(madvise(memory, 16 * PAGE, MADV_WILLNEED), "MADV_WILLNEED");
    WORKS(madvise(memory + PAGE, 2 * PAGE, MADV_DONTNEED), "MADV_DONTNEED");
    CHECK(memory[0] == 'm' && memory[PAGE] == 0 && memory[2 * PAGE] == 0 && memory[3 * PAGE] == 'm',
          "MADV_DONTNEED: the pages are zero again");
    WORKS(madvise(memory, 16 * PAGE, MADV_FREE), "MADV_FREE");
    memory[0] = 'n';
    CHECK(memory[0] == 'n' && (memory[5 * PAGE] == 'm' || memory[5 * PAGE] == 0),
          "MADV_FREE: a page that is written stays");
    memset(memory, 'm', 16 * PAGE);
    WORKS(madvise(memory, 16 * PAGE, MADV_COLD), "MADV_COLD");
    WORKS(madvise(memory, 16 * PAGE, MADV_PAGEOUT), "MADV_PAGEOUT");
    CHECK(memory[0] == 'm' && memory[16 * PAGE - 1] == 'm', "and contents stay");

    WORKS(madvise(memory, 4 * PAGE, MADV_DONTFORK), "MADV_DONTFORK");
    EXITS(0, "MADV_DONTFORK: not in a child", {
        STEP_EQUAL(LOADS(memory), SIGSEGV);
        STEP_EQUAL(LOADS(memory + 4 * PAGE), 0);
    });
    WORKS(madvise(memory, 4 * PAGE, MADV_DOFORK), "MADV_DOFORK");
    WORKS(madvise(memory, 4 * PAGE, MADV_WIPEONFORK), "MADV_WIPEONFORK");
    EXITS(0, "MADV_WIPEONFORK: zero in a child", {
        STEP_EQUAL(memory[0], 0);
        STEP_EQUAL(memory[4 * PAGE], 'm');
    });
    EQUAL(memory[0], 'm', "MADV_WIPEONFORK: not in the parent");
    WORKS(madvise(memory, 4 * PAGE, MADV_KEEPONFORK), "MADV_KEEPONFORK");
    WORKS(madvise(memory, 16 * PAGE, MADV_DONTDUMP), "MADV_DONTDUMP");
    WORKS(madvise(memory, 16 * PAGE, MADV_DODUMP), "MADV_DODUMP");
    WORKS(madvise(memory, 16 * PAGE, MADV_NOHUGEPAGE), "MADV_NOHUGEPAGE");

    char *fresh = test_map(32 * PAGE);
    STEP_EQUAL(madvise(fresh, 32 * PAGE, MADV_NOHUGEPAGE), 0);
    WORKS(madvise(fresh, 8 * PAGE, MADV_POPULATE_READ), "MADV_POPULATE_READ");
    EQUAL(count_present(fresh, 8), 8, "MADV_POPULATE_READ: the pages are there");
    WORKS(madvise(fresh + 8 * PAGE, 8 * PAGE, MADV_POPULATE_WRITE), "MADV_POPULATE_WRITE");
    EQUAL(count_present(fresh + 8 * PAGE, 8), 8, "MADV_POPULATE_WRITE: the pages are there");
    STEP_EQUAL(mprotect(fresh, PAGE, PROT_READ), 0);
    FAILS(madvise(fresh, PAGE, MADV_POPULATE_WRITE), EINVAL, "MADV_POPULATE_WRITE: read-only memory");
    fresh[9 * PAGE] = 'g';
    WORKS(madvise(fresh + 8 * PAGE, 4 * PAGE, MADV_GUARD_INSTALL), "MADV_GUARD_INSTALL");
    CHECK(LOADS(fresh + 9 * PAGE) == SIGSEGV && !LOADS(fresh + 12 * PAGE), "a guard faults");
    FAILS(madvise(fresh + 9 * PAGE, PAGE, MADV_POPULATE_READ), EFAULT, "a guard cannot be populated");
    WORKS(madvise(fresh + 8 * PAGE, 4 * PAGE, MADV_GUARD_REMOVE), "MADV_GUARD_REMOVE");
    CHECK(!LOADS(fresh + 9 * PAGE) && fresh[9 * PAGE] == 0, "afterwards the page is zero");

    char *large = test_map(8 << 20);
    char *aligned = (char *)(((uintptr_t)large + (2 << 20)) & ~(uintptr_t)((2 << 20) - 1));
    for (int page = 0; page < 512; page++)
        aligned[page * PAGE] = 'a' + page % 26;
    WORKS(madvise(aligned, 2 << 20, MADV_HUGEPAGE), "MADV_HUGEPAGE");
    int collapsed = madvise(aligned, 2 << 20, MADV_COLLAPSE);
    CHECK(collapsed == 0 || errno == EAGAIN || errno == ENOMEM || errno == EINVAL, "MADV_COLLAPSE");
    char *common = mmap(0, 4 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(common != MAP_FAILED);
    common = (char *)(((uintptr_t)common + (2 << 20) - 1) & -(2UL << 20));
    FAILS(madvise(common, 2 << 20, MADV_COLLAPSE), EINVAL, "MADV_COLLAPSE: nothing is there");
    memset(common, 1, 4 * PAGE);
    EQUAL(madvise(common + 7 * PAGE, PAGE, MADV_GUARD_INSTALL), 0, "a guard in shared memory");
    FAILS(madvise(common, 2 << 20, MADV_COLLAPSE), EINVAL, "MADV_COLLAPSE: there is a guard");
    EQUAL(LOADS(common + 7 * PAGE), SIGSEGV, "which stays");
    EQUAL(madvise(common + 7 * PAGE, PAGE, MADV_GUARD_REMOVE), 0, "without the guard");
    EQUAL(madvise(common, 2 << 20, MADV_COLLAPSE), 0, "MADV_COLLAPSE of shared memory");
    CHECK(common[3 * PAGE] == 1 && common[7 * PAGE] == 0, "its contents stay");
    int before = test_failures;
    for (int page = 0; page < 512; page++)
        STEP_EQUAL(aligned[page * PAGE], 'a' + page % 26);
    ALL_STEPS(before, "contents stay");

    int file = memfd_create("advise", 0);
    NEED(file >= 0 && ftruncate(file, 8 * PAGE) == 0);
    char *shared = mmap(0, 8 * PAGE, both, MAP_SHARED, file, 0);
    NEED(shared != MAP_FAILED);
    memset(shared, 's', 8 * PAGE);
    WORKS(madvise(shared, 2 * PAGE, MADV_DONTNEED), "MADV_DONTNEED: a file");
    EQUAL(shared[0], 's', "comes back from the file");
    WORKS(madvise(shared + 2 * PAGE, 2 * PAGE, MADV_REMOVE), "MADV_REMOVE");
    CHECK(shared[2 * PAGE] == 0 && shared[4 * PAGE] == 's', "punches a hole into the file");
    FAILS(madvise(shared, PAGE, MADV_FREE), EINVAL, "MADV_FREE: a file");
    FAILS(madvise(memory, PAGE, MADV_REMOVE), EINVAL, "MADV_REMOVE: anonymous memory");
    FAILS(madvise(memory, PAGE, 999), EINVAL, "an unknown kind");
    FAILS(madvise(memory + 1, PAGE, MADV_NORMAL), EINVAL, "a crooked address");
    WORKS(madvise(memory, 0, MADV_DONTNEED), "no length");
    FAILS(madvise(test_wild(0x10000), PAGE, MADV_DONTNEED), ENOMEM, "no mapping");

    int self = syscall(SYS_pidfd_open, getpid(), 0);
    WORKS(self, "pidfd_open");
    memset(memory, 'p', 16 * PAGE);
    struct iovec pieces[2] = {{memory, 2 * PAGE}, {memory + 4 * PAGE, 2 * PAGE}};
    EQUAL(syscall(SYS_process_madvise, self, pieces, 2, MADV_COLD, 0), 4 * PAGE, "process_madvise: MADV_COLD");
    EQUAL(memory[0], 'p', "contents stay");
    EQUAL(syscall(SYS_process_madvise, self, pieces, 2, MADV_DONTNEED, 0), 4 * PAGE,
          "process_madvise of itself: MADV_DONTNEED");
    CHECK(memory[0] == 0 && memory[2 * PAGE] == 'p' && memory[4 * PAGE] == 0, "in all pieces");
    FAILS(syscall(SYS_process_madvise, self, pieces, 2, MADV_COLD, 1), EINVAL, "process_madvise: unknown flags");
    FAILS(syscall(SYS_process_madvise, 999, pieces, 2, MADV_COLD, 0), EBADF, "process_madvise: bad descriptor");
    FAILS(syscall(SYS_process_madvise, file, pieces, 2, MADV_COLD, 0), EBADF, "process_madvise: no process");
    FAILS(syscall(SYS_process_madvise, self, test_wild(8), 1, MADV_COLD, 0), EFAULT, "process_madvise: a bad pointer");
    pid_t child = CHILD(pause());
    int other = syscall(SYS_pidfd_open, child, 0);
    NEED(other >= 0);
    EQUAL(syscall(SYS_process_madvise, other, pieces, 2, MADV_COLD, 0), 4 * PAGE, "process_madvise of a child");
    struct iovec nothing = {aligned, 0};
    EQUAL(syscall(SYS_process_madvise, other, &nothing, 1, MADV_COLD, 0), 0, "process_madvise of nothing");
    FAILS(syscall(SYS_process_madvise, other, &nothing, 1, 1000, 0), EINVAL,
          "process_madvise of nothing in a child: unknown advice");
    // Linux accepts it where it is about the caller, up to 6.18 at least; 7.2 refuses.
    struct utsname system;
    NEED(uname(&system) == 0);
    if (atoi(system.release) >= 7 || strstr(system.release, "bindery"))
        FAILS(syscall(SYS_process_madvise, self, &nothing, 1, 1000, 0), EINVAL,
              "process_madvise of nothing: unknown advice");
    FAILS(syscall(SYS_process_madvise, other, pieces, 2, MADV_DONTNEED, 0), EINVAL,
          "process_madvise of a child: no MADV_DONTNEED");
    kill(child, SIGKILL);
    test_wait(child);
    FAILS(syscall(SYS_process_madvise, other, pieces, 2, MADV_COLD, 0), ESRCH, "process_madvise: it is dead");
    FAILS(syscall(SYS_pidfd_open, 999999, 0), ESRCH, "pidfd_open: no process");
    return test_end();
}
