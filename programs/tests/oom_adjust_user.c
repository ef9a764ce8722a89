// kernel-only: a host in a container may have no CAP_SYS_RESOURCE
//
// oom_score_adj of a process without privileges: it may raise the value, and lower it again, but
// not below the value that root has set.

#include "test.h"

static int file;

static ssize_t set(const char *value) { return pwrite(file, value, strlen(value), 0); }

int main(void) {
    test_start();
    // Opened by root: the writer's privileges count.
    file = open("/proc/self/oom_score_adj", O_RDWR);
    NEED(file >= 0);
    EQUAL(set("-500"), 4, "root goes below 0");
    EQUAL(set("200"), 3, "and above");
    STEP_EQUAL(setuid(1000), 0);
    EQUAL(set("700"), 3, "a user goes above what root has set");
    EQUAL(set("200"), 3, "and back to that");
    FAILS(set("199"), EACCES, "but not below");
    FAILS(set("1001"), EINVAL, "nothing above 1000");
    char text[16] = "";
    STEP(pread(file, text, sizeof text - 1, 0) > 0);
    EQUAL(atol(text), 200, "what is refused changes nothing");
    return test_end();
}
