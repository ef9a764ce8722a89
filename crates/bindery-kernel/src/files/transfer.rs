//! `read` and `write`: copies between a program's memory and a node, in pieces.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::NonNull;

use bindery::Access;
use bindery::arch::Arch;
use linux_raw_sys::general::{SEEK_CUR, SEEK_DATA, SEEK_END, SEEK_HOLE, SEEK_SET};

use crate::arch::EntryFormat;
use crate::errno::{Errno, Outcome};
use crate::{heap, process, user};

use super::descriptor::Description;
use super::manner::{self, Manner, Start};
use super::node::{Kind, Node, Patience};

/// The most that one call moves, in bytes (as Linux: `INT_MAX` rounded down to a page).
const CALL_MAX: u64 = 0x7fff_f000;

/// The most memory of the kernel that a call takes, in bytes.
const PIECE: usize = 64 << 10;

/// The most pieces of memory that a call can name (`IOV_MAX`).
const SEGMENTS_MAX: u64 = 1024;

/// Where in a program's memory bytes come from or go to.
pub struct Segments {
    stretches: Stretches,
    /// Whether some of it lies outside of what a program can have at all. As Linux, that is refused
    /// before anything is moved.
    outside: bool,
}

/// Addresses and lengths, in bytes.
enum Stretches {
    One([(u64, u64); 1]),
    Many(Vec<(u64, u64)>),
}

/// Whether a stretch lies outside of a program's addresses.
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
    /// `EFAULT`; `EINVAL` for too many, or too much altogether.
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

    /// The first `length` bytes of it.
    #[cold]
    fn first(&self, length: u64) -> Result<Self, Errno> {
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

    /// The stretches, addresses and lengths in bytes.
    #[inline]
    pub fn list(&self) -> &[(u64, u64)] {
        match &self.stretches {
            Stretches::One(one) => one,
            Stretches::Many(list) => list,
        }
    }

    /// Refuses where the first byte could not be written.
    fn check_first(&self) -> Result<(), Errno> {
        if self.total() == 0 { Ok(()) } else { self.fault_in(0, Access::Write) }
    }

    /// Puts bytes into the program's memory, `skip` bytes from the beginning on; returns how many
    /// before one could not be written. May be called with locks held.
    ///
    /// # Safety
    /// 1. `from` is valid for reads of `length` bytes, which may change meanwhile.
    #[inline]
    pub unsafe fn put(&self, skip: usize, from: NonNull<u8>, length: usize) -> usize {
        self.each(skip, length, |at, done, count| {
            // SAFETY: the caller's promise; `done` and `count` are within the length.
            unsafe { user::put(at, from.as_ptr().add(done), count) }
        })
    }

    /// Takes bytes from the program's memory, `skip` bytes from the beginning on; returns how many
    /// before one could not be read. May be called with locks held.
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

    /// Resolves what keeps the byte `skip` bytes from the beginning from being used, so that a copy
    /// can go on. Called with nothing held.
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

    /// Calls `act` with an address, a distance from the beginning and a length for each stretch of
    /// `length` bytes, `skip` bytes further on, until it does less than that. Gives how much was
    /// done.
    #[inline]
    fn each(
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

    /// Refuses what lies outside of a program's addresses.
    pub fn check(&self) -> Result<(), Errno> {
        if self.outside { Err(Errno::EFAULT) } else { Ok(()) }
    }

    /// How many bytes there are.
    #[inline]
    pub fn total(&self) -> u64 {
        self.list().iter().map(|(_, length)| length).sum()
    }
}

/// How long to wait for the next piece: what cannot be found again is not waited for twice.
fn next_patience(node: &dyn Node, done: u64, first: Patience) -> Patience {
    if done > 0 && !node.is_seekable() { Patience::None } else { first }
}

/// Reads from a node at `at` into a program's memory; returns the count.
pub fn fill(node: &dyn Node, at: u64, segments: &Segments, patience: Patience) -> Outcome {
    segments.check()?;
    match node.read_into(at, segments, patience) {
        Some(outcome) => outcome,
        None => fill_by_pieces(node, at, segments, patience),
    }
}

/// As [`fill`], through memory of the kernel.
fn fill_by_pieces(node: &dyn Node, at: u64, segments: &Segments, patience: Patience) -> Outcome {
    let total = segments.total();
    let mut piece = buffer(total)?;
    let mut done = 0;
    if !node.is_seekable() {
        // What is taken out of a socket cannot be put back.
        segments.check_first()?;
    }
    loop {
        let length = ((total - done) as usize).min(piece.len());
        let now = next_patience(node, done, patience);
        let read = node.read(at.saturating_add(done), &mut piece[..length], now);
        let count = match read {
            Ok(count) => count,
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        };
        let piece = NonNull::from(&mut piece[..]).cast::<u8>();
        let copied = move_all(
            count,
            |moved| {
                // SAFETY: the buffer has `count` bytes.
                unsafe { segments.put(done as usize + moved, piece.add(moved), count - moved) }
            },
            |moved| segments.fault_in(done + moved as u64, Access::Write),
        );
        match copied {
            Ok(copied) => {
                done += copied as u64;
                if copied < count {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
        if count < length || done == total {
            break;
        }
    }
    Ok(done)
}

/// Writes a program's memory to a node at `at`; returns the count.
fn drain(node: &dyn Node, at: u64, segments: &Segments, patience: Patience) -> Outcome {
    segments.check()?;
    let cut;
    let asked = segments.total();
    let allowed = manner::within_limit(node, at, asked)?;
    let segments = if allowed < asked {
        cut = segments.first(allowed)?;
        &cut
    } else {
        segments
    };
    match node.write_from(at, segments, patience) {
        Some(outcome) => outcome,
        None => drain_by_pieces(node, at, segments, patience),
    }
}

/// As [`drain`], through memory of the kernel.
fn drain_by_pieces(node: &dyn Node, at: u64, segments: &Segments, patience: Patience) -> Outcome {
    let total = segments.total();
    let mut piece = buffer(total)?;
    let mut done = 0;
    loop {
        let length = ((total - done) as usize).min(piece.len());
        let target = NonNull::from(&mut piece[..]).cast::<u8>();
        let copied = move_all(
            length,
            |moved| {
                // SAFETY: the buffer has `length` bytes.
                unsafe { segments.take(done as usize + moved, target.add(moved), length - moved) }
            },
            |moved| segments.fault_in(done + moved as u64, Access::Read),
        );
        let write = |copied| node.write(at.saturating_add(done), &piece[..copied], patience);
        let written = copied.and_then(write);
        match written {
            Ok(count) => {
                done += count as u64;
                if count < length || done == total {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Has `act` move what is left of `length` bytes until all are moved; where it stops, `fault_in`
/// resolves why. Gives how much was moved before that refused, or its refusal where nothing was.
pub fn move_all(
    length: usize,
    mut act: impl FnMut(usize) -> usize,
    mut fault_in: impl FnMut(usize) -> Result<(), Errno>,
) -> Result<usize, Errno> {
    let mut moved = 0;
    loop {
        moved += act(moved);
        if moved == length {
            return Ok(moved);
        }
        match fault_in(moved) {
            Ok(()) => {}
            Err(errno) if moved == 0 => return Err(errno),
            Err(_) => return Ok(moved),
        }
    }
}

/// One step of [`by_steps`].
#[derive(Clone, Copy, Default)]
pub struct Step {
    /// Bytes that were moved.
    pub count: usize,
    /// Where the program's memory was missing, counted from the step's beginning.
    pub fault: Option<usize>,
}

/// Moves bytes by steps. `step` takes how many bytes were moved before; where it finds the
/// program's memory missing, `fault_in` resolves that, with no lock held, and a further step
/// follows. After a step without a fault, `goes_on` decides. Returns the count of bytes moved; a
/// refusal only where nothing was moved.
#[inline]
pub fn by_steps(
    mut step: impl FnMut(usize) -> Result<Step, Errno>,
    fault_in: impl Fn(usize) -> Result<(), Errno>,
    goes_on: impl Fn(usize) -> bool,
) -> Result<usize, Errno> {
    let mut done = 0;
    loop {
        let again = step(done).and_then(|Step { count, fault }| {
            let before = done;
            done += count;
            match fault {
                Some(reached) => fault_in(before + reached).map(|()| true),
                None => Ok(goes_on(done)),
            }
        });
        match again {
            Ok(true) => {}
            Err(errno) if done == 0 => return Err(errno),
            Ok(false) | Err(_) => return Ok(done),
        }
    }
}

fn buffer(total: u64) -> Result<Vec<u8>, Errno> {
    let length = (total as usize).min(PIECE);
    heap::room(length)?;
    Ok(alloc::vec![0; length])
}

fn description(descriptor: i32) -> Result<Arc<Description>, Errno> {
    process::current().files().get(descriptor)
}

/// `read(2)` and its kin.
///
/// # Errors
/// As read(2), and as [`Manner::new`] for the flags of `preadv2(2)`.
pub fn read(descriptor: i32, segments: &Segments, start: Start, flags: u32) -> Outcome {
    let description = description(descriptor)?;
    let node = start_of(&description, start)?.readable()?;
    if segments.total() == 0 && flags != 0 {
        return Ok(0);
    }
    let Manner { patience, .. } = Manner::new(&description, flags)?;
    match start {
        Start::At(at) => fill(node, at, segments, patience),
        Start::Position if !node.is_seekable() => fill(node, 0, segments, patience),
        Start::Position => {
            let mut position = description.position.lock();
            let count = fill(node, *position, segments, patience)?;
            *position += count;
            Ok(count)
        }
    }
}

/// `write(2)` and its kin. As Linux: a file opened for appending is appended to wherever one asks
/// to write.
///
/// # Errors
/// As write(2), and as [`Manner::new`] for the flags of `pwritev2(2)`.
pub fn write(descriptor: i32, segments: &Segments, start: Start, flags: u32) -> Outcome {
    let description = description(descriptor)?;
    let node = start_of(&description, start)?.writable()?;
    if segments.total() == 0 && flags != 0 {
        return Ok(0);
    }
    let Manner { patience, appends } = Manner::new(&description, flags)?;
    let end = || node.attributes().size;
    match start {
        Start::At(at) => drain(node, if appends { end() } else { at }, segments, patience),
        Start::Position if !node.is_seekable() => drain(node, 0, segments, patience),
        Start::Position => {
            let mut position = description.position.lock();
            if appends {
                *position = end();
            }
            let count = drain(node, *position, segments, patience)?;
            *position += count;
            Ok(count)
        }
    }
}

/// Refuses to begin elsewhere than at the position of what has none.
fn start_of(description: &Description, start: Start) -> Result<&Description, Errno> {
    if start != Start::Position && !description.node.is_seekable() {
        return Err(Errno::ESPIPE);
    }
    Ok(description)
}

fn seekable(node: &dyn Node, at: i64) -> Result<u64, Errno> {
    if !node.is_seekable() {
        return Err(Errno::ESPIPE);
    }
    u64::try_from(at).map_err(|_| Errno::EINVAL)
}

/// `lseek(2)`.
pub fn seek(descriptor: i32, offset: i64, from: u32) -> Outcome {
    let description = description(descriptor)?;
    let node = &description.node;
    if !node.is_seekable() {
        return Err(Errno::ESPIPE);
    }
    if !node.has_end() && !matches!(from, SEEK_SET | SEEK_CUR) {
        return Err(Errno::EINVAL);
    }
    let mut position = description.position.lock();
    let size = node.length();
    let new = match from {
        SEEK_SET => Some(offset),
        SEEK_CUR => (*position as i64).checked_add(offset),
        SEEK_END => (size as i64).checked_add(offset),
        SEEK_DATA | SEEK_HOLE if offset < 0 || offset as u64 >= size => return Err(Errno::ENXIO),
        SEEK_DATA | SEEK_HOLE => {
            let data = from == SEEK_DATA;
            let found = match node.object() {
                Some(object) if data => object.next_data(offset as u64),
                Some(object) => object.next_hole(offset as u64),
                // What has no object has no holes.
                None => Some(if data { offset as u64 } else { size }),
            };
            Some(found.ok_or(Errno::ENXIO)? as i64)
        }
        _ => return Err(Errno::EINVAL),
    };
    let new = new.ok_or(Errno::EOVERFLOW)?;
    *position = u64::try_from(new).map_err(|_| Errno::EINVAL)?;
    Ok(*position)
}

/// Copies up to `count` bytes from one description to another (`sendfile`, `copy_file_range`).
/// Where an address of an offset is given, it counts instead of the position, and is moved on.
pub fn copy(from: (&Description, u64), to: (&Description, u64), count: u64) -> Outcome {
    let (source, target) = (from.0.readable()?, to.0.writable()?);
    if source.kind() == Kind::Directory {
        return Err(Errno::EINVAL);
    }
    let start = |(description, offset): (&Description, u64)| -> Result<u64, Errno> {
        if offset == 0 {
            return Ok(*description.position.lock());
        }
        seekable(&*description.node, user::read(offset)?)
    };
    let (source_at, target_at) = (start(from)?, start(to)?);
    let count = manner::within_limit(target, target_at, count.min(CALL_MAX))?;
    let mut piece = buffer(count)?;
    let mut done = 0;
    while done < count {
        let length = ((count - done) as usize).min(piece.len());
        let patience = next_patience(source, done, from.0.patience());
        let moved =
            source.read(source_at + done, &mut piece[..length], patience).and_then(|read| {
                if read == 0 {
                    return Ok(0);
                }
                target.write(target_at + done, &piece[..read], to.0.patience())
            });
        match moved {
            Ok(0) => break,
            Ok(moved) => done += moved as u64,
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    let finish = |(description, offset): (&Description, u64), start: u64| {
        if offset != 0 {
            return user::write(offset, &(start + done));
        }
        if description.node.is_seekable() {
            *description.position.lock() = start + done;
        }
        Ok(())
    };
    finish(from, source_at)?;
    finish(to, target_at)?;
    Ok(done)
}
