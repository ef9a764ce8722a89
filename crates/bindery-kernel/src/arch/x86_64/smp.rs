//! The start of the other CPUs. Each initializes itself, and idles until threads run.
//!
//! Such a CPU begins in 16-bit mode, in a page below 1 MiB that the first CPU chooses. The code
//! there enters 64-bit mode at once, on tables with an identity mapping of that page. The CPU soon
//! leaves those tables, so neither a program's root nor the kernel's has the identity mapping.

use alloc::boxed::Box;
use core::arch::global_asm;
use core::ops::Range;
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use crate::boot::Stretch;
use crate::process::scheduler;
use crate::{log, self_test};

use super::super::shootdowns;
use super::per_cpu::{Local, Stack};
use super::{cpu_features, interrupts, machine, nanoseconds, page_tables, tlb};

/// The physical address of the first page.
pub const FIRST_PAGE: Range<u64> = 0x8000..0x9000;

/// As large as the stack of a thread, because the idle loop serves interrupts and ends the machine.
const STACK_SIZE: usize = 32 << 10;

/// The times for a CPU to start, in nanoseconds. The second attempt is for processors that miss the
/// first. A virtual CPU also waits for its share of the host.
const PATIENCE: [u64; 2] = [100_000_000, 10_000_000_000];

/// Commands of the local APIC (Intel SDM volume 3A, "Local Interrupt Command Register").
const INIT: u32 = 0x4500;
const START_UP: u32 = 0x4600 | (FIRST_PAGE.start >> 12) as u32;

global_asm!(r#"
.section .rodata
.global first_page_code
first_page_code:
.code16
    cli
    cld
    mov ax, cs
    mov ds, ax
    .set place, first_page_pointer - first_page_code
    lgdtd [place]
    .set place, first_page_root - first_page_code
    mov eax, [place]
    mov cr3, eax
    mov eax, 0x20                   // PAE
    mov cr4, eax
    mov ecx, 0xc0000080             // EFER: LME, NXE
    rdmsr
    or eax, 0x900
    wrmsr
    mov eax, 0x80050033             // PE, MP, ET, NE, WP, AM, PG
    mov cr0, eax
    .byte 0x66, 0xea                // a far jump
    .long {first_page} + (1f - first_page_code)
    .word 8
.code64
1:  xor eax, eax
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov fs, eax
    mov gs, eax
    xor ebp, ebp
    mov rsp, [rip + first_page_stack]
    mov rdi, [rip + first_page_local]
    movabs rax, offset {arrived}
    call rax
    ud2
    .balign 8
first_page_segments:
    .quad 0, 0x00209a0000000000
first_page_pointer:
    .word 15
    .long {first_page} + (first_page_segments - first_page_code)
    .balign 8
.global first_page_data
first_page_data:
first_page_root: .quad 0
first_page_stack: .quad 0
first_page_local: .quad 0
.global first_page_end
first_page_end:
.text
"#, first_page = const FIRST_PAGE.start, arrived = sym arrived);

unsafe extern "C" {
    static first_page_code: u8;
    static first_page_data: u8;
    static first_page_end: u8;
}

/// The root that identity-maps the first page.
static ROOT: AtomicU64 = AtomicU64::new(0);

/// The CPU that is awaited; 0 for none. Either the CPU takes the number away when it arrives, or the
/// first CPU when it gives up. So a late CPU sees that nothing counts on it.
static AWAITED: AtomicU16 = AtomicU16::new(0);

/// Builds the tables on which other CPUs begin.
pub fn begin(tables: &mut page_tables::Tables) {
    let page = Stretch { start: FIRST_PAGE.start, end: FIRST_PAGE.end };
    ROOT.store(tables.root_with_identity(page).start().0, Ordering::Relaxed);
}

/// Starts CPUs one after the other, until `count` run.
pub fn start_other_cpus(count: usize) {
    let own = interrupts::id();
    interrupts::set_id(0, own);
    let others = machine::get().cpus().iter().copied().filter(|id| *id != own);
    for (id, number) in others.zip(1..count as u16) {
        interrupts::set_id(number, id);
        if !start(id, number) {
            // The first page is not written again, since this CPU may still run the code there.
            log!(
                "CPU {number} does not respond: the kernel goes on without it and all further ones"
            );
            break;
        }
        log!("CPU {number} is up");
    }
}

/// Starts one CPU; `false` if it does not answer.
fn start(id: u32, number: u16) -> bool {
    let local = Box::leak(Box::new(Local::new(u64::from(number))));
    let stack = Box::leak(Box::new(Stack::<STACK_SIZE>::new()));
    let (code, data) = (&raw const first_page_code, &raw const first_page_data);
    let page = page_tables::direct_map(FIRST_PAGE.start).as_ptr();
    // SAFETY: the page is kept out of free memory, and no other CPU is in it: each has left before
    // the next is started. The code is shorter than the page.
    unsafe {
        page.copy_from_nonoverlapping(code, first_page_end_offset());
        let data = page.add(data as usize - code as usize).cast::<[u64; 3]>();
        let stack = core::ptr::from_mut(stack).add(1) as u64;
        data.write_unaligned([ROOT.load(Ordering::Relaxed), stack, &raw mut *local as u64]);
    }
    AWAITED.store(number, Ordering::Release);
    interrupts::send(id, INIT);
    wait(10_000, || false);
    let is_up = || shootdowns::others() >= u32::from(number);
    let answers = PATIENCE.into_iter().any(|patience| {
        interrupts::send(id, START_UP);
        wait(patience, is_up)
    });
    if !answers && AWAITED.swap(0, Ordering::AcqRel) == number {
        return false;
    }
    // A CPU that has arrived goes on by itself.
    while !wait(PATIENCE[0], is_up) {}
    true
}

fn first_page_end_offset() -> usize {
    &raw const first_page_end as usize - &raw const first_page_code as usize
}

/// Waits up to `patience` nanoseconds until `done` is true; returns whether it became true. Sleeps
/// in between, so that an emulator that runs one CPU at a time can run the others.
fn wait(patience: u64, done: impl Fn() -> bool) -> bool {
    const PIECE: u64 = 10_000;
    let until = nanoseconds() + patience;
    while !done() && nanoseconds() < until {
        super::set_timer(Some(nanoseconds() + PIECE));
        super::sleep();
    }
    done()
}

/// The entry of another CPU in 64-bit mode.
extern "C" fn arrived(local: *mut Local) -> ! {
    tlb::load_own_root();
    if AWAITED.swap(0, Ordering::AcqRel) == 0 {
        // Interrupts are off, so nothing wakes this CPU.
        loop {
            x86_64::instructions::hlt();
        }
    }
    // SAFETY: `start` made the block for this CPU, and the first CPU has made the gates.
    unsafe { Local::load(local) };
    cpu_features::enable();
    interrupts::begin_here();
    self_test::registers();
    tlb::join();
    scheduler::run_other()
}
