//! Interrupts: the local APIC, with its timer and the interrupts between CPUs. The disk is the only
//! other source.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bindery::platform::MAX_CPUS;

use x86_64::instructions::port::Port;

use super::super::interrupt_counts::{self, Reason};

/// The vector of the timer.
pub const TIMER: u64 = 32;
/// The vector of a TLB flush on other CPUs.
pub const FORGET: u64 = 33;
/// The vector that makes another CPU look for work.
pub const LOOK: u64 = 35;
/// The vector of the disk.
pub const DISK: u64 = 34;
/// The vector of a spurious interrupt, which was withdrawn before its delivery.
pub const FALSE_ALARM: u64 = 47;

/// The interrupts between CPUs: the reason, and Linux's name and text in `/proc/interrupts`.
pub const INTERRUPT_NAMES: [(Reason, &str, &str); 3] = [
    (Reason::Look, "RES", "Rescheduling interrupts"),
    (Reason::Order, "CAL", "Function call interrupts"),
    (Reason::Flush, "TLB", "TLB shootdowns"),
];

const ID: u64 = 0x20;
const END_OF_INTERRUPT: u64 = 0xb0;
const FALSE_ALARM_VECTOR: u64 = 0xf0;
const COMMAND_LOW: u64 = 0x300;
const COMMAND_HIGH: u64 = 0x310;
const TIMER_VECTOR: u64 = 0x320;
const INITIAL_COUNT: u64 = 0x380;
const CURRENT_COUNT: u64 = 0x390;
const DIVISOR: u64 = 0x3e0;

/// In [`FALSE_ALARM_VECTOR`]: the local APIC is enabled.
const ENABLED: u32 = 1 << 8;
/// In [`COMMAND_LOW`]: the last command has not been accepted yet.
const PENDING: u32 = 1 << 12;
/// In [`DIVISOR`].
const BY_ONE: u32 = 0b1011;

/// The numbers of the CPUs' local APICs.
static IDS: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];

/// The address of the mapped registers.
static REGISTERS: AtomicU64 = AtomicU64::new(0);

fn register(offset: u64) -> *mut u32 {
    (REGISTERS.load(Ordering::Relaxed) + offset) as *mut u32
}

fn read(offset: u64) -> u32 {
    // SAFETY: `begin` has mapped the registers; reading these changes nothing.
    unsafe { register(offset).read_volatile() }
}

fn write(offset: u64, value: u32) {
    // SAFETY: as in `read`; the writes of this file touch no memory.
    unsafe { register(offset).write_volatile(value) }
}

/// Masks both 8259 controllers. The firmware leaves their timer at vector 8, which would look like
/// a double fault.
pub fn silence_old_controllers() {
    for data_port in [0x21, 0xa1] {
        // SAFETY: the controllers' ports, which touch no memory.
        unsafe { Port::<u8>::new(data_port).write(0xff) };
    }
}

/// Records the address of the mapped registers and sets up those of the first CPU.
pub fn begin(registers: *mut u8) {
    REGISTERS.store(registers as u64, Ordering::Relaxed);
    begin_here();
}

/// Sets up the local APIC of this CPU.
pub fn begin_here() {
    write(FALSE_ALARM_VECTOR, ENABLED | FALSE_ALARM as u32);
    write(DIVISOR, BY_ONE);
    write(TIMER_VECTOR, TIMER as u32); // one shot
}

/// The number of this CPU's local APIC.
pub fn id() -> u32 {
    read(ID) >> 24
}

/// Signals the end of the interrupt.
pub fn served() {
    write(END_OF_INTERRUPT, 0);
}

/// Sets the timer to interrupt after this many ticks; 0 stops it.
pub fn start_timer(ticks: u32) {
    write(INITIAL_COUNT, ticks);
}

/// The ticks left.
pub fn timer_count() -> u32 {
    read(CURRENT_COUNT)
}

/// Sends a command to another CPU's local APIC: the lower half of the command register.
pub fn send(to: u32, command: u32) {
    write(COMMAND_HIGH, to << 24);
    send_low(command);
}

/// Interrupts the CPU of this number.
pub fn send_to(cpu: u16, reason: Reason) {
    const ASSERT: u32 = 1 << 14;
    interrupt_counts::count(reason, cpu);
    let vector = match reason {
        Reason::Look => LOOK,
        Reason::Order | Reason::Flush => FORGET,
    };
    send(IDS[usize::from(cpu)].load(Ordering::Relaxed), ASSERT | vector as u32);
}

/// Makes another CPU look for work.
pub fn interrupt(cpu: u16) {
    send_to(cpu, Reason::Look);
}

/// Names the local APIC of a CPU.
pub fn set_id(cpu: u16, id: u32) {
    IDS[usize::from(cpu)].store(id, Ordering::Relaxed);
}

fn send_low(command: u32) {
    write(COMMAND_LOW, command);
    while read(COMMAND_LOW) & PENDING != 0 {
        core::hint::spin_loop();
    }
}

/// Sleeps until an interrupt has arrived, with interrupts enabled. The caller does not hold the
/// kernel's lock.
pub fn sleep() {
    // `sti` takes effect after `hlt` has begun, so a pending interrupt is handled there and ends
    // the sleep.
    x86_64::instructions::interrupts::enable_and_hlt();
    x86_64::instructions::interrupts::disable();
}

/// Completes [`sleep`]. Returns whether a timer interrupt arrived that the caller has to handle. On
/// x86-64 the entry code has already handled it.
pub fn after_sleep() -> bool {
    false
}
