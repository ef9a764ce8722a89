// futex: requeue, cmp_requeue and wake_op.

#include "test.h"

#include <pthread.h>

static volatile int first, second, woken, waiting;

static void *wait_first(void *argument) {
    (void)argument;
    __sync_fetch_and_add(&waiting, 1);
    long result = test_futex(&first, FUTEX_WAIT | FUTEX_PRIVATE, 0, 0, 0, 0);
    __sync_fetch_and_add(&woken, 1);
    return (void *)result;
}

static void *wait_second(void *argument) {
    (void)argument;
    __sync_fetch_and_add(&waiting, 1);
    long result = test_futex(&second, FUTEX_WAIT | FUTEX_PRIVATE, 0, 0, 0, 0);
    __sync_fetch_and_add(&woken, 1);
    return (void *)result;
}

static pthread_t threads[8];

// As many threads asleep at `first` (or `second`) as asked for.
static void start(int number, void *(*function)(void *)) {
    waiting = woken = 0;
    for (int index = 0; index < number; index++)
        NEED(pthread_create(&threads[index], 0, function, 0) == 0);
    while (waiting < number)
        test_sleep(1);
    test_sleep(50);
}

static void join(int number) {
    void *result;
    for (int index = 0; index < number; index++) {
        pthread_join(threads[index], &result);
        STEP_EQUAL((long)result, 0);
    }
}

static long move(int operation, int wake, int moved, int value) {
    return test_futex(&first, operation | FUTEX_PRIVATE, wake, (void *)(intptr_t)moved, &second, value);
}

static void settle(int wanted) {
    for (int round = 0; round < 2000 && woken < wanted; round++)
        test_sleep(1);
}

// FUTEX_OP: operation, argument, comparison, argument.
static int encode(int operation, int argument, int comparison, int against) {
    return operation << 28 | comparison << 24 | argument << 12 | against;
}

static long wake_op(int wake, int wake_second, int encoded) {
    return test_futex(&first, FUTEX_WAKE_OP | FUTEX_PRIVATE, wake,
                      (void *)(intptr_t)wake_second, &second, encoded);
}

int main(void) {
    test_start();
    start(5, wait_first);
    EQUAL(move(FUTEX_REQUEUE, 1, 2, 0), 3, "requeue counts woken and moved");
    settle(1);
    test_sleep(20);
    EQUAL(woken, 1, "requeue: one is woken");
    EQUAL(test_futex(&second, FUTEX_WAKE | FUTEX_PRIVATE, 10, 0, 0, 0), 2, "requeue: two have moved");
    EQUAL(test_futex(&first, FUTEX_WAKE | FUTEX_PRIVATE, 10, 0, 0, 0), 2, "requeue: two have stayed");
    join(5);

    start(4, wait_first);
    FAILS(move(FUTEX_CMP_REQUEUE, 1, 10, 7), EAGAIN, "cmp_requeue: another value");
    EQUAL(move(FUTEX_CMP_REQUEUE, 1, 10, 0), 4, "cmp_requeue counts woken and moved");
    settle(1);
    test_sleep(20);
    EQUAL(woken, 1, "cmp_requeue: one is woken");
    EQUAL(test_futex(&first, FUTEX_WAKE | FUTEX_PRIVATE, 10, 0, 0, 0), 0, "cmp_requeue: nobody has stayed");
    EQUAL(test_futex(&second, FUTEX_WAKE | FUTEX_PRIVATE, 1, 0, 0, 0), 1, "cmp_requeue: wake one of the moved");
    EQUAL(test_futex(&second, FUTEX_WAKE | FUTEX_PRIVATE, 10, 0, 0, 0), 2, "cmp_requeue: wake the other moved");
    join(4);
    FAILS(move(FUTEX_CMP_REQUEUE, -1, 1, 0), EINVAL, "cmp_requeue: a negative number");
    FAILS(test_futex(&first, FUTEX_CMP_REQUEUE, 1, (void *)1, test_wild(8), 0), EFAULT,
          "cmp_requeue: a bad second pointer");

    enum { SET, ADD, OR, ANDN, XOR };
    enum { EQ, NE, LT, LE, GT, GE };
    second = 10;
    EQUAL(wake_op(1, 1, encode(ADD, 5, EQ, 99)), 0, "wake_op with nobody waiting");
    EQUAL(second, 15, "wake_op: add");
    wake_op(1, 1, encode(OR, 0x20, EQ, 99));
    EQUAL(second, 15 | 0x20, "wake_op: or");
    wake_op(1, 1, encode(ANDN, 0xf, EQ, 99));
    EQUAL(second, 0x20, "wake_op: and not");
    wake_op(1, 1, encode(XOR, 0x21, EQ, 99));
    EQUAL(second, 1, "wake_op: xor");
    wake_op(1, 1, encode(SET, 3, EQ, 99));
    EQUAL(second, 3, "wake_op: set");
    wake_op(1, 1, encode(OR | 8, 4, EQ, 99));
    EQUAL(second, 3 | 16, "wake_op: or with a shifted argument");
    wake_op(1, 1, encode(SET, 0xfff, EQ, 99));
    EQUAL(second, -1, "wake_op: the argument has a sign");

    second = 0;
    start(2, wait_second);
    first = 1;
    EQUAL(wake_op(1, 10, encode(SET, 5, NE, 0)), 0, "wake_op: the comparison fails, nobody wakes");
    second = 7;
    EQUAL(wake_op(1, 1, encode(SET, 5, GT, 6)), 1, "wake_op: the comparison holds, one wakes");
    EQUAL(wake_op(1, 10, encode(SET, 5, GE, 5)), 1, "wake_op: the other wakes");
    join(2);
    first = 0;
    second = 0;
    start(2, wait_first);
    EQUAL(wake_op(10, 0, encode(SET, 1, EQ, 1)), 2, "wake_op wakes at the first word");
    join(2);
    FAILS(wake_op(1, 1, encode(7, 0, EQ, 0)), ENOSYS, "wake_op: an unknown operation");
    FAILS(test_futex(&first, FUTEX_WAKE_OP, 1, (void *)1, test_wild(8), 0), EFAULT,
          "wake_op: a bad second pointer");
    return test_end();
}
