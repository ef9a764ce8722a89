//! Clocks and the timer: the time-stamp counter for the time, the local APIC's timer for
//! interrupts, the real-time clock for the date.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use x86_64::instructions::port::Port;

use super::interrupts;
use super::machine::Machine;

/// Nanoseconds in a second.
const SECOND: u64 = 1_000_000_000;

/// The frequency of the power-management timer in Hz.
const TIMER_FREQUENCY: u64 = 3_579_545;
/// The timer has at least 24 bits.
const TIMER_MASK: u32 = 0xff_ffff;
/// The counts of one measurement: a third of a millisecond.
const MEASURED_COUNTS: u64 = 1193;

/// Nanoseconds per tick of the time-stamp counter, times 2^32.
static NANOSECONDS_PER_TICK: AtomicU64 = AtomicU64::new(1 << 32);
/// Ticks of the local APIC's timer per nanosecond, times 2^32.
static TIMER_TICKS_PER_NANOSECOND: AtomicU64 = AtomicU64::new(1 << 32);

#[inline]
fn ticks() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter.
    unsafe {
        asm!("rdtsc", out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags))
    };
    u64::from(high) << 32 | u64::from(low)
}

#[inline]
fn scale(value: u64, by: &AtomicU64) -> u64 {
    ((u128::from(value) * u128::from(by.load(Ordering::Relaxed))) >> 32) as u64
}

/// Nanoseconds since power-on: the counter begins with the machine.
#[inline]
pub fn nanoseconds() -> u64 {
    scale(ticks(), &NANOSECONDS_PER_TICK)
}

/// The next timer interrupt of this CPU.
pub fn set_timer(at: Option<u64>) {
    let ticks = at.map_or(0, |at| {
        let left = at.saturating_sub(nanoseconds());
        // A time beyond the timer's range: the timer interrupts earlier and is then set again.
        scale(left, &TIMER_TICKS_PER_NANOSECOND).clamp(1, u64::from(u32::MAX))
    });
    interrupts::start_timer(ticks as u32);
}

/// Reads all counters, right after a step of the timer of known frequency.
#[derive(Clone, Copy)]
struct Moment {
    timer: u32,
    ticks: u64,
    local_timer: u32,
}

impl Moment {
    fn next(port: u16) -> Self {
        let mut port = Port::<u32>::new(port);
        // SAFETY: the firmware's tables name the timer's port; reading it changes nothing.
        let mut read = || unsafe { port.read() } & TIMER_MASK;
        let before = read();
        loop {
            let timer = read();
            if timer != before {
                return Self { timer, ticks: ticks(), local_timer: interrupts::timer_count() };
            }
        }
    }
}

/// Measures the frequencies of the time-stamp counter and the local APIC's timer. Takes the median
/// of three short measurements, since the host may stop the machine during one of them.
pub fn calibrate(machine: &Machine) {
    interrupts::start_timer(u32::MAX);
    let mut measured = [(); 3].map(|()| {
        let begin = Moment::next(machine.timer_port);
        loop {
            let end = Moment::next(machine.timer_port);
            let counts = u64::from(end.timer.wrapping_sub(begin.timer) & TIMER_MASK);
            if counts >= MEASURED_COUNTS {
                let local = u64::from(begin.local_timer - end.local_timer);
                break (frequency(end.ticks - begin.ticks, counts), frequency(local, counts));
            }
        }
    });
    interrupts::start_timer(0);
    measured.sort_unstable();
    let (ticks, local) = measured[1];
    NANOSECONDS_PER_TICK.store((SECOND << 32) / ticks, Ordering::Relaxed);
    let per_nanosecond = (u128::from(local) << 32) / u128::from(SECOND);
    TIMER_TICKS_PER_NANOSECOND.store(per_nanosecond as u64, Ordering::Relaxed);
}

/// In tenths of a megahertz, the precision of the measurement.
fn frequency(ticks: u64, counts: u64) -> u64 {
    const STEP: u64 = 100_000;
    let measured = ticks * TIMER_FREQUENCY / counts;
    (measured + STEP / 2) / STEP * STEP
}

/// A register of the machine's clock.
fn clock(register: u8) -> u8 {
    // SAFETY: the ports of the clock, which touch no memory; bit 7 keeps non-maskable interrupts
    // as they are after power-on.
    unsafe {
        Port::new(0x70).write(register);
        Port::new(0x71).read()
    }
}

/// Seconds since 1970 by the machine's clock.
pub fn real_time() -> u64 {
    const UPDATING: u8 = 1 << 7;
    const FORMAT: u8 = 0xb;
    const BINARY: u8 = 1 << 2;
    const WHOLE_DAY: u8 = 1 << 1;
    const AFTERNOON: u8 = 1 << 7;
    let read = || {
        while clock(0xa) & UPDATING != 0 {
            core::hint::spin_loop();
        }
        [0, 2, 4, 7, 8, 9, 0x32].map(clock)
    };
    // Two equal readings mean that the clock did not advance between the first register and the
    // last.
    let mut now = read();
    loop {
        let again = read();
        if now == again {
            break;
        }
        now = again;
    }
    let format = clock(FORMAT);
    let afternoon = now[2] & AFTERNOON != 0;
    now[2] &= !AFTERNOON;
    if format & BINARY == 0 {
        now = now.map(|value| value / 16 * 10 + value % 16);
    }
    let [second, minute, mut hour, day, month, year, century] = now.map(u64::from);
    if format & WHOLE_DAY == 0 {
        hour = hour % 12 + if afternoon { 12 } else { 0 };
    }
    let century = if century < 19 { 20 } else { century };
    days(century * 100 + year, month, day) * 86_400 + hour * 3600 + minute * 60 + second
}

/// Days from 1970-01-01 to a date. Years are taken to begin in March, so that a leap day is the
/// last of its year.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let leap_days = year / 4 - year / 100 + year / 400;
    let days = year * 365 + leap_days + (153 * month + 2) / 5 + day;
    const FIRST: u64 = 1969 * 365 + 1969 / 4 - 1969 / 100 + 1969 / 400 + (153 * 10 + 2) / 5 + 1;
    days.saturating_sub(FIRST)
}
