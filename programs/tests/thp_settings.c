// memory: 256M
//
// /sys/kernel/mm/transparent_hugepage: its files can be read, written and read
// back, and determine the size that a first touch maps.

#include "settings.h"

#include <dirent.h>

static char text[200000], saved[40][2][200];
static int saves;

// The word in brackets.
static const char *chosen(const char *path) {
    static char value[200];
    if (test_read_file(path, text, 200) <= 0 || sscanf(text, "%*[^[][%199[^]]]", value) != 1)
        if (sscanf(text, "[%199[^]]]", value) != 1)
            return "?";
    return value;
}

static void save(const char *path) {
    snprintf(saved[saves][0], 200, "%s", path);
    snprintf(saved[saves][1], 200, "%s", chosen(path));
    saves++;
}

static void restore(void) {
    for (int index = 0; index < saves; index++)
        STEP(write_setting(saved[index][0], saved[index][1]) > 0);
}

// KiB that one store into fresh memory brings in, around an address that is
// aligned to 2 MiB.
static long touched(int advice, const char *field) {
    char *memory = test_map(6 << 20);
    char *aligned = (char *)(((uintptr_t)memory + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    if (advice)
        STEP_EQUAL(madvise(aligned, 2 << 20, advice), 0);
    aligned[PAGE * 17] = 1;
    long result = smaps(aligned, field);
    munmap(memory, 6 << 20);
    return result;
}

int main(void) {
    test_start();
    CHECK(test_read_file(THP_ROOT "hpage_pmd_size", text, 100) > 0 && atol(text) == 2 << 20, "hpage_pmd_size is 2 MiB");
    CHECK(test_read_file(THP_ROOT "enabled", text, 100) > 0 && strchr(text, '[') && strchr(text, ']') &&
              text[strlen(text) - 1] == '\n',
          "enabled: one word in brackets");
    save(THP_ROOT "enabled");
    static const char *words[] = {"always", "madvise", "never"};
    int before = test_failures;
    for (int index = 0; index < 3; index++) {
        STEP_EQUAL(write_setting(THP_ROOT "enabled", words[index]), strlen(words[index]));
        STEP(strcmp(chosen(THP_ROOT "enabled"), words[index]) == 0);
    }
    STEP_EQUAL(write_setting(THP_ROOT "enabled", "always\n"), 7);
    STEP(strcmp(chosen(THP_ROOT "enabled"), "always") == 0);
    ALL_STEPS(before, "enabled: what is written is read back");
    FAILS(write_setting(THP_ROOT "enabled", "sometimes"), EINVAL, "enabled: another word is refused");
    CHECK(strcmp(chosen(THP_ROOT "enabled"), "always") == 0, "enabled: and changes nothing");
    NEED(test_read_file(THP_ROOT "enabled", text, 100) > 0);
    CHECK(strcmp(text, "[always] madvise never\n") == 0, "enabled: the whole line");

    char path[300];
    int sizes = 0;
    DIR *directory = opendir(THP_ROOT);
    NEED(directory);
    struct dirent *entry;
    before = test_failures;
    while ((entry = readdir(directory))) {
        int size;
        if (sscanf(entry->d_name, "hugepages-%dkB", &size) != 1)
            continue;
        STEP(size >= 8 && size <= 2048 && (size & (size - 1)) == 0);
        snprintf(path, sizeof path, THP_ROOT "hugepages-%dkB/enabled", size);
        // The smallest sizes are only for shared memory.
        if (access(path, F_OK) != 0)
            continue;
        save(path);
        static const char *values[] = {"always", "inherit", "madvise", "never"};
        for (int index = 0; index < 4; index++) {
            STEP_EQUAL(write_setting(path, values[index]), strlen(values[index]));
            STEP(strcmp(chosen(path), values[index]) == 0);
        }
        STEP_FAILS(write_setting(path, "nothing"), EINVAL);
        sizes++;
    }
    closedir(directory);
    ALL_STEPS(before, "hugepages-*kB: each size keeps its setting");
    CHECK(sizes >= 2, "there are several sizes");

    // All sizes are off now. First touches, then with one size on.
    EQUAL(touched(0, "Rss"), 4, "all off: a touch brings in one page");
    const char *whole = THP_ROOT "hugepages-2048kB/enabled", *part = THP_ROOT "hugepages-64kB/enabled";
    STEP(write_setting(whole, "always") > 0);
    EQUAL(touched(0, "AnonHugePages"), 2048, "2048kB always: a touch brings in 2 MiB");
    EQUAL(touched(MADV_NOHUGEPAGE, "Rss"), 4, "MADV_NOHUGEPAGE: one page");
    STEP(write_setting(whole, "madvise") > 0);
    EQUAL(touched(0, "AnonHugePages"), 0, "2048kB madvise: nothing large without advice");
    EQUAL(touched(MADV_HUGEPAGE, "AnonHugePages"), 2048, "2048kB madvise: 2 MiB with MADV_HUGEPAGE");
    STEP(write_setting(whole, "inherit") > 0);
    STEP(write_setting(THP_ROOT "enabled", "madvise") > 0);
    EQUAL(touched(0, "AnonHugePages"), 0, "2048kB inherit: as `enabled` says");
    EQUAL(touched(MADV_HUGEPAGE, "AnonHugePages"), 2048, "2048kB inherit: with advice too");
    STEP(write_setting(THP_ROOT "enabled", "never") > 0);
    EQUAL(touched(MADV_HUGEPAGE, "AnonHugePages"), 0, "never: nothing large even with advice");
    STEP(write_setting(whole, "never") > 0);
    if (access(part, F_OK) == 0) {
        STEP(write_setting(part, "always") > 0);
        EQUAL(touched(0, "Rss"), 64, "64kB always: a touch brings in 64 KiB");
        EQUAL(touched(0, "AnonHugePages"), 0, "64kB: none of it mapped as 2 MiB");
        STEP(write_setting(whole, "always") > 0);
        EQUAL(touched(0, "AnonHugePages"), 2048, "2048kB before 64kB: the largest that fits");
    }
    char *memory = test_map(6 << 20);
    char *aligned = (char *)(((uintptr_t)memory + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    aligned[0] = 1;
    STEP_EQUAL(smaps(aligned, "AnonHugePages"), 2048);
    STEP_EQUAL(munmap(aligned + 5 * PAGE, PAGE), 0);
    EQUAL(smaps(aligned, "AnonHugePages") + smaps(aligned + 6 * PAGE, "AnonHugePages"), 0,
          "a hole splits the 2 MiB");
    CHECK(aligned[0] == 1 && LOADS(aligned + 5 * PAGE) == SIGSEGV && aligned[6 * PAGE] == 0, "and the rest stays");
    restore();
    return test_end();
}
