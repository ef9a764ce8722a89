// memory: 128M
//
// shmem_enabled: where shared memory comes in large folios.

#include "settings.h"

#define SIZE (2l << 20)

static char text[200000];

static const char *line(const char *name) {
    char path[200];
    snprintf(path, sizeof path, THP_ROOT "%s", name);
    return test_read_file(path, text, 300) > 0 ? text : "?";
}

// Whether one store brings 2 MiB of shared memory in, mapped large.
static int large(long length, int advice) {
    char *whole = mmap(0, 2 * SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(whole != MAP_FAILED);
    char *memory = (char *)(((uintptr_t)whole + SIZE - 1) & ~(uintptr_t)(SIZE - 1));
    NEED(mmap(memory, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    if (advice)
        STEP_EQUAL(madvise(memory, length, advice), 0);
    memory[17 * PAGE] = 1;
    int result = smaps(memory, "ShmemPmdMapped") == SIZE / 1024;
    munmap(whole, 2 * SIZE);
    return result;
}

int main(void) {
    test_start();
    char before[2][300];
    STEP(sscanf(strchr(line("shmem_enabled"), '[') + 1, "%99[^]]", before[0]) == 1);
    STEP(sscanf(strchr(line("hugepages-2048kB/shmem_enabled"), '[') + 1, "%99[^]]", before[1]) == 1);

    STEP(write_thp("shmem_enabled", "within_size\n") == 12);
    CHECK(strcmp(line("shmem_enabled"), "always [within_size] advise never deny force\n") == 0,
          "shmem_enabled: the whole line");
    STEP(write_thp("hugepages-2048kB/shmem_enabled", "within_size") > 0);
    CHECK(strcmp(line("hugepages-2048kB/shmem_enabled"), "always inherit [within_size] advise never\n") == 0,
          "a size's shmem_enabled: the whole line");
    FAILS(write_thp("shmem_enabled", "inherit"), EINVAL, "shmem_enabled: another word is refused");
    FAILS(write_thp("hugepages-2048kB/shmem_enabled", "deny"), EINVAL, "a size's: another word is refused");
    FAILS(write_thp("shmem_enabled", " never"), EINVAL, "a word stands alone");

    static const struct {
        const char *word;
        int plain, advised;
    } words[] = {{"always", 1, 1}, {"within_size", 1, 1}, {"advise", 0, 1},
                 {"never", 0, 0},  {"deny", 0, 0},        {"force", 1, 1}};
    STEP(write_thp("hugepages-2048kB/shmem_enabled", "inherit") > 0);
    for (int index = 0; index < 6; index++) {
        char what[100];
        STEP(write_thp("shmem_enabled", words[index].word) > 0);
        snprintf(what, sizeof what, "%s: shared memory comes %s", words[index].word, words[index].plain ? "large" : "in pages");
        EQUAL(large(SIZE, 0), words[index].plain, what);
        snprintf(what, sizeof what, "%s: with MADV_HUGEPAGE, %s", words[index].word, words[index].advised ? "large" : "in pages");
        EQUAL(large(SIZE, MADV_HUGEPAGE), words[index].advised, what);
        EQUAL(large(SIZE, MADV_NOHUGEPAGE), 0, "and never with MADV_NOHUGEPAGE");
    }
    STEP(write_thp("shmem_enabled", "within_size") > 0);
    EQUAL(large(SIZE - (long)PAGE, 0), 0, "within_size: nothing reaches behind the end");

    STEP(write_thp("shmem_enabled", "never") > 0 && write_thp("hugepages-2048kB/shmem_enabled", "always") > 0);
    EQUAL(large(SIZE, 0), 1, "a size's own word counts");
    STEP(write_thp("shmem_enabled", "deny") > 0);
    EQUAL(large(SIZE, 0), 0, "but not where all are denied");
    STEP(write_thp("shmem_enabled", "never") > 0 && write_thp("hugepages-2048kB/shmem_enabled", "advise") > 0);
    EQUAL(large(SIZE, 0) * 2 + large(SIZE, MADV_HUGEPAGE), 1, "advise: with MADV_HUGEPAGE alone");
    FAILS(write_thp("shmem_enabled", "force"), EINVAL, "force: only where 2 MiB inherits");
    STEP(write_thp("hugepages-2048kB/shmem_enabled", "inherit") > 0 && write_thp("shmem_enabled", "force") > 0);
    STEP(write_thp("hugepages-2048kB/shmem_enabled", "never") > 0);
    EQUAL(large(SIZE, MADV_HUGEPAGE), 0, "force: only sizes that inherit");
    FAILS(write_thp("hugepages-64kB/shmem_enabled", "inherit"), EINVAL, "force: no small size inherits");

    STEP(write_thp("shmem_enabled", before[0]) > 0 && write_thp("hugepages-2048kB/shmem_enabled", before[1]) > 0);
    return test_end();
}
