// SQLite with a database in memory: rows of text with two indexes, changed, joined, sorted, deleted.
// The argument is the number of rows.

#include "answer.h"

#include <sqlite3.h>
#include <stdlib.h>

// Text that compresses, as text does.
static const char *const WORDS[16] = {"page", "table",  "frame", "leaf",  "entry", "folio", "slot",    "swap",
                                      "map",  "access", "fault", "clean", "dirty", "young", "present", "zero"};

static sqlite3 *database;
static uint64_t answer = ANSWER_BEGIN;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, sqlite3_errmsg(database));
    exit(1);
}

// Each value of each row is part of the answer.
static int row(void *unused, int count, char **values, char **names) {
    (void)unused, (void)names;
    for (int at = 0; at < count; at++)
        answer = answer_text(answer, values[at] ? values[at] : "NULL");
    return 0;
}

static void run(const char *statement) {
    if (sqlite3_exec(database, statement, row, 0, 0) != SQLITE_OK)
        fail(statement);
}

static void fill(int rows) {
    sqlite3_stmt *insert;
    if (sqlite3_prepare_v2(database, "INSERT INTO item VALUES (?, ?, ?, ?)", -1, &insert, 0) != SQLITE_OK)
        fail("prepare");
    uint64_t seed = 88172645463325252u;
    run("BEGIN");
    for (int number = 0; number < rows; number++) {
        char text[400];
        int length = 0;
        for (int words = 8 + answer_random(&seed) % 32; words > 0; words--)
            length += sprintf(text + length, "%s ", WORDS[answer_random(&seed) % 16]);
        sqlite3_bind_int(insert, 1, number);
        sqlite3_bind_int64(insert, 2, answer_random(&seed) >> 40);
        sqlite3_bind_int(insert, 3, answer_random(&seed) % 1000);
        sqlite3_bind_text(insert, 4, text, length, SQLITE_TRANSIENT);
        if (sqlite3_step(insert) != SQLITE_DONE || sqlite3_reset(insert) != SQLITE_OK)
            fail("insert");
    }
    run("COMMIT");
    sqlite3_finalize(insert);
}

int main(int argc, char **argv) {
    int rows = argc > 1 ? atoi(argv[1]) : 1000;
    if (sqlite3_open(":memory:", &database) != SQLITE_OK)
        fail("open");
    run("CREATE TABLE item (number INTEGER PRIMARY KEY, weight INTEGER, class INTEGER, text TEXT)");
    fill(rows);
    run("CREATE INDEX by_weight ON item (weight)");
    run("CREATE INDEX by_class ON item (class, text)");
    run("SELECT class, count(*), sum(weight), max(text) FROM item GROUP BY class ORDER BY class");
    run("UPDATE item SET text = text || weight, weight = weight + number WHERE number % 7 = 3");
    run("SELECT a.number, b.number, substr(b.text, 1, 20) FROM item a JOIN item b "
        "ON b.number = (a.weight * 31 + a.number) % (SELECT count(*) FROM item) WHERE a.class < 100 ORDER BY b.text");
    run("DELETE FROM item WHERE class % 5 = 1");
    run("SELECT number, weight, text FROM item WHERE weight > 1000 ORDER BY weight, number");
    run("PRAGMA integrity_check");
    sqlite3_close(database);
    answer_print(answer);
    return 0;
}
