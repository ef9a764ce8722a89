// System V shared memory: keys and identifiers, attaching at chosen places, the
// count of attachments, the time of destruction, and /proc/sysvipc/shm.

#include "test.h"

#include <sys/ipc.h>
#include <sys/resource.h>
#include <sys/shm.h>

#ifndef SHM_STAT_ANY
#define SHM_STAT_ANY 15
#endif
enum { INFO = 3 };

static long attached(int id) {
    struct shmid_ds status;
    return shmctl(id, IPC_STAT, &status) < 0 ? -1 : (long)status.shm_nattch;
}

static int make(size_t size) {
    int id = shmget(IPC_PRIVATE, size, IPC_CREAT | 0600);
    NEED(id >= 0);
    return id;
}

// Raw calls: libc's wrappers hide what is refused.
static long attach(long id, void *at, long flags) { return syscall(SYS_shmat, id, at, flags); }

static void keys(void) {
    key_t key = 0x5acc0000 | getpid();
    FAILS(shmget(key, PAGE, 0), ENOENT, "a key that nobody has");
    FAILS(shmget(key, 0, IPC_CREAT | 0600), EINVAL, "no size");
    FAILS(shmget(key, (size_t)-1, IPC_CREAT | 0600), EINVAL, "more than the largest size");
    int id = shmget(key, PAGE + 1, IPC_CREAT | IPC_EXCL | 0640);
    WORKS(id, "a key is taken");
    EQUAL(shmget(key, PAGE, IPC_CREAT | 0600), id, "and found");
    EQUAL(shmget(key, 0, 0), id, "of whatever size");
    EQUAL(shmget(key, PAGE + 1, 0600), id, "of its own size");
    FAILS(shmget(key, PAGE + 2, 0), EINVAL, "but of no larger one");
    FAILS(shmget(key, PAGE, IPC_CREAT | IPC_EXCL | 0600), EEXIST, "nor for oneself alone");
    struct shmid_ds status;
    WORKS(shmctl(id, IPC_STAT, &status), "IPC_STAT");
    CHECK(status.shm_perm.__key == key && status.shm_perm.mode == 0640 &&
              status.shm_perm.uid == getuid() && status.shm_perm.cgid == getgid(),
          "tells of key, mode and owner");
    CHECK(status.shm_segsz == PAGE + 1 && status.shm_cpid == getpid() && status.shm_lpid == 0 &&
              status.shm_nattch == 0 && status.shm_atime == 0 && status.shm_ctime != 0,
          "and of size, processes and times");
    status.shm_perm.mode = 0604;
    WORKS(shmctl(id, IPC_SET, &status), "IPC_SET");
    WORKS(shmctl(id, IPC_STAT, &status), "and again");
    EQUAL(status.shm_perm.mode, 0604, "has changed the mode");
    status.shm_perm.uid = -1;
    FAILS(shmctl(id, IPC_SET, &status), EINVAL, "IPC_SET: nobody");
    WORKS(shmctl(id, SHM_LOCK, 0), "SHM_LOCK");
    WORKS(shmctl(id, IPC_STAT, &status), "is told");
    EQUAL(status.shm_perm.mode, 0604 | SHM_LOCKED, "in the mode");
    WORKS(shmctl(id, SHM_UNLOCK, 0), "SHM_UNLOCK");
    FAILS(shmctl(id, IPC_STAT, test_wild(8)), EFAULT, "no buffer");
    FAILS(shmctl(id, IPC_SET, test_wild(8)), EFAULT, "nothing to set");
    FAILS(shmctl(id, 99, 0), EINVAL, "no such command");
    FAILS(shmctl(id, -1, 0), EINVAL, "a negative one");
    FAILS(shmctl(-1, IPC_STAT, &status), EINVAL, "a negative identifier");
    FAILS(shmctl(id + 1, IPC_STAT, &status), EINVAL, "an identifier that nobody has");
    WORKS(shmctl(id, IPC_RMID, 0), "IPC_RMID");
    FAILS(shmctl(id, IPC_STAT, &status), EINVAL, "and it is gone");
    FAILS(attach(id, 0, 0), EINVAL, "for all");
    FAILS(shmget(key, 0, 0), ENOENT, "its key too");
    int next = shmget(key, PAGE, IPC_CREAT | 0600);
    CHECK(next >= 0 && next != id, "another identifier the next time");
    WORKS(shmctl(next, IPC_RMID, 0), "and gone");
}

static void places(void) {
    int id = make(3 * PAGE);
    char *at = shmat(id, 0, 0);
    NEED(at != (char *)-1);
    CHECK(at[0] == 0 && at[3 * PAGE - 1] == 0, "it is all zeroes");
    strcpy(at, "shared");
    char *constant = shmat(id, 0, SHM_RDONLY);
    CHECK(constant != (char *)-1 && !strcmp(constant, "shared"), "attached twice, once to read");
    EQUAL(STORES(constant), SIGSEGV, "alone");
    FAILS(mprotect(constant, PAGE, PROT_READ | PROT_WRITE), EACCES, "for good");
    EQUAL(attached(id), 2, "both count");
    FAILS(attach(id, at, 0), EINVAL, "what is taken");
    FAILS(attach(id, at + 1, 0), EINVAL, "a crooked address");
    FAILS(attach(id, at + 1, SHM_RND), EINVAL, "one that is rounded to what is taken");
    FAILS(attach(id, 0, SHM_REMAP), EINVAL, "SHM_REMAP of nothing");
    FAILS(attach(id, (void *)8, SHM_RND | SHM_REMAP), EINVAL, "SHM_REMAP of page 0");
    FAILS(attach(-1, 0, 0), EINVAL, "a negative identifier");
    FAILS(attach(id, (void *)(-8 * PAGE), 0), ENOMEM, "addresses of the kernel");
    FAILS(attach(id, (void *)(-PAGE), 0), EINVAL, "addresses that wrap");
    char *room = test_map(8 * PAGE);
    EQUAL(attach(id, room + PAGE, SHM_REMAP), (long)(room + PAGE), "SHM_REMAP of what is taken");
    CHECK(!strcmp(room + PAGE, "shared") && room[0] == 0, "which shows it");
    NEED(munmap(room, 8 * PAGE) == 0);
    EQUAL(attached(id), 2, "unmapped is detached");
    EQUAL(attach(id, room + 5, SHM_RND), (long)room, "SHM_RND of what is free");
    EQUAL(attached(id), 3, "counts");
    WORKS(shmdt(room), "shmdt");
    FAILS(shmdt(room), EINVAL, "shmdt of nothing");
    FAILS(shmdt(constant + 1), EINVAL, "shmdt of a crooked address");
    FAILS(shmdt(constant + PAGE), EINVAL, "shmdt of its middle");
    char *code = shmat(id, 0, SHM_EXEC);
    CHECK(code != (char *)-1 && mprotect(code, PAGE, PROT_READ | PROT_EXEC) == 0, "SHM_EXEC");
    WORKS(shmdt(code), "detached");
    WORKS(shmdt(constant), "all");
    WORKS(shmctl(id, IPC_RMID, 0), "destroyed while it is attached");
    struct shmid_ds status;
    WORKS(shmctl(id, IPC_STAT, &status), "it is there still");
    CHECK(status.shm_perm.mode & SHM_DEST && status.shm_perm.__key == IPC_PRIVATE,
          "and says what will become of it");
    char *again = shmat(id, 0, 0);
    CHECK(again != (char *)-1 && !strcmp(again, "shared"), "attached even now");
    WORKS(shmdt(at), "one goes");
    EQUAL(attached(id), 1, "one stays");
    WORKS(shmdt(again), "and goes");
    FAILS(shmctl(id, IPC_STAT, &status), EINVAL, "and the segment with it");
}

static void counts(void) {
    int id = make(8 * PAGE);
    char *at = shmat(id, 0, 0);
    NEED(at != (char *)-1);
    NEED(munmap(at + 2 * PAGE, PAGE) == 0);
    EQUAL(attached(id), 2, "a hole makes two of one");
    NEED(munmap(at, PAGE) == 0);
    EQUAL(attached(id), 2, "a shorter one counts");
    at[4 * PAGE] = 'm';
    char *moved = mremap(at + 4 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, test_map(PAGE));
    CHECK(moved != MAP_FAILED && *moved == 'm', "a page is moved away");
    EQUAL(attached(id), 4, "which makes two more");
    NEED(mprotect(at + 5 * PAGE, PAGE, PROT_READ) == 0);
    NEED(mprotect(at + 5 * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    CHECK(attached(id) >= 5, "so do changes of protection");
    long before = attached(id);
    int ready[2], go[2];
    NEED(pipe(ready) == 0 && pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        char byte = 1;
        if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1)
            _exit(1);
        _exit(0);
    }
    char byte;
    NEED(read(ready[0], &byte, 1) == 1);
    EQUAL(attached(id), 2 * before, "a child has all of them");
    NEED(write(go[1], &byte, 1) == 1);
    test_wait(child);
    EQUAL(attached(id), before, "until it ends");
    WORKS(shmdt(at), "shmdt of what was cut");
    EQUAL(attached(id), 1, "leaves what was moved");
    CHECK(*moved == 'm', "as it was");
    FAILS(shmdt(at), EINVAL, "and finds no more");
    WORKS(shmdt(moved - 4 * PAGE), "which is found where the segment would begin");
    EQUAL(attached(id), 0, "then none is left");
    WORKS(shmctl(id, IPC_RMID, 0), "the segment goes");
    struct shmid_ds status;
    id = make(PAGE);
    NEED(shmat(id, 0, 0) != (void *)-1);
    child = fork();
    if (child == 0) {
        shmctl(id, IPC_RMID, 0);
        _exit(0);
    }
    test_wait(child);
    WORKS(shmctl(id, IPC_STAT, &status), "a child cannot take it away");
    CHECK(status.shm_lpid == child && status.shm_dtime != 0, "but was the last to have it");
}

static void shown(void) {
    int id = shmget(0x1234abcd, 5 * PAGE, IPC_CREAT | 0600);
    NEED(id >= 0);
    char *at = shmat(id, 0, 0);
    NEED(at != (char *)-1);
    at[0] = at[PAGE] = 1;
    static char text[100000];
    char line[200];
    NEED(test_read_file("/proc/self/maps", text, sizeof text) > 0);
    snprintf(line, sizeof line, "%lx-%lx rw-s 00000000 00:01 %d ", (long)at,
             (long)(at + 5 * PAGE), id);
    CHECK(strstr(text, line) && strstr(text, " /SYSV1234abcd (deleted)\n"), "maps shows it");
    NEED(test_read_file("/proc/sysvipc/shm", text, sizeof text) > 0);
    CHECK(strstr(text, "       key      shmid perms                  size  cpid  lpid nattch   uid"
                       "   gid  cuid  cgid      atime      dtime      ctime                   rss"
                       "                  swap\n") == text,
          "/proc/sysvipc/shm has a head");
    snprintf(line, sizeof line, "\n%10d %10d   600 %21lu %5u %5u  %5u ", 0x1234abcd, id,
             5 * PAGE, getpid(), getpid(), 1);
    CHECK(strstr(text, line), "and a line");
    snprintf(line, sizeof line, " %21lu %21lu\n", 2 * PAGE, 0UL);
    CHECK(strstr(text, line), "with what is in memory");
    struct shminfo info;
    int last = shmctl(0, INFO, (void *)&info);
    CHECK(last >= 0 && info.shmmin == 1 && info.shmmni >= 128 && info.shmmax > 1UL << 40,
          "IPC_INFO");
    struct shm_info used;
    EQUAL(shmctl(0, SHM_INFO, (void *)&used), last, "SHM_INFO");
    CHECK(used.used_ids >= 1 && used.shm_tot >= 5 && used.shm_rss >= 2, "tells what there is");
    int found = 0;
    for (int index = 0; index <= last; index++) {
        struct shmid_ds status;
        if (shmctl(index, SHM_STAT, &status) == id)
            found = status.shm_perm.__key == 0x1234abcd &&
                    shmctl(index, SHM_STAT_ANY, &status) == id;
    }
    CHECK(found, "SHM_STAT finds it by its index");
    NEED(shmctl(id, IPC_RMID, 0) == 0);
    NEED(shmdt(at) == 0);
}

static void programs(char **arguments) {
    int id = make(PAGE);
    pid_t child = fork();
    if (child == 0) {
        char number[20];
        snprintf(number, sizeof number, "%d", id);
        if (shmat(id, 0, 0) == (void *)-1)
            _exit(9);
        execl(arguments[0], arguments[0], number, (char *)0);
        _exit(8);
    }
    int status = test_wait(child);
    EQUAL(WEXITSTATUS(status), 42, "a new program has nothing attached");
    NEED(shmctl(id, IPC_RMID, 0) == 0);
}

static void limit(size_t bytes) {
    struct rlimit limit;
    NEED(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    limit.rlim_cur = bytes;
    NEED(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
}

static int lock(int id) { return shmctl(id, SHM_LOCK, 0); }

// A user that nothing else runs as.
static void as_user(void) {
    if (getuid() == 0)
        NEED(setgid(54321) == 0 && setuid(54321) == 0);
}

// As a user without privileges. Answers through the pipes let the parent act in between.
static void locks(int ready, int go, int *shared) {
    char byte = 1;
    as_user();
    int large = make(4 * PAGE), small = make(PAGE);
    limit(0);
    FAILS(lock(large), EPERM, "SHM_LOCK: a limit of 0");
    limit(4 * PAGE - 1);
    FAILS(lock(large), ENOMEM, "SHM_LOCK: a limit below the size");
    limit(4 * PAGE);
    WORKS(lock(large), "SHM_LOCK: the limit");
    WORKS(lock(large), "SHM_LOCK: again, which counts nothing");
    FAILS(lock(small), ENOMEM, "SHM_LOCK: above the limit");
    STEP_EQUAL(test_wait(CHILD(STEP_FAILS(lock(small), ENOMEM))), 0);
    EXITS(0, "SHM_LOCK: another process of the user has a limit of its own", {
        limit(5 * PAGE);
        STEP_EQUAL(lock(small), 0);
    });
    char *memory = test_map(4 * PAGE);
    WORKS(mlock(memory, 4 * PAGE), "mlock counts apart, for the process");
    limit(0);
    WORKS(shmctl(small, SHM_UNLOCK, 0), "SHM_UNLOCK needs no limit");
    limit(4 * PAGE);
    void *at = shmat(large, 0, 0);
    STEP(at != (void *)-1 && shmctl(large, IPC_RMID, 0) == 0);
    FAILS(lock(small), ENOMEM, "a segment counts until its last attachment");
    STEP_EQUAL(shmdt(at), 0);
    WORKS(lock(small), "and no longer");
    large = make(4 * PAGE);
    FAILS(lock(large), ENOMEM, "SHM_LOCK: one page is locked");
    *shared = small;
    NEED(write(ready, &byte, 1) == 1 && read(go, &byte, 1) == 1);
    WORKS(lock(large), "root has unlocked the page, and the user has its room again");
    STEP_EQUAL(shmctl(large, IPC_RMID, 0), 0);
}

static void locked(void) {
    int ready[2], go[2];
    char byte;
    int *shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(pipe(ready) == 0 && pipe(go) == 0 && shared != MAP_FAILED);
    pid_t child = CHILD(locks(ready[1], go[0], shared));
    close(ready[1]);
    if (read(ready[0], &byte, 1) == 1) {
        STEP_EQUAL(shmctl(*shared, SHM_UNLOCK, 0), 0);
        STEP_EQUAL(write(go[1], &byte, 1), 1);
        STEP_EQUAL(shmctl(*shared, IPC_RMID, 0), 0);
    }
    STEP_EQUAL(test_wait(child), 0);
    if (getuid() == 0) {
        limit(0);
        int id = make(PAGE);
        EXITS(0, "SHM_LOCK: the segment of another user", {
            as_user();
            limit(PAGE);
            STEP_FAILS(lock(id), EPERM);
        });
        WORKS(lock(id), "SHM_LOCK: root has no limit");
        STEP_EQUAL(shmctl(id, IPC_RMID, 0), 0);
    }
}

int main(int count, char **arguments) {
    if (count > 1)
        return attached(atoi(arguments[1])) == 0 ? 42 : 1;
    test_start();
    keys();
    places();
    counts();
    shown();
    programs(arguments);
    locked();
    return test_end();
}
