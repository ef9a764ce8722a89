//! The routines behind [`super::super::user_copy`].
//!
//! The processor checks the rights of the program's entries and keys. A page fault in one of the
//! three string instructions, or in the exchange of a word, leads to the end of the routine, which returns how many bytes are
//! left:
//!
//! ```text
//! program's address    |...b b b|b b b b b b b b| ... |b b b b b b b b|b b .....|
//!                       bytes       words, aligned: none lies in two pages   bytes
//! ```

use core::arch::global_asm;

use super::cpu_features;

/// Shorter copies proceed byte by byte, because starting a string instruction costs more than it
/// saves.
const SHORT: usize = 32;

global_asm!(r#"
.macro user_copy name, user         // rdi: to, rsi: from, rdx: how many; rax: how many are left
.global \name
\name:
\name\()_allow:
    nop dword ptr [rax]             // STAC where there is SMAP (see `adapt`)
    mov rcx, rdx
    cmp rdx, {short}
    jb 1f
    mov rcx, \user
    neg rcx
    and ecx, 7
    sub rdx, rcx
\name\()_first:
    rep movsb
    mov rcx, rdx
    shr rcx, 3
    and edx, 7
\name\()_words:
    rep movsq
    mov ecx, edx
1:
\name\()_last:
    rep movsb
    xor eax, eax
2:
\name\()_forbid:
    nop dword ptr [rax]             // CLAC
    ret
\name\()_first_faults:
    lea rax, [rcx + rdx]
    jmp 2b
\name\()_words_fault:
    lea rax, [rcx * 8 + rdx]
    jmp 2b
\name\()_last_faults:
    mov rax, rcx
    jmp 2b
.endm

user_copy copy_to_program, rdi
user_copy copy_from_program, rsi

.global exchange_in_program
exchange_in_program:                // rdi: where, esi: old, edx: new; rax: the word, or -1
exchange_in_program_allow:
    nop dword ptr [rax]             // STAC
    mov eax, esi
exchange_in_program_word:
    lock cmpxchg [rdi], edx
    mov eax, eax
2:
exchange_in_program_forbid:
    nop dword ptr [rax]             // CLAC
    ret
exchange_in_program_faults:
    mov rax, -1
    jmp 2b

.pushsection .rodata.user_copy, "a"
.balign 8
.global user_copy_faults
user_copy_faults:
    .quad copy_to_program_first, copy_to_program_first_faults
    .quad copy_to_program_words, copy_to_program_words_fault
    .quad copy_to_program_last, copy_to_program_last_faults
    .quad copy_from_program_first, copy_from_program_first_faults
    .quad copy_from_program_words, copy_from_program_words_fault
    .quad copy_from_program_last, copy_from_program_last_faults
    .quad exchange_in_program_word, exchange_in_program_faults
.popsection
"#,
    short = const SHORT,
);

unsafe extern "C" {
    /// The instructions that may fault, and the addresses where a fault continues.
    static user_copy_faults: [[u64; 2]; 7];
    static copy_to_program_allow: u8;
    static copy_to_program_forbid: u8;
    static copy_from_program_allow: u8;
    static copy_from_program_forbid: u8;
    static exchange_in_program_allow: u8;
    static exchange_in_program_forbid: u8;
}

/// The address at which a page fault of the kernel at `instruction` continues, if the instruction
/// may fault.
pub(super) fn continuation(instruction: u64) -> Option<u64> {
    // SAFETY: the table above, which is never written.
    let faults = unsafe { &user_copy_faults };
    faults.iter().find(|[at, _]| *at == instruction).map(|[_, then]| *then)
}

/// Patches in `stac` and `clac` if the processor has them. Runs before code becomes read-only.
pub(super) fn adapt() {
    if !cpu_features::has_smap() {
        return;
    }
    let places = [
        (&raw const copy_to_program_allow, 0xcb),
        (&raw const copy_from_program_allow, 0xcb),
        (&raw const copy_to_program_forbid, 0xca),
        (&raw const copy_from_program_forbid, 0xca),
        (&raw const exchange_in_program_allow, 0xcb),
        (&raw const exchange_in_program_forbid, 0xca),
    ];
    for (place, operation) in places {
        let place = place.cast_mut().cast::<[u8; 3]>();
        // SAFETY: the place is three bytes long, still writable, and has not run.
        unsafe { place.write_volatile([0x0f, 0x01, operation]) };
    }
}
