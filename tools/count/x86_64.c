/*
 * x86-64 instructions: prefixes, an optional REX, then one or two bytes of opcode and ModRM. Only
 * the classes of the counters are distinguished. (Intel SDM, volume 2; marks:
 * programs/include/mark.h.)
 */
#include <string.h>

#include "classify.h"

struct decoded {
    bool lock, repeat, operand_size, wide;
    /* The byte after the prefixes and the two after that; 0 beyond the end. */
    uint8_t opcode, second, third;
};

static bool is_ignored_prefix(uint8_t byte)
{
    /* Address size, and the six segments. */
    return byte == 0x67 || byte == 0x26 || byte == 0x2E || byte == 0x36 || byte == 0x3E ||
           byte == 0x64 || byte == 0x65;
}

static struct decoded decode(const uint8_t *bytes, size_t size)
{
    struct decoded decoded = {0};
    size_t at = 0;
    for (; at < size; at++) {
        if (bytes[at] == 0xF0)
            decoded.lock = true;
        else if (bytes[at] == 0xF2 || bytes[at] == 0xF3)
            decoded.repeat = true;
        else if (bytes[at] == 0x66)
            decoded.operand_size = true;
        else if (!is_ignored_prefix(bytes[at]))
            break;
    }
    bool is_rex = at < size && (bytes[at] & 0xF0) == 0x40;
    decoded.wide = is_rex && bytes[at] & 8;
    at += is_rex;
    decoded.opcode = at < size ? bytes[at] : 0;
    decoded.second = at + 1 < size ? bytes[at + 1] : 0;
    decoded.third = at + 2 < size ? bytes[at + 2] : 0;
    return decoded;
}

static int mark_of(const uint8_t *bytes, size_t size)
{
    static const uint8_t nop[] = {0x0F, 0x1F, 0x84, 0x00};
    if (size != 8 || memcmp(bytes, nop, sizeof nop) != 0 || bytes[6] != 0x41 || bytes[7] != 0x4D)
        return NO_MARK;
    return bytes[4] | bytes[5] << 8;
}

/* MOVS, CMPS, STOS, LODS and SCAS. */
static bool is_string_opcode(uint8_t opcode)
{
    return (opcode >= 0xA4 && opcode <= 0xA7) || (opcode >= 0xAA && opcode <= 0xAF);
}

/* The bytes that an iteration of MOVS or STOS stores; the others store none. */
static unsigned stored_bytes(struct decoded decoded)
{
    if (decoded.opcode == 0xA4 || decoded.opcode == 0xAA)
        return 1;
    if (decoded.opcode != 0xA5 && decoded.opcode != 0xAB)
        return 0;
    return decoded.wide ? 8 : decoded.operand_size ? 2 : 4;
}

static bool is_memory_operand(uint8_t modrm)
{
    return modrm < 0xC0;
}

/* Opcodes that begin with 0F. */
static uint32_t two_byte_events(struct decoded decoded)
{
    uint8_t modrm = decoded.third;
    unsigned field = modrm >> 3 & 7;
    switch (decoded.second) {
    case 0x01: /* INVLPG */
        return field == 7 && is_memory_operand(modrm) ? event(INVALIDATE_PAGE) : 0;
    case 0x05: /* SYSCALL */
        return event(SYSTEM_CALLS);
    case 0x07: /* SYSRET */
        return event(EXCEPTION_RETURNS);
    case 0x22: /* MOV to a control register; to CR4 drops global entries too */
        return field == 3 ? event(ROOT_WRITES) : field == 4 ? event(INVALIDATE_ALL) : 0;
    case 0x30: /* WRMSR */
        return event(REGISTER_WRITES);
    case 0x38: /* INVPCID, of any type */
        return modrm == 0x82 && decoded.operand_size ? event(INVALIDATE_SPACE) : 0;
    case 0xA2: /* CPUID, which serializes */
        return event(BARRIERS);
    case 0xAE: /* LFENCE, MFENCE, SFENCE */
        return modrm >= 0xE8 && !decoded.repeat && !decoded.operand_size ? event(BARRIERS) : 0;
    default:
        return 0;
    }
}

struct meaning classify_x86_64(const uint8_t *bytes, size_t size)
{
    struct decoded decoded = decode(bytes, size);
    struct meaning meaning = {
        .is_string = decoded.repeat && is_string_opcode(decoded.opcode),
        .mark = mark_of(bytes, size),
    };
    if (meaning.is_string)
        meaning.string_bytes = stored_bytes(decoded);
    /* XCHG with memory locks without a prefix. */
    bool exchanges = decoded.opcode == 0x86 || decoded.opcode == 0x87;
    if (decoded.lock || (exchanges && is_memory_operand(decoded.second)))
        meaning.events |= event(ATOMICS);
    if (decoded.opcode == 0x0F)
        meaning.events |= two_byte_events(decoded);
    else if (decoded.opcode == 0xCF) /* IRET */
        meaning.events |= event(EXCEPTION_RETURNS);
    else if (decoded.opcode == 0xF4) /* HLT */
        meaning.events |= event(HALTS);
    return meaning;
}
