//! Time: the counter and the virtual timer of the CPU, and the machine's clock (PL031).

use core::sync::atomic::{AtomicU64, Ordering};

use aarch64_cpu::registers::{
    CNTFRQ_EL0, CNTKCTL_EL1, CNTV_CTL_EL0, CNTV_CVAL_EL0, CNTVCT_EL0, Readable, Writeable,
};

/// Nanoseconds in a second.
const SECOND: u64 = 1_000_000_000;

/// Fraction bits of [`NANOSECONDS_PER_TICK`]: enough for frequencies from 1 MHz.
const NANOSECONDS_SHIFT: u32 = 52;
/// Fraction bits of [`TICKS_PER_NANOSECOND`]: enough for frequencies up to 16 GHz.
const TICKS_SHIFT: u32 = 60;

static NANOSECONDS_PER_TICK: AtomicU64 = AtomicU64::new(0);
static TICKS_PER_NANOSECOND: AtomicU64 = AtomicU64::new(0);

/// The address of the PL031's registers; 0 if there is none.
static CALENDAR: AtomicU64 = AtomicU64::new(0);

/// Reads the counter's frequency from the CPU; `calendar` is the address of the clock with the time
/// of day.
pub fn begin(calendar: Option<u64>) {
    let frequency = CNTFRQ_EL0.get();
    assert!(
        (1_000_000..16_000_000_000).contains(&frequency),
        "the counter's frequency of {frequency} Hz is outside of 1 MHz to 16 GHz: firmware has \
         to set CNTFRQ_EL0"
    );
    let nanoseconds = (u128::from(SECOND) << NANOSECONDS_SHIFT) / u128::from(frequency);
    let ticks = (u128::from(frequency) << TICKS_SHIFT) / u128::from(SECOND);
    NANOSECONDS_PER_TICK.store(nanoseconds as u64, Ordering::Relaxed);
    TICKS_PER_NANOSECOND.store(ticks as u64, Ordering::Relaxed);
    CALENDAR.store(calendar.unwrap_or(0), Ordering::Relaxed);
    begin_cpu();
}

/// Sets up the timer of the calling CPU.
pub fn begin_cpu() {
    CNTV_CTL_EL0.set(0);
    // Programs may read only the virtual counter and its frequency.
    CNTKCTL_EL1.write(CNTKCTL_EL1::EL0VCTEN::SET);
}

/// Nanoseconds since power-on.
#[inline]
pub fn nanoseconds() -> u64 {
    let scale = NANOSECONDS_PER_TICK.load(Ordering::Relaxed);
    (u128::from(CNTVCT_EL0.get()) * u128::from(scale) >> NANOSECONDS_SHIFT) as u64
}

/// Seconds since 1970, or since power-on if the machine has no clock.
pub fn real_time() -> u64 {
    let calendar = CALENDAR.load(Ordering::Relaxed);
    if calendar == 0 {
        return nanoseconds() / SECOND;
    }
    let data = core::ptr::with_exposed_provenance::<u32>(calendar as usize);
    // SAFETY: the data register, mapped when the device was found.
    u64::from(unsafe { data.read_volatile() })
}

/// Sets the next timer interrupt of this CPU, or none.
pub fn set_timer(at: Option<u64>) {
    let Some(at) = at else {
        return CNTV_CTL_EL0.set(0);
    };
    let scale = TICKS_PER_NANOSECOND.load(Ordering::Relaxed);
    let ticks = u128::from(at) * u128::from(scale) >> TICKS_SHIFT;
    // Rounded down plus one tick, so that the time has passed when the interrupt arrives.
    CNTV_CVAL_EL0.set(u64::try_from(ticks).map_or(u64::MAX, |ticks| ticks.saturating_add(1)));
    CNTV_CTL_EL0.write(CNTV_CTL_EL0::ENABLE::SET);
}
