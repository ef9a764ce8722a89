// Redis, and a client of it. The network is one pair of connected sockets: Redis' `main` and its calls about
// sockets are linked to functions here. The client fills the store, has a snapshot written (BGSAVE, a fork) while
// it changes everything, and loads the snapshot: the store must be as it was when the snapshot began. The
// argument is the number of keys.

#include "answer.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int __real_main(int argc, char **argv);

// The socket on which Redis listens: readable until the client is accepted.
static int waiting, servers_end;

int __wrap_socket(int domain, int type, int protocol) {
    (void)domain, (void)type, (void)protocol;
    return dup(waiting);
}

int __wrap_setsockopt(int descriptor, int level, int name, const void *value, socklen_t length) {
    (void)descriptor, (void)level, (void)name, (void)value, (void)length;
    return 0;
}

int __wrap_bind(int descriptor, const struct sockaddr *name, socklen_t length) {
    (void)descriptor, (void)name, (void)length;
    return 0;
}

int __wrap_listen(int descriptor, int backlog) {
    (void)descriptor, (void)backlog;
    return 0;
}

int __wrap_accept(int descriptor, struct sockaddr *name, socklen_t *length) {
    (void)length;
    uint64_t count;
    if (read(descriptor, &count, sizeof count) != sizeof count)
        return -1;
    name->sa_family = AF_UNIX;
    return dup(servers_end);
}

int __wrap_accept4(int descriptor, struct sockaddr *name, socklen_t *length, int flags) {
    (void)flags;
    return __wrap_accept(descriptor, name, length);
}

static pid_t server;
static FILE *to_server, *from_server;
static uint64_t answer = ANSWER_BEGIN;

static void fail(const char *what, const char *reply) {
    fprintf(stderr, "%s: %s\n", what, reply);
    kill(server, SIGKILL);
    exit(1);
}

// Sends a command of words, which end with a null pointer.
static void send_words(const char *const *words) {
    int count = 0;
    while (words[count])
        count++;
    fprintf(to_server, "*%d\r\n", count);
    for (int at = 0; at < count; at++)
        fprintf(to_server, "$%zu\r\n%s\r\n", strlen(words[at]), words[at]);
}

#define SEND(...) send_words((const char *const[]){__VA_ARGS__, 0})

static char reply[1 << 16];

// Reads a reply that is not an array: a line, and the text that it announces.
static char *receive(void) {
    fflush(to_server);
    if (!fgets(reply, sizeof reply, from_server))
        fail("the server", "gone");
    if (reply[0] == '-')
        fail("an error", reply);
    if (reply[0] == '$' && reply[1] != '-') {
        size_t length = strtoul(reply + 1, 0, 10);
        if (length + 3 > sizeof reply || fread(reply, 1, length + 2, from_server) != length + 2)
            fail("the server", "half a text");
        reply[length] = 0;
    }
    return reply;
}

// Some hundred bytes that compress, as text does.
static void text_of(char *text, uint64_t seed) {
    static const char *const words[] = {"page", "table", "frame", "leaf", "entry", "folio", "slot", "swap"};
    for (int count = 20 + answer_random(&seed) % 40; count > 0; count--)
        text += sprintf(text, "%s ", words[answer_random(&seed) % 8]);
    sprintf(text, "%llx", (unsigned long long)seed);
}

// Sets every key, with values of a generation, a hundred commands at a time.
static void set(int keys, int generation) {
    for (int key = 0; key < keys; key++) {
        char name[30], field[30], text[700];
        sprintf(name, "%s:%d", key % 4 == 0 ? "hash" : key % 4 == 1 ? "list" : "text", key % 4 < 2 ? key / 40 : key);
        sprintf(field, "%d", key);
        text_of(text, (uint64_t)key << 8 | (generation + 1));
        if (key % 4 == 0)
            SEND("HSET", name, field, text);
        else if (key % 4 == 1)
            SEND("RPUSH", name, text);
        else
            SEND("SET", name, text);
        if (key % 100 == 99 || key == keys - 1)
            for (int left = key % 100; left >= 0; left--)
                receive();
    }
}

static char *digest(void) {
    SEND("DEBUG", "DIGEST");
    return receive();
}

static int is_saving(void) {
    SEND("INFO", "persistence");
    return strstr(receive(), "rdb_bgsave_in_progress:1") != 0;
}

static void client(int keys) {
    char before[100];
    set(keys, 0);
    strcpy(before, digest());
    SEND("BGSAVE");
    receive();
    set(keys, 1);
    if (strcmp(digest(), before) == 0)
        fail("the store", "not changed");
    while (is_saving())
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, 0);
    SEND("DEBUG", "RELOAD", "NOSAVE");
    receive();
    if (strcmp(digest(), before) != 0)
        fail("the snapshot", "not the store as it was");
    answer = answer_text(answer, before);
    for (int key = 2; key < keys; key += 4) {
        char name[30];
        sprintf(name, "text:%d", key);
        SEND("GET", name);
        answer = answer_text(answer, receive());
    }
    SEND("SHUTDOWN", "NOSAVE");
    fflush(to_server);
}

int __wrap_main(int argc, char **argv) {
    int ends[2], status;
    unlink("/tmp/dump.rdb");
    waiting = eventfd(1, EFD_SEMAPHORE | EFD_NONBLOCK);
    if (argc != 2 || waiting < 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 2;
    server = fork();
    if (server == 0) {
        close(ends[0]);
        servers_end = ends[1];
        char *arguments[] = {argv[0], "--port", "0", "--unixsocket", "/tmp/socket", "--save", "", "--dir", "/tmp",
                             "--enable-debug-command", "yes", "--logfile", "/dev/null", 0};
        return __real_main(sizeof arguments / sizeof *arguments - 1, arguments);
    }
    close(ends[1]);
    to_server = fdopen(ends[0], "w");
    from_server = fdopen(dup(ends[0]), "r");
    client(atoi(argv[1]));
    if (server < 0 || waitpid(server, &status, 0) != server || status != 0 || unlink("/tmp/dump.rdb") != 0)
        return 1;
    answer_print(answer);
    return 0;
}
