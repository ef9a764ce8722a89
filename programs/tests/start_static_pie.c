// link: static-pie
//
// A static position-independent program: loaded anywhere, relocated by
// itself, protected after that.

#include "test.h"

#include <elf.h>
#include <sys/auxv.h>

static int target = 5;
static int *const relocated = &target;
static int (*const function)(const char *, ...) = printf;
static _Thread_local int local = 9;

int main(void) {
    test_start();
    EQUAL(*relocated, 5, "pointers in data are relocated");
    CHECK(function == printf, "pointers to functions are relocated");
    EQUAL(local, 9, "thread-local data is there");
    const Elf64_Phdr *headers = (const Elf64_Phdr *)getauxval(AT_PHDR);
    NEED(headers);
    uintptr_t base = 0;
    int dynamic = 0;
    for (unsigned long index = 0; index < getauxval(AT_PHNUM); index++) {
        if (headers[index].p_type == PT_PHDR)
            base = (uintptr_t)headers - headers[index].p_vaddr;
        dynamic += headers[index].p_type == PT_DYNAMIC;
    }
    CHECK(dynamic == 1, "the program is position-independent");
    if (base == 0)
        base = (uintptr_t)headers - sizeof(Elf64_Ehdr);
    CHECK(base % PAGE == 0 && base > 0x100000, "the program is not loaded at 0");
    CHECK(memcmp((void *)base, ELFMAG, SELFMAG) == 0, "the ELF header is mapped");
    uintptr_t entry = getauxval(AT_ENTRY);
    CHECK(entry > base && entry < base + 0x1000000, "AT_ENTRY is relocated");
    EQUAL(LOADS(&target), 0, "data can be read");
    EQUAL(STORES((void *)(uintptr_t)main), SIGSEGV, "code cannot be written");
    EQUAL(STORES((void *)(uintptr_t)&relocated), SIGSEGV, "relocated constants are read-only");
    EXITS(3, "fork and exit work", _exit(3));
    return test_end();
}
