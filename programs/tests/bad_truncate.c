// Bad programs: a file is cut short while it is mapped and in use: SIGBUS for
// loads and stores, EFAULT for calls, and the memory comes back when the file
// grows.

#include "test.h"

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    static const char *paths[] = {"/tmp/bad-truncate", "/dev/shm/bad-truncate"};
    for (int index = 0; index < 2; index++) {
        int file = open(paths[index], O_RDWR | O_CREAT | O_TRUNC, 0600);
        NEED(file >= 0 && ftruncate(file, 8 * PAGE) == 0);
        test_print("in %s", paths[index]);
        char *shared = mmap(0, 8 * PAGE, both, MAP_SHARED, file, 0);
        char *private = mmap(0, 8 * PAGE, both, MAP_PRIVATE, file, 0);
        NEED(shared != MAP_FAILED && private != MAP_FAILED);
        memset(shared, 's', 8 * PAGE);
        private[5 * PAGE] = 'p';
        NEED(ftruncate(file, 3 * PAGE + 100) == 0);
        EQUAL(LOADS(shared + 4 * PAGE), SIGBUS, "a load behind the new end");
        EQUAL(STORES(shared + 7 * PAGE), SIGBUS, "a store behind the new end");
        EQUAL(LOADS(private + 5 * PAGE), SIGBUS, "even a private copy is gone");
        CHECK(shared[3 * PAGE + 99] == 's' && shared[3 * PAGE + 100] == 0, "the last page is zero behind the end");
        DIES(SIGBUS, "without a handler SIGBUS kills", shared[6 * PAGE] = 1);
        int null = open("/dev/zero", O_RDONLY), other = open("/tmp/bad-other", O_RDWR | O_CREAT, 0600);
        FAILS(read(null, shared + 5 * PAGE, 100), EFAULT, "read into it");
        FAILS(write(other, shared + 5 * PAGE, 100), EFAULT, "write from it");
        FAILS(open(shared + 5 * PAGE, O_RDONLY), EFAULT, "a path in it");
        FAILS(test_futex((int *)(shared + 5 * PAGE), FUTEX_WAIT, 0, 0, 0, 0), EFAULT, "a futex in it");
        ssize_t count = pwrite(other, shared + 2 * PAGE, 4 * PAGE, 0);
        CHECK(count == 2 * (ssize_t)PAGE || (count == -1 && errno == EFAULT),
              "write across the end is short or refused");
        NEED(ftruncate(file, 8 * PAGE) == 0);
        EQUAL(LOADS(shared + 7 * PAGE), 0, "the file grows and the memory is there");
        EQUAL(shared[7 * PAGE], 0, "with zeros");
        STEP_EQUAL(private[5 * PAGE], 0);
        close(null);
        close(other);

        // One process uses the mapping while another cuts and grows the file.
        pid_t child = CHILD({
            for (int round = 0; round < 200; round++) {
                STEP_EQUAL(ftruncate(file, 0), 0);
                STEP_EQUAL(ftruncate(file, 8 * PAGE), 0);
                if (round % 20 == 0)
                    test_sleep(1);
            }
        });
        int wrong = 0;
        for (int round = 0; round < 3000; round++) {
            int signal = STORES(shared + round % 8 * PAGE);
            wrong += signal != 0 && signal != SIGBUS;
        }
        EQUAL(wrong, 0, "nothing but SIGBUS while another process cuts the file");
        EQUAL(test_wait(child), 0, "and it cuts undisturbed");
        EQUAL(STORES(shared + 7 * PAGE), 0, "at the end all is there");
        munmap(shared, 8 * PAGE);
        munmap(private, 8 * PAGE);
        close(file);
        unlink(paths[index]);
        unlink("/tmp/bad-other");
    }
    return test_end();
}
