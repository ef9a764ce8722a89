// futex: between processes, in shared memory of all kinds; private words of
// two processes do not meet; robust lists.

#include "test.h"

#include <pthread.h>
#include <stddef.h>

static void meet(volatile int *here, volatile int *there, const char *text) {
    *here = 0;
    pid_t child = CHILD({
        for (int round = 0; round < 5000 && *there != 2; round++) {
            if (*there == 0)
                *there = 1;
            struct timespec time = {0, 100000000};
            test_futex(there, FUTEX_WAIT, 1, &time, 0, 0);
        }
        STEP_EQUAL(*there, 2);
        *there = 3;
        test_futex(there, FUTEX_WAKE, 1, 0, 0, 0);
    });
    while (*here == 0)
        test_sleep(1);
    test_sleep(10);
    *here = 2;
    test_futex(here, FUTEX_WAKE, 1, 0, 0, 0);
    struct timespec time = {20, 0};
    while (*here == 2 && test_futex(here, FUTEX_WAIT, 2, &time, 0, 0) == 0)
        ;
    int good = *here == 3;
    test_check(good & (test_wait(child) == 0), 1, __FILE__, __LINE__, "the words to meet", text);
}

struct robust_list {
    struct robust_list *next;
};

struct robust_head {
    struct robust_list list;
    long offset;
    struct robust_list *pending;
};

struct lock {
    struct robust_list entry;
    volatile int word;
};

// A thread may die between the store that unlocks and its wake, or between a
// wake that it got and its lock: the word then has no owner.
static void unowned_at_the_end(volatile int *word, int left, const char *text) {
    *word = 7;
    pid_t waiter = CHILD(STEP(test_futex(word, FUTEX_WAIT, 7, 0, 0, 0) == 0 || errno == EAGAIN));
    test_sleep(50);
    EXITS(0, text, {
        static struct robust_head head;
        head.list.next = &head.list;
        head.offset = offsetof(struct lock, word);
        head.pending = (struct robust_list *)((char *)word - offsetof(struct lock, word));
        STEP_EQUAL(syscall(SYS_set_robust_list, &head, sizeof head), 0);
        *word = left;
    });
    EQUAL(test_futex(word, FUTEX_WAKE, 1, 0, 0, 0), 0, "the kernel wakes the waiter");
    EQUAL(test_wait(waiter), 0, "which goes on");
    EQUAL(*word, left, "and the word stays as it is");
}

int main(void) {
    test_start();
    volatile int *shared =
        mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    meet(shared + 5, shared + 5, "shared anonymous memory");
    int memory = memfd_create("futex", 0);
    NEED(memory >= 0 && ftruncate(memory, 4 * PAGE) == 0);
    char *one = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    char *two = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 2 * PAGE);
    NEED(one != MAP_FAILED && two != MAP_FAILED);
    meet((int *)(one + 2 * PAGE + 40), (int *)(two + 40), "two mappings of a memfd at other addresses");
    int file = open("/tmp/futex-shared", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && ftruncate(file, PAGE) == 0);
    unlink("/tmp/futex-shared");
    volatile int *mapped = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(mapped != (void *)MAP_FAILED);
    meet(mapped, mapped, "a file in /tmp");

    // Private words: the same address in two processes.
    static volatile int private;
    pid_t child = CHILD({
        struct timespec time = {0, 300000000};
        shared[0] = 1;
        STEP_FAILS(test_futex(&private, FUTEX_WAIT, 0, &time, 0, 0), ETIMEDOUT);
    });
    while (shared[0] == 0)
        test_sleep(1);
    test_sleep(50);
    EQUAL(test_futex(&private, FUTEX_WAKE, 10, 0, 0, 0), 0, "private memory: a wake in the parent");
    EQUAL(test_wait(child), 0, "does not reach its child");

    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutex_t *mutex = (pthread_mutex_t *)(shared + 64);
    pthread_mutex_init(mutex, &attributes);
    volatile int *counter = shared + 32;
    pid_t children[4];
    for (int index = 0; index < 4; index++)
        children[index] = CHILD({
            for (int round = 0; round < 500; round++) {
                pthread_mutex_lock(mutex);
                int value = *counter;
                if (round % 100 == 0)
                    test_sleep(1);
                *counter = value + 1;
                pthread_mutex_unlock(mutex);
            }
        });
    for (int index = 0; index < 4; index++)
        STEP_EQUAL(test_wait(children[index]), 0);
    EQUAL(*counter, 2000, "a mutex between four processes");

    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    DIES(SIGKILL, "a process dies while it holds a robust mutex", {
        pthread_mutex_lock(mutex);
        kill(getpid(), SIGKILL);
    });
    EQUAL(pthread_mutex_lock(mutex), EOWNERDEAD, "the next one learns of it");
    EQUAL(pthread_mutex_consistent(mutex), 0, "and makes it consistent");
    STEP_EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_lock(mutex), 0, "then it is a plain mutex again");
    pthread_mutex_unlock(mutex);

    // The same by hand: the kernel walks the list at exit.
    struct lock *locks = (struct lock *)(one + PAGE);
    EXITS(0, "a process exits with a robust list", {
        static struct robust_head head;
        head.list.next = &locks[0].entry;
        head.offset = offsetof(struct lock, word);
        locks[0].entry.next = &locks[1].entry;
        locks[1].entry.next = &head.list;
        locks[0].word = getpid() | (int)0x80000000;
        locks[1].word = getpid() + 1;
        STEP_EQUAL(syscall(SYS_set_robust_list, &head, sizeof head), 0);
        struct robust_head *found;
        size_t length;
        STEP_EQUAL(syscall(SYS_get_robust_list, 0, &found, &length), 0);
        STEP(found == &head && length == sizeof head);
    });
    EQUAL((unsigned)locks[0].word & 0xc0000000, 0xc0000000u, "its own word says that the owner died");
    EQUAL(locks[1].word & 0x40000000, 0, "the word of another stays");
    unowned_at_the_end(&locks[2].word, 0, "a process dies between its unlock and the wake");
    unowned_at_the_end(&locks[2].word, (int)0xc0000000, "one dies after its wake, before its lock");
    static struct robust_head broken;
    EXITS(0, "a robust list in a circle does no harm", {
        static struct robust_list circle;
        circle.next = &circle;
        broken.list.next = &circle;
        STEP_EQUAL(syscall(SYS_set_robust_list, &broken, sizeof broken), 0);
    });
    EXITS(0, "a robust list with a bad pointer does no harm", {
        broken.list.next = test_wild(8);
        STEP_EQUAL(syscall(SYS_set_robust_list, &broken, sizeof broken), 0);
    });
    EXITS(0, "a robust list at a bad address does no harm",
          STEP_EQUAL(syscall(SYS_set_robust_list, test_wild(8), sizeof broken), 0));
    FAILS(syscall(SYS_set_robust_list, 0, 5), EINVAL, "set_robust_list: a bad length");
    return test_end();
}
