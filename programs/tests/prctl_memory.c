// memory: 256M
//
// prctl(2) about memory: PR_SET_THP_DISABLE decides whether a first touch brings
// in a large folio, PR_SET_MDWE whether memory becomes executable; both for
// children and over execve.

#include "test.h"

#include <sys/prctl.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_GET_MDWE 66
#endif
enum { REFUSE = 1, NO_INHERIT = 2, EXCEPT_ADVISED = 2 };

#define HUGE_PAGE ((size_t)2 << 20)
#define SIZE_FILE "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled"

static char text[200000];

static int write_setting(const char *value) {
    int file = open(SIZE_FILE, O_WRONLY);
    int count = write(file, value, strlen(value));
    close(file);
    return count;
}

static long field(const char *path, const char *name) {
    NEED(test_read_file(path, text, sizeof text) > 0);
    char *at = strstr(text, name);
    return at ? atol(at + strlen(name)) : -1;
}

// KiB that one store into fresh memory with that advice brings in.
static long touched(int advice) {
    long before = field("/proc/self/statm", " ");
    char *memory = mmap(0, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    if (advice)
        STEP_EQUAL(madvise(memory, 2 * HUGE_PAGE, advice), 0);
    char *aligned = (char *)(((uintptr_t)memory + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
    aligned[PAGE] = 1;
    long after = field("/proc/self/statm", " ");
    STEP_EQUAL(munmap(memory, 2 * HUGE_PAGE), 0);
    return (after - before) * 4 >= 2048;
}

static int collapses(void) {
    char *memory = mmap(0, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *aligned = (char *)(((uintptr_t)memory + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
    for (size_t at = 0; at < HUGE_PAGE; at += PAGE)
        aligned[at] = 1;
    int result = madvise(aligned, HUGE_PAGE, MADV_COLLAPSE), error = errno;
    STEP_EQUAL(munmap(memory, 2 * HUGE_PAGE), 0);
    errno = error;
    return result;
}

static int disable(unsigned long on, unsigned long flags) { return prctl(PR_SET_THP_DISABLE, on, flags, 0, 0); }

static int disabled(void) { return prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0); }

static void large_folios(void) {
    FAILS(prctl(PR_SET_THP_DISABLE, 1, 1, 0, 0), EINVAL, "PR_SET_THP_DISABLE: an unknown flag");
    FAILS(prctl(PR_SET_THP_DISABLE, 0, EXCEPT_ADVISED, 0, 0), EINVAL, "a flag where nothing is disabled");
    FAILS(prctl(PR_SET_THP_DISABLE, 1, 0, 1, 0), EINVAL, "an argument that means nothing");
    FAILS(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 1), EINVAL, "nor the next one");
    FAILS(prctl(PR_GET_THP_DISABLE, 1, 0, 0, 0), EINVAL, "PR_GET_THP_DISABLE: the same");
    EQUAL(disabled(), 0, "nothing is disabled at first");
    STEP_EQUAL(write_setting("always"), 6);
    EQUAL(touched(0), 1, "a touch brings in a large folio");
    EQUAL(field("/proc/self/status", "THP_enabled:\t"), 1, "which status says");
    EQUAL(disable(1, 0), 0, "disabled");
    EQUAL(disabled(), 1, "as is told");
    EQUAL(field("/proc/self/status", "THP_enabled:\t"), 0, "and status says");
    EQUAL(touched(0), 0, "a touch brings in a page");
    EQUAL(touched(MADV_HUGEPAGE), 0, "even where large folios are advised");
    FAILS(collapses(), EINVAL, "and none is made by MADV_COLLAPSE");
    EXITS(0, "a child inherits that", STEP_EQUAL(disabled(), 1); STEP_EQUAL(touched(0), 0));
    EQUAL(disable(1, EXCEPT_ADVISED), 0, "disabled except where advised");
    EQUAL(disabled(), 3, "as is told");
    EQUAL(touched(0), 0, "a touch brings in a page");
    EQUAL(touched(MADV_HUGEPAGE), 1, "but where a large folio is advised, that");
    EQUAL(collapses(), 0, "and MADV_COLLAPSE makes one");
    EXITS(0, "a child inherits that too", STEP_EQUAL(disabled(), 3));
    EQUAL(disable(7, 0), 0, "any number but 0 disables");
    EQUAL(disabled(), 1, "all");
    EXITS(0, "execve keeps it", execl("/proc/self/exe", "prctl_memory", "1", "0", (char *)0));
    EQUAL(disable(0, 0), 0, "enabled again");
    EQUAL(touched(0), 1, "a touch brings in a large folio again");
    STEP_EQUAL(write_setting("never"), 5);
}

static int map_as(int protection) {
    char *memory = mmap(0, PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -1;
    return munmap(memory, PAGE);
}

static int set(unsigned long bits) { return prctl(PR_SET_MDWE, bits, 0, 0, 0); }

static int get(void) { return prctl(PR_GET_MDWE, 0, 0, 0, 0); }

static void executable_memory(void) {
    FAILS(set(4), EINVAL, "PR_SET_MDWE: an unknown bit");
    FAILS(set(NO_INHERIT), EINVAL, "one that means nothing alone");
    FAILS(prctl(PR_SET_MDWE, REFUSE, 1, 0, 0), EINVAL, "an argument that means nothing");
    FAILS(prctl(PR_SET_MDWE, REFUSE, 0, 1, 0), EINVAL, "nor the next one");
    FAILS(prctl(PR_SET_MDWE, REFUSE, 0, 0, 1), EINVAL, "nor the last");
    FAILS(prctl(PR_GET_MDWE, 0, 1, 0, 0), EINVAL, "PR_GET_MDWE: the same");
    EQUAL(set(0), 0, "nothing is refused: that may be said");
    EQUAL(get(), 0, "and is so");
    EQUAL(map_as(PROT_READ | PROT_WRITE | PROT_EXEC), 0, "mmap of what is writable and executable");
    char *both = mmap(0, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *code = mmap(0, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *data = test_map(3 * PAGE);
    NEED(both != MAP_FAILED && code != MAP_FAILED);
    EXITS(0, "not for children, if that is said", {
        STEP_EQUAL(set(REFUSE | NO_INHERIT), 0);
        STEP_EQUAL(get(), REFUSE | NO_INHERIT);
        STEP_FAILS(set(REFUSE), EPERM);
        STEP_FAILS(map_as(PROT_READ | PROT_WRITE | PROT_EXEC), EACCES);
        EXITS(0, "a child of it maps what it wants",
              STEP_EQUAL(get(), 0); STEP_EQUAL(map_as(PROT_READ | PROT_WRITE | PROT_EXEC), 0));
        execl("/proc/self/exe", "prctl_memory", "0", "0", (char *)0);
    });
    EQUAL(set(REFUSE), 0, "refused");
    EQUAL(get(), REFUSE, "as is told");
    EQUAL(set(REFUSE), 0, "again");
    FAILS(set(0), EPERM, "that cannot be taken back");
    FAILS(set(REFUSE | NO_INHERIT), EPERM, "nor be changed");
    FAILS(map_as(PROT_READ | PROT_WRITE | PROT_EXEC), EACCES, "mmap of what is writable and executable");
    FAILS(map_as(PROT_WRITE | PROT_EXEC), EACCES, "even if not readable");
    EQUAL(map_as(PROT_READ | PROT_EXEC), 0, "of what is executable alone: no gain");
    EQUAL(mprotect(both, PAGE, PROT_READ | PROT_EXEC), 0, "mprotect: what was both may be code");
    FAILS(mprotect(both, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC), EACCES, "but not both again");
    EQUAL(mprotect(code, PAGE, PROT_EXEC), 0, "code stays code");
    EQUAL(mprotect(code, PAGE, PROT_READ), 0, "may cease to be");
    FAILS(mprotect(code, PAGE, PROT_READ | PROT_EXEC), EACCES, "and does not become it again");
    FAILS(mprotect(data, 3 * PAGE, PROT_READ | PROT_EXEC), EACCES, "nor does data");
    EQUAL(data[PAGE] = 1, 1, "which is as it was");
    EXITS(0, "a child inherits that", STEP_EQUAL(get(), REFUSE);
          STEP_FAILS(map_as(PROT_READ | PROT_WRITE | PROT_EXEC), EACCES));
    EXITS(0, "execve keeps it", execl("/proc/self/exe", "prctl_memory", "0", "1", (char *)0));
}

int main(int count, char **words) {
    test_start();
    if (count > 2) {
        STEP_EQUAL(disabled(), atol(words[1]));
        STEP_EQUAL(get(), atol(words[2]));
        STEP_EQUAL(map_as(PROT_READ | PROT_WRITE | PROT_EXEC), get() ? -1 : 0);
        return test_failures != 0;
    }
    large_folios();
    executable_memory();
    return test_end();
}
