// The swap device of the machine, /dev/zram0, for programs that swap: its size,
// the header that mkswap(8) writes, swapon and swapoff.

#ifndef SWAP_H
#define SWAP_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/swap.h>
#include <unistd.h>

#define SWAP_DEVICE "/dev/zram0"
#define SWAP_SETTINGS "/sys/block/zram0/"
#define SWAP_PAGE 4096

// The first page of a swap area.
struct swap_header {
    char boot[1024];
    uint32_t version, last_page, bad_pages;
    char rest[SWAP_PAGE - 1024 - 12 - 10];
    char signature[10];
};

// Writes a number to a file by one call; -1 and errno where that fails.
__attribute__((unused)) static int swap_setting(const char *name, unsigned long long number) {
    char path[100], text[32];
    snprintf(path, sizeof path, SWAP_SETTINGS "%s", name);
    int length = snprintf(text, sizeof text, "%llu", number);
    int file = open(path, O_WRONLY);
    if (file < 0)
        return -1;
    ssize_t written = write(file, text, length);
    close(file);
    return written == length ? 0 : -1;
}

// Writes the header of an area of this number of pages, including itself.
__attribute__((unused)) static int swap_make(uint32_t pages) {
    struct swap_header header = {.version = 1, .last_page = pages - 1};
    memcpy(header.signature, "SWAPSPACE2", 10);
    int file = open(SWAP_DEVICE, O_RDWR);
    if (file < 0)
        return -1;
    ssize_t written = pwrite(file, &header, sizeof header, 0);
    close(file);
    return written == sizeof header ? 0 : -1;
}

// Makes the device a swap area of this size and turns it on.
__attribute__((unused)) static int swap_begin(unsigned long long bytes) {
    return swap_setting("disksize", bytes) || swap_make(bytes / SWAP_PAGE) || swapon(SWAP_DEVICE, 0) ? -1 : 0;
}

// Turns the area off and gives the device back.
__attribute__((unused)) static int swap_end(void) {
    return swapoff(SWAP_DEVICE) || swap_setting("reset", 1) ? -1 : 0;
}

#endif
