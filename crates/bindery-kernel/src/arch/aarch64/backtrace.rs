//! Backtraces of the kernel, along the frame pointers.

use core::arch::asm;

use aarch64_cpu::registers::{PAR_EL1, Readable};

use super::page_tables;

/// Passes the return addresses of the functions above the caller, the nearest first. Follows the
/// frame pointers while they lie in mapped kernel memory. From the overflow stack, the frame
/// pointers lead to the stack that overflowed.
pub fn return_addresses(mut each: impl FnMut(u64)) {
    const MOST: usize = 64;
    let mut frame: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, x29", out(reg) frame, options(nomem, nostack, preserves_flags)) };
    // A frame is two words, aligned to their size, so it does not cross a page.
    for _ in 0..MOST {
        if !frame.is_multiple_of(16) || !is_readable(frame) {
            break;
        }
        let words = core::ptr::with_exposed_provenance::<[usize; 2]>(frame);
        // SAFETY: the page is mapped, and only read.
        let [next, address] = unsafe { words.read_volatile() };
        if address == 0 {
            break;
        }
        each(address as u64);
        frame = next;
    }
}

/// Whether the kernel can read at an address of its half.
fn is_readable(address: usize) -> bool {
    const FAILED: u64 = 1;
    if (address as u64) < page_tables::DIRECT_MAP {
        return false;
    }
    // SAFETY: asks the MMU; changes only PAR_EL1, which nothing else uses.
    unsafe { asm!("at s1e1r, {}", "isb", in(reg) address, options(nostack, preserves_flags)) };
    PAR_EL1.get() & FAILED == 0
}
