//! From the machine's entry to [`crate::start`].
//!
//! QEMU loads the image and enters it by PVH: 32-bit mode, paging off, EBX with the physical
//! address of a structure that describes memory, modules and the command line (Xen's
//! `hvm_start_info`). The assembly maps the first gibibyte three times: at its physical address, in
//! the direct map, and where the kernel was linked. The Rust code starts on these tables and builds
//! the kernel's own (`page_tables`).

use core::arch::global_asm;

use bindery::addr::Frame;
use bindery::arch::{Level, MemoryType, Permissions};

use crate::boot::{Information, MAX_RANGES, Stretch};
use crate::start;

use super::per_cpu::Stack;
use super::{
    EntryFormat, context, cpu_check, cpu_features, entry, interrupts, machine, page_tables,
    per_cpu, serial, smp,
};

static mut BOOT_STACK: Stack<65536> = Stack::new();

/// Entries of the first tables: one that refers to the table at address 0, and a leaf of 2 MiB at
/// address 0 that allows everything. The assembly adds the addresses, since no code runs at its
/// linked address before these tables exist.
const TABLE: u64 = EntryFormat::table_entry(Frame(0)).0;
const LEAF: u64 = {
    let everything = Permissions::READ.union(Permissions::WRITE).union(Permissions::EXECUTE);
    EntryFormat::kernel_leaf(Frame(0), Level::PMD, everything, MemoryType::Normal).0
};

global_asm!(r#"
.section .note.pvh, "a", @note
    .balign 4
    .long 4, 8, 18                  // length of the name and of the contents, type
    .asciz "Xen"
    .quad pvh_start

.section .boot.text, "ax"
.code32
.global pvh_start
pvh_start:
    cli
    cld
    mov edi, ebx
    mov ebp, offset supported
    jmp check_processor
supported:
    lea eax, [boot_level_3 + {table}]
    mov [boot_level_4], eax
    mov [boot_level_4 + 256 * 8], eax
    mov [boot_level_4 + 511 * 8], eax
    lea eax, [boot_level_2 + {table}]
    mov [boot_level_3], eax
    mov [boot_level_3 + 510 * 8], eax
    xor ecx, ecx
    mov eax, {leaf}
1:  mov [boot_level_2 + ecx * 8], eax
    add eax, 0x200000
    inc ecx
    cmp ecx, 512
    jne 1b

    mov eax, cr4
    or eax, 0x20                    // PAE
    mov cr4, eax
    lea eax, [boot_level_4]
    mov cr3, eax
    mov ecx, 0xc0000080             // EFER: LME, NXE
    rdmsr
    or eax, 0x900
    wrmsr
    mov eax, 0x80050033             // PE, MP, ET, NE, WP, AM, PG
    mov cr0, eax
    lgdt [boot_segments_pointer]
    .byte 0xea                      // a far jump
    .long long_mode
    .word 8
.code64
long_mode:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov fs, eax
    mov gs, eax
    xor ebp, ebp
    mov edi, edi
    movabs rsp, offset {stack} + {stack_size}
    movabs rax, offset {entered}
    call rax
    ud2

    .balign 8
boot_segments:
    .quad 0, 0x00209a0000000000
boot_segments_pointer:
    .word 15
    .long boot_segments

.section .boot.bss, "aw", @nobits
    .balign 4096
boot_level_4: .skip 4096
boot_level_3: .skip 4096
boot_level_2: .skip 4096
.text
"#,
    stack = sym BOOT_STACK,
    stack_size = const size_of::<Stack<65536>>(),
    entered = sym entered,
    table = const TABLE,
    leaf = const LEAF,
);

/// The information that PVH passes (`hvm_start_info`, version 1).
#[repr(C)]
#[derive(Clone, Copy)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
    rsdp: u64,
    memory_map: u64,
    memory_map_entries: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Module {
    start: u64,
    size: u64,
    command_line: u64,
    reserved: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryMapEntry {
    start: u64,
    size: u64,
    kind: u32,
    reserved: u32,
}

const MAGIC: u32 = 0x336e_c578;
const USABLE: u32 = 1;

/// The first Rust code.
extern "C" fn entered(start_info: u64) -> ! {
    serial::begin();
    cpu_check::check_calls();
    interrupts::silence_old_controllers();
    per_cpu::begin(entry::system_call_entry as *const () as u64, entry::exception_entry);
    // SAFETY: the boot protocol put the structure there, and the boot tables map it.
    let start: StartInfo = unsafe { read(start_info) };
    assert!(
        start.magic == MAGIC && start.version >= 1,
        "the kernel was not entered by the PVH protocol: boot it with `bindery run`, or QEMU's \
         `-kernel`"
    );
    let mut information = information(&start);
    cpu_features::enable();
    entry::adapt();
    context::set_beginning(entry::begin_thread);
    let mut tables = page_tables::begin(&mut information);
    let machine = machine::begin(&mut tables, start.rsdp);
    information.cpus = machine.cpus().len();
    smp::begin(&mut tables);
    start::begin(&information)
}

/// # Safety
/// 1. There is a `T` at the physical address, within the first gibibyte.
unsafe fn read<T: Copy>(physical: u64) -> T {
    // SAFETY: the caller's promise; the boot protocol guarantees no alignment.
    unsafe { page_tables::direct_map(physical).cast::<T>().read_unaligned() }
}

fn information(start: &StartInfo) -> Information {
    let mut information = Information::EMPTY;
    let entries = (start.memory_map_entries as usize).min(MAX_RANGES * 4) as u64;
    let map = (0..entries).map(|index| -> MemoryMapEntry {
        // SAFETY: the structure gives this number of entries.
        unsafe { read(start.memory_map + index * size_of::<MemoryMapEntry>() as u64) }
    });
    for (slot, entry) in information.memory.iter_mut().zip(map.filter(|entry| entry.kind == USABLE))
    {
        *slot = Stretch { start: entry.start, end: entry.start.saturating_add(entry.size) };
    }
    if start.modules > 0 {
        // SAFETY: the structure gives its address.
        let module: Module = unsafe { read(start.module_list) };
        information.initramfs = Stretch { start: module.start, end: module.start + module.size };
    }
    let line = command_line(start.command_line);
    information.command_line = line;
    let line_end = start.command_line + line.len() as u64;
    information.reserved[..4].copy_from_slice(&[
        // The firmware's memory, and the page in which other CPUs begin.
        Stretch { start: 0, end: 1 << 20 },
        page_tables::image(),
        information.initramfs,
        Stretch { start: start.command_line, end: line_end },
    ]);
    information
}

/// The command line, up to the first byte that is not UTF-8.
fn command_line(at: u64) -> &'static str {
    if at == 0 {
        return "";
    }
    assert!(
        !smp::FIRST_PAGE.contains(&at),
        "the boot loader has put the command line into the page in which other CPUs begin"
    );
    // SAFETY: the boot protocol puts a text there that ends with a zero byte; its memory is kept
    // out of free memory.
    let line = unsafe { core::ffi::CStr::from_ptr(page_tables::direct_map(at).as_ptr().cast()) };
    match line.to_str() {
        Ok(line) => line,
        Err(problem) => {
            let good = &line.to_bytes()[..problem.valid_up_to()];
            core::str::from_utf8(good).unwrap_or("")
        }
    }
}
