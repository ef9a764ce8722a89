// arguments: one "two words" three=3 ü
//
// The initial state of a program: arguments, environment, the auxiliary vector,
// its stack, thread-local storage, and stdio.

#include "test.h"

#include <elf.h>
#include <sys/auxv.h>

extern char **environ;

static _Thread_local int initialized = 42;
static _Thread_local int zeroed[100];
static int constructed;
static char bss[100000];
static int data[3] = {1, 2, 3};

__attribute__((constructor)) static void construct(void) { constructed = 7; }

static const Elf64_auxv_t *auxiliary(void) {
    char **end = environ;
    while (*end)
        end++;
    return (const Elf64_auxv_t *)(end + 1);
}

int main(int count, char **arguments) {
    test_start();
    CHECK(count >= 1 && arguments[0] && arguments[0][0], "argv[0] is there");
    CHECK(arguments[count] == 0, "argv ends with a null pointer");
    if (count > 1) {
        EQUAL(count, 5, "argc counts all arguments");
        CHECK(count == 5 && strcmp(arguments[1], "one") == 0 &&
                  strcmp(arguments[2], "two words") == 0 &&
                  strcmp(arguments[3], "three=3") == 0 && strcmp(arguments[4], "ü") == 0,
              "arguments arrive byte by byte");
    }
    CHECK(environ != 0, "the environment is there");
    CHECK(((uintptr_t)__builtin_frame_address(0) & 15) == 0, "the stack is aligned to 16");
    EQUAL(constructed, 7, "constructors have run");
    EQUAL(data[0] + data[1] + data[2], 6, "initialized data is there");
    int sum = 0;
    for (size_t index = 0; index < sizeof bss; index++)
        sum |= bss[index];
    EQUAL(sum, 0, "bss is zero");
    EQUAL(initialized, 42, "thread-local data is there");
    for (int index = 0; index < 100; index++)
        sum |= zeroed[index];
    EQUAL(sum, 0, "thread-local bss is zero");

    EQUAL(getauxval(AT_PAGESZ), 4096, "AT_PAGESZ is 4096");
    EQUAL(sysconf(_SC_PAGESIZE), 4096, "sysconf knows the page size");
    EQUAL(getauxval(AT_PHENT), sizeof(Elf64_Phdr), "AT_PHENT is the size of a program header");
    const Elf64_Phdr *headers = (const Elf64_Phdr *)getauxval(AT_PHDR);
    unsigned long number = getauxval(AT_PHNUM);
    int loads = 0, executable = 0;
    if (CHECK(headers != 0 && number > 0, "AT_PHDR and AT_PHNUM are there"))
        for (unsigned long index = 0; index < number; index++)
            if (headers[index].p_type == PT_LOAD) {
                loads++;
                executable += (headers[index].p_flags & PF_X) != 0;
            }
    CHECK(loads >= 1 && executable >= 1, "AT_PHDR points to the program headers");
    CHECK(getauxval(AT_ENTRY) != 0, "AT_ENTRY is there");
    const unsigned char *random = (const unsigned char *)getauxval(AT_RANDOM);
    int bits = 0;
    for (int index = 0; random && index < 16; index++)
        bits |= random[index];
    CHECK(bits != 0, "AT_RANDOM points to 16 bytes");
    const char *name = (const char *)getauxval(AT_EXECFN);
    CHECK(name && access(name, X_OK) == 0, "AT_EXECFN names an executable file");
    EQUAL(getauxval(AT_SECURE), 0, "AT_SECURE is 0");
    EQUAL(getauxval(AT_UID), getuid(), "AT_UID is the user");
    EQUAL(getauxval(AT_EUID), geteuid(), "AT_EUID is the effective user");
    EQUAL(getauxval(AT_GID), getgid(), "AT_GID is the group");
    EQUAL(getauxval(AT_EGID), getegid(), "AT_EGID is the effective group");
    EQUAL(getauxval(AT_CLKTCK), 100, "AT_CLKTCK is 100");
    const Elf64_auxv_t *entry = auxiliary();
    int entries = 0;
    while (entry[entries].a_type != AT_NULL && entries < 100)
        entries++;
    CHECK(entries >= 12 && entries < 100, "the auxiliary vector ends with AT_NULL");

    STEP_EQUAL(setenv("BINDERY_TEST", "a value", 1), 0);
    CHECK(strcmp(getenv("BINDERY_TEST"), "a value") == 0, "setenv and getenv work");
    char *text = malloc(300000), *more = malloc(100);
    NEED(text && more);
    memset(text, 'x', 299999);
    text[299999] = 0;
    EQUAL(strlen(text), 299999, "malloc gives small and large blocks");
    free(more);
    free(text);

    FILE *file = fopen("/tmp/start-stdio", "w+");
    NEED(file);
    for (int line = 0; line < 1000; line++)
        fprintf(file, "%d %.3f\n", line, line / 8.0);
    rewind(file);
    int good = 0, whole;
    double part;
    while (fscanf(file, "%d %lf", &whole, &part) == 2)
        good += part == whole / 8.0;
    EQUAL(good, 1000, "stdio writes and reads a file");
    fclose(file);
    unlink("/tmp/start-stdio");
    CHECK(fcntl(0, F_GETFD) >= 0 && fcntl(1, F_GETFD) >= 0 && fcntl(2, F_GETFD) >= 0,
          "descriptors 0, 1 and 2 are open");
    return test_end();
}
