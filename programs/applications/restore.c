// Processes come back lazily: their memory is a snapshot in a file, and a thread that serves a
// userfaultfd reads a page when it is touched. The computation runs at the same time, each process
// with its own seed, and another thread fetches the rest. Pages of zeroes are not in the snapshot.
// The arguments are the size of the snapshot in MiB and the number of processes.

#include "answer.h"
#include "userfault.h"

enum { PAGE_WORDS = 512, AT_ONCE = 4 };

static size_t pages;
static uint64_t *memory;
static int snapshot, faults;

static int is_zero(size_t page) { return page % 5 == 4; }

static void need(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

// The content of a page that the computation has made before the snapshot.
static void make(uint64_t *words, size_t page) {
    uint64_t seed = page * 0x9e3779b97f4a7c15u + 1;
    memset(words, 0, PAGE);
    for (size_t at = 0; at < PAGE_WORDS && !is_zero(page); at += 4)
        words[at] = answer_random(&seed);
}

static void write_snapshot(void) {
    static uint64_t words[PAGE_WORDS];
    snapshot = open("/tmp/snapshot", O_RDWR | O_CREAT | O_TRUNC, 0600);
    need(snapshot >= 0, "open");
    for (size_t page = 0; page < pages; page++) {
        make(words, page);
        if (!is_zero(page))
            need(pwrite(snapshot, words, PAGE, page * PAGE) == PAGE, "write");
    }
}

// Fills the page, and some after it, unless they are present.
static void fetch(size_t page, size_t count) {
    static __thread uint64_t words[PAGE_WORDS];
    for (size_t end = page + count; page < end && page < pages; page++) {
        uint64_t *at = memory + page * PAGE_WORDS;
        int64_t done;
        if (is_zero(page)) {
            done = uf_zero(faults, at, PAGE, 0);
        } else {
            need(pread(snapshot, words, PAGE, page * PAGE) == PAGE, "read");
            done = uf_copy(faults, at, words, PAGE, 0);
        }
        if (done == -EEXIST)
            uf_wake(faults, at, PAGE);
        else
            need(done == PAGE, "fill");
    }
}

static void *serve(void *unused) {
    struct uf_message message;
    while (read(faults, &message, sizeof message) == sizeof message) {
        need(message.event == FAULT, "event");
        fetch((message.fault.address - (uintptr_t)memory) / PAGE, AT_ONCE);
    }
    return unused;
}

static void *fetch_rest(void *unused) {
    for (size_t page = 0; page < pages; page += AT_ONCE)
        fetch(page, AT_ONCE);
    return unused;
}

// A walk whose next step follows from what it finds and leaves behind.
static uint64_t compute(uint64_t state, size_t steps) {
    for (; steps > 0; steps--) {
        uint64_t *words = memory + answer_random(&state) % pages * PAGE_WORDS;
        size_t at = answer_random(&state) % PAGE_WORDS;
        state = (state ^ words[at]) | 1;
        words[at] += state;
    }
    return state;
}

static uint64_t restore(uint64_t seed) {
    memory = (uint64_t *)uf_map(pages * PAGE);
    faults = uf_open(O_CLOEXEC, 0);
    need(faults >= 0 && uf_register(faults, memory, pages * PAGE, MISSING) == 0, "userfaultfd");
    pthread_t server, fetcher;
    need(pthread_create(&server, 0, serve, 0) == 0, "thread");
    uint64_t state = compute(seed, pages / 2);
    need(pthread_create(&fetcher, 0, fetch_rest, 0) == 0, "thread");
    state = compute(state, 2 * pages);
    need(pthread_join(fetcher, 0) == 0, "join");
    need(uf_unregister(faults, memory, pages * PAGE) == 0, "unregister");
    return answer_bytes(state, memory, pages * PAGE);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    pages = strtoul(argv[1], 0, 10) << 8;
    int processes = atoi(argv[2]);
    uint64_t *answers = mmap(0, processes * sizeof *answers, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(answers != MAP_FAILED, "mmap");
    write_snapshot();
    for (int number = 0; number < processes; number++)
        if (fork() == 0) {
            answers[number] = restore(number + 1);
            exit(0);
        }
    int status;
    while (wait(&status) > 0)
        need(status == 0, "a process");
    need(unlink("/tmp/snapshot") == 0, "unlink");
    answer_print(answer_bytes(ANSWER_BEGIN, answers, processes * sizeof *answers));
    return 0;
}
