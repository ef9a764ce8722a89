// /proc/self/pagemap, mem, exe, cmdline, fd, stat, and files of the system
// under /proc.

#include "test.h"

#include <dirent.h>

static char text[100000];

static volatile char target[] = "of this program";

// A file `mem` is that of the memory which the process had when it was opened.
static void of_program_before(void) {
    int ready[2], gone[2];
    char path[64];
    NEED(pipe2(ready, O_CLOEXEC) == 0 && pipe(gone) == 0);
    pid_t child = CHILD({
        char byte;
        char number[20];
        close(gone[1]);
        snprintf(number, sizeof number, "%d", gone[0]);
        char *words[] = {"name", number, 0};
        NEED(read(ready[0], &byte, 1) == 1);
        execv("/proc/self/exe", words);
    });
    close(gone[0]);
    snprintf(path, sizeof path, "/proc/%d/mem", child);
    int memory = open(path, O_RDWR);
    NEED(memory >= 0);
    EQUAL(pwrite(memory, "O", 1, (off_t)(uintptr_t)target), 1, "mem: write to a child");
    NEED(write(ready[1], "x", 1) == 1);
    close(ready[1]);
    // The end of the file: the child has become the program again.
    char byte;
    close(ready[0]);
    snprintf(path, sizeof path, "/proc/%d/cmdline", child);
    do
        NEED(test_read_file(path, text, sizeof text) > 0);
    while (strcmp(text, "name") != 0);
    EQUAL(pwrite(memory, "wrong", 5, (off_t)(uintptr_t)target), 0, "mem: not the memory of the next program");
    EQUAL(pread(memory, &byte, 1, (off_t)(uintptr_t)target), 0, "mem: nor to read");
    close(memory);
    close(gone[1]);
    EQUAL(test_wait(child), 0, "the next program has its own");
}

int main(int count, char **arguments) {
    if (count > 1) {
        ssize_t end = read(atoi(arguments[1]), text, 1);
        return end != 0 || memcmp((char *)target, "of this program", 15) != 0;
    }
    test_start();
    of_program_before();
    int pagemap = open("/proc/self/pagemap", O_RDONLY);
    NEED(pagemap >= 0);
    char *memory = test_map(8 * PAGE);
    STEP_EQUAL(madvise(memory, 8 * PAGE, MADV_NOHUGEPAGE), 0);
    memory[0] = memory[5 * PAGE] = 1;
    uint64_t entries[8];
    EQUAL(pread(pagemap, entries, sizeof entries, (uintptr_t)memory / PAGE * 8), sizeof entries, "pagemap: read");
    int before = test_failures;
    for (int index = 0; index < 8; index++)
        STEP_EQUAL(entries[index] >> 63, index == 0 || index == 5);
    ALL_STEPS(before, "pagemap: the touched pages are present");
    CHECK((entries[0] & 0x7fffffffffffff) != 0, "pagemap: root sees frames");
    CHECK(entries[0] >> 56 & 1, "pagemap: a page of one process is exclusive");
    uint64_t frame = entries[0] & 0x7fffffffffffff;
    EXITS(0, "pagemap: a child shares the frame until it writes", {
        int own = open("/proc/self/pagemap", O_RDONLY);
        uint64_t entry = 0;
        STEP_EQUAL(pread(own, &entry, 8, (uintptr_t)memory / PAGE * 8), 8);
        STEP_EQUAL(entry & 0x7fffffffffffff, frame);
        STEP_EQUAL(entry >> 56 & 1, 0);
        memory[0] = 2;
        STEP_EQUAL(pread(own, &entry, 8, (uintptr_t)memory / PAGE * 8), 8);
        STEP((entry & 0x7fffffffffffff) != frame);
    });
    FAILS(pread(pagemap, entries, 7, 0), EINVAL, "pagemap: a crooked length");
    EQUAL(pread(pagemap, entries, 8, 8), 8, "pagemap: where nothing is mapped");
    EQUAL(entries[0] >> 63, 0, "pagemap: nothing is present");

    int self = open("/proc/self/mem", O_RDWR);
    NEED(self >= 0);
    strcpy(memory, "in memory");
    EQUAL(pread(self, text, 9, (off_t)(uintptr_t)memory), 9, "mem: read");
    CHECK(memcmp(text, "in memory", 9) == 0, "mem: the bytes are right");
    EQUAL(pwrite(self, "on", 2, (off_t)(uintptr_t)memory), 2, "mem: write");
    CHECK(strcmp(memory, "on memory") == 0, "mem: the memory has it");

    char *hole = test_map(3 * PAGE);
    NEED(munmap(hole + 2 * PAGE, PAGE) == 0);
    EQUAL(pwrite(self, text, 3 * PAGE, (off_t)(uintptr_t)hole + 5), 2 * PAGE - 5, "mem: write up to a hole");
    CHECK(memcmp(hole + 5, text, 2 * PAGE - 5) == 0, "mem: all of that is there");
    FAILS(pwrite(self, text, 10, (off_t)(uintptr_t)hole + 2 * PAGE), EIO, "mem: write to a hole");

    FAILS(pread(self, text, 10, 0x1000), EIO, "mem: where nothing is mapped");
    STEP_EQUAL(mprotect(memory, PAGE, PROT_READ), 0);
    // As a debugger does: newer kernels may be set to refuse it.
    ssize_t forced = pwrite(self, "IN", 2, (off_t)(uintptr_t)memory);
    CHECK(forced == 2 ? strcmp(memory, "IN memory") == 0 : errno == EIO && strcmp(memory, "on memory") == 0,
          "mem: write to read-only memory works, or is refused and changes nothing");

    ssize_t length = readlink("/proc/self/exe", text, sizeof text - 1);
    CHECK(length > 0 && text[0] == '/', "exe: a path");
    struct stat one, two;
    text[length] = 0;
    STEP_EQUAL(stat(text, &one), 0);
    STEP_EQUAL(stat("/proc/self/exe", &two), 0);
    EQUAL(one.st_ino, two.st_ino, "exe: the program itself");
    length = test_read_file("/proc/self/cmdline", text, sizeof text);
    CHECK(length > 1 && text[length - 1] == 0, "cmdline: words that end with zero");
    length = readlink("/proc/self", text, 99);
    text[length > 0 ? length : 0] = 0;
    EQUAL(atoi(text), getpid(), "/proc/self names the process");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/status", getpid());
    CHECK(test_read_file(path, text, sizeof text) > 100, "/proc/PID is the same");
    FAILS(open("/proc/999999/status", O_RDONLY), ENOENT, "/proc of no process");
    pid_t child = CHILD(pause());
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    CHECK(test_read_file(path, text, sizeof text) > 50 && atoi(text) == child, "stat of a child");
    kill(child, SIGKILL);
    test_wait(child);
    FAILS(open(path, O_RDONLY), ENOENT, "and it is gone when it is");
    NEED(test_read_file("/proc/self/stat", text, sizeof text) > 0);
    char *rest = strrchr(text, ')');
    char state = 0;
    int parent = -1;
    CHECK(rest && sscanf(rest + 1, " %c %d", &state, &parent) == 2 && state == 'R' && parent == getppid(),
          "stat: state and parent");
    int fields = 2;
    for (char *at = rest; at && *at; at++)
        fields += *at == ' ';
    EQUAL(fields, 52, "stat: 52 fields");

    int null = open("/dev/null", O_RDONLY), seen = 0;
    DIR *directory = opendir("/proc/self/fd");
    NEED(directory);
    struct dirent *entry;
    while ((entry = readdir(directory)))
        seen += atoi(entry->d_name) == null && entry->d_name[0] != '.';
    closedir(directory);
    EQUAL(seen, 1, "fd: an open descriptor is listed");
    snprintf(path, sizeof path, "/proc/self/fd/%d", null);
    length = readlink(path, text, 99);
    text[length > 0 ? length : 0] = 0;
    CHECK(strcmp(text, "/dev/null") == 0, "fd: a link to its file");
    int again = open(path, O_RDONLY);
    WORKS(again, "fd: it can be opened");
    close(null);
    FAILS(readlink(path, text, 99), ENOENT, "fd: gone after close");
    int listed = 0;
    directory = opendir("/proc");
    while (directory && (entry = readdir(directory)))
        listed += atoi(entry->d_name) == getpid();
    EQUAL(listed, 1, "/proc lists this process");

    CHECK(test_read_file("/proc/meminfo", text, sizeof text) > 0 && strstr(text, "MemTotal:") &&
              strstr(text, "MemFree:") && strstr(text, "MemAvailable:"),
          "/proc/meminfo");
    long total = 0, free = 0;
    sscanf(strstr(text, "MemTotal:") + 9, "%ld", &total);
    sscanf(strstr(text, "MemFree:") + 8, "%ld", &free);
    CHECK(total > free && free > 0, "/proc/meminfo: total and free");
    CHECK(test_read_file("/proc/filesystems", text, sizeof text) > 0 && strstr(text, "tmpfs\n"), "/proc/filesystems");
    CHECK(test_read_file("/proc/mounts", text, sizeof text) > 0 && strstr(text, " /proc proc ") &&
              strstr(text, " / "),
          "/proc/mounts");
    CHECK(test_read_file("/proc/self/comm", text, sizeof text) > 1 || errno == ENOENT, "comm");
    FAILS(open("/proc/self/nothing", O_RDONLY), ENOENT, "no such file");
    int fixed = open("/proc/meminfo", O_RDONLY);
    STEP_EQUAL(read(fixed, text, 10), 10);
    STEP_EQUAL(read(fixed, text + 10, 10), 10);
    STEP_EQUAL(pread(fixed, text + 50, 20, 0), 20);
    CHECK(memcmp(text, text + 50, 20) == 0, "files under /proc can be read in pieces");
    return test_end();
}
