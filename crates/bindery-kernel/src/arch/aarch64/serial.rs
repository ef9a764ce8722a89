//! The serial line: a PL011 (Arm DDI 0183), with the settings that the firmware left.

use core::sync::atomic::{AtomicU64, Ordering};

use super::page_tables;

/// The physical address; 0 until the device is found.
static BASE: AtomicU64 = AtomicU64::new(0);

const FLAGS: usize = 0x18;
const RECEIVER_EMPTY: u32 = 1 << 4;
const SENDER_FULL: u32 = 1 << 5;

/// Uses the device at `base`; its registers are mapped.
pub fn begin(base: u64) {
    BASE.store(base, Ordering::Relaxed);
}

fn register(offset: usize) -> Option<*mut u32> {
    let base = BASE.load(Ordering::Relaxed);
    // The registers take less than the mapped page.
    (base != 0).then(|| page_tables::direct_map(base).as_ptr().wrapping_add(offset).cast())
}

fn has(flag: u32) -> bool {
    // SAFETY: a register of the device.
    register(FLAGS).is_some_and(|flags| unsafe { flags.read_volatile() } & flag != 0)
}

/// Sends a byte. One sent before the device was found is lost.
pub fn write_console(byte: u8) {
    while has(SENDER_FULL) {
        core::hint::spin_loop();
    }
    if let Some(data) = register(0) {
        // SAFETY: a register of the device.
        unsafe { data.write_volatile(u32::from(byte)) };
    }
}

/// Returns a received byte, if any.
pub fn read_console() -> Option<u8> {
    let data = register(0)?;
    // SAFETY: a register of the device.
    (!has(RECEIVER_EMPTY)).then(|| unsafe { data.read_volatile() } as u8)
}
