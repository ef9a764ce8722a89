// execve: arguments, environment, what is kept and what is not, and errors.

#include "test.h"

static void ignore(int signal) { (void)signal; }

// The program again, in another mode; what it checks is in its exit status.
static int again(int count, char **arguments, char **environment) {
    const char *mode = arguments[1];
    if (strcmp(mode, "arguments") == 0) {
        STEP_EQUAL(count, 5);
        STEP(strcmp(arguments[2], "") == 0);
        STEP(strcmp(arguments[3], "a b\tc\n") == 0);
        STEP(strlen(arguments[4]) == 20000 && arguments[4][19999] == 'z');
        STEP(arguments[5] == 0);
        STEP(environment[0] && strcmp(environment[0], "FIRST=1") == 0);
        STEP(environment[1] && strcmp(environment[1], "SECOND=two words") == 0);
        STEP(environment[2] == 0);
    } else if (strcmp(mode, "state") == 0) {
        struct sigaction action;
        sigset_t mask;
        sigaction(SIGUSR1, 0, &action);
        STEP(action.sa_handler == SIG_DFL);
        sigaction(SIGUSR2, 0, &action);
        STEP(action.sa_handler == SIG_IGN);
        sigprocmask(0, 0, &mask);
        STEP(sigismember(&mask, SIGHUP) == 1);
        STEP(sigismember(&mask, SIGINT) == 0);
        sigpending(&mask);
        STEP(sigismember(&mask, SIGHUP) == 1);
        stack_t stack;
        sigaltstack(0, &stack);
        STEP(stack.ss_flags & SS_DISABLE);
        STEP_EQUAL(getpid(), atoi(arguments[2]));
        STEP(fcntl(atoi(arguments[3]), F_GETFD) >= 0);
        STEP_FAILS(fcntl(atoi(arguments[4]), F_GETFD), EBADF);
        STEP(LOADS(strtoul(arguments[5], 0, 16)) == SIGSEGV);
        char directory[100];
        STEP(getcwd(directory, 100) && strcmp(directory, "/tmp") == 0);
        STEP_EQUAL(umask(0), 031);
    } else if (strcmp(mode, "exit") == 0) {
        return 33;
    }
    return test_end();
}

static void write_file(const char *path, const void *bytes, size_t length, int mode) {
    unlink(path);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0700);
    NEED(file >= 0);
    NEED(write(file, bytes, length) == (ssize_t)length);
    fchmod(file, mode);
    close(file);
}

int main(int count, char **arguments, char **environment) {
    test_start();
    if (count > 1)
        return again(count, arguments, environment);
    char *none[] = {0};

    static char longest[20001];
    memset(longest, 'z', 20000);
    EXITS(0, "execve passes arguments and environment", {
        char *list[] = {"name", "arguments", "", "a b\tc\n", longest, 0};
        char *variables[] = {"FIRST=1", "SECOND=two words", 0};
        execve("/proc/self/exe", list, variables);
        _exit(99);
    });
    EXITS(0, "execve keeps mask, pid, descriptors, directory; resets handlers and memory", {
        signal(SIGUSR1, ignore);
        signal(SIGUSR2, SIG_IGN);
        sigset_t mask;
        sigemptyset(&mask);
        sigaddset(&mask, SIGHUP);
        sigprocmask(SIG_BLOCK, &mask, 0);
        raise(SIGHUP);
        stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536};
        sigaltstack(&stack, 0);
        STEP(chdir("/tmp") == 0);
        umask(031);
        char *mapping = mmap((void *)0x123400000000, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char pid[20], kept[20], closed[20], address[20];
        snprintf(pid, 20, "%d", getpid());
        snprintf(kept, 20, "%d", open("/dev/null", O_RDONLY));
        snprintf(closed, 20, "%d", open("/dev/null", O_RDONLY | O_CLOEXEC));
        snprintf(address, 20, "%lx", (unsigned long)mapping);
        char *list[] = {"name", "state", pid, kept, closed, address, 0};
        execve("/proc/self/exe", list, none);
        _exit(99);
    });
    char self[200];
    ssize_t length = readlink("/proc/self/exe", self, 199);
    NEED(length > 0);
    self[length] = 0;
    CHECK(self[0] == '/', "/proc/self/exe is an absolute path");
    EXITS(33, "execve of the path that /proc/self/exe gives", {
        char *list[] = {"name", "exit", 0};
        execve(self, list, none);
        _exit(99);
    });
    pid_t child = vfork();
    if (child == 0) {
        char *list[] = {"name", "exit", 0};
        execve(self, list, none);
        _exit(99);
    }
    EQUAL(WEXITSTATUS(test_wait(child)), 33, "execve after vfork");
    int until[2];
    NEED(pipe2(until, O_CLOEXEC) == 0);
    child = syscall(SYS_clone, 0, 0, 0, 0, 0);
    if (child == 0) {
        char *list[] = {"name", "exit", 0};
        execve(self, list, none);
        _exit(99);
    }
    char byte;
    close(until[1]);
    NEED(child > 0 && read(until[0], &byte, 1) == 0);
    close(until[0]);
    EQUAL(WEXITSTATUS(test_wait(child)), 33, "execve: the parent waits for any program's end");

    char *list[] = {"name", "exit", 0};
    FAILS(execve("/nowhere", list, none), ENOENT, "execve: no such file");
    FAILS(execve("/dev/null/x", list, none), ENOTDIR, "execve: a path through a file");
    FAILS(execve("/tmp", list, none), EACCES, "execve: a directory");
    FAILS(execve("", list, none), ENOENT, "execve: an empty path");
    write_file("/tmp/exec-plain", "\177ELF\2\1\1 nonsense", 16, 0644);
    FAILS(execve("/tmp/exec-plain", list, none), EACCES, "execve: not executable");
    chmod("/tmp/exec-plain", 0755);
    FAILS(execve("/tmp/exec-plain", list, none), ENOEXEC, "execve: a broken ELF header");
    write_file("/tmp/exec-plain", "nothing known", 13, 0755);
    FAILS(execve("/tmp/exec-plain", list, none), ENOEXEC, "execve: an unknown format");
    write_file("/tmp/exec-plain", "", 0, 0755);
    FAILS(execve("/tmp/exec-plain", list, none), ENOEXEC, "execve: an empty file");
    FAILS(execve(test_wild(8), list, none), EFAULT, "execve: a bad path pointer");
    FAILS(execve(self, test_wild(8), none), EFAULT, "execve: a bad argument pointer");
    char *bad[] = {"name", test_wild(8), 0};
    FAILS(execve(self, bad, none), EFAULT, "execve: a bad argument string");
    char *huge = test_map(256 * 1024);
    memset(huge, 'x', 256 * 1024 - 1);
    char *large[] = {"name", huge, 0};
    FAILS(execve(self, large, none), E2BIG, "execve: one argument of 256 KiB");
    static char *many[40000];
    for (int index = 0; index < 39999; index++)
        many[index] = huge + 256 * 1024 - 1001;
    FAILS(execve(self, many, none), E2BIG, "execve: 40 MB of arguments");
    munmap(huge, 256 * 1024);

    char script[300];
    length = snprintf(script, 300, "#!%s exit\nrest\n", self);
    write_file("/tmp/exec-script", script, length, 0755);
    EXITS(33, "execve of a script with #! runs its interpreter", {
        char *words[] = {"script", 0};
        execve("/tmp/exec-script", words, none);
        _exit(99);
    });
    unlink("/tmp/exec-script");
    unlink("/tmp/exec-plain");
    EXITS(33, "fork and execve twenty deep", {
        for (int level = 0; level < 20; level++) {
            pid_t next = fork();
            if (next)
                _exit(WEXITSTATUS(test_wait(next)));
        }
        execve(self, list, none);
        _exit(99);
    });
    return test_end();
}
