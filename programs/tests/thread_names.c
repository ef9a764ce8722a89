// Short names: each thread has its own, and a process has that of its first thread.

#include "test.h"

#include <pthread.h>
#include <sys/prctl.h>

// The first line of a file, without its end.
static const char *line(const char *format, ...) {
    static char text[4000], path[100];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path, sizeof path, format, arguments);
    va_end(arguments);
    if (test_read_file(path, text, sizeof text) <= 0)
        return "";
    text[strcspn(text, "\n")] = 0;
    return text;
}

static const char *own_name(void) {
    static char name[17];
    STEP_EQUAL(prctl(PR_GET_NAME, name), 0);
    return name;
}

static int is(const char *text, const char *expected) {
    if (strcmp(text, expected) == 0)
        return 1;
    test_print("# \"%s\" instead of \"%s\"", text, expected);
    return 0;
}

static pthread_barrier_t barrier;
static int thread_id;

static void *run(void *unused) {
    (void)unused;
    thread_id = syscall(SYS_gettid);
    CHECK(is(own_name(), "first"), "a thread begins with its creator's name");
    EQUAL(prctl(PR_SET_NAME, "second, and too long"), 0, "PR_SET_NAME of a thread");
    CHECK(is(own_name(), "second, and too"), "PR_GET_NAME");
    CHECK(is(line("/proc/self/comm"), "first"), "the process keeps its name");
    CHECK(is(line("/proc/thread-self/comm"), "second, and too"), "/proc/thread-self/comm");
    CHECK(is(line("/proc/self/task/%d/comm", getpid()), "first"), "comm of the first thread");
    CHECK(is(line("/proc/self/task/%d/status", thread_id), "Name:\tsecond, and too"), "status");
    CHECK(strstr(line("/proc/self/task/%d/stat", thread_id), " (second, and too) "), "stat");
    EXITS(0, "a child of the thread has the thread's name", {
        STEP(is(own_name(), "second, and too"));
        STEP(is(line("/proc/self/comm"), "second, and too"));
    });
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    CHECK(is(own_name(), "by another"), "the new name is the thread's");
    return 0;
}

static ssize_t write_name(int process, int thread, const char *name) {
    char path[100];
    snprintf(path, sizeof path, "/proc/%d/task/%d/comm", process, thread);
    int file = open(path, O_WRONLY);
    if (file < 0)
        return -1;
    ssize_t count = write(file, name, strlen(name));
    int error = errno;
    close(file);
    errno = error;
    return count;
}

int main(int count, char **arguments) {
    if (count > 1)
        return is(own_name(), arguments[1]) ? 0 : 1;
    test_start();
    EQUAL(prctl(PR_SET_NAME, "first"), 0, "PR_SET_NAME of the first thread");
    pthread_t thread;
    NEED(pthread_barrier_init(&barrier, 0, 2) == 0 && pthread_create(&thread, 0, run, 0) == 0);
    pthread_barrier_wait(&barrier);
    CHECK(is(own_name(), "first"), "the first thread keeps its name");
    EQUAL(write_name(getpid(), thread_id, "by another"), 10, "a thread names another");
    CHECK(is(line("/proc/self/task/%d/comm", thread_id), "by another"), "which is shown");
    CHECK(is(line("/proc/self/comm"), "first"), "in its file only");
    pthread_barrier_wait(&barrier);
    NEED(pthread_join(thread, 0) == 0);
    pid_t child = CHILD(for (;;) pause());
    FAILS(write_name(child, child, "stranger"), EINVAL, "a thread of another process is not named");
    kill(child, SIGKILL);
    test_wait(child);
    EXITS(0, "a new program has its file's name", {
        execl("/proc/self/exe", arguments[0], "exe", (char *)0);
        _exit(9);
    });
    return test_end();
}
