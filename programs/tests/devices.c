// /dev/null, /dev/zero, /dev/shm and what else programs expect under /dev.

#include "test.h"

#include <sys/sysmacros.h>

int main(void) {
    test_start();
    char data[5000];
    memset(data, 'x', sizeof data);
    int null = open("/dev/null", O_RDWR), zero = open("/dev/zero", O_RDWR);
    NEED(null >= 0 && zero >= 0);
    EQUAL(write(null, data, sizeof data), sizeof data, "/dev/null takes everything");
    EQUAL(read(null, data, sizeof data), 0, "/dev/null gives nothing");
    EQUAL(lseek(null, 0, SEEK_END), 0, "/dev/null can seek");
    EQUAL(write(zero, data, sizeof data), sizeof data, "/dev/zero takes everything");
    EQUAL(read(zero, data, sizeof data), sizeof data, "/dev/zero gives what is asked for");
    int sum = 0;
    for (size_t index = 0; index < sizeof data; index++)
        sum |= data[index];
    EQUAL(sum, 0, "/dev/zero gives zeros");
    FAILS(read(zero, test_wild(8), 10), EFAULT, "/dev/zero: read to a bad pointer");

    char *private = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0);
    NEED(private != MAP_FAILED);
    private[PAGE] = 'p';
    CHECK(private[0] == 0 && private[PAGE] == 'p', "/dev/zero mapped private is zero memory");
    char *shared = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    NEED(shared != MAP_FAILED);
    EXITS(0, "/dev/zero mapped shared: a child writes", {
        shared[2 * PAGE] = 's';
        private[PAGE] = 'q';
    });
    CHECK(shared[2 * PAGE] == 's', "and its parent sees it");
    EQUAL(private[PAGE], 'p', "but not what it writes to the private one");
    char *another = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    NEED(another != MAP_FAILED);
    EQUAL(another[2 * PAGE], 0, "each shared mapping of /dev/zero is new");
    FAILS((long)mmap(0, PAGE, PROT_READ, MAP_SHARED, null, 0), ENODEV, "/dev/null cannot be mapped");
    FAILS(ftruncate(zero, 0), EINVAL, "/dev/zero cannot be truncated");

    int full = open("/dev/full", O_RDWR);
    if (full >= 0)
        FAILS(write(full, "x", 1), ENOSPC, "/dev/full is full");
    int devices[] = {null, zero, full}, before = test_failures;
    static const unsigned minors[] = {3, 5, 7};
    for (int index = 0; index < 3 && devices[index] >= 0; index++) {
        struct stat status;
        STEP_EQUAL(fstat(devices[index], &status), 0);
        STEP(S_ISCHR(status.st_mode) && status.st_rdev == makedev(1, minors[index]));
        STEP_EQUAL(lseek(devices[index], 100, SEEK_SET), 0);
        STEP_EQUAL(lseek(devices[index], -7, SEEK_CUR), 0);
        STEP_EQUAL(lseek(devices[index], 100, SEEK_END), 0);
        STEP_EQUAL(lseek(devices[index], 0, SEEK_HOLE), 0);
        STEP_FAILS(lseek(devices[index], 0, 99), EINVAL);
        STEP_EQUAL(read(devices[index], data, 10), devices[index] == null ? 0 : 10);
        STEP_EQUAL(lseek(devices[index], 0, SEEK_CUR), 0);
    }
    ALL_STEPS(before, "null, zero and full have their numbers, and no position but 0");
    int random = open("/dev/urandom", O_RDONLY);
    if (random >= 0) {
        unsigned char bytes[64] = {0}, others[64] = {0};
        EQUAL(read(random, bytes, 64), 64, "/dev/urandom gives bytes");
        STEP_EQUAL(read(random, others, 64), 64);
        CHECK(memcmp(bytes, others, 64) != 0, "and always others");
    }
    int shm = open("/dev/shm/devices", O_RDWR | O_CREAT | O_TRUNC, 0600);
    WORKS(shm, "/dev/shm: a file");
    STEP_EQUAL(ftruncate(shm, 8 * PAGE), 0);
    char *mapping = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, shm, 0);
    NEED(mapping != MAP_FAILED);
    mapping[5 * PAGE] = 'm';
    char one;
    STEP_EQUAL(pread(shm, &one, 1, 5 * PAGE), 1);
    EQUAL(one, 'm', "/dev/shm: mapping and file agree");
    int named = shm_open("/devices", O_RDONLY, 0);
    WORKS(named, "shm_open finds it");
    WORKS(shm_unlink("/devices"), "shm_unlink");
    FAILS(open("/dev/shm/devices", O_RDONLY), ENOENT, "and it is gone");

    int again = dup(1);
    EQUAL(write(again, "ok  a copy of standard output writes\n", 37), 37, "descriptor 1 can be copied");
    FAILS(open("/dev/nothing", O_RDONLY), ENOENT, "no such device");
    return test_end();
}
