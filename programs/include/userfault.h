// userfaultfd: numbers and structures, which not every cross compiler brings, and a handler.

#ifndef BINDERY_USERFAULT_H
#define BINDERY_USERFAULT_H

#include "test.h"

#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>

#ifndef SYS_userfaultfd
#ifdef __x86_64__
#define SYS_userfaultfd 323
#else
#define SYS_userfaultfd 282
#endif
#endif

#define USER_MODE_ONLY 1

struct uf_api {
    uint64_t api, features, requests;
};
struct uf_range {
    uint64_t start, length;
};
struct uf_register {
    struct uf_range range;
    uint64_t mode, requests;
};
struct uf_copy {
    uint64_t to, from, length, mode;
    int64_t copied;
};
struct uf_zero {
    struct uf_range range;
    uint64_t mode;
    int64_t done;
};
struct uf_protect {
    struct uf_range range;
    uint64_t mode;
};
struct uf_message {
    uint8_t event, reserved[7];
    union {
        struct {
            uint64_t flags, address;
            uint32_t thread;
        } fault;
        uint32_t child;
        struct {
            uint64_t from, to, length;
        } remap;
        struct {
            uint64_t start, end;
        } range;
    };
} __attribute__((packed));

#define UF_API _IOWR(0xAA, 0x3F, struct uf_api)
#define UF_REGISTER _IOWR(0xAA, 0, struct uf_register)
#define UF_UNREGISTER _IOR(0xAA, 1, struct uf_range)
#define UF_WAKE _IOR(0xAA, 2, struct uf_range)
#define UF_COPY _IOWR(0xAA, 3, struct uf_copy)
#define UF_ZEROPAGE _IOWR(0xAA, 4, struct uf_zero)
#define UF_MOVE _IOWR(0xAA, 5, struct uf_copy)
#define UF_WRITEPROTECT _IOWR(0xAA, 6, struct uf_protect)
#define UF_NEW _IO(0xAA, 0)

enum { MISSING = 1, PROTECTED = 2, MINOR = 4 };
enum { FAULT = 0x12, FORK, REMAP, REMOVE, UNMAP };
enum { FLAG_WRITE = 1, FLAG_PROTECTED = 2 };
enum {
    EVENT_FORK = 2,
    EVENT_REMAP = 4,
    EVENT_REMOVE = 8,
    EVENT_UNMAP = 64,
    SIGBUS_FEATURE = 128,
    THREAD_ID = 256,
    EXACT_ADDRESS = 2048,
    UNPOPULATED = 8192,
    ASYNC = 32768,
    MOVES = 65536,
};

// A userfaultfd with these features, or -1.
UNUSED static int uf_open(int flags, uint64_t features) {
    int fd = syscall(SYS_userfaultfd, flags);
    struct uf_api api = {.api = 0xAA, .features = features};
    if (fd >= 0 && ioctl(fd, UF_API, &api) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

UNUSED static int uf_register(int fd, void *at, size_t length, uint64_t mode) {
    struct uf_register request = {.range = {(uintptr_t)at, length}, .mode = mode};
    return ioctl(fd, UF_REGISTER, &request);
}

UNUSED static int uf_unregister(int fd, void *at, size_t length) {
    struct uf_range range = {(uintptr_t)at, length};
    return ioctl(fd, UF_UNREGISTER, &range);
}

UNUSED static int uf_wake(int fd, void *at, size_t length) {
    struct uf_range range = {(uintptr_t)at, length};
    return ioctl(fd, UF_WAKE, &range);
}

// The result in the structure: an errno below 0, or a length.
UNUSED static int64_t uf_copy(int fd, void *to, const void *from, size_t length, uint64_t mode) {
    struct uf_copy request = {(uintptr_t)to, (uintptr_t)from, length, mode, 12345};
    int result = ioctl(fd, UF_COPY, &request);
    return result == 0 || request.copied != 12345 ? request.copied : -errno;
}

UNUSED static int64_t uf_move(int fd, void *to, void *from, size_t length, uint64_t mode) {
    struct uf_copy request = {(uintptr_t)to, (uintptr_t)from, length, mode, 12345};
    int result = ioctl(fd, UF_MOVE, &request);
    return result == 0 || request.copied != 12345 ? request.copied : -errno;
}

UNUSED static int64_t uf_zero(int fd, void *to, size_t length, uint64_t mode) {
    struct uf_zero request = {{(uintptr_t)to, length}, mode, 12345};
    int result = ioctl(fd, UF_ZEROPAGE, &request);
    return result == 0 || request.done != 12345 ? request.done : -errno;
}

UNUSED static int uf_protect(int fd, void *at, size_t length, uint64_t mode) {
    struct uf_protect request = {{(uintptr_t)at, length}, mode};
    return ioctl(fd, UF_WRITEPROTECT, &request);
}

// The next message of a userfaultfd that waits in reads.
UNUSED static struct uf_message uf_next(int fd) {
    struct uf_message message = {0};
    STEP_EQUAL(read(fd, &message, sizeof message), sizeof message);
    return message;
}

UNUSED static char *uf_map(size_t length) {
    return mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

#endif
