/*
 * Checks the classification of instructions: a program that says what is wrong and ends with 1.
 * Encodings are those that GNU as gives. Run by the tests of `bindery compare`.
 */
#include <stdio.h>
#include <string.h>

#include "classify.h"

#define STRING (1u << 31)

static int failures;

static void expect(const char *text, struct meaning found, uint32_t events, int mark)
{
    uint32_t all = found.events | (found.is_string ? STRING : 0);
    if (all == events && found.mark == mark)
        return;
    printf("%s: events %#x, mark %d instead of events %#x, mark %d\n", text, all, found.mark, events,
           mark);
    failures++;
}

struct x86_64_case {
    const char *text;
    size_t size;
    const char *bytes;
    uint32_t events;
    int mark;
};
#define BYTES(text) sizeof(text) - 1, text
#define E(counter) (1u << (counter))

static const struct x86_64_case X86_64[] = {
    {"nop", BYTES("\x90"), 0, NO_MARK},
    {"add %rax,%rbx", BYTES("\x48\x01\xC3"), 0, NO_MARK},
    {"rep stosb", BYTES("\xF3\xAA"), STRING, NO_MARK},
    {"rep movsq", BYTES("\xF3\x48\xA5"), STRING, NO_MARK},
    {"rep movsb %gs:(%rsi),(%rdi)", BYTES("\x65\xF3\xA4"), STRING, NO_MARK},
    {"stosb", BYTES("\xAA"), 0, NO_MARK},
    {"pause", BYTES("\xF3\x90"), 0, NO_MARK},
    {"lock incq (%rdi)", BYTES("\xF0\x48\xFF\x07"), E(ATOMICS), NO_MARK},
    {"lock cmpxchg16b (%rdi)", BYTES("\xF0\x48\x0F\xC7\x0F"), E(ATOMICS), NO_MARK},
    {"xchg %rax,(%rdi)", BYTES("\x48\x87\x07"), E(ATOMICS), NO_MARK},
    {"xchg %al,%fs:(%rdi)", BYTES("\x64\x86\x07"), E(ATOMICS), NO_MARK},
    {"xchg %rax,%rbx", BYTES("\x48\x87\xC3"), 0, NO_MARK},
    {"invlpg (%rdi)", BYTES("\x0F\x01\x3F"), E(INVALIDATE_PAGE), NO_MARK},
    {"invlpg (%r9)", BYTES("\x41\x0F\x01\x39"), E(INVALIDATE_PAGE), NO_MARK},
    {"swapgs", BYTES("\x0F\x01\xF8"), 0, NO_MARK},
    {"rdtscp", BYTES("\x0F\x01\xF9"), 0, NO_MARK},
    {"mov %rax,%cr3", BYTES("\x0F\x22\xD8"), E(ROOT_WRITES), NO_MARK},
    {"mov %r8,%cr3", BYTES("\x41\x0F\x22\xD8"), E(ROOT_WRITES), NO_MARK},
    {"mov %rax,%cr4", BYTES("\x0F\x22\xE0"), E(INVALIDATE_ALL), NO_MARK},
    {"mov %rax,%cr0", BYTES("\x0F\x22\xC0"), 0, NO_MARK},
    {"mov %cr3,%rax", BYTES("\x0F\x20\xD8"), 0, NO_MARK},
    {"invpcid (%rdi),%rax", BYTES("\x66\x0F\x38\x82\x07"), E(INVALIDATE_SPACE), NO_MARK},
    {"invpcid (%r9),%r10", BYTES("\x66\x45\x0F\x38\x82\x11"), E(INVALIDATE_SPACE), NO_MARK},
    {"wrmsr", BYTES("\x0F\x30"), E(REGISTER_WRITES), NO_MARK},
    {"syscall", BYTES("\x0F\x05"), E(SYSTEM_CALLS), NO_MARK},
    {"sysretq", BYTES("\x48\x0F\x07"), E(EXCEPTION_RETURNS), NO_MARK},
    {"iretq", BYTES("\x48\xCF"), E(EXCEPTION_RETURNS), NO_MARK},
    {"cpuid", BYTES("\x0F\xA2"), E(BARRIERS), NO_MARK},
    {"mfence", BYTES("\x0F\xAE\xF0"), E(BARRIERS), NO_MARK},
    {"lfence", BYTES("\x0F\xAE\xE8"), E(BARRIERS), NO_MARK},
    {"sfence", BYTES("\x0F\xAE\xF8"), E(BARRIERS), NO_MARK},
    {"xsave (%rdi)", BYTES("\x0F\xAE\x27"), 0, NO_MARK},
    {"clflushopt (%rdi)", BYTES("\x66\x0F\xAE\x3F"), 0, NO_MARK},
    {"hlt", BYTES("\xF4"), E(HALTS), NO_MARK},
    {"mark: begin 4", BYTES("\x0F\x1F\x84\x00\x04\x00\x41\x4D"), 0, 4},
    {"mark: end 4", BYTES("\x0F\x1F\x84\x00\x04\x08\x41\x4D"), 0, 0x804},
    {"a nop of another displacement", BYTES("\x0F\x1F\x84\x00\x04\x00\x42\x4D"), 0, NO_MARK},
    {"a long nop", BYTES("\x0F\x1F\x84\x00\x00\x00\x00\x00"), 0, NO_MARK},
    {"prefixes and nothing else", BYTES("\x66\xF3"), 0, NO_MARK},
};

static const struct {
    const char *text;
    size_t size;
    const char *bytes;
    unsigned string_bytes;
} STRINGS[] = {
    {"rep movsb", BYTES("\xF3\xA4"), 1},        {"rep stosb", BYTES("\xF3\xAA"), 1},
    {"rep stosw", BYTES("\x66\xF3\xAB"), 2},   {"rep movsl", BYTES("\xF3\xA5"), 4},
    {"rep movsq", BYTES("\xF3\x48\xA5"), 8},   {"rep stosq", BYTES("\xF3\x48\xAB"), 8},
    {"repe cmpsb", BYTES("\xF3\xA6"), 0},       {"movsq", BYTES("\x48\xA5"), 0},
};

struct aarch64_case {
    const char *text;
    uint32_t word;
    uint32_t events;
    int mark;
};

static const struct aarch64_case AARCH64[] = {
    {"nop", 0xD503201F, 0, NO_MARK},
    {"add x0, x1, x2", 0x8B020020, 0, NO_MARK},
    {"dc zva, x0", 0xD50B7420, STRING, NO_MARK},
    {"dc cvac, x0", 0xD50B7A20, 0, NO_MARK},
    {"cpyfp [x0]!, [x1]!, x2!", 0x19010440, STRING, NO_MARK},
    {"setp [x0]!, x1!, x2", 0x19C20420, STRING, NO_MARK},
    {"ldr x0, [x1]", 0xF9400020, 0, NO_MARK},
    {"ldar x0, [x1]", 0xC8DFFC20, 0, NO_MARK},
    {"ldapr x0, [x1]", 0xF8BFC020, 0, NO_MARK},
    {"stlr x0, [x1]", 0xC89FFC20, 0, NO_MARK},
    {"ldxr x0, [x1]", 0xC85F7C20, 0, NO_MARK},
    {"ldxp x0, x1, [x2]", 0xC87F0440, 0, NO_MARK},
    {"stxr w0, x1, [x2]", 0xC8007C41, E(ATOMICS), NO_MARK},
    {"stlxr w0, x1, [x2]", 0xC800FC41, E(ATOMICS), NO_MARK},
    {"stxp w0, x1, x3, [x2]", 0xC8200C41, E(ATOMICS), NO_MARK},
    {"ldadd x0, x1, [x2]", 0xF8200041, E(ATOMICS), NO_MARK},
    {"ldclral x0, x1, [x2]", 0xF8E01041, E(ATOMICS), NO_MARK},
    {"swpal x0, x1, [x2]", 0xF8E08041, E(ATOMICS), NO_MARK},
    {"stset x0, [x2]", 0xF820305F, E(ATOMICS), NO_MARK},
    {"cas x0, x1, [x2]", 0xC8A07C41, E(ATOMICS), NO_MARK},
    {"casal w0, w1, [x2]", 0x88E0FC41, E(ATOMICS), NO_MARK},
    {"caspal x0, x1, x2, x3, [x4]", 0x4860FC82, E(ATOMICS), NO_MARK},
    {"dsb ish", 0xD5033B9F, E(BARRIERS), NO_MARK},
    {"dsb ishst", 0xD5033A9F, E(BARRIERS), NO_MARK},
    {"dsb nsh", 0xD503379F, E(BARRIERS), NO_MARK},
    {"dmb ish", 0xD5033BBF, E(BARRIERS), NO_MARK},
    {"isb", 0xD5033FDF, E(BARRIERS), NO_MARK},
    {"tlbi vmalle1is", 0xD508831F, E(INVALIDATE_ALL), NO_MARK},
    {"tlbi vmalle1", 0xD508871F, E(INVALIDATE_ALL), NO_MARK},
    {"tlbi alle1", 0xD50C879F, E(INVALIDATE_ALL), NO_MARK},
    {"tlbi aside1is, x0", 0xD5088340, E(INVALIDATE_SPACE), NO_MARK},
    {"tlbi vae1is, x0", 0xD5088320, E(INVALIDATE_PAGE), NO_MARK},
    {"tlbi vale1, x0", 0xD50887A0, E(INVALIDATE_PAGE), NO_MARK},
    {"tlbi vaale1is, x0", 0xD50883E0, E(INVALIDATE_PAGE), NO_MARK},
    {"tlbi rvae1is, x0", 0xD5088220, E(INVALIDATE_RANGE), NO_MARK},
    {"tlbi rvale1os, x0", 0xD50885A0, E(INVALIDATE_RANGE), NO_MARK},
    {"tlbi rvae1, x0", 0xD5088620, E(INVALIDATE_RANGE), NO_MARK},
    {"at s1e1r, x0", 0xD5087800, 0, NO_MARK},
    {"ic ivau, x0", 0xD50B7520, 0, NO_MARK},
    {"msr ttbr0_el1, x0", 0xD5182000, E(ROOT_WRITES), NO_MARK},
    {"msr ttbr1_el1, x0", 0xD5182020, E(ROOT_WRITES), NO_MARK},
    {"msr tcr_el1, x0", 0xD5182040, E(REGISTER_WRITES), NO_MARK},
    {"msr elr_el1, x0", 0xD5184020, E(REGISTER_WRITES), NO_MARK},
    {"msr daifset, #3", 0xD50343DF, 0, NO_MARK},
    {"mrs x0, ttbr0_el1", 0xD5382000, 0, NO_MARK},
    {"eret", 0xD69F03E0, E(EXCEPTION_RETURNS), NO_MARK},
    {"svc #0", 0xD4000001, E(SYSTEM_CALLS), NO_MARK},
    {"svc #7", 0xD40000E1, E(SYSTEM_CALLS), NO_MARK},
    {"hvc #0", 0xD4000002, 0, NO_MARK},
    {"wfi", 0xD503207F, E(HALTS), NO_MARK},
    {"wfe", 0xD503205F, 0, NO_MARK},
    {"mark: begin 4", 0xD28A009F, 0, 4},
    {"mark: end 4", 0xD28B009F, 0, 0x804},
    {"mov xzr, #0x4004", 0xD288009F, 0, NO_MARK},
    {"mov x0, #0x5004", 0xD28A0080, 0, NO_MARK},
};

int main(void)
{
    for (size_t i = 0; i < sizeof X86_64 / sizeof *X86_64; i++) {
        const struct x86_64_case *c = &X86_64[i];
        expect(c->text, classify_x86_64((const uint8_t *)c->bytes, c->size), c->events, c->mark);
    }
    for (size_t i = 0; i < sizeof AARCH64 / sizeof *AARCH64; i++)
        expect(AARCH64[i].text, classify_aarch64(AARCH64[i].word), AARCH64[i].events,
               AARCH64[i].mark);
    for (size_t i = 0; i < sizeof STRINGS / sizeof *STRINGS; i++) {
        unsigned found =
            classify_x86_64((const uint8_t *)STRINGS[i].bytes, STRINGS[i].size).string_bytes;
        if (found != STRINGS[i].string_bytes) {
            printf("%s: %u bytes instead of %u\n", STRINGS[i].text, found, STRINGS[i].string_bytes);
            failures++;
        }
    }
    return failures != 0;
}
