// Transfers whose memory is absent, or not mapped yet: missing pages are
// faulted in, and if that fails, the bytes before them count, as on Linux.

#include "test.h"

#include <pthread.h>
#include <sys/uio.h>

static int file;

static int new_file(size_t size) {
    int made = (int)syscall(SYS_memfd_create, "faults", 0);
    NEED(made >= 0 && ftruncate(made, (off_t)size) == 0);
    return made;
}

static char *mapped(int protection, int flags, int of, size_t pages) {
    char *memory = mmap(NULL, pages * PAGE, protection, flags, of, 0);
    NEED(memory != MAP_FAILED);
    return memory;
}

static int all_are(const char *memory, char value, size_t length) {
    for (size_t at = 0; at < length; at++)
        if (memory[at] != value)
            return 0;
    return 1;
}

// Transfers that reach over the end of what is mapped, from all distances.
static void up_to_the_end(const char *what, char *end, int readable) {
    int before = test_failures;
    for (size_t distance = 1; distance < 300; distance += distance < 140 ? 1 : 37) {
        char *start = end - distance;
        if (readable) {
            STEP_EQUAL(pwrite(file, start, distance + 50, 4096 - 20), (long)distance);
            STEP_EQUAL(pwrite(file, start, distance + 5000, 1), (long)distance);
        }
        memset(start, 1, distance);
        STEP_EQUAL(pread(file, start, distance + 50, 3), (long)distance);
        STEP_EQUAL(pread(file, start, distance + 9000, 4095), (long)distance);
        struct iovec pieces[3] = {{start, distance / 2}, {start + distance / 2, 5000}, {start, 1}};
        STEP_EQUAL(preadv(file, pieces, 3, 7), (long)distance);
    }
    STEP_FAILS(pread(file, end, 1, 0), EFAULT);
    STEP_FAILS(pread(file, end, 3 * PAGE, 0), EFAULT);
    if (readable) {
        STEP_FAILS(pwrite(file, end, 1, 0), EFAULT);
        STEP_FAILS(pwrite(file, end, 3 * PAGE, 0), EFAULT);
    }
    ALL_STEPS(before, what);
}

static void ends_of_memory(void) {
    char *memory = test_map(4 * PAGE);
    NEED(munmap(memory + 2 * PAGE, PAGE) == 0);
    up_to_the_end("in front of a hole", memory + 2 * PAGE, 1);
    memory = test_map(4 * PAGE);
    NEED(mprotect(memory + 2 * PAGE, PAGE, PROT_NONE) == 0);
    up_to_the_end("in front of PROT_NONE", memory + 2 * PAGE, 1);
    int small = new_file(2 * PAGE);
    up_to_the_end("in front of the end of a mapped file", mapped(PROT_READ | PROT_WRITE, MAP_SHARED, small, 4) + 2 * PAGE, 1);
    close(small);
    memory = test_map(4 * PAGE);
    NEED(mprotect(memory + 2 * PAGE, PAGE, PROT_READ) == 0);
    int before = test_failures;
    STEP_EQUAL(pread(file, memory + 2 * PAGE - 77, 200, 0), 77);
    STEP_FAILS(pread(file, memory + 2 * PAGE, 10, 0), EFAULT);
    STEP_EQUAL(pwrite(file, memory + 2 * PAGE - 77, 200, 0), 200);
    ALL_STEPS(before, "memory to read only is written from, not read into");
    FAILS(pread(file, (void *)-4096l, 10, 0), EFAULT, "addresses of the kernel");
    FAILS(pwrite(file, (void *)-4096l, 10, 0), EFAULT, "and writing from them");
}

static void ends_in_pipes(void) {
    int ends[2];
    NEED(pipe(ends) == 0);
    char *memory = test_map(4 * PAGE), *end = memory + 3 * PAGE;
    NEED(munmap(end, PAGE) == 0);
    memset(memory, 5, 3 * PAGE);
    FAILS(write(ends[1], end - 100, 200), EFAULT, "a pipe takes no part of a small write");
    EQUAL(write(ends[1], end - PAGE - 100, 2 * PAGE), PAGE, "of a large one it takes whole pages");
    FAILS(read(ends[0], end - 100, 200), EFAULT, "a pipe gives no part of a page");
    EQUAL(read(ends[0], memory, 3 * PAGE), PAGE, "and keeps it");
    EQUAL(all_are(memory, 5, PAGE), 1, "as it was");
    EQUAL(write(ends[1], test_map(16 * PAGE), 16 * PAGE), 16 * PAGE, "untouched memory goes into a pipe");
    char *untouched = test_map(16 * PAGE);
    EQUAL(read(ends[0], untouched, 16 * PAGE), 16 * PAGE, "and out into untouched memory");
    EQUAL(all_are(untouched, 0, 16 * PAGE), 1, "zeroes");
    close(ends[0]);
    close(ends[1]);
}

static void first_touches(void) {
    int full = new_file(64 * PAGE);
    char *source = test_map(64 * PAGE), *target = test_map(64 * PAGE);
    memset(source, 9, 64 * PAGE);
    EQUAL(pwrite(full, source, 64 * PAGE, 0), 64 * PAGE, "a file is filled");
    EQUAL(pread(full, target + 1, 64 * PAGE - 1, 1), 64 * PAGE - 1, "and read into untouched memory");
    EQUAL(all_are(target + 1, 9, 64 * PAGE - 1) && target[0] == 0, 1, "which has it then");
    char *zeroes = test_map(2 * PAGE);
    STEP(zeroes[0] == 0 && zeroes[PAGE] == 0);
    EQUAL(pread(full, zeroes + 5, PAGE, 0), PAGE, "memory that was only read becomes the program's own");
    EQUAL(all_are(zeroes + 5, 9, PAGE) && zeroes[4] == 0 && zeroes[PAGE + 5] == 0, 1, "with what is read");

    EXITS(0, "a child reads", {
        STEP_EQUAL(pread(file, target, 64 * PAGE, 0), pread(file, source, 64 * PAGE, 0));
        memset(target, 3, 64 * PAGE);
    });
    EQUAL(all_are(target + 1, 9, 64 * PAGE - 1), 1, "what a child reads is the child's");
    memset(source, 4, 64 * PAGE);
    EXITS(0, "a child reads", { STEP_EQUAL(pread(full, source, 64 * PAGE, 0), 64 * PAGE); });
    EQUAL(all_are(source, 4, 64 * PAGE), 1, "copies on write come first");

    char *own = mapped(PROT_READ | PROT_WRITE, MAP_PRIVATE, full, 4);
    EQUAL(pwrite(full, "abc", 3, 2 * PAGE), 3, "a private mapping of the file");
    EQUAL(pread(full, own + PAGE, 3, 2 * PAGE), 3, "is read into");
    EQUAL(own[PAGE] == 'a' && own[PAGE + 3] == 9, 1, "and keeps it to itself");
    char byte = 0;
    STEP_EQUAL(pread(full, &byte, 1, PAGE), 1);
    EQUAL(byte, 9, "the file is as before");

    char *shared = mapped(PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 4);
    EXITS(0, "a child reads", { STEP_EQUAL(pread(full, shared, 3 * PAGE, 0), 3 * PAGE); });
    EQUAL(all_are(shared, 9, 2 * PAGE) && shared[2 * PAGE] == 'a' && shared[3 * PAGE] == 0, 1,
          "shared memory shows what a child has read");
    close(full);
}

// A file's own mapping as the other side.
static void onto_itself(void) {
    int own = new_file(8 * PAGE);
    for (size_t page = 0; page < 8; page++)
        STEP_EQUAL(pwrite(own, "01234567" + page, 1, (off_t)(page * PAGE + page)), 1);
    char *map = mapped(PROT_READ | PROT_WRITE, MAP_SHARED, own, 8);
    EQUAL(pread(own, map + 4 * PAGE, 4 * PAGE, 0), 4 * PAGE, "a file is read into its own untouched mapping");
    EQUAL(map[4 * PAGE] == '0' && map[7 * PAGE + 3] == '3' && map[7 * PAGE + 7] == 0, 1, "and has it");
    map = mapped(PROT_READ | PROT_WRITE, MAP_SHARED, own, 8);
    EQUAL(pwrite(own, map + PAGE, 2 * PAGE, 5 * PAGE), 2 * PAGE, "and written from it");
    EQUAL(map[5 * PAGE + 1] == '1' && map[6 * PAGE + 2] == '2', 1, "and has it");
    map = mapped(PROT_READ | PROT_WRITE, MAP_SHARED, own, 8);
    EQUAL(pread(own, map, 8 * PAGE, 0), 8 * PAGE, "each page is read into itself");
    map = mapped(PROT_READ | PROT_WRITE, MAP_SHARED, own, 8);
    EQUAL(pwrite(own, map, 8 * PAGE, 0), 8 * PAGE, "and written from itself");
    EQUAL(map[0] == '0' && map[PAGE + 1] == '1' && map[6 * PAGE + 2] == '2', 1, "and is as before");
    int hole = new_file(8 * PAGE);
    map = mapped(PROT_READ | PROT_WRITE, MAP_SHARED, hole, 8);
    EQUAL(pwrite(hole, map, 8 * PAGE, 0), 8 * PAGE, "a hole is written from itself");
    EQUAL(all_are(map, 0, 8 * PAGE), 1, "zeroes");
    close(own);
    close(hole);
}

// The content that a write that stops early leaves in a new file.
static void new_pages(void) {
    char *memory = test_map(4 * PAGE);
    NEED(munmap(memory + 2 * PAGE, PAGE) == 0);
    memset(memory, 8, 2 * PAGE);
    int before = test_failures;
    for (size_t distance = 1; distance < 2 * PAGE; distance += 811) {
        int fresh = new_file(0);
        STEP_EQUAL(pwrite(fresh, memory + 2 * PAGE - distance, 3 * PAGE, 10), (long)distance);
        STEP_EQUAL(lseek(fresh, 0, SEEK_END), (long)distance + 10);
        NEED(ftruncate(fresh, 4 * PAGE) == 0);
        char *map = mapped(PROT_READ, MAP_SHARED, fresh, 4);
        STEP(all_are(map, 0, 10) && all_are(map + 10, 8, distance) && all_are(map + 10 + distance, 0, 4 * PAGE - 10 - distance));
        munmap(map, 4 * PAGE);
        STEP_FAILS(pwrite(fresh, memory + 2 * PAGE, PAGE, 0), EFAULT);
        STEP_EQUAL(lseek(fresh, 0, SEEK_END), 4 * PAGE);
        close(fresh);
    }
    ALL_STEPS(before, "a write that stops early: bytes, size, and zeroes behind");
}

static int changing;
static volatile int over;

static void *cut(void *argument) {
    while (!over)
        if (ftruncate(changing, 0) != 0 || ftruncate(changing, 32 * PAGE) != 0)
            break;
    return argument;
}

static void while_cut(void) {
    changing = new_file(32 * PAGE);
    char *source = test_map(32 * PAGE), *target = test_map(32 * PAGE);
    char *map = mapped(PROT_READ | PROT_WRITE, MAP_SHARED, changing, 32);
    memset(source, 6, 32 * PAGE);
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, cut, NULL) == 0);
    int before = test_failures;
    for (int round = 0; round < 300; round++) {
        STEP_EQUAL(pwrite(changing, source, 32 * PAGE, 0), 32 * PAGE);
        long count = pread(changing, target, 32 * PAGE, 0);
        STEP(count >= 0 && count <= (long)(32 * PAGE));
        for (long at = 0; at < count; at += 512)
            STEP(target[at] == 6 || target[at] == 0);
        count = pread(file, map, 16 * PAGE, 0);
        STEP(count > 0 || (count == -1 && errno == EFAULT));
        count = pwrite(changing, map, 16 * PAGE, 0);
        STEP(count > 0 || (count == -1 && errno == EFAULT));
        if (round % 16 == 0)
            STEP(usleep(1000) == 0);
    }
    over = 1;
    NEED(pthread_join(thread, NULL) == 0);
    ALL_STEPS(before, "files that another thread cuts meanwhile");
}

int main(void) {
    test_start();
    file = new_file(64 * PAGE);
    ends_of_memory();
    ends_in_pipes();
    first_touches();
    onto_itself();
    new_pages();
    while_cut();
    return test_end();
}
