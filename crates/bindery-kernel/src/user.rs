//! Programs' memory, as the kernel reads and writes it.
//!
//! A pointer of a program is never followed: everything goes through the core, which faults pages
//! in as the program itself would have, and says where it could not.

use alloc::vec::Vec;
use core::mem::{MaybeUninit, size_of};

use bindery::addr::VirtAddr;
use bindery::{Access, FaultError};
use linux_raw_sys::general;

use crate::errno::Errno;
use crate::memory::Space;
use crate::process;

/// A type that any bytes make a valid value of, and that has no padding that matters.
///
/// # Safety
/// The implementor promises that every pattern of bits is a value.
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

// SAFETY: each element is.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Does something that may fault. Where there is no memory for that, room is made, as for a fault of
/// the program itself.
fn attempt(mut act: impl FnMut() -> Result<(), FaultError>) -> Result<(), Errno> {
    loop {
        match act() {
            Ok(()) => return Ok(()),
            Err(FaultError::OutOfMemory) if process::memory_ran_out() => return Err(Errno::ENOMEM),
            Err(FaultError::OutOfMemory) => {}
            Err(_) => return Err(Errno::EFAULT),
        }
    }
}

/// Refuses where the program could not write the byte at an address.
///
/// # Errors
/// `EFAULT`.
pub fn check_writable(at: u64) -> Result<(), Errno> {
    let fault = |space: &Space| space.fault(VirtAddr(at), Access::Write).map(|_| ());
    process::with_space(|space| attempt(|| fault(space)))
}

/// Reads bytes of the running program.
pub fn read_bytes(at: u64, into: &mut [u8]) -> Result<(), Errno> {
    process::with_space(|space| read_bytes_of(space, at, into))
}

/// Writes bytes of the running program.
pub fn write_bytes(at: u64, from: &[u8]) -> Result<(), Errno> {
    process::with_space(|space| write_bytes_of(space, at, from))
}

/// As [`read_bytes`], of any address space.
pub fn read_bytes_of(space: &Space, at: u64, into: &mut [u8]) -> Result<(), Errno> {
    attempt(|| space.read_user(VirtAddr(at), into))
}

/// As [`write_bytes`], of any address space.
pub fn write_bytes_of(space: &Space, at: u64, from: &[u8]) -> Result<(), Errno> {
    attempt(|| space.write_user(VirtAddr(at), from))
}

/// Reads a value.
pub fn read<T: Plain>(at: u64) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the bytes belong to `value`, and are initialised (zeroes).
    let bytes =
        unsafe { core::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>()) };
    read_bytes(at, bytes)?;
    // SAFETY: `Plain` says that any bytes make a value.
    Ok(unsafe { value.assume_init() })
}

/// Writes a value.
pub fn write<T: Plain>(at: u64, value: &T) -> Result<(), Errno> {
    write_bytes(at, bytes_of(value))
}

/// The bytes of a value.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a plain value's bytes may be looked at; they live as long as the value.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Reads a text that ends with a zero byte, without it.
///
/// # Errors
/// `ENAMETOOLONG` where there is no zero in the first `limit` bytes.
pub fn text(at: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    let mut piece = [0; 256];
    while text.len() < limit {
        let from = at.checked_add(text.len() as u64).ok_or(Errno::EFAULT)?;
        // Not beyond the page: what lies there may not be mapped.
        let in_page = 4096 - (from % 4096) as usize;
        let piece = &mut piece[..in_page.min(256).min(limit - text.len())];
        read_bytes(from, piece)?;
        if let Some(end) = piece.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&piece[..end]);
            return Ok(text);
        }
        text.extend_from_slice(piece);
    }
    Err(Errno::ENAMETOOLONG)
}
