// Queries about the system: uname, limits, processors, random bytes, and
// unknown calls.

#include "test.h"

#include <sched.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>

#ifndef SYS_getrandom
#error "getrandom has a number on every architecture"
#endif

int main(void) {
    test_start();
    struct utsname name;
    EQUAL(uname(&name), 0, "uname");
    CHECK(strcmp(name.sysname, "Linux") == 0, "uname: programs expect Linux");
#if defined(__x86_64__)
    CHECK(strcmp(name.machine, "x86_64") == 0, "uname: the machine");
#elif defined(__aarch64__)
    CHECK(strcmp(name.machine, "aarch64") == 0, "uname: the machine");
#endif
    int major = 0;
    CHECK(sscanf(name.release, "%d.", &major) == 1 && major >= 5, "uname: a release that glibc takes");
    FAILS(uname(test_wild(8)), EFAULT, "uname: a bad pointer");

    struct rlimit limit, again;
    EQUAL(getrlimit(RLIMIT_STACK, &limit), 0, "getrlimit: the stack");
    CHECK(limit.rlim_cur >= 1 << 20, "getrlimit: at least 1 MiB");
    int before = test_failures;
    for (int resource = 0; resource < 16; resource++)
        STEP_EQUAL(getrlimit(resource, &again), 0);
    ALL_STEPS(before, "getrlimit: all resources");
    FAILS(getrlimit(99, &again), EINVAL, "getrlimit: an unknown resource");
    EXITS(0, "setrlimit", {
        struct rlimit files = {50, 60};
        STEP_EQUAL(setrlimit(RLIMIT_NOFILE, &files), 0);
        STEP_EQUAL(getrlimit(RLIMIT_NOFILE, &again), 0);
        STEP(again.rlim_cur == 50 && again.rlim_max == 60);
        STEP_FAILS(dup2(1, 50), EBADF);
        STEP_EQUAL(dup2(1, 49), 49);
        files.rlim_cur = 70;
        STEP_FAILS(setrlimit(RLIMIT_NOFILE, &files), EINVAL);
        STEP_EQUAL(test_wait(CHILD({
            STEP_EQUAL(getrlimit(RLIMIT_NOFILE, &again), 0);
            STEP_EQUAL(again.rlim_cur, 50);
        })), 0);
    });
    EXITS(0, "RLIMIT_AS refuses mmap", {
        struct rlimit space = {64 << 20, 64 << 20};
        STEP_EQUAL(setrlimit(RLIMIT_AS, &space), 0);
        STEP_FAILS((long)mmap(0, 128 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), ENOMEM);
        char *small = mmap(0, 1 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        STEP(small != MAP_FAILED);
    });
    uint64_t pair[2];
    EQUAL(syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, pair), 0, "prlimit64");
    EQUAL(syscall(SYS_prlimit64, getpid(), RLIMIT_NOFILE, pair, 0), 0, "prlimit64: set");
    FAILS(syscall(SYS_prlimit64, 999999, RLIMIT_NOFILE, 0, pair), ESRCH, "prlimit64: no process");

    cpu_set_t processors;
    CPU_ZERO(&processors);
    EQUAL(sched_getaffinity(0, sizeof processors, &processors), 0, "sched_getaffinity");
    CHECK(CPU_COUNT(&processors) >= 1 && CPU_COUNT(&processors) <= 64, "with some processors");
    FAILS(syscall(SYS_sched_getaffinity, 0, 4, &processors), EINVAL, "sched_getaffinity: too small a set");
    CHECK(sysconf(_SC_NPROCESSORS_ONLN) >= 1, "sysconf: processors");
    CHECK(sysconf(_SC_PHYS_PAGES) > 1000, "sysconf: pages");
    EQUAL(sched_yield(), 0, "sched_yield");
    unsigned processor = 99;
    EQUAL(syscall(SYS_getcpu, &processor, 0, 0), 0, "getcpu");
    CHECK(processor < 64, "getcpu: a processor");

    unsigned char bytes[300] = {0}, others[300] = {0};
    EQUAL(getrandom(bytes, 300, 0), 300, "getrandom");
    STEP_EQUAL(getrandom(others, 300, 0), 300);
    CHECK(memcmp(bytes, others, 300) != 0, "getrandom: always others");
    int zeros = 0;
    for (int index = 0; index < 300; index++)
        zeros += bytes[index] == 0;
    CHECK(zeros < 30, "getrandom: not zeros");
    EQUAL(getrandom(bytes, 10, GRND_NONBLOCK), 10, "getrandom: GRND_NONBLOCK");
    FAILS(getrandom(bytes, 10, 0x100), EINVAL, "getrandom: unknown flags");
    FAILS(getrandom(test_wild(8), 10, 0), EFAULT, "getrandom: a bad pointer");

    struct sysinfo info;
    memset(&info, 0, sizeof info);
    EQUAL(sysinfo(&info), 0, "sysinfo");
    CHECK(info.totalram > info.freeram && info.freeram > 0 && info.mem_unit > 0 && info.procs > 0,
          "sysinfo: sensible values");
    FAILS(sysinfo(test_wild(8)), EFAULT, "sysinfo: a bad pointer");
    FAILS(prctl(9999, 0, 0, 0, 0), EINVAL, "prctl: an unknown option");
#if defined(__x86_64__)
    unsigned long base = 0;
    EQUAL(syscall(SYS_arch_prctl, 0x1003, &base), 0, "arch_prctl: ARCH_GET_FS");
    CHECK(base != 0, "arch_prctl: the base is there");
    FAILS(syscall(SYS_arch_prctl, 0x1002, 0x8000000000000000), EPERM, "arch_prctl: a non-canonical base");
    FAILS(syscall(SYS_arch_prctl, 0x7777, 0), EINVAL, "arch_prctl: an unknown code");
#endif
    FAILS(syscall(999), ENOSYS, "an unknown call: 999");
    FAILS(syscall(100000), ENOSYS, "an unknown call: 100000");
    FAILS(syscall(-5), ENOSYS, "an unknown call: -5");
    FAILS(syscall(0x7fffffffffffffff), ENOSYS, "an unknown call: the largest number");
    before = test_failures;
    for (int number = 500; number < 900; number++)
        STEP_FAILS(syscall(number, -1, -1, -1, -1, -1, -1), ENOSYS);
    ALL_STEPS(before, "400 unknown calls give ENOSYS");
    return test_end();
}
