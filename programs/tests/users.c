// Users other than root: the users that they may become, and their rights to
// processes, limits, memory and files.

#include "test.h"

#include <grp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/uio.h>

#ifndef SYS_faccessat2
#define SYS_faccessat2 439
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { ALICE = 1000, BOB = 2000, STAFF = 50, CAP_IPC_LOCK_BIT = 14 };

struct sets {
    unsigned effective, permitted, inheritable;
};

static long capget_own(struct sets *sets) {
    unsigned header[2] = {0x20080522, 0};
    return syscall(SYS_capget, header, sets);
}

static long capset_own(const struct sets *sets) {
    unsigned header[2] = {0x20080522, 0};
    return syscall(SYS_capset, header, sets);
}

static int ids_are(uid_t real, uid_t effective, uid_t saved) {
    uid_t found[3];
    return getresuid(&found[0], &found[1], &found[2]) == 0 && found[0] == real &&
           found[1] == effective && found[2] == saved;
}

static void become(uid_t user) {
    NEED(setgroups(0, 0) == 0 && setresgid(user, user, user) == 0);
    NEED(setresuid(user, user, user) == 0);
}

static int status_says(const char *line) {
    static char text[8192];
    NEED(test_read_file("/proc/self/status", text, sizeof text) > 0);
    return strstr(text, line) != 0;
}

static void changes_of_users(void) {
    EXITS(0, "setuid of root sets all, and there is no way back", {
        STEP_EQUAL(setuid(ALICE), 0);
        STEP(ids_are(ALICE, ALICE, ALICE));
        STEP_FAILS(setuid(0), EPERM);
        STEP_FAILS(setuid(BOB), EPERM);
        STEP_EQUAL(setuid(ALICE), 0);
        STEP_EQUAL(getuid(), ALICE);
        STEP_EQUAL(geteuid(), ALICE);
    });
    EXITS(0, "seteuid can be taken back", {
        STEP_EQUAL(seteuid(ALICE), 0);
        STEP(ids_are(0, ALICE, 0));
        STEP_FAILS(setuid(BOB), EPERM);
        STEP_EQUAL(seteuid(0), 0);
        STEP(ids_are(0, 0, 0));
    });
    EXITS(0, "setreuid swaps, and saves", {
        STEP_EQUAL(setreuid(ALICE, BOB), 0);
        STEP(ids_are(ALICE, BOB, BOB));
        STEP_EQUAL(setreuid(BOB, ALICE), 0);
        STEP(ids_are(BOB, ALICE, ALICE));
        STEP_FAILS(setreuid(0, -1), EPERM);
        STEP_FAILS(setreuid(-1, 0), EPERM);
    });
    EXITS(0, "setresuid permutes", {
        STEP_EQUAL(setresuid(1, 2, 3), 0);
        STEP_EQUAL(setresuid(3, 1, 2), 0);
        STEP(ids_are(3, 1, 2));
        STEP_EQUAL(setresuid(-1, -1, 3), 0);
        STEP(ids_are(3, 1, 3));
        STEP_FAILS(setresuid(4, -1, -1), EPERM);
    });
    EXITS(0, "setfsuid gives the old one", {
        STEP_EQUAL(syscall(SYS_setfsuid, ALICE), 0);
        STEP_EQUAL(syscall(SYS_setfsuid, -1), ALICE);
        STEP(status_says("\nUid:\t0\t0\t0\t1000\n"));
    });
    EXITS(0, "groups likewise", {
        gid_t list[4] = {0};
        gid_t more[2] = {STAFF, 51};
        STEP_EQUAL(setgroups(2, more), 0);
        STEP_EQUAL(getgroups(0, 0), 2);
        STEP_EQUAL(getgroups(4, list), 2);
        STEP(list[0] == STAFF && list[1] == 51);
        STEP_FAILS(getgroups(1, list), EINVAL);
        STEP_FAILS(syscall(SYS_getgroups, -1, list), EINVAL);
        STEP_FAILS(setgroups(65537, list), EINVAL);
        STEP_EQUAL(setresgid(ALICE, BOB, STAFF), 0);
        STEP_EQUAL(getgid(), ALICE);
        STEP_EQUAL(getegid(), BOB);
        STEP_EQUAL(setgid(7), 0);
        STEP_EQUAL(setuid(ALICE), 0);
        STEP_FAILS(setgid(8), EPERM);
        STEP_FAILS(setgroups(0, 0), EPERM);
        STEP(status_says("\nGid:\t7\t7\t7\t7\n"));
        STEP(status_says("\nGroups:\t50 51 \n"));
    });
    EXITS(0, "no groups are told as such", {
        STEP_EQUAL(setgroups(0, 0), 0);
        STEP(status_says("\nGroups:\t \n"));
    });
}

static void capabilities(void) {
    struct sets sets[2];
    STEP_EQUAL(capget_own(sets), 0);
    CHECK(sets[0].effective & 1 << CAP_IPC_LOCK_BIT, "root may lock memory");
    EXITS(0, "capabilities go with the last root id", {
        STEP_EQUAL(seteuid(ALICE), 0);
        STEP_EQUAL(capget_own(sets), 0);
        STEP(sets[0].effective == 0 && sets[0].permitted != 0);
        STEP_EQUAL(seteuid(0), 0);
        STEP_EQUAL(capget_own(sets), 0);
        STEP(sets[0].effective == sets[0].permitted);
        STEP_EQUAL(setuid(ALICE), 0);
        STEP_EQUAL(capget_own(sets), 0);
        STEP(sets[0].effective == 0 && sets[0].permitted == 0 && sets[1].permitted == 0);
        STEP(status_says("\nUid:\t1000\t1000\t1000\t1000\n"));
        STEP(status_says("\nCapEff:\t0000000000000000\n"));
        STEP(status_says("\nCapPrm:\t0000000000000000\n"));
    });
    EXITS(0, "capset gives them up for good", {
        STEP_EQUAL(capget_own(sets), 0);
        sets[0].effective &= ~(1 << CAP_IPC_LOCK_BIT);
        STEP_EQUAL(capset_own(sets), 0);
        sets[0].permitted &= ~(1 << CAP_IPC_LOCK_BIT);
        STEP_EQUAL(capset_own(sets), 0);
        sets[0].permitted |= 1 << CAP_IPC_LOCK_BIT;
        STEP_FAILS(capset_own(sets), EPERM);
    });
    unsigned header[2] = {7, 0};
    FAILS(syscall(SYS_capget, header, sets), EINVAL, "an unknown version");
    EQUAL(header[0], 0x20080522, "is told the known one");
}

static void signals_and_processes(void) {
    pid_t alice = CHILD({ become(ALICE); pause(); });
    pid_t root = CHILD({ pause(); });
    test_sleep(50);
    EXITS(0, "a user signals his own processes alone", {
        become(ALICE);
        STEP_EQUAL(kill(alice, 0), 0);
        STEP_FAILS(kill(root, 0), EPERM);
        STEP_FAILS(kill(root, SIGTERM), EPERM);
        STEP_FAILS(kill(getppid(), SIGKILL), EPERM);
        STEP_FAILS(syscall(SYS_tgkill, root, root, SIGTERM), EPERM);
        STEP_EQUAL(kill(root, SIGCONT), 0);
        STEP_FAILS(kill(root, 65), EINVAL);
        STEP_EQUAL(kill(getpid(), 0), 0);
    });
    EXITS(0, "another user does not", {
        become(BOB);
        STEP_FAILS(kill(alice, 0), EPERM);
    });
    struct iovec nothing = {0, 0};
    EXITS(0, "nor does he look into them", {
        become(BOB);
        int handle = syscall(SYS_pidfd_open, root, 0);
        STEP(handle >= 0);
        STEP_FAILS(syscall(SYS_process_madvise, handle, &nothing, 1, MADV_COLD, 0), EACCES);
        char one = 0;
        struct iovec byte = {&one, 1};
        STEP_FAILS(syscall(SYS_process_vm_readv, root, &byte, 1, &byte, 1, 0), EPERM);
        char path[60];
        char text[100];
        const char *closed[] = {"maps", "smaps", "mem", "pagemap", "environ", "fd/0"};
        for (unsigned index = 0; index < sizeof closed / sizeof *closed; index++) {
            snprintf(path, sizeof path, "/proc/%d/%s", root, closed[index]);
            STEP_FAILS(open(path, O_RDONLY), EACCES);
        }
        snprintf(path, sizeof path, "/proc/%d/cwd", root);
        STEP_FAILS(readlink(path, text, sizeof text), EACCES);
        snprintf(path, sizeof path, "/proc/%d/status", root);
        STEP(open(path, O_RDONLY) >= 0);
        STEP(open("/proc/self/maps", O_RDONLY) >= 0);
        STEP(open("/proc/self/fd", O_RDONLY) >= 0);
        STEP_FAILS(open("/proc/self/mem", O_RDONLY), EACCES);
        STEP_EQUAL(prctl(PR_SET_DUMPABLE, 1), 0);
        STEP(open("/proc/self/mem", O_RDONLY) >= 0);
    });
    EQUAL(prctl(PR_GET_DUMPABLE), 1, "a program can be looked into by its user");
    EXITS(0, "but not after a change of users", {
        become(BOB);
        STEP_EQUAL(prctl(PR_GET_DUMPABLE), 0);
    });
    kill(alice, SIGKILL), kill(root, SIGKILL);
    test_wait(alice), test_wait(root);
}

static void limits(void) {
    EXITS(0, "a hard limit can be lowered and not raised", {
        become(ALICE);
        struct rlimit limit;
        STEP_EQUAL(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
        limit.rlim_cur = limit.rlim_max = 4 * PAGE;
        STEP_EQUAL(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
        limit.rlim_max = 5 * PAGE;
        STEP_FAILS(setrlimit(RLIMIT_MEMLOCK, &limit), EPERM);
        char *memory = test_map(8 * PAGE);
        STEP_EQUAL(mlock(memory, 4 * PAGE), 0);
        STEP_FAILS(mlock(memory, 5 * PAGE), ENOMEM);
        STEP(mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0) ==
                 MAP_FAILED && errno == EAGAIN);
        STEP_EQUAL(munlockall(), 0);
        limit.rlim_cur = 0;
        limit.rlim_max = 4 * PAGE;
        STEP_EQUAL(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
        STEP_FAILS(mlock(memory, PAGE), EPERM);
        STEP_FAILS(mlockall(MCL_CURRENT), EPERM);
    });
    EXITS(0, "root locks without limit, until it is none", {
        struct rlimit limit = {PAGE, PAGE};
        STEP_EQUAL(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
        char *memory = test_map(8 * PAGE);
        STEP_EQUAL(mlock(memory, 4 * PAGE), 0);
        STEP_EQUAL(munlock(memory, 4 * PAGE), 0);
        STEP_EQUAL(seteuid(ALICE), 0);
        STEP_FAILS(mlock(memory, 4 * PAGE), ENOMEM);
        STEP_EQUAL(seteuid(0), 0);
        STEP_EQUAL(mlock(memory, 4 * PAGE), 0);
    });
    pid_t root = CHILD({ pause(); });
    EXITS(0, "limits of others are theirs", {
        become(ALICE);
        struct rlimit limit;
        STEP_FAILS(syscall(SYS_prlimit64, root, RLIMIT_CORE, 0, &limit), EPERM);
        STEP_EQUAL(syscall(SYS_prlimit64, getpid(), RLIMIT_CORE, 0, &limit), 0);
    });
    kill(root, SIGKILL);
    test_wait(root);
}

static int make(const char *path, int mode, uid_t owner, gid_t group) {
    unlink(path);
    int file = open(path, O_CREAT | O_EXCL | O_RDWR, 0600);
    int good = file >= 0 && fchmod(file, mode) == 0 && fchown(file, owner, group) == 0;
    close(file);
    return good;
}

static int can(const char *path, int flags) {
    int file = open(path, flags);
    if (file >= 0)
        close(file);
    return file >= 0;
}

static void files(void) {
    umask(022);
    NEED(mkdir("users", 0755) == 0 && chdir("users") == 0);
    NEED(make("private", 0600, 0, 0) && make("alices", 0400, ALICE, 0));
    NEED(make("staffs", 0060, 0, STAFF) && make("public", 0644, 0, 0));
    NEED(mkdir("closed", 0700) == 0 && make("closed/inside", 0666, 0, 0));
    NEED(mkdir("open", 0777) == 0 && chmod("open", 0777) == 0 && make("open/root", 0666, 0, 0));
    NEED(mkdir("sticky", 0777) == 0 && chmod("sticky", 01777) == 0);
    NEED(make("sticky/root", 0666, 0, 0) && make("sticky/alice", 0666, ALICE, 0));
    EXITS(0, "owner, group and others open what they may", {
        gid_t staff = STAFF;
        NEED(setgroups(1, &staff) == 0 && setresgid(ALICE, ALICE, ALICE) == 0);
        NEED(setresuid(ALICE, ALICE, ALICE) == 0);
        STEP(!can("private", O_RDONLY) && errno == EACCES);
        STEP(can("alices", O_RDONLY) && !can("alices", O_WRONLY) && !can("alices", O_RDWR));
        STEP(can("staffs", O_RDWR) && can("public", O_RDONLY) && !can("public", O_WRONLY));
        STEP(!can("public", O_RDONLY | O_TRUNC) && errno == EACCES);
        STEP(can("private", O_PATH));
        STEP(!can("closed/inside", O_RDONLY) && errno == EACCES);
        STEP_FAILS(chdir("closed"), EACCES);
        STEP_FAILS(truncate("public", 0), EACCES);
    });
    EXITS(0, "names are made and taken where one may write", {
        become(ALICE);
        STEP_FAILS(open("new", O_CREAT | O_RDWR, 0600), EACCES);
        STEP_FAILS(mkdir("new", 0700), EACCES);
        STEP_FAILS(unlink("public"), EACCES);
        STEP_FAILS(rename("public", "open/public"), EACCES);
        STEP_FAILS(symlink("public", "link"), EACCES);
        int file = open("open/new", O_CREAT | O_RDWR, 0);
        STEP(file >= 0);
        struct stat status;
        STEP_EQUAL(fstat(file, &status), 0);
        STEP(status.st_uid == ALICE && status.st_gid == ALICE);
        STEP_EQUAL(write(file, "x", 1), 1);
        STEP_EQUAL(unlink("open/root"), 0);
        STEP_FAILS(unlink("sticky/root"), EPERM);
        STEP_FAILS(rename("sticky/root", "open/root"), EPERM);
        STEP_FAILS(rename("open/new", "sticky/root"), EPERM);
        STEP_EQUAL(unlink("sticky/alice"), 0);
    });
    EXITS(0, "owners change modes, root changes owners", {
        become(ALICE);
        STEP_EQUAL(chmod("alices", 0640), 0);
        STEP_FAILS(chmod("public", 0666), EPERM);
        STEP_FAILS(chown("alices", BOB, -1), EPERM);
        STEP_EQUAL(chown("alices", ALICE, ALICE), 0);
        STEP_FAILS(chown("alices", -1, STAFF), EPERM);
        STEP_EQUAL(utimensat(AT_FDCWD, "alices", 0, 0), 0);
        STEP_FAILS(utimensat(AT_FDCWD, "public", 0, 0), EACCES);
        struct timespec times[2] = {{1, 0}, {1, 0}};
        STEP_FAILS(utimensat(AT_FDCWD, "public", times, 0), EPERM);
    });
    EXITS(0, "access asks for the real user", {
        STEP_EQUAL(setresuid(ALICE, 0, 0), 0);
        STEP_FAILS(access("private", R_OK), EACCES);
        STEP_EQUAL(access("public", R_OK), 0);
        STEP_EQUAL(syscall(SYS_faccessat2, AT_FDCWD, "private", R_OK, AT_EACCESS), 0);
        STEP_FAILS(syscall(SYS_faccessat2, AT_FDCWD, "private", R_OK, 0), EACCES);
        STEP_FAILS(syscall(SYS_faccessat2, AT_FDCWD, "private", R_OK, 0x4000), EINVAL);
        STEP(can("private", O_RDWR));
    });
    EXITS(0, "programs are run by those who may", {
        become(ALICE);
        STEP_FAILS(execl("public", "public", (char *)0), EACCES);
        STEP_FAILS(execl("closed/inside", "inside", (char *)0), EACCES);
    });
    EXITS(0, "a memfd belongs to whoever made it", {
        become(ALICE);
        int file = syscall(SYS_memfd_create, "own", 0);
        struct stat status;
        STEP_EQUAL(fstat(file, &status), 0);
        STEP_EQUAL(status.st_uid, ALICE);
        char path[40];
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        STEP(can(path, O_RDWR));
    });
}

// The program when it was started again, as the owner of its file.
static int started_as(const char *expected) {
    char found[60];
    uid_t ids[3];
    getresuid(&ids[0], &ids[1], &ids[2]);
    snprintf(found, sizeof found, "%d %d %d", ids[0], ids[1], ids[2]);
    return strcmp(found, expected) == 0 ? 0 : 1;
}

static void set_user(void) {
    static char bytes[1 << 16];
    int from = open("/proc/self/exe", O_RDONLY), to = open("runs", O_CREAT | O_WRONLY, 0755);
    NEED(from >= 0 && to >= 0);
    ssize_t count;
    while ((count = read(from, bytes, sizeof bytes)) > 0)
        NEED(write(to, bytes, count) == count);
    close(from), close(to);
    NEED(chown("runs", BOB, BOB) == 0 && chmod("runs", 04755) == 0);
    EXITS(0, "a set-user-ID program runs as its owner", {
        become(ALICE);
        execl("runs", "runs", "1000 2000 2000", (char *)0);
        _exit(99);
    });
    NEED(chown("runs", 0, 0) == 0);
    struct stat status;
    NEED(stat("runs", &status) == 0);
    EQUAL(status.st_mode & 07777, 0755, "another owner takes the bit away");
    EXITS(0, "then it runs as whoever starts it", {
        become(ALICE);
        execl("runs", "runs", "1000 1000 1000", (char *)0);
        _exit(99);
    });
}

int main(int count, char **arguments) {
    if (count > 1)
        return started_as(arguments[1]);
    test_start();
    NEED(getuid() == 0);
    char directory[] = "/tmp/users-XXXXXX";
    NEED(mkdtemp(directory) && chmod(directory, 0755) == 0 && chdir(directory) == 0);
    changes_of_users();
    capabilities();
    signals_and_processes();
    limits();
    files();
    set_user();
    return test_end();
}
