// Users and each other: their threads, their children, the number of their processes, their
// segments, and the programs of others that they start.

#include "test.h"

#include <grp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ipc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>

enum { ALICE = 54001, BOB = 54002, STAFF = 54050, OTHERS = 54051 };

static void become_member(uid_t user, gid_t group) {
    NEED(setgroups(1, &group) == 0 && setresgid(user, user, user) == 0);
    NEED(setresuid(user, user, user) == 0);
}

static void become(uid_t user) { become_member(user, user); }

// A child of another user that waits to be killed.
static pid_t waiting_child(uid_t user) {
    int ready[2];
    char byte = 0;
    NEED(pipe(ready) == 0);
    pid_t child = CHILD({
        if (user != 0)
            become(user);
        NEED(write(ready[1], &byte, 1) == 1);
        for (;;)
            pause();
    });
    NEED(child > 0 && read(ready[0], &byte, 1) == 1);
    close(ready[0]), close(ready[1]);
    return child;
}

static void end(pid_t child) {
    STEP_EQUAL(kill(child, SIGKILL), 0);
    test_wait(child);
}

static void threads(void) {
    pid_t root = waiting_child(0), alice = waiting_child(ALICE);
    unsigned long set[16] = {0};
    int priority = 0;
    void *head;
    size_t length;
    long size = syscall(SYS_sched_getaffinity, 0, sizeof set, set);
    NEED(size > 0);
    EXITS(0, "the CPUs of threads: the user's own alone can be set", {
        become(ALICE);
        STEP_EQUAL(syscall(SYS_sched_getaffinity, root, sizeof set, set), size);
        STEP_FAILS(syscall(SYS_sched_setaffinity, root, size, set), EPERM);
        STEP_FAILS(syscall(SYS_sched_setaffinity, root, size, test_wild(8)), EFAULT);
        STEP_FAILS(syscall(SYS_sched_setaffinity, 999999, size, set), ESRCH);
        STEP_EQUAL(syscall(SYS_sched_setaffinity, alice, size, set), 0);
        STEP_EQUAL(syscall(SYS_sched_setaffinity, 0, size, set), 0);
    });
    EXITS(0, "so it is with their policies", {
        become(ALICE);
        STEP_EQUAL(syscall(SYS_sched_getscheduler, root), 0);
        STEP_FAILS(syscall(SYS_sched_setscheduler, root, SCHED_OTHER, &priority), EPERM);
        STEP_FAILS(syscall(SYS_sched_setscheduler, root, 77, &priority), EINVAL);
        STEP_EQUAL(syscall(SYS_sched_setscheduler, alice, SCHED_OTHER, &priority), 0);
    });
    EXITS(0, "and to read their lists of futexes", {
        become(ALICE);
        STEP_FAILS(syscall(SYS_get_robust_list, root, &head, &length), EPERM);
        STEP_FAILS(syscall(SYS_get_robust_list, 999999, &head, &length), ESRCH);
        STEP_EQUAL(syscall(SYS_get_robust_list, 0, &head, &length), 0);
        STEP_EQUAL(syscall(SYS_get_robust_list, getpid(), &head, &length), 0);
    });
    EQUAL(syscall(SYS_sched_setaffinity, alice, size, set), 0, "root sets those of any");
    EQUAL(syscall(SYS_get_robust_list, alice, &head, &length), 0, "and reads those of any");
    end(root), end(alice);
}

static void children(void) {
    sigset_t mask;
    siginfo_t info = {0};
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    NEED(sigprocmask(SIG_BLOCK, &mask, 0) == 0);
    pid_t child = CHILD({ become(ALICE); });
    STEP_EQUAL(sigwaitinfo(&mask, &info), SIGCHLD);
    CHECK(info.si_pid == child && info.si_uid == ALICE, "SIGCHLD names the user of an ended child");
    info.si_uid = 0;
    STEP_EQUAL(waitid(P_PID, child, &info, WEXITED), 0);
    EQUAL(info.si_uid, ALICE, "and so does waitid");
    child = CHILD({ become(BOB); raise(SIGSTOP); });
    STEP_EQUAL(sigwaitinfo(&mask, &info), SIGCHLD);
    CHECK(info.si_code == CLD_STOPPED && info.si_uid == BOB, "SIGCHLD: of a stopped one");
    STEP_EQUAL(waitid(P_PID, child, &info, WSTOPPED), 0);
    CHECK(info.si_code == CLD_STOPPED && info.si_uid == BOB, "waitid: of a stopped one");
    STEP_EQUAL(kill(child, SIGCONT), 0);
    STEP_EQUAL(test_wait(child), 0);
    NEED(sigprocmask(SIG_UNBLOCK, &mask, 0) == 0);
}

static void *nothing(void *argument) { return argument; }

static void numbers(void) {
    EXITS(0, "the number of root's processes is not limited", {
        struct rlimit limit = {1, 1};
        STEP_EQUAL(setrlimit(RLIMIT_NPROC, &limit), 0);
        STEP_EQUAL(test_wait(CHILD(STEP_EQUAL(test_wait(CHILD(_exit(0))), 0))), 0);
    });
    EXITS(0, "that of others is, for each user alone", {
        struct rlimit limit = {2, 2};
        pthread_t thread;
        STEP_EQUAL(setrlimit(RLIMIT_NPROC, &limit), 0);
        become(ALICE);
        pid_t child = CHILD(pause());
        STEP(child > 0);
        STEP_FAILS(fork(), EAGAIN);
        STEP_EQUAL(pthread_create(&thread, 0, nothing, 0), EAGAIN);
        STEP_EQUAL(kill(child, SIGKILL), 0);
        siginfo_t info;
        STEP_EQUAL(waitid(P_PID, child, &info, WEXITED | WNOWAIT), 0);
        STEP_FAILS(fork(), EAGAIN);
        test_wait(child);
        STEP_EQUAL(pthread_create(&thread, 0, nothing, 0), 0);
        STEP_EQUAL(pthread_join(thread, 0), 0);
        STEP_EQUAL(test_wait(CHILD(_exit(0))), 0);
    });
    EXITS(0, "and not for one that may exceed limits", {
        struct rlimit limit = {1, 1};
        STEP_EQUAL(setrlimit(RLIMIT_NPROC, &limit), 0);
        STEP_EQUAL(setresuid(ALICE, 0, 0), 0);
        STEP_EQUAL(test_wait(CHILD(_exit(0))), 0);
        STEP_EQUAL(setresuid(ALICE, ALICE, 0), 0);
        STEP_FAILS(fork(), EAGAIN);
    });
}

static void segments(void) {
    int id = shmget(IPC_PRIVATE, PAGE, 0060);
    struct shmid_ds status;
    NEED(id >= 0 && shmctl(id, IPC_STAT, &status) == 0);
    status.shm_perm.gid = STAFF;
    NEED(shmctl(id, IPC_SET, &status) == 0);
    EXITS(0, "a member of a segment's group attaches it", {
        become_member(ALICE, STAFF);
        STEP(shmat(id, 0, 0) != (void *)-1);
        STEP_FAILS(shmctl(id, IPC_RMID, 0), EPERM);
    });
    EXITS(0, "a member of another group does not", {
        become_member(ALICE, OTHERS);
        STEP_FAILS((long)shmat(id, 0, 0), EACCES);
    });
    STEP_EQUAL(shmctl(id, IPC_RMID, 0), 0);
}

static void copy_of_this_program(const char *path) {
    static char bytes[1 << 16];
    int from = open("/proc/self/exe", O_RDONLY), to = open(path, O_CREAT | O_WRONLY, 0755);
    NEED(from >= 0 && to >= 0);
    ssize_t count;
    while ((count = read(from, bytes, sizeof bytes)) > 0)
        NEED(write(to, bytes, count) == count);
    close(from), close(to);
}

// This program, started again by another user.
static int again(const char *what, int expected) {
    if (strcmp(what, "dumpable") == 0)
        return prctl(PR_GET_DUMPABLE) == 1 ? expected != 1 : expected != 0;
    return (int)geteuid() != expected;
}

static void programs(void) {
    copy_of_this_program("runs");
    NEED(chmod("runs", 0111) == 0);
    EXITS(0, "a program that its user cannot read is hidden from others of the user", {
        become(ALICE);
        execl("runs", "runs", "dumpable", "0", (char *)0);
        _exit(99);
    });
    NEED(chmod("runs", 0555) == 0);
    EXITS(0, "one that can be read is not", {
        become(ALICE);
        execl("runs", "runs", "dumpable", "1", (char *)0);
        _exit(99);
    });
    NEED(chown("runs", BOB, BOB) == 0 && chmod("runs", 04555) == 0);
    EXITS(0, "a set-user-ID program gets its owner's rights", {
        become(ALICE);
        execl("runs", "runs", "user", "54002", (char *)0);
        _exit(99);
    });
    EXITS(0, "without new privileges it does not", {
        become(ALICE);
        STEP_EQUAL(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
        STEP_FAILS(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0), EINVAL);
        STEP_FAILS(prctl(PR_SET_NO_NEW_PRIVS, 1, 1, 0, 0), EINVAL);
        STEP_FAILS(prctl(PR_GET_NO_NEW_PRIVS, 1, 0, 0, 0), EINVAL);
        STEP_EQUAL(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        STEP_EQUAL(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
        STEP_EQUAL(test_wait(CHILD(_exit(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1))), 0);
        execl("runs", "runs", "user", "54001", (char *)0);
        _exit(99);
    });
}

static int mode_after(uid_t user, int mode, ssize_t (*change)(int)) {
    struct stat status;
    int file = open("bits", O_RDWR | O_CREAT, 0600);
    NEED(file >= 0 && fchown(file, ALICE, ALICE) == 0 && fchmod(file, mode) == 0);
    pid_t child = CHILD({
        if (user != 0)
            become(user);
        STEP(change(file) >= 0);
    });
    STEP_EQUAL(test_wait(child), 0);
    NEED(fstat(file, &status) == 0);
    close(file), unlink("bits");
    return status.st_mode & 07777;
}

static ssize_t write_one(int file) { return write(file, "x", 1); }
static ssize_t write_nothing(int file) { return write(file, "", 0); }
static ssize_t cut(int file) { return ftruncate(file, 0); }

static void bits(void) {
    EQUAL(mode_after(ALICE, 06777, write_one), 0777, "a write takes away set-user-ID and set-group-ID");
    EQUAL(mode_after(BOB, 06777, write_one), 0777, "whose file it is does not matter");
    EQUAL(mode_after(ALICE, 06767, write_one), 02767, "without execution by the group it stays");
    EQUAL(mode_after(ALICE, 06777, cut), 0777, "a new length takes them away too");
    EQUAL(mode_after(ALICE, 06777, write_nothing), 06777, "a write of nothing does not");
    EQUAL(mode_after(0, 06777, write_one), 06777, "nor does root's");
}

int main(int count, char **arguments) {
    if (count > 2)
        return again(arguments[1], atoi(arguments[2]));
    test_start();
    NEED(getuid() == 0);
    char directory[] = "/tmp/others-XXXXXX";
    NEED(mkdtemp(directory) && chmod(directory, 0755) == 0 && chdir(directory) == 0);
    threads();
    children();
    numbers();
    segments();
    programs();
    bits();
    unlink("runs");
    rmdir(directory);
    return test_end();
}
