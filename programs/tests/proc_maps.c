// /proc/self/maps, smaps, smaps_rollup, status, statm: the text follows the
// mappings.

#include "settings.h"

static char text[200000];

struct line {
    unsigned long start, end, offset, inode;
    char permissions[5], path[200];
};

// The line of /proc/self/maps that covers the address.
static int find(const void *address, struct line *line) {
    NEED(test_read_file("/proc/self/maps", text, sizeof text) > 0);
    for (char *at = text; *at; at = strchr(at, '\n') + 1) {
        unsigned major, minor;
        int length = 0;
        memset(line, 0, sizeof *line);
        if (sscanf(at, "%lx-%lx %4s %lx %x:%x %lu%n", &line->start, &line->end, line->permissions,
                   &line->offset, &major, &minor, &line->inode, &length) < 7)
            return 0;
        const char *path = at + length + strspn(at + length, " ");
        sscanf(path, "%199[^\n]", line->path);
        if (line->start <= (unsigned long)address && (unsigned long)address < line->end)
            return 1;
    }
    return 0;
}

static long status(const char *path, const char *field) {
    NEED(test_read_file(path, text, sizeof text) > 0);
    for (char *at = text; *at; at = strchr(at, '\n') + 1)
        if (strncmp(at, field, strlen(field)) == 0 && at[strlen(field)] == ':')
            return atol(at + strlen(field) + 1);
    return -1;
}

int main(void) {
    test_start();
    struct line line;
    const int both = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *memory = mmap((void *)0x100000000000, 16 * PAGE, both, flags, -1, 0);
    NEED(memory != MAP_FAILED);
    STEP_EQUAL(madvise(memory, 16 * PAGE, MADV_NOHUGEPAGE), 0);
    CHECK(find(memory, &line), "maps: a mapping has a line");
    CHECK(line.start == (unsigned long)memory && line.end == line.start + 16 * PAGE, "maps: with its borders");
    CHECK(strcmp(line.permissions, "rw-p") == 0, "maps: and its permissions");
    CHECK(line.inode == 0 && line.path[0] == 0, "maps: anonymous memory has no file");
    STEP_EQUAL(mprotect(memory + 4 * PAGE, 4 * PAGE, PROT_READ | PROT_EXEC), 0);
    CHECK(find(memory + 4 * PAGE, &line) && line.start == (unsigned long)memory + 4 * PAGE &&
              line.end == (unsigned long)memory + 8 * PAGE && strcmp(line.permissions, "r-xp") == 0,
          "maps: mprotect splits");
    STEP_EQUAL(mprotect(memory + 4 * PAGE, 4 * PAGE, both), 0);
    CHECK(find(memory, &line) && line.end == (unsigned long)memory + 16 * PAGE, "maps: and joins");
    int local;
    CHECK(find(&local, &line) && strstr(line.path, "[stack]") && strncmp(line.permissions, "rw", 2) == 0,
          "maps: the stack");
    CHECK(find((void *)(uintptr_t)main, &line) && strcmp(line.permissions, "r-xp") == 0, "maps: the code");
    char self[200];
    ssize_t length = readlink("/proc/self/exe", self, 199);
    NEED(length > 0);
    self[length] = 0;
    find((void *)(uintptr_t)main, &line);
    CHECK(strstr(line.path, self) != 0, "maps: the program's path");
    int file = open("/tmp/proc maps", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && ftruncate(file, 8 * PAGE) == 0);
    char *shared = mmap(0, 4 * PAGE, both, MAP_SHARED, file, 2 * PAGE);
    NEED(shared != MAP_FAILED);
    struct stat properties;
    fstat(file, &properties);
    CHECK(find(shared, &line) && strcmp(line.permissions, "rw-s") == 0 && line.offset == 2 * PAGE &&
              line.inode == properties.st_ino && strstr(line.path, "/tmp/proc maps"),
          "maps: a file's offset, inode and path");
    unlink("/tmp/proc maps");
    CHECK(find(shared, &line) && strstr(line.path, "(deleted)"), "maps: a deleted file");
    munmap(memory + 2 * PAGE, PAGE);
    CHECK(!find(memory + 2 * PAGE, &line), "maps: no line after munmap");
    int before = test_failures;
    NEED(test_read_file("/proc/self/maps", text, sizeof text) > 0);
    unsigned long last = 0;
    for (char *at = text; *at; at = strchr(at, '\n') + 1) {
        unsigned long start = 0, end = 0;
        STEP_EQUAL(sscanf(at, "%lx-%lx", &start, &end), 2);
        STEP(start >= last && end > start && start % PAGE == 0 && end % PAGE == 0);
        last = end;
    }
    ALL_STEPS(before, "maps: lines in order, without overlap");

    memory += 3 * PAGE;
    EQUAL(smaps(memory, "Size"), 13 * 4, "smaps: Size");
    EQUAL(smaps(memory, "Rss"), 0, "smaps: nothing is resident");
    memset(memory, 1, 3 * PAGE);
    EQUAL(smaps(memory, "Rss"), 12, "smaps: Rss");
    EQUAL(smaps(memory, "Pss"), 12, "smaps: Pss");
    EQUAL(smaps(memory, "Private_Dirty"), 12, "smaps: Private_Dirty");
    EQUAL(smaps(memory, "Anonymous"), 12, "smaps: Anonymous");
    EQUAL(smaps(memory, "Locked"), 0, "smaps: Locked");
    STEP_EQUAL(mlock(memory, 13 * PAGE), 0);
    EQUAL(smaps(memory, "Locked"), 52, "smaps: Locked after mlock");
    EQUAL(smaps(memory, "KernelPageSize"), 4, "smaps: KernelPageSize");
    CHECK(smaps(memory, "AnonHugePages") >= 0, "smaps: AnonHugePages");
    NEED(test_read_file("/proc/self/smaps", text, sizeof text) > 0);
    CHECK(strstr(text, "VmFlags: ") && strstr(text, " lo "), "smaps: VmFlags");
    EQUAL(status("/proc/self/status", "VmLck"), 52, "status: VmLck");
    munlock(memory, 13 * PAGE);
    pid_t child = CHILD({
        STEP_EQUAL(smaps(memory, "Pss"), 26);
        STEP_EQUAL(smaps(memory, "Shared_Dirty") + smaps(memory, "Shared_Clean"), 52);
    });
    EQUAL(test_wait(child), 0, "smaps: a child shares its parent's pages");
    CHECK(status("/proc/self/smaps_rollup", "Rss") > 50, "smaps_rollup: Rss");

    EQUAL(status("/proc/self/status", "Pid"), getpid(), "status: Pid");
    EQUAL(status("/proc/self/status", "PPid"), getppid(), "status: PPid");
    EQUAL(status("/proc/self/status", "Threads"), 1, "status: Threads");
    CHECK(strstr(text, "Name:\t") && strstr(text, "State:\tR"), "status: Name and State");
    long size = status("/proc/self/status", "VmSize"), resident = status("/proc/self/status", "VmRSS");
    CHECK(size > resident && resident > 50, "status: VmSize and VmRSS");
    char *more = mmap(0, 1 << 20, both, flags, -1, 0);
    EQUAL(status("/proc/self/status", "VmSize"), size + 1024, "status: VmSize follows mmap");
    memset(more, 1, 1 << 20);
    CHECK(status("/proc/self/status", "VmRSS") >= resident + 1000, "status: VmRSS follows the pages");
    CHECK(status("/proc/self/status", "VmPeak") >= size + 1024, "status: VmPeak");
    CHECK(status("/proc/self/status", "VmData") > 1024 && status("/proc/self/status", "VmStk") > 0 &&
              status("/proc/self/status", "VmPTE") > 0 && status("/proc/self/status", "VmHWM") > 0,
          "status: VmData, VmStk, VmPTE and VmHWM");
    long pages, present;
    NEED(test_read_file("/proc/self/statm", text, sizeof text) > 0);
    CHECK(sscanf(text, "%ld %ld", &pages, &present) == 2 && pages == status("/proc/self/status", "VmSize") / 4,
          "statm agrees with status");
    return test_end();
}
