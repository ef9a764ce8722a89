//! Copies between the kernel and the program whose tables are loaded, at the program's addresses.
//! The MMU checks the program's rights. The copy ends at the first byte that the MMU refuses.
//!
//! The caller then drops its locks, has the core resolve the fault ([`crate::user::fault_in`]), and
//! copies the rest. Each architecture provides the routines and knows which of their instructions
//! may fault.

unsafe extern "C" {
    /// Copies to a program; returns how many bytes are left.
    fn copy_to_program(to: u64, from: *const u8, length: usize) -> usize;
    /// Copies from a program; returns how many bytes are left.
    fn copy_from_program(to: *mut u8, from: u64, length: usize) -> usize;
    /// Writes `new` to an aligned word of a program if it is `old`. Returns the word that was there,
    /// or a value above 32 bits after a fault.
    fn exchange_in_program(at: u64, old: u32, new: u32) -> u64;
}

/// Copies to addresses of the program. Returns the number of bytes copied before the first byte
/// that could not be written.
///
/// # Safety
/// 1. `from` is valid for reads of `length` bytes, which may change during the copy.
/// 2. The `length` bytes at `to` lie below the end of programs' addresses.
#[inline]
pub unsafe fn copy_to_user(to: u64, from: *const u8, length: usize) -> usize {
    // SAFETY: the caller's promise. Only memory that the program itself may write is written.
    length - unsafe { copy_to_program(to, from, length) }
}

/// Copies from addresses of the program. Returns the number of bytes copied before the first byte
/// that could not be read.
///
/// # Safety
/// 1. `to` is valid for writes of `length` bytes.
/// 2. The `length` bytes at `from` lie below the end of programs' addresses.
#[inline]
pub unsafe fn copy_from_user(to: *mut u8, from: u64, length: usize) -> usize {
    // SAFETY: the caller's promise.
    length - unsafe { copy_from_program(to, from, length) }
}

/// Writes `new` to a word of the program in one step if the word is `old`. Returns the word that was
/// there; `None` if the word cannot be written.
///
/// # Safety
/// 1. The word at `at` is aligned, and lies below the end of programs' addresses.
pub unsafe fn exchange_in_user(at: u64, old: u32, new: u32) -> Option<u32> {
    // SAFETY: the caller's promise.
    u32::try_from(unsafe { exchange_in_program(at, old, new) }).ok()
}

/// Copies bytes of the kernel that may change during the copy.
///
/// # Safety
/// 1. `from` is valid for reads and `to` for writes of `length` bytes.
/// 2. The two do not overlap.
#[inline]
pub unsafe fn copy_bytes(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise; nothing faults.
    unsafe { copy_to_program(to.expose_provenance() as u64, from, length) };
}
