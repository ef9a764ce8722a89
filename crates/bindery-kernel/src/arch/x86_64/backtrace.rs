//! Backtraces of the kernel, along the frame pointers.

use core::arch::asm;

use super::page_tables;

/// Passes the return addresses of the functions above the caller, the nearest first. Follows the
/// frame pointers while they lie in mapped kernel memory. From the stack of a double fault, the
/// frame pointers lead to the interrupted stack.
pub fn return_addresses(mut each: impl FnMut(u64)) {
    const MOST: usize = 64;
    let mut frame: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rbp", out(reg) frame, options(nomem, nostack, preserves_flags)) };
    for _ in 0..MOST {
        if !frame.is_multiple_of(8)
            || !page_tables::is_mapped(frame)
            || !page_tables::is_mapped(frame.wrapping_add(8))
        {
            break;
        }
        // SAFETY: both words lie in pages that are mapped, and are only read.
        let [next, address] = unsafe { (frame as *const [u64; 2]).read_volatile() };
        if address == 0 {
            break;
        }
        each(address);
        frame = next;
    }
}
