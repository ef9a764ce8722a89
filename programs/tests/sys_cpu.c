// /sys/devices/system/cpu, as C libraries and tools count CPUs.

#include "test.h"

#include <dirent.h>
#include <sched.h>
#include <stdlib.h>

static char text[100];

// The directories cpu0, cpu1 and so on.
static int directories(const char *path) {
    DIR *folder = opendir(path);
    if (!folder)
        return -1;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        count += strncmp(entry->d_name, "cpu", 3) == 0 && entry->d_name[3] >= '0' && entry->d_name[3] <= '9';
    closedir(folder);
    return count;
}

// The argument is the machine's number of CPUs, 1 without it.
int main(int count, char **words) {
    test_start();
    // The others begin to run programs after the first has begun with this one.
    while (count > 1 && sysconf(_SC_NPROCESSORS_ONLN) < atoi(words[1]))
        sched_yield();
    // From the scheduler, not from these files.
    int cpus = sysconf(_SC_NPROCESSORS_ONLN);
    char numbers[20];
    snprintf(numbers, sizeof numbers, cpus == 1 ? "0\n" : "0-%d\n", cpus - 1);
    static const char *files[] = {"possible", "present", "online"};
    for (int index = 0; index < 3; index++) {
        char path[100];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/%s", files[index]);
        CHECK(test_read_file(path, text, sizeof text) > 0 && strcmp(text, numbers) == 0, files[index]);
        FAILS(open(path, O_WRONLY), EACCES, "which cannot be written");
    }
    struct stat status;
    for (int cpu = 0; cpu <= cpus; cpu++) {
        char path[100];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d", cpu);
        if (cpu < cpus)
            CHECK(stat(path, &status) == 0 && S_ISDIR(status.st_mode), "a directory for each CPU");
        else
            FAILS(stat(path, &status), ENOENT, "and none for another");
    }
    FAILS(stat("/sys/devices/system/cpu/cpu00", &status), ENOENT, "with the one name");
    EQUAL(sysconf(_SC_NPROCESSORS_CONF), cpus, "sysconf: CPUs that there are");
    EQUAL(directories("/sys/devices/system/cpu"), cpus, "all that is listed");
    return test_end();
}
