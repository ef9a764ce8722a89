//! Copies between the kernel and programs' memory.
//!
//! The running program's memory is copied at its own addresses and with its own rights
//! ([`arch::copy_to_user`]), up to the first missing page. With no lock held, the core then
//! resolves the fault as if the program had made the access, or refuses it. The core copies the
//! memory of other programs.

use alloc::vec::Vec;
use core::mem::{MaybeUninit, size_of};

use bindery::addr::VirtAddr;
use bindery::arch::Arch;
use bindery::{Access, FaultError};
use linux_raw_sys::general;
use spin::Once;

use crate::arch::{self, EntryFormat};
use crate::errno::Errno;
use crate::heap;
use crate::memory::Space;

/// A type for which any bytes are a valid value, and whose padding does not matter.
///
/// # Safety
/// 1. Every pattern of bits is a value.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ty),*) => {
        // SAFETY: plain numbers, or structures of the system-call interface that hold nothing else
        // (addresses of programs are numbers to the kernel).
        $(unsafe impl Plain for $name {})*
    };
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, usize, isize);
plain!(general::pollfd, general::stat, general::statfs64, general::statx, general::termios);

// SAFETY: each element is plain.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The handler of faults during copies for the running program.
pub trait Faults: Sync {
    /// Resolves the fault of an access by the running program.
    ///
    /// # Errors
    /// The core's.
    fn resolve(&self, at: VirtAddr, access: Access) -> Result<(), FaultError>;

    /// Frees memory after a fault that ran out of memory. `true` if the running thread has to end
    /// instead.
    fn make_room(&self) -> bool;
}

static FAULTS: Once<&'static dyn Faults> = Once::new();

/// Registers the fault handler.
pub fn set_faults(faults: &'static dyn Faults) {
    FAULTS.call_once(|| faults);
}

/// # Panics
/// Before the first program runs.
fn faults() -> &'static dyn Faults {
    *FAULTS.get().expect("programs run after the handler of faults is registered")
}

/// Runs an action that may fault. Frees memory if too little is free, as for a fault of the program
/// itself.
fn attempt(mut act: impl FnMut() -> Result<(), FaultError>) -> Result<(), Errno> {
    loop {
        match act() {
            Ok(()) => return Ok(()),
            Err(FaultError::OutOfMemory) if faults().make_room() => return Err(Errno::ENOMEM),
            Err(FaultError::OutOfMemory) => {}
            Err(_) => return Err(Errno::EFAULT),
        }
    }
}

/// Resolves the fault that the running program would have at an address, so that a copy can
/// continue. May sleep, so it is called without locks.
///
/// # Errors
/// `EFAULT` if the program may not access the address; `ENOMEM` if the program is about to end for
/// lack of memory.
#[cold]
pub fn fault_in(at: u64, access: Access) -> Result<(), Errno> {
    attempt(|| faults().resolve(VirtAddr(at), access))
}

/// The number of bytes from an address on, up to `length`, that lie within programs' addresses.
fn within(at: u64, length: usize) -> usize {
    EntryFormat::USER_END.saturating_sub(at).min(length as u64) as usize
}

/// Copies bytes to the running program, up to the first missing page. Returns their number. May be
/// called with locks held.
///
/// # Safety
/// 1. `from` is valid for reads of `length` bytes, which may change during the copy.
#[inline]
pub unsafe fn put(at: u64, from: *const u8, length: usize) -> usize {
    // SAFETY: the caller's promise; addresses of the kernel are left out.
    unsafe { arch::copy_to_user(at, from, within(at, length)) }
}

/// Copies bytes of the running program, up to the first missing page. Returns their number. May be
/// called with locks held.
///
/// # Safety
/// 1. `to` is valid for writes of `length` bytes.
#[inline]
pub unsafe fn take(to: *mut u8, at: u64, length: usize) -> usize {
    // SAFETY: as above.
    unsafe { arch::copy_from_user(to, at, within(at, length)) }
}

/// Reads bytes of the running program.
pub fn read_bytes(at: u64, into: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    loop {
        let left = &mut into[done..];
        let from = at.wrapping_add(done as u64);
        // SAFETY: the bytes are the caller's.
        done += unsafe { take(left.as_mut_ptr(), from, left.len()) };
        if done == into.len() {
            return Ok(());
        }
        fault_in(at.wrapping_add(done as u64), Access::Read)?;
    }
}

/// Writes bytes of the running program.
pub fn write_bytes(at: u64, from: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    loop {
        let left = &from[done..];
        // SAFETY: the bytes are the caller's.
        done += unsafe { put(at.wrapping_add(done as u64), left.as_ptr(), left.len()) };
        if done == from.len() {
            return Ok(());
        }
        fault_in(at.wrapping_add(done as u64), Access::Write)?;
    }
}

/// As [`write_bytes`], for any address space.
pub fn write_bytes_of(space: &Space, at: u64, from: &[u8]) -> Result<(), Errno> {
    attempt(|| space.write_user(VirtAddr(at), from))
}

/// As [`read_bytes`], for any address space, on behalf of another process.
pub fn read_bytes_foreign(space: &Space, at: u64, into: &mut [u8]) -> Result<(), Errno> {
    attempt(|| space.read_foreign(VirtAddr(at), into))
}

/// As [`write_bytes_of`], on behalf of another process.
pub fn write_bytes_foreign(space: &Space, at: u64, from: &[u8]) -> Result<(), Errno> {
    attempt(|| space.write_foreign(VirtAddr(at), from))
}

/// Reads a value.
pub fn read<T: Plain>(at: u64) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the bytes belong to `value`, and are initialized (zeroes).
    let bytes =
        unsafe { core::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>()) };
    read_bytes(at, bytes)?;
    // SAFETY: `Plain` says that any bytes make a value.
    Ok(unsafe { value.assume_init() })
}

/// Reads consecutive values.
pub fn read_into<T: Plain>(at: u64, values: &mut [T]) -> Result<(), Errno> {
    // SAFETY: the bytes belong to `values`, and `Plain` says that any bytes make a value.
    let bytes =
        unsafe { core::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) };
    read_bytes(at, bytes)
}

/// Writes a value.
pub fn write<T: Plain>(at: u64, value: &T) -> Result<(), Errno> {
    write_bytes(at, bytes_of(value))
}

/// Changes an aligned word of the running program in one step; `change` returns `None` to leave it.
/// Returns the old word.
pub fn update(at: u64, mut change: impl FnMut(u32) -> Option<u32>) -> Result<u32, Errno> {
    loop {
        let old = read::<u32>(at)?;
        let Some(new) = change(old) else { return Ok(old) };
        if within(at, size_of::<u32>()) < size_of::<u32>() || !at.is_multiple_of(4) {
            return Err(Errno::EFAULT);
        }
        // SAFETY: an aligned word below the end of programs' addresses.
        match unsafe { arch::exchange_in_user(at, old, new) } {
            Some(found) if found == old => return Ok(old),
            // A thread on another CPU has changed the word.
            Some(_) => {}
            None => fault_in(at, Access::Write)?,
        }
    }
}

/// The bytes of a value.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a plain value's bytes may be read; they live as long as the value.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Reads a string that ends with a zero byte, without the zero.
///
/// # Errors
/// `ENAMETOOLONG` if there is no zero in the first `limit` bytes.
pub fn text(at: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    let mut piece = [0; 256];
    while text.len() < limit {
        let from = at.checked_add(text.len() as u64).ok_or(Errno::EFAULT)?;
        // The copy stops at the end of the page, because the next one may be unmapped.
        let in_page = 4096 - (from % 4096) as usize;
        let piece = &mut piece[..in_page.min(256).min(limit - text.len())];
        read_bytes(from, piece)?;
        if let Some(end) = piece.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&piece[..end]);
            return Ok(text);
        }
        // Checked after the read, which may have slept while other threads used up the heap.
        heap::room(2 * (text.len() + piece.len()))?;
        text.extend_from_slice(piece);
    }
    Err(Errno::ENAMETOOLONG)
}
