// Runs a program with a swap device of the size that the first argument gives in MiB, and tells how much memory
// and how much swap was in use at most, and how many pages went out and came back. Its exit status is the program's.

#include "swap.h"

#include <stdlib.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <time.h>

enum { FAILED = 125, NOT_STARTED = 127 };

static unsigned long long statistic(const char *name) {
    char line[200], found[100];
    unsigned long long value;
    FILE *file = fopen("/proc/vmstat", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%99s %llu", found, &value) == 2 && strcmp(found, name) == 0) {
            fclose(file);
            return value;
        }
    fprintf(stderr, "/proc/vmstat has no %s\n", name);
    exit(FAILED);
}

static struct sysinfo machine(void) {
    struct sysinfo now;
    if (sysinfo(&now) != 0) {
        perror("sysinfo");
        exit(FAILED);
    }
    now.freeram *= now.mem_unit;
    now.totalswap *= now.mem_unit;
    now.freeswap *= now.mem_unit;
    return now;
}

int main(int argc, char **argv) {
    if (argc < 3 || swap_begin(strtoull(argv[1], 0, 10) << 20)) {
        perror("swap");
        return FAILED;
    }
    unsigned long long out = statistic("pswpout"), in = statistic("pswpin");
    unsigned long free_before = machine().freeram, least_free = free_before, most_swapped = 0;
    pid_t child = fork(), ended = 0;
    if (child == 0) {
        execv(argv[2], argv + 2);
        perror(argv[2]);
        _exit(NOT_STARTED);
    }
    int status;
    while (child > 0 && (ended = waitpid(child, &status, WNOHANG)) == 0) {
        struct sysinfo now = machine();
        if (now.freeram < least_free)
            least_free = now.freeram;
        if (now.totalswap - now.freeswap > most_swapped)
            most_swapped = now.totalswap - now.freeswap;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, 0);
    }
    if (ended != child) {
        perror("a child");
        return FAILED;
    }
    printf("memory %lu kB, swap %lu kB\n", (free_before - least_free) >> 10, most_swapped >> 10);
    printf("pages %llu out, %llu in\n", statistic("pswpout") - out, statistic("pswpin") - in);
    fflush(stdout);
    if (swap_end()) {
        perror("swapoff");
        return FAILED;
    }
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
