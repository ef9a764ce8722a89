// kernel-only: Linux has /dev/fb0 only with a display
// The frame buffer, /dev/fb0: frames of a device in programs. It is drawn into, shared by children,
// protected, moved, copied by private mappings, and refuses what Linux refuses for such memory.

#include "test.h"

#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>

static char *map(int protection, int flags, int file, size_t length, off_t offset) {
    return mmap(0, length, protection, flags, file, offset);
}

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    int file = open("/dev/fb0", O_RDWR);
    NEED(file >= 0);
    struct stat status;
    CHECK(fstat(file, &status) == 0 && S_ISCHR(status.st_mode) && status.st_rdev == makedev(29, 0),
          "a character device with its number");
    // Not every cross compiler brings <linux/fb.h>.
    enum { FBIOGET_VSCREENINFO = 0x4600, FBIOGET_FSCREENINFO = 0x4602 };
    enum { SMEM_LEN = 6, LINE_LENGTH = 12, XRES = 0, YRES = 1, BITS_PER_PIXEL = 6 };
    uint32_t fixed[20], sizes[40];
    WORKS(ioctl(file, FBIOGET_FSCREENINFO, fixed), "FBIOGET_FSCREENINFO");
    WORKS(ioctl(file, FBIOGET_VSCREENINFO, sizes), "FBIOGET_VSCREENINFO");
    uint32_t width = sizes[XRES], height = sizes[YRES];
    size_t length = fixed[SMEM_LEN];
    CHECK(fixed[LINE_LENGTH] == width * sizes[BITS_PER_PIXEL] / 8 &&
              length >= fixed[LINE_LENGTH] * height,
          "lines and pixels fit");

    uint32_t *screen = (uint32_t *)map(both, MAP_SHARED, file, length, 0);
    NEED((char *)screen != MAP_FAILED);
    for (uint32_t y = 0; y < height; y++)
        for (uint32_t x = 0; x < width; x++)
            screen[y * width + x] = x << 16 | y;
    uint32_t *again = (uint32_t *)map(PROT_READ, MAP_SHARED, file, length, 0);
    NEED((char *)again != MAP_FAILED);
    CHECK(again[width * 5 + 7] == (7 << 16 | 5) && again[width * 500 + 700] == (700 << 16 | 500),
          "a picture, seen through another mapping");
    static char maps[1 << 16];
    CHECK(test_read_file("/proc/self/maps", maps, sizeof maps) > 0 && strstr(maps, " /dev/fb0\n"),
          "maps: the path of the device");
    WORKS(mprotect(again, PAGE, both), "opened for both: it may become writable");
    EXITS(0, "a child draws", {
        screen[3] = 0xc0ffee;
        again[4] = 0xbeef;
    });
    CHECK(screen[3] == 0xc0ffee && screen[4] == 0xbeef, "and its parent sees it");

    // Protections.
    WORKS(mprotect(screen, length, PROT_READ), "read-only");
    EQUAL(STORES(screen), SIGSEGV, "refuses a store");
    WORKS(mprotect((char *)screen + PAGE, PAGE, PROT_NONE), "a page of it without any access");
    EQUAL(LOADS((char *)screen + PAGE), SIGSEGV, "refuses a load");
    WORKS(mprotect(screen, length, both), "and back");
    CHECK(screen[PAGE / 4] == (PAGE / 4 % width << 16 | PAGE / 4 / width), "with its content");

    // A private mapping copies what it writes, and no more.
    uint32_t *own = (uint32_t *)map(both, MAP_PRIVATE, file, length, 0);
    NEED((char *)own != MAP_FAILED);
    EQUAL(own[3], 0xc0ffee, "a private mapping shows the picture");
    own[3] = 1;
    screen[5] = 55;
    screen[PAGE / 4 * 2] = 66;
    CHECK(own[3] == 1 && screen[3] == 0xc0ffee, "its writes are its own");
    CHECK(own[5] != 55 && own[PAGE / 4 * 2] == 66, "a copied page stays as it was, others do not");
    EXITS(0, "a child writes to its copy", {
        if (own[3] != 1)
            _exit(2);
        own[3] = 2;
        own[PAGE / 4 * 2] = 3;
    });
    CHECK(own[3] == 1 && own[PAGE / 4 * 2] == 66, "and its parent does not see it");

    // What Linux refuses for VM_PFNMAP.
    FAILS(madvise(screen, PAGE, MADV_DONTNEED), EINVAL, "MADV_DONTNEED");
    FAILS(madvise(own, PAGE, MADV_DONTNEED), EINVAL, "MADV_DONTNEED of copies");
    FAILS(madvise(screen, PAGE, MADV_COLD), EINVAL, "MADV_COLD");
    FAILS(madvise(screen, PAGE, MADV_PAGEOUT), EINVAL, "MADV_PAGEOUT");
    FAILS(madvise(screen, PAGE, MADV_POPULATE_READ), EINVAL, "MADV_POPULATE_READ");
    FAILS(madvise(screen, PAGE, MADV_REMOVE), ENODEV, "MADV_REMOVE");
    FAILS(madvise(own, PAGE, MADV_REMOVE), EACCES, "MADV_REMOVE of a private mapping");
    FAILS(read(file, &(char){0}, 1), EINVAL, "read");
    FAILS(write(file, "", 1), EINVAL, "write");
    FAILS(fallocate(file, 0, 0, PAGE), ENODEV, "fallocate");
    FAILS(ftruncate(file, PAGE), EINVAL, "ftruncate");
    WORKS(mlock(screen, PAGE), "mlock has no effect");
    unsigned char resident = 1;
    CHECK(mincore(screen, PAGE, &resident) == 0 && !(resident & 1), "mincore: not resident");
    char byte;
    struct iovec here = {&byte, 1}, there = {screen, 1};
    FAILS(process_vm_readv(getpid(), &here, 1, &there, 1, 0), EFAULT, "process_vm_readv");
    FAILS((long)mremap(screen, length, 2 * length, MREMAP_MAYMOVE), EFAULT,
          "mremap does not let it grow");

    // It moves, and is unmapped in part.
    char *moved = mremap(screen, length, length, MREMAP_MAYMOVE | MREMAP_FIXED,
                         (char *)0x50000000 + 3 * PAGE);
    NEED(moved != MAP_FAILED);
    EQUAL(((uint32_t *)moved)[3], 0xc0ffee, "it moves with its content");
    WORKS(munmap(moved + PAGE, PAGE), "a page is unmapped");
    EQUAL(LOADS(moved + PAGE), SIGSEGV, "and gone");
    EQUAL(((uint32_t *)moved)[PAGE / 4 * 2], 66, "the next is not");
    char *beyond = map(PROT_READ, MAP_SHARED, file, PAGE, length);
    CHECK(beyond != MAP_FAILED && LOADS(beyond) == SIGBUS, "no frames behind the end");
    return test_end();
}
