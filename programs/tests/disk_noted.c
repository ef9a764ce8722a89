// disk: 16M
// starts: 1
// kernel-only: it needs the kernel's disk
//
// A page is stored in the middle of the write that made it dirty, which goes on with the next page.
// Later a program writes it through a mapping: that is a change of the file.

#include "userfault.h"

#define PAST 1000

static int file;
static char *served;

// Its second page comes when the first one is stored.
static void *write_served(void *unused UNUSED) { return (void *)pwrite(file, served, 2 * PAGE, 0); }

int main(void) {
    test_start();
    static char page[PAGE];
    struct timespec past[2] = {{PAST, 0}, {PAST, 0}};
    struct stat status;
    file = open("/disk/noted", O_RDWR | O_CREAT, 0600);
    int fault = uf_open(O_CLOEXEC, 0);
    served = uf_map(2 * PAGE);
    NEED(file >= 0 && fault >= 0 && served != MAP_FAILED);
    memset(served, 's', PAGE);
    NEED(uf_register(fault, served + PAGE, PAGE, MISSING) == 0);
    pthread_t writer;
    NEED(pthread_create(&writer, 0, write_served, 0) == 0);
    NEED(uf_next(fault).event == FAULT);
    EQUAL(fsync(file), 0, "a page is stored in the middle of a write");
    NEED(uf_copy(fault, served + PAGE, page, PAGE, 0) == PAGE);
    void *written;
    NEED(pthread_join(writer, &written) == 0);
    EQUAL((long)written, 2 * PAGE, "which goes on");
    NEED(fsync(file) == 0 && futimens(file, past) == 0);
    char *map = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(map != MAP_FAILED && fstat(file, &status) == 0 && status.st_mtim.tv_sec == PAST);
    map[0] = 'm';
    EQUAL(msync(map, PAGE, MS_SYNC), 0, "the page is written through a mapping");
    NEED(fstat(file, &status) == 0);
    CHECK(status.st_mtim.tv_sec > PAST, "which is a change of the file");
    return test_end();
}
