/*
 * AArch64 instructions: one word each, told apart by masks. (Arm Architecture Reference Manual,
 * chapter C4; marks: programs/include/mark.h.)
 */
#include "classify.h"

struct pattern {
    uint32_t mask, value;
};

static bool matches(uint32_t word, const struct pattern *patterns, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if ((word & patterns[i].mask) == patterns[i].value)
            return true;
    return false;
}
#define MATCHES(word, ...)                                                                         \
    matches(word, (const struct pattern[]){__VA_ARGS__},                                           \
            sizeof((const struct pattern[]){__VA_ARGS__}) / sizeof(struct pattern))

static bool is_string(uint32_t word)
{
    return MATCHES(word, {0xFFFFFFE0, 0xD50B7420}, /* DC ZVA */
                   {0x3B200C00, 0x19000400});      /* CPY and SET, of FEAT_MOPS */
}

static int mark_of(uint32_t word)
{
    /* MOVZ XZR, #0x5nnn */
    bool is_mark = (word & 0xFFFE001F) == 0xD28A001F;
    return is_mark ? (int)(word >> 5 & 0xFFF) : NO_MARK;
}

static bool is_atomic(uint32_t word)
{
    /* LDAPR looks like a read-modify-write, and is a load. */
    if ((word & 0x3FFFFC00) == 0x38BFC000)
        return false;
    return MATCHES(word, {0x3F200C00, 0x38200000}, /* LDADD and the like, SWP */
                   {0x3FA07C00, 0x08A07C00},       /* CAS */
                   {0xBFA07C00, 0x08207C00},       /* CASP */
                   {0x3FE00000, 0x08000000},       /* STXR, STLXR */
                   {0xBFE00000, 0x88200000});      /* STXP, STLXP */
}

static bool is_barrier(uint32_t word)
{
    return MATCHES(word, {0xFFFFF0FF, 0xD503309F}, /* DSB */
                   {0xFFFFF3FF, 0xD503323F},       /* DSB nXS */
                   {0xFFFFF0FF, 0xD50330BF},       /* DMB */
                   {0xFFFFF0FF, 0xD50330DF});      /* ISB */
}

static bool is_invalidation(uint32_t word)
{
    /* SYS with CRn 8, or 9 for the nXS variants. */
    return (word & 0xFFF8E000) == 0xD5088000;
}

/* TLBI, by CRm and op2. */
static enum counter invalidation(uint32_t word)
{
    unsigned crm = word >> 8 & 15, op2 = word >> 5 & 7;
    if (crm == 2 || crm == 5 || crm == 6)
        return INVALIDATE_RANGE;
    if (op2 == 2)
        return INVALIDATE_SPACE;
    return op2 & 1 ? INVALIDATE_PAGE : INVALIDATE_ALL;
}

/* The block of DC ZVA in QEMU's -cpu max; FEAT_MOPS decides during execution how much it moves. */
#define ZVA_BYTES 64

struct meaning classify_aarch64(uint32_t word)
{
    struct meaning meaning = {.is_string = is_string(word), .mark = mark_of(word)};
    if ((word & 0xFFFFFFE0) == 0xD50B7420)
        meaning.string_bytes = ZVA_BYTES;
    if (is_invalidation(word))
        meaning.events = event(invalidation(word));
    else if (is_barrier(word))
        meaning.events = event(BARRIERS);
    else if (is_atomic(word))
        meaning.events = event(ATOMICS);
    else if ((word & 0xFFFFFBFF) == 0xD69F03E0) /* ERET, ERETAA, ERETAB */
        meaning.events = event(EXCEPTION_RETURNS);
    else if ((word & 0xFFE0001F) == 0xD4000001) /* SVC */
        meaning.events = event(SYSTEM_CALLS);
    else if ((word & 0xFFFFFFC0) == 0xD5182000) /* MSR TTBR0_EL1, MSR TTBR1_EL1 */
        meaning.events = event(ROOT_WRITES);
    else if ((word & 0xFFF00000) == 0xD5100000) /* MSR of another register */
        meaning.events = event(REGISTER_WRITES);
    else if (word == 0xD503207F) /* WFI */
        meaning.events = event(HALTS);
    return meaning;
}
