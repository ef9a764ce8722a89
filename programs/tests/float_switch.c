// Floating-point values and the rounding mode survive preemption, signal
// handlers, system calls and fork; each thread has its own.

#include "test.h"

#include <pthread.h>
#include <sys/time.h>

static volatile int stop, handled, bad[4];
static volatile double third = 3.0, one = 1.0;

// Rounding modes as the control register has them; no libm is linked.
#if defined(__x86_64__)
enum { NEAREST = 0, DOWNWARD = 1, UPWARD = 2, TOWARDS_ZERO = 3, MODE_SHIFT = 13 };

static unsigned long get_control(void) {
    unsigned control;
    __asm__ volatile("stmxcsr %0" : "=m"(control));
    return control;
}

static void set_control(unsigned long value) {
    unsigned control = value;
    __asm__ volatile("ldmxcsr %0" : : "m"(control) : "memory");
}

static int divided_by_zero(void) { return get_control() >> 2 & 1; }
static const unsigned long flush_to_zero = 0x8000;
#elif defined(__aarch64__)
enum { NEAREST = 0, UPWARD = 1, DOWNWARD = 2, TOWARDS_ZERO = 3, MODE_SHIFT = 22 };

static unsigned long get_control(void) {
    unsigned long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
}

static void set_control(unsigned long control) {
    __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
}

static int divided_by_zero(void) {
    unsigned long status;
    __asm__ volatile("mrs %0, fpsr" : "=r"(status));
    return status >> 1 & 1;
}
static const unsigned long flush_to_zero = 1ul << 24;
#endif

static int get_rounding(void) { return get_control() >> MODE_SHIFT & 3; }

static void set_rounding(int mode) {
    set_control((get_control() & ~(3ul << MODE_SHIFT)) | (unsigned long)mode << MODE_SHIFT);
}

// All vector registers hold values of this thread for a while; did they stay?
static int keep(unsigned long value) {
    unsigned long wrong = 0;
#if defined(__x86_64__)
    __asm__ volatile(
        "movq %1, %%xmm0\n punpcklqdq %%xmm0, %%xmm0\n"
        "movdqa %%xmm0, %%xmm1\n movdqa %%xmm0, %%xmm2\n movdqa %%xmm0, %%xmm7\n"
        "movdqa %%xmm0, %%xmm8\n movdqa %%xmm0, %%xmm15\n"
        "mov $20000, %%ecx\n"
        "1: pause\n dec %%ecx\n jnz 1b\n"
        "pxor %%xmm0, %%xmm1\n pxor %%xmm0, %%xmm2\n pxor %%xmm0, %%xmm7\n"
        "pxor %%xmm0, %%xmm8\n pxor %%xmm0, %%xmm15\n"
        "por %%xmm2, %%xmm1\n por %%xmm7, %%xmm1\n por %%xmm8, %%xmm1\n por %%xmm15, %%xmm1\n"
        "movhlps %%xmm1, %%xmm2\n por %%xmm2, %%xmm1\n movq %%xmm1, %0\n"
        "movq %%xmm0, %%rcx\n xor %1, %%rcx\n or %%rcx, %0\n"
        : "=&r"(wrong)
        : "r"(value)
        : "rcx", "xmm0", "xmm1", "xmm2", "xmm7", "xmm8", "xmm15", "cc");
#elif defined(__aarch64__)
    __asm__ volatile(
        "dup v0.2d, %1\n mov v1.16b, v0.16b\n mov v8.16b, v0.16b\n mov v15.16b, v0.16b\n"
        "mov v16.16b, v0.16b\n mov v31.16b, v0.16b\n"
        "mov x9, #20000\n"
        "1: subs x9, x9, #1\n b.ne 1b\n"
        "eor v1.16b, v1.16b, v0.16b\n eor v8.16b, v8.16b, v0.16b\n eor v15.16b, v15.16b, v0.16b\n"
        "eor v16.16b, v16.16b, v0.16b\n eor v31.16b, v31.16b, v0.16b\n"
        "orr v1.16b, v1.16b, v8.16b\n orr v1.16b, v1.16b, v15.16b\n orr v1.16b, v1.16b, v16.16b\n"
        "orr v1.16b, v1.16b, v31.16b\n"
        "mov %0, v1.d[0]\n mov x9, v1.d[1]\n orr %0, %0, x9\n mov x9, v0.d[1]\n"
        "eor x9, x9, %1\n orr %0, %0, x9\n"
        : "=&r"(wrong)
        : "r"(value)
        : "x9", "v0", "v1", "v8", "v15", "v16", "v31", "cc");
#endif
    return wrong == 0;
}

static void *compute(void *argument) {
    int number = (int)(intptr_t)argument;
    static const int modes[4] = {NEAREST, UPWARD, DOWNWARD, TOWARDS_ZERO};
    set_rounding(modes[number]);
    double sum = 0;
    for (int round = 0; !stop; round++) {
        if (!keep(0x0101010101010101ul * (number * 50 + round % 50)))
            bad[number] |= 1;
        if (get_rounding() != modes[number])
            bad[number] |= 2;
        double value = one / third * (number == 0 ? 1 : -1);
        sum += value * 0;
        if (round % 16 == 0)
            getppid();
    }
    if (sum != 0)
        bad[number] |= 4;
    return 0;
}

static void disturb(int signal) {
    (void)signal;
    set_rounding(UPWARD);
    keep(0xdeadbeefdeadbeef);
    volatile double value = one / third;
    handled += value > 0;
}

int main(void) {
    test_start();
    EQUAL(get_rounding(), NEAREST, "a program starts with rounding to nearest");
    EQUAL(divided_by_zero(), 0, "and without exceptions");
    CHECK(keep(0x1234567890abcdef), "vector registers hold values");
    volatile double sum = 0;
    for (int index = 1; index <= 1000; index++)
        sum += one / index;
    CHECK(sum > 7.48547086 && sum < 7.48547087, "doubles compute");
    CHECK(one / third * third == 1.0, "rounding to nearest");
    set_rounding(UPWARD);
    volatile double up = one / third;
    set_rounding(DOWNWARD);
    volatile double down = one / third;
    CHECK(up > down, "the rounding mode matters");
    getppid();
    test_sleep(20);
    EQUAL(get_rounding(), DOWNWARD, "the rounding mode survives calls and sleep");
    EXITS(0, "a child inherits the rounding mode", STEP_EQUAL(get_rounding(), DOWNWARD));
    EXITS(0, "a child's rounding mode", set_rounding(UPWARD));
    EQUAL(get_rounding(), DOWNWARD, "does not change its parent's");
    set_rounding(NEAREST);
    volatile double infinite = one / (third - 3.0);
    test_sleep(5);
    CHECK(divided_by_zero() && infinite > 1e300, "exception flags survive");

    pthread_t threads[4];
    for (int index = 0; index < 4; index++)
        NEED(pthread_create(&threads[index], 0, compute, (void *)(intptr_t)index) == 0);
    test_sleep(300);
    stop = 1;
    for (int index = 0; index < 4; index++)
        pthread_join(threads[index], 0);
    CHECK(((bad[0] | bad[1] | bad[2] | bad[3]) & 1) == 0, "vector registers of four threads do not mix");
    CHECK(((bad[0] | bad[1] | bad[2] | bad[3]) & 2) == 0, "nor do their rounding modes");

    struct sigaction action = {.sa_handler = disturb};
    sigaction(SIGVTALRM, &action, 0);
    // One expiry at a time: under emulation a handler can outlast any short interval, and an
    // interval timer would then start the next handler before this loop goes on.
    struct itimerval timer = {{0, 0}, {0, 2000}}, off = {{0, 0}, {0, 0}};
    long long start = test_now();
    int wrong = 0, armed = -1;
    for (int round = 0; handled < 10 && test_now() - start < 30000000000LL; round++) {
        if (armed != handled) {
            armed = handled;
            NEED(setitimer(ITIMER_VIRTUAL, &timer, 0) == 0);
        }
        wrong += !keep(0x0202020202020202ul + round);
        wrong += get_rounding() != NEAREST;
    }
    setitimer(ITIMER_VIRTUAL, &off, 0);
    CHECK(handled >= 10, "handlers use floating point");
    EQUAL(wrong, 0, "registers and rounding mode survive them");

    set_control(get_control() | flush_to_zero);
    test_sleep(20);
    CHECK(get_control() & flush_to_zero, "flush-to-zero survives a switch");
    set_control(get_control() & ~flush_to_zero);
#if defined(__x86_64__)
    EQUAL(get_control() & 0x1f80, 0x1f80, "MXCSR: all exceptions are masked");
    unsigned short word;
    __asm__ volatile("fnstcw %0" : "=m"(word));
    EQUAL(word, 0x37f, "the x87 control word");
    long double wide = (long double)one / 3, product;
    __asm__ volatile("fldt %1\n mov $500000, %%ecx\n 1: pause\n dec %%ecx\n jnz 1b\n fstpt %0"
                     : "=m"(product) : "m"(wide) : "ecx", "cc", "st");
    CHECK(product == wide, "x87 registers survive preemption");
#endif
    return test_end();
}
