// mbind and set_mempolicy on a machine with one memory node.

#include "test.h"

enum { DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL };
enum { MOVE = 2 };

static long bind_to(void *at, size_t length, int mode, unsigned long *nodes, unsigned long count) {
    return syscall(SYS_mbind, at, length, mode, nodes, count, MOVE);
}

int main(void) {
    test_start();
    unsigned long first = 1, second = 2, none = 0;
    char *memory = test_map(8 * PAGE);
    memset(memory, 'n', 8 * PAGE);
    WORKS(bind_to(memory, 8 * PAGE, LOCAL, 0, 0), "MPOL_LOCAL");
    WORKS(bind_to(memory, 8 * PAGE, LOCAL, 0, 0x7ff), "MPOL_LOCAL: no pointer, whatever the count");
    WORKS(bind_to(memory, 8 * PAGE, BIND, &first, 64), "MPOL_BIND to the one node");
    WORKS(bind_to(memory, 8 * PAGE, INTERLEAVE, &first, 64), "MPOL_INTERLEAVE");
    WORKS(bind_to(memory, 8 * PAGE, PREFERRED, 0, 0), "MPOL_PREFERRED without a node");
    WORKS(bind_to(memory, 8 * PAGE, DEFAULT, 0, 0), "MPOL_DEFAULT");
    WORKS(bind_to(memory, 0, DEFAULT, 0, 0), "nothing");
    CHECK(memory[0] == 'n' && memory[8 * PAGE - 1] == 'n', "the contents stay");
    FAILS(bind_to(memory, PAGE, BIND, &second, 64), EINVAL, "a node that there is not");
    FAILS(bind_to(memory, PAGE, BIND, &none, 64), EINVAL, "MPOL_BIND to no node");
    FAILS(bind_to(memory, PAGE, LOCAL, &first, 64), EINVAL, "MPOL_LOCAL with a node");
    FAILS(bind_to(memory, PAGE, 99, 0, 0), EINVAL, "no such policy");
    FAILS(bind_to(memory + 1, PAGE, LOCAL, 0, 0), EINVAL, "an address that is not a page's");
    FAILS(syscall(SYS_mbind, memory, PAGE, LOCAL, 0, 0, 1 << 10), EINVAL, "no such flag");
    FAILS(bind_to(memory, PAGE, BIND, test_wild(8), 64), EFAULT, "a bad pointer");
    STEP_EQUAL(munmap(memory + 4 * PAGE, PAGE), 0);
    FAILS(bind_to(memory, 8 * PAGE, LOCAL, 0, 0), EFAULT, "a hole");
    WORKS(syscall(SYS_set_mempolicy, LOCAL, 0, 0), "set_mempolicy");
    FAILS(syscall(SYS_set_mempolicy, BIND, &second, 64), EINVAL, "set_mempolicy: no such node");
    WORKS(syscall(SYS_set_mempolicy, DEFAULT, 0, 0), "set_mempolicy: back to the default");
    return test_end();
}
