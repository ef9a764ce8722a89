//! Interrupts: a GICv3 (Arm IHI 0069). The only sources are the disk and the timer of each CPU.
//!
//! The CPU interface consists of system registers. The distributor and the redistributors are set
//! up once, at boot, which takes less code here than a driver crate.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use aarch64_cpu::registers::{MPIDR_EL1, Readable};
use bindery::platform::MAX_CPUS;
use spin::Once;

use super::super::interrupt_counts::{self, Reason};

/// The interrupt that CPUs send to each other.
const LOOK: u32 = 0;
/// The timer's interrupt.
static TIMER: AtomicU32 = AtomicU32::new(0);
/// The interrupt of the disk, and the function that serves it.
static DISK: Once<(u32, fn())> = Once::new();
/// The address of the distributor.
static DISTRIBUTOR: AtomicU64 = AtomicU64::new(0);
/// The start and the end of the redistributors' registers.
static REDISTRIBUTORS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Of the distributor.
mod distributor {
    pub const CONTROL: u64 = 0;
    pub const GROUP_1: u32 = 1 << 1;
    pub const AFFINITY_ROUTING: u32 = 1 << 4;
    pub const WRITE_PENDING: u32 = 1 << 31;
    /// A bit, a byte, two bits and 64 bits for each interrupt.
    pub const GROUP: u64 = 0x80;
    pub const ENABLE: u64 = 0x100;
    pub const PRIORITY: u64 = 0x400;
    pub const CONFIGURATION: u64 = 0xc00;
    pub const ROUTE: u64 = 0x6000;
}

/// Registers of a redistributor: two pages of 64 KiB, and two more if the redistributor supports
/// virtual interrupts.
mod redistributor {
    pub const TYPE: u64 = 0x8;
    pub const TYPE_VIRTUAL: u32 = 1 << 1;
    pub const TYPE_LAST: u32 = 1 << 4;
    pub const AFFINITY: u64 = 0xc;
    pub const WAKER: u64 = 0x14;
    pub const ASLEEP: u32 = 1 << 1;
    pub const CHILDREN_ASLEEP: u32 = 1 << 2;
    pub const GROUP: u64 = 0x1_0080;
    pub const ENABLE: u64 = 0x1_0100;
    pub const PRIORITY: u64 = 0x1_0400;
}

/// Numbers from here on mean that no interrupt is pending.
const NONE: u32 = 1020;

fn register(at: u64) -> *mut u32 {
    core::ptr::with_exposed_provenance_mut(at as usize)
}

fn read(at: u64) -> u32 {
    // SAFETY: a register of the interrupt controller, mapped when it was found.
    unsafe { register(at).read_volatile() }
}

fn write(at: u64, value: u32) {
    // SAFETY: as in `read`; the registers concern only interrupts, which are off.
    unsafe { register(at).write_volatile(value) };
}

/// Initializes the controller whose registers are mapped at these addresses.
pub fn begin(at: u64, redistributors: (u64, u64), timer: u32) {
    TIMER.store(timer, Ordering::Relaxed);
    DISTRIBUTOR.store(at, Ordering::Relaxed);
    REDISTRIBUTORS[0].store(redistributors.0, Ordering::Relaxed);
    REDISTRIBUTORS[1].store(redistributors.1, Ordering::Relaxed);
    write(at + distributor::CONTROL, distributor::AFFINITY_ROUTING | distributor::GROUP_1);
    while read(at + distributor::CONTROL) & distributor::WRITE_PENDING != 0 {
        pause();
    }
    begin_cpu();
}

/// Routes a shared, edge-triggered interrupt to the calling CPU; `serve` handles it.
pub fn route(number: u32, serve: fn()) {
    use distributor as d;
    let at = DISTRIBUTOR.load(Ordering::Relaxed);
    let (word, bit) = (u64::from(number / 32) * 4, 1 << (number % 32));
    DISK.call_once(|| (number, serve));
    write(at + d::GROUP + word, read(at + d::GROUP + word) | bit);
    let configuration = at + d::CONFIGURATION + u64::from(number / 16) * 4;
    write(configuration, read(configuration) | 0b10 << (number % 16 * 2));
    let affinity = MPIDR_EL1.get() & 0xff_00ff_ffff;
    // SAFETY: as in `write`; priorities are bytes, and routes are affinities of 64 bits.
    unsafe {
        register(at + d::PRIORITY).cast::<u8>().add(number as usize).write_volatile(0x80);
        register(at + d::ROUTE + u64::from(number) * 8).cast::<u64>().write_volatile(affinity);
    }
    write(at + d::ENABLE + word, bit);
}

/// Enables the interrupts of the timer and of other CPUs on the calling CPU.
///
/// # Panics
/// If no redistributor belongs to the CPU.
pub fn begin_cpu() {
    use redistributor as r;
    let own = own_redistributor().expect("each CPU has a redistributor");
    write(own + r::WAKER, read(own + r::WAKER) & !r::ASLEEP);
    while read(own + r::WAKER) & r::CHILDREN_ASLEEP != 0 {
        pause();
    }
    let timer = TIMER.load(Ordering::Relaxed);
    write(own + r::GROUP, u32::MAX);
    // SAFETY: as in `write`; priorities are bytes.
    unsafe {
        for number in [timer, LOOK] {
            register(own + r::PRIORITY).cast::<u8>().add(number as usize).write_volatile(0x80);
        }
    }
    write(own + r::ENABLE, 1 << timer | 1 << LOOK);
    // SAFETY: the CPU's own interface, while interrupts are off: system registers instead of
    // memory, all priorities, group 1. By number, since ICC_IGRPEN1_EL1 and the others are newer
    // than the target's baseline: ICC_SRE_EL1, ICC_PMR_EL1, ICC_IGRPEN1_EL1.
    unsafe {
        asm!(
            "mrs {register}, s3_0_c12_c12_5",
            "orr {register}, {register}, #1",
            "msr s3_0_c12_c12_5, {register}",
            "isb",
            "msr s3_0_c4_c6_0, {all}",
            "msr s3_0_c12_c12_7, {on}",
            "isb",
            register = out(reg) _, all = in(reg) 0xff_u64, on = in(reg) 1_u64,
            options(nostack, preserves_flags)
        );
    }
}

fn own_redistributor() -> Option<u64> {
    use redistributor as r;
    let cpu = MPIDR_EL1.get();
    // Affinities 3 to 0, one byte each, in the redistributor's format.
    let affinity = (cpu >> 8 & 0xff00_0000 | cpu & 0x00ff_ffff) as u32;
    let mut at = REDISTRIBUTORS[0].load(Ordering::Relaxed);
    while at < REDISTRIBUTORS[1].load(Ordering::Relaxed) {
        let kind = read(at + r::TYPE);
        if read(at + r::AFFINITY) == affinity {
            return Some(at);
        }
        if kind & r::TYPE_LAST != 0 {
            break;
        }
        at += if kind & r::TYPE_VIRTUAL != 0 { 256 << 10 } else { 128 << 10 };
    }
    None
}

/// An acknowledged interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// The timer's.
    Timer,
    /// Any other. If it was the disk's, it has been handled.
    Other,
    /// No interrupt was pending.
    None,
}

/// Acknowledges a pending interrupt, if any.
pub fn take() -> Taken {
    let number: u64;
    // SAFETY: reads the interrupt's number from ICC_IAR1_EL1 and ends it at once by ICC_EOIR1_EL1,
    // since another thread may run before this function returns. The timer keeps its interrupt
    // pending until `trap::timer` programs it again.
    unsafe {
        asm!(
            "mrs {number}, s3_0_c12_c12_0",
            "msr s3_0_c12_c12_1, {number}",
            "isb",
            number = out(reg) number, options(nostack, preserves_flags)
        );
    }
    if let Some((disk, serve)) = DISK.get()
        && u64::from(*disk) == number
    {
        serve();
        return Taken::Other;
    }
    match number as u32 {
        timer if timer == TIMER.load(Ordering::Relaxed) => Taken::Timer,
        NONE.. => Taken::None,
        _ => Taken::Other,
    }
}

/// Passes a moment in a loop that waits for another CPU.
///
/// The hint of the Rust library is a barrier here (`ISB`). At a `YIELD`, an emulator that runs one
/// CPU at a time goes on with the next one. Otherwise it would run this one to the end of a slice of
/// seconds.
#[inline]
pub fn pause() {
    // SAFETY: the instruction changes nothing.
    unsafe { asm!("yield", options(nomem, nostack, preserves_flags)) }
}

/// Sleeps until an interrupt arrives. Interrupts stay masked. `WFI` wakes all the same, so no
/// interrupt is lost between the last check for work and the sleep.
pub fn sleep() {
    aarch64_cpu::asm::wfi();
}

/// Acknowledges the interrupt that has ended a [`sleep`]. Returns whether it was a timer interrupt,
/// which the caller has to handle.
pub fn after_sleep() -> bool {
    take() == Taken::Timer
}

/// The affinities of the CPUs.
static AFFINITIES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Names the affinity of a CPU, as `MPIDR_EL1` has it.
pub fn set_affinity(cpu: u16, affinity: u64) {
    AFFINITIES[usize::from(cpu)].store(affinity, Ordering::Relaxed);
}

/// The interrupts between CPUs: the reason, and Linux's name and text in `/proc/interrupts`.
pub const INTERRUPT_NAMES: [(Reason, &str, &str); 2] = [
    (Reason::Look, "IPI0", "Rescheduling interrupts"),
    (Reason::Order, "IPI1", "Function call interrupts"),
];

/// Makes another CPU look for work.
pub fn interrupt(cpu: u16) {
    send_to(cpu, Reason::Look);
}

/// Makes another CPU look for work and for requests, by software-generated interrupt 0.
pub fn send_to(cpu: u16, reason: Reason) {
    interrupt_counts::count(reason, cpu);
    let affinity = AFFINITIES[usize::from(cpu)].load(Ordering::Relaxed);
    let (first, rest) = (affinity & 0xff, affinity >> 8);
    // Affinities 3 to 1, the group of 16 CPUs, and one bit for the CPU in it.
    let value = (rest >> 24 & 0xff) << 48
        | (first >> 4) << 44
        | (rest >> 8 & 0xff) << 32
        | (rest & 0xff) << 16
        | 1 << (first & 0xf);
    // SAFETY: ICC_SGI1R_EL1, which only interrupts. The barrier orders earlier writes before it.
    unsafe {
        asm!("dsb ishst", "msr s3_0_c12_c11_5, {value}", "isb", value = in(reg) value,
            options(nostack, preserves_flags));
    }
}
