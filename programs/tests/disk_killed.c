// disk: 16M
// option: silent-file=yes
// option: disk-silent=0
// kernel-only: it needs the kernel's disk and a file, both of which are silent
//
// Processes that wait for a device that never answers can be killed: in a read, in a fault, in an
// fsync, in an fsync of pages that the kernel's thread has begun to store, and in a write with no
// room for more dirty pages. Their ends, which store the rest, do not wait either.

#include <sys/wait.h>

#include "settings.h"

static int silent;

static void read_disk(void) {
    char byte;
    int file = open("/disk/file", O_RDONLY);
    _exit(file >= 0 && pread(file, &byte, 1, 0) == 1);
}

static void touch_disk(void) {
    int file = open("/disk/file", O_RDONLY);
    volatile char *map = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    _exit(map != MAP_FAILED && map[0]);
}

static void sync_disk(void) {
    int file = open("/disk/written", O_RDWR | O_CREAT, 0600);
    _exit(file >= 0 && write(file, "x", 1) == 1 && fsync(file));
}

static void sync_later(void) {
    int file = open("/disk/later", O_RDWR | O_CREAT, 0600);
    // The thread stores the page in the meantime.
    _exit(file >= 0 && write(file, "x", 1) == 1 && usleep(60000) == 0 && fsync(file));
}

static void fill_silent(void) {
    for (int page = 0; page < 4096; page++)
        if (pwrite(silent, "x", 1, (off_t)page * 4096) != 1)
            _exit(1);
    _exit(2);
}

static void waits_and_is_killed(void (*body)(void), const char *name) {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0)
        body();
    int status;
    usleep(100000);
    EQUAL(waitpid(child, &status, WNOHANG), 0, name);
    NEED(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, name);
}

int main(void) {
    test_start();
    silent = open("/dev/silent", O_RDWR);
    int file = open("/disk/file", O_RDWR | O_CREAT, 0600);
    NEED(silent >= 0 && file >= 0 && ftruncate(file, 65536) == 0 && close(file) == 0);
    waits_and_is_killed(read_disk, "a read of the disk waits, and is killed");
    waits_and_is_killed(touch_disk, "a fault in a file of the disk waits, and is killed");
    waits_and_is_killed(sync_disk, "an fsync of the disk waits, and is killed");
    EQUAL(write_setting("/proc/sys/vm/dirty_writeback_centisecs", "1"), 1, "a thread stores pages");
    waits_and_is_killed(sync_later, "an fsync waits for what the thread stores, and is killed");
    waits_and_is_killed(fill_silent, "a write to the silent file waits, and is killed");
    // The machine ends beside one that waits.
    if (fork() == 0)
        sync_disk();
    usleep(100000);
    return test_end();
}
