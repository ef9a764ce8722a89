//! `read` and `write`: copies between a program's memory and a node, in pieces.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::NonNull;

use bindery::Access;
use linux_raw_sys::general::{O_APPEND, SEEK_CUR, SEEK_DATA, SEEK_END, SEEK_HOLE, SEEK_SET};

use crate::errno::{Errno, Outcome};
use crate::{heap, user};

use super::attributes::{Kind, Patience};
use super::descriptor::{Description, Files};
use super::manner::{self, Manner, Start};
use super::node::Node;
use super::permission;
use super::segments::{CALL_MAX, Segments};

/// The maximum size of a call's buffer in the kernel, in bytes.
const PIECE: usize = 64 << 10;

/// Whether to wait for the next piece. A read whose bytes can be read only once waits only for the
/// first piece.
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
        // Bytes taken from a socket cannot be returned.
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
    manner::limited(node, at, segments, |segments| match node.write_from(at, segments, patience) {
        Some(outcome) => outcome,
        None => drain_by_pieces(node, at, segments, patience),
    })
}

/// As [`drain`], at the end of the node. Returns the position of the end, and the count.
fn append(node: &dyn Node, segments: &Segments, patience: Patience) -> Result<(u64, u64), Errno> {
    segments.check()?;
    if let Some(appended) = node.append_from(segments) {
        return appended;
    }
    let end = node.attributes().size;
    drain(node, end, segments, patience).map(|count| (end, count))
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

/// Calls `act` with the rest of `length` bytes until all are moved. If `act` stops early,
/// `fault_in` resolves the fault. Returns the number of bytes moved before `fault_in` failed, or
/// its error if nothing was moved.
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
    /// The first missing byte of the program's memory, relative to the step's beginning.
    pub fault: Option<usize>,
}

/// Moves bytes in steps. `step` gets the number of bytes moved so far. If `step` meets missing
/// memory of the program, `fault_in` resolves the fault with no lock held, and another step
/// follows. After a step without a fault, `goes_on` decides. Returns the number of bytes moved, or
/// an error if nothing was moved.
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
    Files::description(descriptor)
}

/// `read(2)` and its kin.
///
/// # Errors
/// The errors of read(2), and those of [`Manner::new`] for the flags of `preadv2(2)`.
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

/// `write(2)` and its kin. As on Linux, a file opened for appending is appended to, whatever the
/// offset.
///
/// # Errors
/// The errors of write(2), and those of [`Manner::new`] for the flags of `pwritev2(2)`.
pub fn write(descriptor: i32, segments: &Segments, start: Start, flags: u32) -> Outcome {
    let description = description(descriptor)?;
    let node = start_of(&description, start)?.writable()?;
    if segments.total() == 0 && flags != 0 {
        return Ok(0);
    }
    let Manner { patience, appends } = Manner::new(&description, flags)?;
    if start == Start::Position && !node.is_seekable() {
        return drain(node, 0, segments, patience);
    }
    if node.sets_ids() && segments.total() > 0 {
        permission::drop_set_ids(node)?;
    }
    match start {
        Start::At(_) if appends => append(node, segments, patience).map(|(_, count)| count),
        Start::At(at) => drain(node, at, segments, patience),
        Start::Position => {
            let mut position = description.position.lock();
            let (at, count) = if appends {
                append(node, segments, patience)?
            } else {
                (*position, drain(node, *position, segments, patience)?)
            };
            *position = at + count;
            Ok(count)
        }
    }
}

/// Refuses an offset for files without positions.
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
    if node.ignores_seeks() && from <= SEEK_HOLE {
        return Ok(0);
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
                // A file without an object has no holes.
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

/// Whether ranges of two files are of one file and overlap, up to its end.
fn do_overlap(
    source: &dyn Node,
    source_at: u64,
    target: &dyn Node,
    target_at: u64,
    count: u64,
) -> bool {
    let (file, other) = (source.attributes(), target.attributes());
    let count = count.min(file.size.saturating_sub(source_at));
    let is_one = file.number == other.number && source.kind() == target.kind();
    is_one && source_at.abs_diff(target_at) < count
}

/// The call that copies between two descriptions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copying {
    /// `sendfile(2)`.
    Send,
    /// `copy_file_range(2)`.
    Range,
}

/// Copies up to `count` bytes from one description to another. If the address of an offset is
/// given, that offset replaces the position and is advanced.
///
/// # Errors
/// The errors of the call.
pub fn copy(
    call: Copying,
    from: (&Description, u64),
    to: (&Description, u64),
    count: u64,
) -> Outcome {
    if call == Copying::Range {
        let kinds = [from.0.node.kind(), to.0.node.kind()];
        if kinds.contains(&Kind::Directory) {
            return Err(Errno::EISDIR);
        }
        if kinds != [Kind::Regular; 2] {
            return Err(Errno::EINVAL);
        }
    }
    let (source, target) = (from.0.readable()?, to.0.writable()?);
    if source.kind() == Kind::Directory {
        return Err(Errno::EINVAL);
    }
    if to.0.flags() & O_APPEND != 0 {
        return Err(if call == Copying::Send { Errno::EINVAL } else { Errno::EBADF });
    }
    let start = |(description, offset): (&Description, u64)| -> Result<u64, Errno> {
        if offset == 0 {
            return Ok(*description.position.lock());
        }
        seekable(&*description.node, user::read(offset)?)
    };
    let (source_at, target_at) = (start(from)?, start(to)?);
    let count = manner::within_limit(target, target_at, count.min(CALL_MAX))?;
    if call == Copying::Range && do_overlap(source, source_at, target, target_at, count) {
        return Err(Errno::EINVAL);
    }
    permission::drop_set_ids(target)?;
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
