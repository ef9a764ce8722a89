//! The memory of a program that a call reads or writes, in one range or several.

use alloc::vec::Vec;
use core::ptr::NonNull;

use bindery::Access;
use bindery::arch::Arch;

use crate::arch::EntryFormat;
use crate::errno::Errno;
use crate::{heap, user};

/// The maximum size of a transfer in bytes (as on Linux: `INT_MAX` rounded down to a page).
pub const CALL_MAX: u64 = 0x7fff_f000;

/// The maximum number of ranges in a call (`IOV_MAX`).
const SEGMENTS_MAX: u64 = 1024;

/// The ranges of a program's memory that a call reads or writes.
pub struct Segments {
    stretches: Stretches,
    /// Whether a part lies outside programs' addresses. As on Linux, the call then fails before
    /// anything is copied.
    outside: bool,
}

/// Addresses and lengths, in bytes.
enum Stretches {
    One([(u64, u64); 1]),
    Many(Vec<(u64, u64)>),
}

/// Whether a range lies outside programs' addresses.
fn is_outside(at: u64, length: u64) -> bool {
    at.checked_add(length).is_none_or(|end| end > EntryFormat::USER_END)
}

impl Segments {
    /// One stretch.
    #[inline]
    pub fn one(at: u64, length: u64) -> Self {
        let stretches = Stretches::One([(at, length.min(CALL_MAX))]);
        Self { stretches, outside: is_outside(at, length) }
    }

    /// The segments of an array of `struct iovec`.
    ///
    /// # Errors
    /// `EFAULT`; `EINVAL` if there are too many segments, or if their total length is too large.
    pub fn many(at: u64, count: u64) -> Result<Self, Errno> {
        if count > SEGMENTS_MAX {
            return Err(Errno::EINVAL);
        }
        let (mut list, mut outside) = (Vec::new(), false);
        let mut left = CALL_MAX;
        for index in 0..count {
            let [base, length]: [u64; 2] = user::read(at.wrapping_add(index * 16))?;
            if length > i64::MAX as u64 {
                return Err(Errno::EINVAL);
            }
            outside |= is_outside(base, length);
            list.push((base, length.min(left)));
            left -= length.min(left);
        }
        Ok(Self { stretches: Stretches::Many(list), outside })
    }

    /// The first `length` bytes of this memory.
    #[cold]
    pub fn first(&self, length: u64) -> Result<Self, Errno> {
        heap::room(self.list().len() * 16)?;
        let mut left = length;
        let cut = |(base, length): &(u64, u64)| {
            let length = (*length).min(left);
            left -= length;
            (*base, length)
        };
        let list = self.list().iter().map(cut).collect();
        Ok(Self { stretches: Stretches::Many(list), outside: self.outside })
    }

    /// The ranges, as addresses and lengths in bytes.
    #[inline]
    pub fn list(&self) -> &[(u64, u64)] {
        match &self.stretches {
            Stretches::One(one) => one,
            Stretches::Many(list) => list,
        }
    }

    /// Fails if the first byte could not be written.
    pub fn check_first(&self) -> Result<(), Errno> {
        if self.total() == 0 { Ok(()) } else { self.fault_in(0, Access::Write) }
    }

    /// Writes bytes to the program's memory, `skip` bytes from its beginning on. Returns the number
    /// of bytes written before the first byte that could not be written. May be called with locks
    /// held.
    ///
    /// # Safety
    /// 1. `from` is valid for reads of `length` bytes, which may change during the copy.
    #[inline]
    pub unsafe fn put(&self, skip: usize, from: NonNull<u8>, length: usize) -> usize {
        self.each(skip, length, |at, done, count| {
            // SAFETY: the caller's promise; `done` and `count` are within the length.
            unsafe { user::put(at, from.as_ptr().add(done), count) }
        })
    }

    /// Reads bytes from the program's memory, `skip` bytes from its beginning on. Returns the
    /// number of bytes read before the first byte that could not be read. May be called with locks
    /// held.
    ///
    /// # Safety
    /// 1. `to` is valid for writes of `length` bytes.
    #[inline]
    pub unsafe fn take(&self, skip: usize, to: NonNull<u8>, length: usize) -> usize {
        self.each(skip, length, |at, done, count| {
            // SAFETY: as above.
            unsafe { user::take(to.as_ptr().add(done), at, count) }
        })
    }

    /// Resolves the fault of the byte `skip` bytes from the beginning, so that a copy can continue.
    /// Called without locks.
    ///
    /// # Errors
    /// As [`user::fault_in`].
    #[cold]
    pub fn fault_in(&self, skip: u64, access: Access) -> Result<(), Errno> {
        let mut left = skip;
        for (at, length) in self.list() {
            if left < *length {
                return user::fault_in(at.wrapping_add(left), access);
            }
            left -= length;
        }
        Err(Errno::EFAULT)
    }

    /// Calls `act` for each range of the `length` bytes from offset `skip` on, with an address, the
    /// distance from the beginning and a length. Stops when `act` moves less than that length.
    /// Returns the number of bytes moved.
    #[inline]
    pub fn each(
        &self,
        skip: usize,
        length: usize,
        mut act: impl FnMut(u64, usize, usize) -> usize,
    ) -> usize {
        if let Stretches::One([(at, all)]) = self.stretches {
            return act(at.wrapping_add(skip as u64), 0, length.min(all as usize - skip));
        }
        let (mut skip, mut done) = (skip as u64, 0);
        for (at, all) in self.list() {
            let skipped = skip.min(*all);
            skip -= skipped;
            let count = (all - skipped).min((length - done) as u64) as usize;
            let moved = if count > 0 { act(at.wrapping_add(skipped), done, count) } else { 0 };
            done += moved;
            if moved < count {
                break;
            }
        }
        done
    }

    /// Refuses memory outside programs' addresses.
    pub fn check(&self) -> Result<(), Errno> {
        if self.outside { Err(Errno::EFAULT) } else { Ok(()) }
    }

    /// The total number of bytes.
    #[inline]
    pub fn total(&self) -> u64 {
        self.list().iter().map(|(_, length)| length).sum()
    }
}
