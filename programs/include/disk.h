// Shared parts of the programs that stop the machine, or disturb writes of its disk
// (`provoke=power-loss`).

#ifndef DISK_H
#define DISK_H

#include <sys/syscall.h>

#include "settings.h"

UNUSED static long disk_reboot(long numbers) {
    return syscall(SYS_reboot, 0xfee1dead, 672274793, 0x4321fedc, numbers);
}

// The power fails. A machine that stops so tells of no failure, so it goes on after one.
UNUSED static void disk_power_fails(void) {
    if (test_failures > 0)
        return;
    disk_reboot(0);
    CHECK(0, "the machine has stopped");
}

// The power fails before a write of the disk, which is counted from 1 on.
UNUSED static void disk_power_fails_before(long write) { NEED(disk_reboot(write) == 0); }

// The device takes a write and loses it, and the power fails when it is to keep it.
UNUSED static void disk_loses(long write) { NEED(disk_reboot(write << 16) == 0); }

// A write fails.
UNUSED static void disk_fails(long write) { NEED(disk_reboot(write << 32) == 0); }

// No thread stores pages early.
UNUSED static void disk_has_no_writer(void) {
    NEED(write_setting("/proc/sys/vm/dirty_writeback_centisecs", "0") == 1);
}

// A file, which is made if there is none.
UNUSED static int disk_open(const char *path) {
    int file = open(path, O_RDWR | O_CREAT, 0600);
    NEED(file >= 0);
    return file;
}

// A writable mapping of the first part of a file.
UNUSED static char *disk_map(int file, size_t size) {
    char *map = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(map != MAP_FAILED);
    return map;
}

#endif
