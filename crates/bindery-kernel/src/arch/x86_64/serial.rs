//! The serial line: a 16550 at the usual ports.

use x86_64::instructions::port::Port;

const SERIAL: u16 = 0x3f8;

/// In the line status: a byte was received.
const RECEIVED: u8 = 1 << 0;
/// In the line status: there is room for a byte to send.
const ROOM: u8 = 1 << 5;

/// Writes to a device.
fn write(port: u16, value: u8) {
    // SAFETY: the ports of this file are those of devices that touch no memory.
    unsafe { Port::new(port).write(value) }
}

fn line_status() -> u8 {
    // SAFETY: as in `write`; reading the status changes nothing.
    unsafe { Port::new(SERIAL + 5).read() }
}

/// Sets the serial line up.
pub fn begin() {
    // No interrupts; 115,200 baud (divisor 1, behind the latch bit), 8 bits, no parity; FIFOs
    // enabled.
    for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
        write(SERIAL + register, value);
    }
}

/// Sends a byte over the serial line.
pub fn write_console(byte: u8) {
    while line_status() & ROOM == 0 {
        core::hint::spin_loop();
    }
    write(SERIAL, byte);
}

/// Returns a byte received over the serial line, if any.
pub fn read_console() -> Option<u8> {
    // SAFETY: as in `write`; the byte is taken from the queue.
    (line_status() & RECEIVED != 0).then(|| unsafe { Port::new(SERIAL).read() })
}
