// SQLite with several connections in threads: each has a database of its own, and all have one more in a shared
// cache, into which they write by turns. The arguments are the number of rows of each thread, and of threads.

#include "answer.h"

#include <pthread.h>
#include <sched.h>
#include <sqlite3.h>
#include <stdlib.h>

enum { MOST = 16, BATCH = 100 };

static int rows = 1000, threads = 4;
static uint64_t answers[MOST];

static void fail(sqlite3 *database, const char *what) {
    fprintf(stderr, "%s: %s\n", what, sqlite3_errmsg(database));
    exit(1);
}

// Each value of each row is part of the answer.
static int row(void *answer, int count, char **values, char **names) {
    (void)names;
    for (int at = 0; at < count; at++)
        *(uint64_t *)answer = answer_text(*(uint64_t *)answer, values[at] ? values[at] : "NULL");
    return 0;
}

// Runs a statement; again for as long as another connection is in the way.
static void run(sqlite3 *database, const char *statement, uint64_t *answer) {
    for (;;) {
        uint64_t found = answer ? *answer : 0;
        int result = sqlite3_exec(database, statement, row, &found, 0);
        if (result == SQLITE_OK) {
            if (answer)
                *answer = found;
            return;
        }
        if ((result & 0xff) != SQLITE_LOCKED && (result & 0xff) != SQLITE_BUSY)
            fail(database, statement);
        sched_yield();
    }
}

static sqlite3 *opened(const char *name) {
    sqlite3 *database;
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_URI | SQLITE_OPEN_FULLMUTEX;
    if (sqlite3_open_v2(name, &database, flags, 0) != SQLITE_OK)
        fail(database, name);
    return database;
}

static sqlite3 *shared(void) { return opened("file:store?mode=memory&cache=shared"); }

static void insert(sqlite3 *database, int thread, int first, uint64_t *seed) {
    char statement[400];
    run(database, "BEGIN IMMEDIATE", 0);
    for (int at = first; at < first + BATCH && at < rows; at++) {
        uint64_t number = answer_random(seed);
        snprintf(statement, sizeof statement, "INSERT INTO item VALUES (%d, %d, '%0*llx')",
                 thread * rows + at, (int)(number >> 50), 20 + (int)(number % 200), (unsigned long long)number);
        run(database, statement, 0);
    }
    run(database, "COMMIT", 0);
}

static void *work(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint64_t seed = 88172645463325252u + thread, answer = ANSWER_BEGIN;
    sqlite3 *own = opened(":memory:"), *all = shared();
    char look[200];
    snprintf(look, sizeof look, "SELECT count(*), sum(weight), max(text) FROM item WHERE number / %d = %d", rows, thread);
    run(own, "CREATE TABLE item (number INTEGER PRIMARY KEY, weight INTEGER, text TEXT)", 0);
    for (int first = 0; first < rows; first += BATCH) {
        insert(own, thread, first, &seed);
        insert(all, thread, first, &seed);
        // A connection finds its own rows, whatever the others do.
        run(all, look, &answer);
    }
    run(own, "CREATE INDEX by_text ON item (text, weight)", 0);
    run(own, "UPDATE item SET text = text || weight WHERE number % 7 = 3", 0);
    run(own, "SELECT weight, text FROM item ORDER BY text DESC", &answer);
    run(own, "PRAGMA integrity_check", &answer);
    sqlite3_close(own);
    sqlite3_close(all);
    answers[thread] = answer;
    return 0;
}

int main(int argc, char **argv) {
    pthread_t started[MOST];
    if (argc > 2)
        rows = atoi(argv[1]), threads = atoi(argv[2]);
    if (threads < 1 || threads > MOST)
        return 2;
    sqlite3 *all = shared();
    run(all, "CREATE TABLE item (number INTEGER PRIMARY KEY, weight INTEGER, text TEXT)", 0);
    for (intptr_t thread = 0; thread < threads; thread++)
        if (pthread_create(&started[thread], 0, work, (void *)thread) != 0)
            return 1;
    uint64_t answer = ANSWER_BEGIN;
    for (int thread = 0; thread < threads; thread++) {
        pthread_join(started[thread], 0);
        answer = answer_bytes(answer, &answers[thread], sizeof answers[thread]);
    }
    run(all, "SELECT number, weight, text FROM item ORDER BY number", &answer);
    run(all, "PRAGMA integrity_check", &answer);
    sqlite3_close(all);
    answer_print(answer);
    return 0;
}
