// memory: 128M
// kernel-only: it changes what the whole machine obeys
//
// /proc/sys/vm: what is written there is obeyed, or refused.

#include "settings.h"

#include <poll.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_process_mrelease
#define SYS_process_mrelease 448
#endif
#ifndef P_PIDFD
#define P_PIDFD 3
#endif

#define MIB (1l << 20)

static ssize_t set(const char *name, const char *value) {
    char path[100];
    snprintf(path, sizeof path, "/proc/sys/%s", name);
    return write_setting(path, value);
}

static ssize_t set_number(const char *name, long value) {
    char text[30];
    snprintf(text, sizeof text, "%ld\n", value);
    return set(name, text);
}

static long number(const char *name) {
    char path[100], text[100];
    snprintf(path, sizeof path, "/proc/sys/%s", name);
    return test_read_file(path, text, sizeof text) > 0 ? atol(text) : -1;
}

// A line of meminfo, in kB.
static long meminfo(const char *name) {
    static char text[8000];
    NEED(test_read_file("/proc/meminfo", text, sizeof text) > 0);
    char *at = strstr(text, name);
    NEED(at);
    return atol(at + strlen(name) + 1);
}

static void *map(long size, int flags) {
    return mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static long mappings(void) {
    static char text[300000];
    NEED(test_read_file("/proc/self/maps", text, sizeof text) > 0);
    long count = 0;
    for (char *at = text; (at = strchr(at, '\n')); at++)
        count++;
    return count;
}

static void map_count(void) {
    EQUAL(number("vm/max_map_count"), 65530, "max_map_count begins as on Linux");
    FAILS(set("vm/max_map_count", "-1"), EINVAL, "max_map_count: nothing below 0");
    FAILS(set("vm/max_map_count", "many"), EINVAL, "max_map_count: a number");
    char *memory = map(64 * PAGE, 0);
    NEED(memory != MAP_FAILED);
    long room = 20;
    STEP(set_number("vm/max_map_count", mappings() + room) > 0);
    EQUAL(number("vm/max_map_count"), mappings() + room, "max_map_count is set");
    long cuts = 0;
    while (cuts < 60 && mprotect(memory + (2 * cuts + 1) % 63 * PAGE, PAGE, PROT_READ) == 0)
        cuts++;
    CHECK(cuts > 0 && cuts < 20 && errno == ENOMEM, "mprotect: too many mappings");
    EXITS(0, "a child has the same limit", {
        // Apart, so that they do not join.
        int made = 0;
        while (made < 100 && mmap(0, PAGE, made % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
            made++;
        _exit(made < 20 && errno == ENOMEM ? 0 : 1);
    });
    STEP(set("vm/max_map_count", "65530") > 0);
    STEP_EQUAL(mprotect(memory + 62 * PAGE, PAGE, PROT_NONE), 0);
    EQUAL(munmap(memory + 31 * PAGE, PAGE), 0, "and back: there is room again");
    munmap(memory, 64 * PAGE);
}

static void overcommit(void) {
    long total = meminfo("MemTotal");
    EQUAL(number("vm/overcommit_memory"), 0, "overcommit_memory begins with 0");
    FAILS(set("vm/overcommit_memory", "3"), EINVAL, "overcommit_memory: 0 to 2");
    CHECK(map(2 * total * 1024, 0) == MAP_FAILED && errno == ENOMEM, "0: more than all memory is refused");
    void *memory = map(2 * total * 1024, MAP_NORESERVE);
    CHECK(memory != MAP_FAILED && munmap(memory, 2 * total * 1024) == 0, "0: but for MAP_NORESERVE");
    STEP(set("vm/overcommit_memory", "1") > 0);
    memory = map(8 * total * 1024, 0);
    CHECK(memory != MAP_FAILED && munmap(memory, 8 * total * 1024) == 0, "1: nothing is refused");

    EQUAL(number("vm/overcommit_ratio"), 50, "overcommit_ratio begins with 50");
    EQUAL(meminfo("CommitLimit"), total / 2 / 4 * 4, "CommitLimit is half of memory");
    STEP(set("vm/overcommit_ratio", "75") > 0);
    long limit = meminfo("CommitLimit");
    CHECK(limit <= total * 3 / 4 && limit > total * 3 / 4 - 8, "overcommit_ratio decides CommitLimit");
    STEP(set("vm/overcommit_kbytes", "40000") > 0);
    EQUAL(meminfo("CommitLimit"), 40000, "overcommit_kbytes decides CommitLimit");
    EQUAL(number("vm/overcommit_ratio"), 0, "and takes the ratio's place");
    STEP(set("vm/overcommit_memory", "2") > 0);
    long left = (meminfo("CommitLimit") - meminfo("Committed_AS")) * 1024;
    NEED(left > 8 * MIB);
    long promised = meminfo("Committed_AS");
    memory = map(left - 2 * MIB, 0);
    CHECK(memory != MAP_FAILED, "2: what is below the limit is promised");
    long more = meminfo("Committed_AS") - promised - (left - 2 * MIB) / 1024;
    CHECK(more > -64 && more < 64, "Committed_AS counts it");
    CHECK(map(4 * MIB, 0) == MAP_FAILED && errno == ENOMEM, "2: and no more");
    CHECK(map(4 * MIB, MAP_NORESERVE) == MAP_FAILED && errno == ENOMEM, "2: MAP_NORESERVE does not help");
    STEP(set("vm/overcommit_kbytes", "80000") > 0);
    void *second = map(4 * MIB, 0);
    CHECK(second != MAP_FAILED, "a higher limit counts at once");
    munmap(second, 4 * MIB);
    munmap(memory, left - 2 * MIB);
    STEP(set("vm/overcommit_memory", "0") > 0 && set("vm/overcommit_ratio", "50") > 0);
    EQUAL(number("vm/overcommit_kbytes"), 0, "overcommit_ratio takes the place of overcommit_kbytes");
}

static void caches(void) {
    FAILS(open("/proc/sys/vm/drop_caches", O_RDONLY), EACCES, "drop_caches cannot be read");
    FAILS(set("vm/drop_caches", "0"), EINVAL, "drop_caches: 1 to 4");
    // Stacks of processes that have ended are kept for the next ones.
    pid_t children[8];
    for (int index = 0; index < 8; index++)
        children[index] = CHILD(for (;;) pause());
    for (int index = 0; index < 8; index++) {
        kill(children[index], SIGKILL);
        waitpid(children[index], 0, 0);
    }
    test_sleep(20);
    struct sysinfo before, after;
    STEP_EQUAL(sysinfo(&before), 0);
    STEP_EQUAL(set("vm/drop_caches", "2"), 1);
    STEP_EQUAL(sysinfo(&after), 0);
    CHECK(after.freeram >= before.freeram + 16 * PAGE, "drop_caches: what the kernel keeps is free");
}

// The number of a child, which ends.
static pid_t child_number(void) {
    pid_t child = CHILD();
    STEP_EQUAL(test_wait(child), 0);
    return child;
}

static void maximum_id(void) {
    long begun = number("kernel/pid_max");
    CHECK(begun >= 301, "pid_max begins with a number");
    FAILS(set("kernel/pid_max", "300"), EINVAL, "pid_max: nothing below 301");
    FAILS(set("kernel/pid_max", "4194305"), EINVAL, "pid_max: nothing above 2^22");
    STEP(set_number("kernel/pid_max", 4194304) > 0);
    EQUAL(number("kernel/pid_max"), 4194304, "pid_max is set");
    STEP(set_number("kernel/pid_max", 310) > 0);
    int before = test_failures, lowest = 4194304;
    for (int count = 0; count < 320; count++) {
        pid_t child = child_number();
        STEP(child < 310);
        if (count >= 310 && child < lowest)
            lowest = child;
    }
    STEP(lowest == 300 || (lowest > 300 && kill(300, 0) == 0));
    ALL_STEPS(before, "pid_max: new numbers stay below, and begin again at 300");
    pid_t holders[20];
    int made = 0;
    while (made < 20 && (holders[made] = CHILD(for (;;) pause())) > 0)
        made++;
    CHECK(made < 11 && errno == EAGAIN, "pid_max: no number is left");
    STEP(set_number("kernel/pid_max", begun) > 0);
    CHECK(child_number() >= 310, "a higher maximum counts at once");
    while (made-- > 0) {
        kill(holders[made], SIGKILL);
        test_wait(holders[made]);
    }
}

// A pidfd names its process, and never the next one of this number.
static void number_used_again(void) {
    long begun = number("kernel/pid_max");
    STEP(set_number("kernel/pid_max", 310) > 0);
    pid_t child = CHILD(_exit(0)), other = 0;
    int known = syscall(SYS_pidfd_open, child, 0);
    STEP(known >= 0);
    STEP_EQUAL(test_wait(child), 0);
    for (int count = 0; count < 20 && other != child; count++) {
        other = CHILD(for (;;) pause());
        if (other != child) {
            kill(other, SIGKILL);
            test_wait(other);
        }
    }
    EQUAL(other, child, "a number is used again");
    struct pollfd ended = {known, POLLIN, 0};
    EQUAL(poll(&ended, 1, 0), 1, "pidfd: its process has ended");
    FAILS(syscall(SYS_pidfd_send_signal, known, 0, 0, 0), ESRCH, "pidfd: no signal to another");
    siginfo_t information;
    FAILS(waitid(P_PIDFD, known, &information, WEXITED | WNOHANG), ECHILD, "pidfd: no wait for another");
    struct iovec page = {test_map(PAGE), PAGE};
    FAILS(syscall(SYS_process_madvise, known, &page, 1, MADV_COLD, 0), ESRCH, "pidfd: no advice for another");
    kill(other, SIGKILL);
    FAILS(syscall(SYS_process_mrelease, known, 0), ESRCH, "pidfd: no release of another's memory");
    STEP(test_wait(other) == SIGKILL);
    close(known);
    STEP(set_number("kernel/pid_max", begun) > 0);
}

int main(void) {
    test_start();
    maximum_id();
    number_used_again();
    map_count();
    overcommit();
    caches();
    long kept = number("vm/min_free_kbytes");
    CHECK(kept >= 0 && kept <= meminfo("MemTotal") / 4, "min_free_kbytes is a small part of memory");
    char pattern[200];
    ssize_t length = test_read_file("/proc/sys/kernel/core_pattern", pattern, sizeof pattern);
    CHECK(length > 1 && strchr(pattern, '\n') == pattern + length - 1, "core_pattern is a line of text");
    EQUAL(number("vm/page-cluster"), 3, "page-cluster begins with 3");
    int cluster = test_failures;
    STEP(set("vm/page-cluster", "0") > 0 && number("vm/page-cluster") == 0);
    STEP(set("vm/page-cluster", "31") > 0 && number("vm/page-cluster") == 31);
    STEP_FAILS(set("vm/page-cluster", "32"), EINVAL);
    STEP(set_number("vm/page-cluster", 3) > 0 && number("vm/page-cluster") == 3);
    ALL_STEPS(cluster, "page-cluster: 0 to 31");
    static const char *fixed[] = {"vm/nr_hugepages", "vm/mmap_min_addr", "kernel/printk", "kernel/hostname",
                                  "kernel/core_pattern", "vm/min_free_kbytes"};
    int before = test_failures;
    for (unsigned index = 0; index < sizeof fixed / sizeof *fixed; index++)
        STEP_FAILS(set(fixed[index], "1"), EACCES);
    ALL_STEPS(before, "what cannot be obeyed cannot be opened to write");
    return test_end();
}
