// /sys/devices/system/cpu, as C libraries and tools count CPUs.

#include "test.h"

#include <dirent.h>

static char text[100];

static int entries(const char *path) {
    DIR *folder = opendir(path);
    if (!folder)
        return -1;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

int main(void) {
    test_start();
    static const char *files[] = {"possible", "present", "online"};
    for (int index = 0; index < 3; index++) {
        char path[100];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/%s", files[index]);
        CHECK(test_read_file(path, text, sizeof text) > 0 && strcmp(text, "0\n") == 0, files[index]);
        FAILS(open(path, O_WRONLY), EACCES, "which cannot be written");
    }
    struct stat status;
    CHECK(stat("/sys/devices/system/cpu/cpu0", &status) == 0 && S_ISDIR(status.st_mode), "a folder for the CPU");
    FAILS(stat("/sys/devices/system/cpu/cpu1", &status), ENOENT, "and none for another");
    EQUAL(sysconf(_SC_NPROCESSORS_ONLN), 1, "sysconf: CPUs that are online");
    EQUAL(sysconf(_SC_NPROCESSORS_CONF), 1, "sysconf: CPUs that there are");
    CHECK(entries("/sys/devices/system/cpu") >= 4, "all that is listed");
    return test_end();
}
