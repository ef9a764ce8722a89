//! From the boot protocol to Rust: the arm64 Image header, the exit from EL2, and the MMU.
//!
//! The code runs where it was loaded until the MMU is on, and so addresses everything relative to
//! itself. It maps only the image, page by page with the permissions of its sections, at the
//! address that it was linked for ([`page_tables`] adds the rest). Without an identity mapping, the
//! first fetch with the MMU on faults, since its physical address is not mapped. The exception
//! leads to `landing`, at its linked address, which jumps to the address in `x27`.
//!
//! On a processor without atomic instructions, the first Rust code replaces them ([`exclusives`]).
//! Until then the code is also writable, and the kernel uses no atomics except loads and stores.
//!
//! Linux, Documentation/arch/arm64/booting.rst, describes the header and the state at entry: MMU
//! off, `x0` the physical address of the device tree, EL2 or EL1, interrupts masked.

use core::arch::{asm, global_asm};
use core::ops::Range;
use core::sync::atomic::Ordering;

use bindery::addr::{Frame, PAGE_SIZE};
use bindery::arch::{Level, MemoryType, Permissions};

use crate::arch::Ended;
use crate::start;

use super::super::boot_tables::Mapping;
use super::super::exclusives::{self, Refusal};
use super::page_tables::Table;
use super::{
    EntryFormat, context, control, cpu_features, entry, machine, page_copy, page_tables, per_cpu,
    smp, tlb, user_copy,
};

/// Tables of pages for the image: 2 MiB each. `link/aarch64.ld` asserts that they suffice.
const IMAGE_TABLES: usize = 4;

/// Size of the stack on which the first CPU boots and later idles.
const STACK_SIZE: usize = 64 << 10;

#[repr(C, align(4096))]
struct Stack([u8; STACK_SIZE]);

static mut STACK: Stack = Stack([0; STACK_SIZE]);
static mut IMAGE_LEVEL_3: Table = Table::EMPTY;
static mut IMAGE_LEVEL_2: Table = Table::EMPTY;
static mut IMAGE_PAGES: [Table; IMAGE_TABLES] = [Table::EMPTY; IMAGE_TABLES];

unsafe extern "C" {
    /// The entry of another CPU, its stack in `x0`.
    pub fn secondary_start();
    /// The first word of the compiler's code.
    static __instructions: u32;
    /// The address one past all code.
    static __text_end: u8;
}

/// `SCTLR_EL1`. On: M, C, SA, SA0, I, DZE, UCT, UCI, and the bits that are 1 in ARMv8.0 (EOS, EIS,
/// TSCXT, nTLSMD, LSMAOE). Off, among others: SPAN (each exception sets PAN), nTWI and nTWE (a
/// program that waits for an interrupt would stop the machine), WXN (it would hold for programs
/// too, which may ask for pages that are writable and executable).
const SYSTEM_CONTROL: u64 = 1 << 0
    | 1 << 2
    | 1 << 3
    | 1 << 4
    | 1 << 11
    | 1 << 12
    | 1 << 14
    | 1 << 15
    | 1 << 20
    | 1 << 22
    | 1 << 26
    | 1 << 28
    | 1 << 29;

/// `SCTLR_EL1.BT0`, of FEAT_BTI: `PACIASP` and `PACIBSP` are not landing pads for `BR` through
/// registers other than x16 and x17.
const STRICT_PADS: u64 = 1 << 35;

/// `SCTLR_EL1` with the MMU and the caches off, that is, only the bits that are always 1.
const SYSTEM_CONTROL_OFF: u64 = 1 << 11 | 1 << 20 | 1 << 22 | 1 << 23 | 1 << 28 | 1 << 29;

/// `MAIR_EL1`, as the core's entries have it: attribute 0 normal write-back memory, 1 Device-nGnRE,
/// 2 normal memory that is not cached, 3 Device-nGnRnE, 4 normal write-through memory.
const MEMORY_TYPES: u64 = 0xbb_0044_04ff;

/// `TCR_EL1` without the bits that depend on the CPU: 48 bits and 4 KiB pages in both halves, walks
/// inner shareable and write-back. Tagged addresses are off (TBI0), so a program that uses them
/// faults.
const TRANSLATION_CONTROL: u64 = 16
    | 0b01 << 8
    | 0b01 << 10
    | 0b11 << 12
    | 16 << 16
    | 0b01 << 24
    | 0b01 << 26
    | 0b11 << 28
    | 0b10 << 30;

/// Entries of the image's tables: one that refers to the table at address 0, and pages at address 0
/// with the permissions of each section. The assembly adds the addresses, since no code runs at its
/// linked address before these tables exist.
const TABLE: u64 = EntryFormat::table_entry(Frame(0)).0;
const CODE: u64 = Mapping::Code.leaf(Frame(0), Level::PTE).0;
const WRITABLE_CODE: u64 = EntryFormat::kernel_leaf(
    Frame(0),
    Level::PTE,
    Permissions::READ.union(Permissions::WRITE).union(Permissions::EXECUTE),
    MemoryType::Normal,
)
.0;
const CONSTANTS: u64 = Mapping::Constants.leaf(Frame(0), Level::PTE).0;
const DATA: u64 = Mapping::Data.leaf(Frame(0), Level::PTE).0;

global_asm!(
    r#"
    .section .head, "ax"
    .global _start
_start:
    b       primary
    .long   0
    .quad   0                       // offset from a multiple of 2 MiB
    .quad   __image_size
    .quad   0b1010                  // little-endian, 4 KiB pages, anywhere in memory
    .quad   0, 0, 0
    .ascii  "ARM\x64"
    .long   0

    .section .text.entry, "ax"
primary:
    mov     x19, x0
    bl      check_processor
    bl      leave_hypervisor
    adrp    x0, __bss_start
    adrp    x1, __image_end
1:  stp     xzr, xzr, [x0]
    stp     xzr, xzr, [x0, #16]
    stp     xzr, xzr, [x0, #32]
    stp     xzr, xzr, [x0, #48]
    add     x0, x0, #64
    cmp     x0, x1
    b.lo    1b

    // The image's pages: code, then constants, then all other sections.
    adrp    x20, _start
    adrp    x2, __text_end
    adrp    x3, __rodata_end
    adrp    x4, {pages}
    add     x4, x4, :lo12:{pages}
    ldr     x5, ={data}
    ldr     x6, ={constants}
    ldr     x7, ={code}
    mrs     x8, id_aa64isar0_el1
    ubfx    x8, x8, #20, #4         // Atomic: 2 is FEAT_LSE
    cmp     x8, #2
    b.hs    14f
    ldr     x7, ={writable_code}
14: mov     x0, x20
2:  cmp     x0, x3
    csel    x8, x6, x5, lo
    cmp     x0, x2
    csel    x8, x7, x8, lo
    orr     x8, x8, x0
    str     x8, [x4], #8
    add     x0, x0, #4096
    cmp     x0, x1
    b.lo    2b

    // The tables above them, with one 2 MiB entry for each table of pages.
    adrp    x4, {pages}
    add     x4, x4, :lo12:{pages}
    orr     x4, x4, #{table}
    adrp    x5, {level_2}
    add     x5, x5, :lo12:{level_2}
    mov     x6, #{tables}
3:  str     x4, [x5], #8
    add     x4, x4, #4096
    subs    x6, x6, #1
    b.ne    3b
    adrp    x4, {level_2}
    add     x4, x4, :lo12:{level_2}
    orr     x4, x4, #{table}
    adrp    x5, {level_3}
    add     x5, x5, :lo12:{level_3}
    str     x4, [x5, #(510 * 8)]    // 0xffffffff80000000, bits 38:30
    orr     x5, x5, #{table}
    adrp    x6, {root}
    add     x6, x6, :lo12:{root}
    str     x5, [x6, #(511 * 8)]    // bits 47:39

    ldr     x27, =primary_high
    b       enable_mmu
primary_high:
    adrp    x0, {stack}
    add     x0, x0, :lo12:{stack}
    mov     x1, #{stack_size}
    add     sp, x0, x1
    mov     x29, xzr
    mov     x0, x19
    mov     x1, x20
    bl      {begin}
    brk     #0

    // Another CPU: x0 is the top of its stack, which holds its number.
    .global secondary_start
secondary_start:
    mov     x19, x0
    bl      check_processor
    bl      check_atomics
    bl      leave_hypervisor
    ldr     x27, =secondary_high
    b       enable_mmu
secondary_high:
    mov     sp, x19
    mov     x29, xzr
    ldr     x0, [sp]
    bl      {secondary}
    brk     #0

    // Continues in EL1, with no traps of EL1 to EL2.
leave_hypervisor:
    ldr     x1, ={control_off}
    msr     sctlr_el1, x1
    mrs     x1, CurrentEL
    cmp     x1, #(2 << 2)
    b.eq    4f
    isb
    ret
4:  mov     x1, #(1 << 31)          // HCR_EL2.RW: EL1 is AArch64
    msr     hcr_el2, x1
    mov     x1, #0b11               // EL1 may use both counters and timers
    msr     cnthctl_el2, x1
    msr     cntvoff_el2, xzr
    mov     x1, #0x33ff             // CPTR_EL2: floating point is not trapped
    msr     cptr_el2, x1
    msr     hstr_el2, xzr
    mrs     x1, midr_el1
    msr     vpidr_el2, x1
    mrs     x1, mpidr_el1
    msr     vmpidr_el2, x1
    mrs     x1, id_aa64pfr0_el1
    ubfx    x1, x1, #24, #4
    cbz     x1, 5f                  // no GIC system registers
    mrs     x1, S3_4_C12_C9_5       // ICC_SRE_EL2: SRE, and EL1 may use them
    orr     x1, x1, #0b1
    orr     x1, x1, #0b1000
    msr     S3_4_C12_C9_5, x1
    isb
5:  mov     x1, #0x3c5              // EL1 with its own stack pointer, all masked
    msr     spsr_el2, x1
    msr     elr_el2, x30
    eret

    // Continues at the linked address in x27.
enable_mmu:
    ldr     x1, ={memory_types}
    msr     mair_el1, x1
    ldr     x1, ={translation}
    mrs     x2, id_aa64mmfr0_el1
    and     x2, x2, #0xf            // the physical addresses that the CPU has
    mov     x3, #5                  // 48 bits, all that the tables can say
    cmp     x2, x3
    csel    x2, x2, x3, lo
    bfi     x1, x2, #32, #3
    mrs     x2, id_aa64mmfr1_el1
    and     x2, x2, #0xf            // FEAT_HAFDBS: 1 is HA, 2 is HD too
    cbz     x2, 6f
    orr     x1, x1, #(1 << 39)
    cmp     x2, #1
    b.eq    6f
    orr     x1, x1, #(1 << 40)
6:  msr     tcr_el1, x1
    adrp    x1, {no_program}
    add     x1, x1, :lo12:{no_program}
    msr     ttbr0_el1, x1
    adrp    x1, {root}
    add     x1, x1, :lo12:{root}
    msr     ttbr1_el1, x1
    mov     x1, #(0b11 << 20)       // CPACR_EL1: floating point for all, SVE and SME for none
    msr     cpacr_el1, x1
    msr     mdscr_el1, xzr
    ldr     x1, =(landing - 0x200)
    msr     vbar_el1, x1
    dsb     sy
    tlbi    vmalle1
    ic      iallu
    dsb     nsh
    isb
    ldr     x1, ={control}
    mrs     x2, id_aa64pfr1_el1
    tst     x2, #0xf                // FEAT_BTI
    b.eq    13f
    orr     x1, x1, #{strict_pads}
13: msr     sctlr_el1, x1
    isb
    b       .                       // never fetched: see the module's text

    // Aligned so that a vector table may begin 0x200 bytes below, since this code is the table's
    // entry for exceptions of the kernel itself.
    .balign 2048
    .skip   0x200
landing:
    ldr     x1, ={vectors}
    msr     vbar_el1, x1
    mrs     x1, id_aa64mmfr1_el1
    ubfx    x1, x1, #20, #4
    cbz     x1, 7f
    .inst   0xd500419f              // msr pan, #1 (ARMv8.1)
7:  isb
    br      x27
    .ltorg
    "#,
    pages = sym IMAGE_PAGES,
    table = const TABLE,
    code = const CODE,
    writable_code = const WRITABLE_CODE,
    constants = const CONSTANTS,
    data = const DATA,
    tables = const IMAGE_TABLES,
    level_2 = sym IMAGE_LEVEL_2,
    level_3 = sym IMAGE_LEVEL_3,
    root = sym page_tables::ROOT,
    no_program = sym page_tables::NO_PROGRAM,
    stack = sym STACK,
    stack_size = const STACK_SIZE,
    begin = sym begin,
    secondary = sym smp::secondary,
    control = const SYSTEM_CONTROL,
    strict_pads = const STRICT_PADS,
    control_off = const SYSTEM_CONTROL_OFF,
    memory_types = const MEMORY_TYPES,
    translation = const TRANSLATION_CONTROL,
    vectors = sym entry::vectors,
);

/// Continues after the assembly: the image runs at its linked address, and nothing else is mapped.
/// `device_tree` and `image` are physical addresses.
extern "C" fn begin(device_tree: u64, image: u64) -> ! {
    page_tables::begin(image);
    if !cpu_features::atomics() {
        replace_atomics();
    }
    per_cpu::begin(&per_cpu::FIRST);
    context::set_beginning(entry::begin_thread);
    page_copy::begin();
    user_copy::begin();
    tlb::begin();
    start::begin(&machine::read(device_tree))
}

/// Replaces the atomic instructions of the image by loops behind it.
fn replace_atomics() {
    page_tables::HAS_LOOPS.store(true, Ordering::Relaxed);
    let code = (&raw const __instructions).addr()..(&raw const __text_end).addr();
    let room =
        (&raw const page_tables::__image_end).addr()..(&raw const page_tables::__loops_end).addr();
    map(&room, WRITABLE_CODE);
    tlb::publish_entries();
    // SAFETY: both are mapped writable, and no other CPU runs. The code's words are otherwise read
    // only as instructions, and the code on the way back has none of those that change. The room
    // belongs to nothing else.
    let (words, loops) = unsafe { (words(&code), words(&room)) };
    match exclusives::replace(words, loops) {
        Ok(_) => {}
        Err(Refusal::Room) => refuse("the image has no room for loops: see link/aarch64.ld"),
        Err(Refusal::Pair) => refuse("an atomic pair of words (CASP) has no loop"),
    }
    let whole = (&raw const page_tables::_start).addr()..code.end;
    for range in [whole, room] {
        page_copy::synchronize_at(range.start as u64, range.len() as u64);
        map(&range, CODE);
    }
    // SAFETY: TLBs of this CPU may have the code as writable.
    unsafe {
        asm!("dsb ishst", "tlbi vmalle1", "dsb nsh", "isb", options(nostack, preserves_flags));
    }
    if !exclusives::are_right() {
        refuse("the loops in their place compute other values: see exclusives.rs");
    }
}

/// Maps pages of the image, or of the loops behind it, with the permissions of `leaf`.
fn map(linked: &Range<usize>, leaf: u64) {
    let image = (&raw const page_tables::_start).addr();
    for at in linked.clone().step_by(PAGE_SIZE as usize) {
        let page = (at - image) / PAGE_SIZE as usize;
        let physical = page_tables::physical(core::ptr::without_provenance::<u8>(at));
        let entry = (&raw mut IMAGE_PAGES).cast::<u64>().wrapping_add(page);
        // SAFETY: `link/aarch64.ld` asserts that the tables have an entry for each page; the MMU
        // only reads them.
        unsafe { entry.write_volatile(leaf | physical & !(PAGE_SIZE - 1)) };
    }
}

/// The words of the image, or of the room behind it, at linked addresses.
///
/// # Safety
/// 1. The memory is mapped writable and used by nothing else.
unsafe fn words(linked: &Range<usize>) -> &'static mut [u32] {
    let start = core::ptr::with_exposed_provenance_mut(linked.start);
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts_mut(start, linked.len() / size_of::<u32>()) }
}

/// Ends the machine before it has a console.
fn refuse(why: &str) -> ! {
    for part in ["panic this processor has no atomic instructions (FEAT_LSE), and ", why, "\n"] {
        part.bytes().for_each(control::write_control);
    }
    control::power_off(Ended::Failed)
}
