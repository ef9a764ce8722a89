// Shared parts of the programs that change settings of the kernel: writes to
// files under /proc and /sys, and fields of /proc/self/smaps.

#ifndef SETTINGS_H
#define SETTINGS_H

#include "test.h"

// The settings of large folios.
#define THP_ROOT "/sys/kernel/mm/transparent_hugepage/"

// Writes a text to a file by one call, as `echo -n` would; -1 and errno where
// the file cannot be opened or written.
UNUSED static ssize_t write_setting(const char *path, const char *value) {
    int file = open(path, O_WRONLY);
    if (file < 0)
        return -1;
    ssize_t count = write(file, value, strlen(value));
    int error = errno;
    close(file);
    errno = error;
    return count;
}

// The same for a file under THP_ROOT.
UNUSED static ssize_t write_thp(const char *name, const char *value) {
    char path[200];
    snprintf(path, sizeof path, THP_ROOT "%s", name);
    return write_setting(path, value);
}

// A field of the smaps entry that covers the address, in KiB, or -1.
UNUSED static long smaps(const void *address, const char *field) {
    static char text[200000];
    NEED(test_read_file("/proc/self/smaps", text, sizeof text) > 0);
    int inside = 0;
    for (char *at = text; *at; at = strchr(at, '\n') + 1) {
        unsigned long start, end;
        if (sscanf(at, "%lx-%lx ", &start, &end) == 2)
            inside = start <= (unsigned long)address && (unsigned long)address < end;
        else if (inside && strncmp(at, field, strlen(field)) == 0 && at[strlen(field)] == ':')
            return atol(at + strlen(field) + 1);
    }
    return -1;
}

#endif
