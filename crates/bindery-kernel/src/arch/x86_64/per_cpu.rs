//! The state of each CPU: segments, the task state with its stacks, and the block that GS points to
//! in the kernel.

use core::arch::asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering};

use super::super::cpu_record::CpuRecord;
use x86_64::PrivilegeLevel;
use x86_64::VirtAddr;
use x86_64::instructions::tables::{lgdt, lidt, load_tss};
use x86_64::registers::model_specific::{GsBase, KernelGsBase, LStar, SFMask, Star};
use x86_64::registers::rflags::RFlags;
use x86_64::registers::segmentation::{CS, DS, ES, SS, Segment};
use x86_64::structures::DescriptorTablePointer;
use x86_64::structures::gdt::{Descriptor, DescriptorFlags, SegmentSelector};
use x86_64::structures::tss::TaskStateSegment;

/// The selectors have Linux's values, because programs see theirs.
pub const KERNEL_CODE: u16 = 2 << 3;
const KERNEL_DATA: u16 = 3 << 3;
/// The data of programs.
pub const USER_DATA: u16 = 5 << 3 | 3;
/// The code of programs.
pub const USER_CODE: u16 = 6 << 3 | 3;
const TASK: u16 = 7 << 3;

/// Vectors that can be taken: 32 exceptions, the timer, the interrupt that one CPU sends to the
/// others, and the local APIC's spurious interrupt.
pub const VECTORS: usize = 48;

/// Offsets in the block that GS points to.
pub(super) const KERNEL_STACK: usize = offset_of!(Local, kernel_stack);
pub(super) const USER_STACK: usize = offset_of!(Local, user_stack);

/// A stack.
#[repr(C, align(16))]
pub struct Stack<const SIZE: usize>([u8; SIZE]);

impl<const SIZE: usize> Stack<SIZE> {
    /// An unused stack.
    pub const fn new() -> Self {
        Self([0; SIZE])
    }
}

/// The block that GS points to.
#[repr(C)]
pub struct Local {
    /// The address of the block, since no instruction loads the base of GS cheaply.
    this: *const Self,
    /// The top of the running thread's kernel stack.
    kernel_stack: u64,
    /// Scratch space for a program's stack pointer during entry.
    user_stack: u64,
    record: CpuRecord,
    task: TaskStateSegment,
    segments: [u64; 9],
    /// The stack of double faults and of exceptions that cannot be masked, which may arrive with
    /// any value in the stack pointer.
    stacks: [Stack<8192>; 2],
}

static mut FIRST: Local = Local::new(0);

/// The gates of exceptions and interrupts. All CPUs share them; the first CPU creates them.
static mut GATES: [u128; VECTORS] = [0; VECTORS];

impl Local {
    /// The block of CPU `number`.
    pub const fn new(number: u64) -> Self {
        Self {
            this: core::ptr::null(),
            kernel_stack: 0,
            user_stack: 0,
            record: CpuRecord::new(number),
            task: TaskStateSegment::new(),
            segments: [0; 9],
            stacks: [const { Stack::new() }; 2],
        }
    }

    /// Makes the running CPU use the block. From here on the CPU handles exceptions, and [`cpu`]
    /// works.
    ///
    /// # Safety
    /// 1. The block stays there forever, nothing else uses it, and the gates are made.
    pub unsafe fn load(this: *mut Self) {
        // SAFETY: the caller's promise; the descriptors and stacks belong to the block.
        unsafe {
            (*this).this = this;
            for index in 0..2 {
                let top = (&raw mut (*this).stacks[index]).add(1);
                (*this).task.interrupt_stack_table[index] = VirtAddr::new(top as u64);
            }
            let (low, high) = match Descriptor::tss_segment_unchecked(&raw const (*this).task) {
                Descriptor::SystemSegment(low, high) => (low, high),
                Descriptor::UserSegment(_) => unreachable!("a task state is a system segment"),
            };
            // Linux has the 32-bit code of programs at index 4. Here the entry is empty, because no
            // program enters 32-bit mode.
            (*this).segments = [
                0,
                0,
                DescriptorFlags::KERNEL_CODE64.bits(),
                DescriptorFlags::KERNEL_DATA.bits(),
                0,
                DescriptorFlags::USER_DATA.bits(),
                DescriptorFlags::USER_CODE64.bits(),
                low,
                high,
            ];
            lgdt(&pointer(&raw const (*this).segments));
            lidt(&pointer(&raw const GATES));
            CS::set_reg(SegmentSelector(KERNEL_CODE));
            SS::set_reg(SegmentSelector(KERNEL_DATA));
            DS::set_reg(SegmentSelector::NULL);
            ES::set_reg(SegmentSelector::NULL);
            load_tss(SegmentSelector(TASK));
            GsBase::write(VirtAddr::from_ptr(this));
            KernelGsBase::write(VirtAddr::zero());
            // The kernel does not use SYSRET, so its base stays 0.
            Star::write_raw(0, KERNEL_CODE);
        }
        LStar::write(VirtAddr::new(SYSTEM_CALLS.load(Ordering::Relaxed)));
        SFMask::write(
            RFlags::INTERRUPT_FLAG
                | RFlags::TRAP_FLAG
                | RFlags::DIRECTION_FLAG
                | RFlags::ALIGNMENT_CHECK
                | RFlags::NESTED_TASK,
        );
    }
}

fn pointer<T>(table: *const T) -> DescriptorTablePointer {
    DescriptorTablePointer { limit: (size_of::<T>() - 1) as u16, base: VirtAddr::from_ptr(table) }
}

/// The entry of system calls, on all CPUs.
static SYSTEM_CALLS: AtomicU64 = AtomicU64::new(0);

/// Makes the gates and sets up the first CPU. `system_calls` is the entry of system calls;
/// `exceptions` returns the entry of a vector.
pub fn begin(system_calls: u64, exceptions: impl Fn(usize) -> u64) {
    SYSTEM_CALLS.store(system_calls, Ordering::Relaxed);
    const BREAKPOINT: usize = 3;
    const DOUBLE_FAULT: usize = 8;
    const NON_MASKABLE: usize = 2;
    const MACHINE_CHECK: usize = 18;
    let gates = core::array::from_fn(|vector| {
        let privilege =
            if vector == BREAKPOINT { PrivilegeLevel::Ring3 } else { PrivilegeLevel::Ring0 };
        let stack = match vector {
            DOUBLE_FAULT => 1,
            NON_MASKABLE | MACHINE_CHECK => 2,
            _ => 0,
        };
        gate(exceptions(vector), stack, privilege)
    });
    // SAFETY: no other code runs this early.
    unsafe { GATES = gates };
    // SAFETY: a static that nothing else uses, and the gates are made.
    unsafe { Local::load(&raw mut FIRST) };
}

/// An interrupt gate (Intel SDM volume 3A, "64-Bit Mode IDT").
fn gate(handler: u64, stack: u64, privilege: PrivilegeLevel) -> u128 {
    const INTERRUPT_GATE: u64 = 0xe;
    let low = handler & 0xffff
        | u64::from(KERNEL_CODE) << 16
        | stack << 32
        | INTERRUPT_GATE << 40
        | (privilege as u64) << 45
        | 1 << 47
        | (handler >> 16 & 0xffff) << 48;
    u128::from(low) | u128::from(handler >> 32) << 64
}

/// The number of the calling CPU.
#[inline]
pub fn cpu() -> u16 {
    const NUMBER: usize = offset_of!(Local, record) + offset_of!(CpuRecord, number);
    let number: u32;
    // SAFETY: in the kernel GS points to this CPU's block.
    unsafe {
        asm!("mov {:e}, gs:[{}]", out(reg) number, const NUMBER,
            options(pure, readonly, nostack, preserves_flags));
    }
    number as u16
}

/// The record of the calling CPU. After a sleep the caller may run on another CPU.
#[inline]
pub fn this_cpu() -> &'static CpuRecord {
    let this: *const Local;
    // SAFETY: as in `cpu`. The block stays there forever, and its record is only shared.
    unsafe {
        asm!("mov {}, gs:[{}]", out(reg) this, const offset_of!(Local, this),
            options(pure, readonly, nostack, preserves_flags));
        &(*this).record
    }
}

/// The running thread, as [`CpuRecord::running`] has it.
#[inline]
pub fn running() -> *mut () {
    const RUNNING: usize = offset_of!(Local, record) + offset_of!(CpuRecord, running);
    let running: *mut ();
    // SAFETY: as in `cpu`. One instruction, since system calls ask for the thread several times.
    unsafe {
        asm!("mov {}, gs:[{}]", out(reg) running, const RUNNING,
            options(pure, readonly, nostack, preserves_flags));
    }
    running
}

/// The loaded address space, as [`CpuRecord::space`] has it.
#[inline]
pub fn loaded_space() -> *mut () {
    const SPACE: usize = offset_of!(Local, record) + offset_of!(CpuRecord, space);
    let space: *mut ();
    // SAFETY: as in `cpu`. One instruction, since each fault asks for the space.
    unsafe {
        asm!("mov {}, gs:[{}]", out(reg) space, const SPACE,
            options(pure, readonly, nostack, preserves_flags));
    }
    space
}

/// Sets the stack on which this CPU enters the kernel from a program: by system calls, and by
/// exceptions.
pub fn set_kernel_stack(top: *mut u8) {
    const STACK_0: usize =
        offset_of!(Local, task) + offset_of!(TaskStateSegment, privilege_stack_table);
    // SAFETY: as in `cpu`; both words exist for this.
    unsafe {
        asm!("mov gs:[{}], {top}", "mov gs:[{}], {top}", const KERNEL_STACK, const STACK_0,
            top = in(reg) top, options(nostack, preserves_flags));
    }
}
