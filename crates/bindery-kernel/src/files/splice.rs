//! `splice`, `tee` and `vmsplice`: bytes between a pipe and another descriptor, copied through
//! memory of the kernel. A pipe never refers to the pages of another object.

use alloc::sync::Arc;
use alloc::vec::Vec;

use linux_raw_sys::general::O_APPEND;

use crate::errno::{Errno, Outcome};
use crate::{heap, process, user};

use super::attributes::{Kind, Patience};
use super::descriptor::{Description, Files};
use super::manner::within_limit;
use super::node::Node;
use super::permission;
use super::pipe::{self, CAPACITY, Pipe};
use super::segments::Segments;
use super::transfer::fill;

/// `SPLICE_F_MOVE`, `SPLICE_F_MORE` and `SPLICE_F_GIFT` are hints, and change nothing.
const FLAGS: u32 = 0xf;
const NONBLOCK: u32 = 2;

fn description(descriptor: i32) -> Result<Arc<Description>, Errno> {
    Files::description(descriptor)
}

fn pipe_of(node: &dyn Node) -> Option<&Pipe> {
    pipe::of(node)
}

fn check(flags: u32) -> Result<(), Errno> {
    if flags & !FLAGS != 0 { Err(Errno::EINVAL) } else { Ok(()) }
}

/// Whether a call may wait for a pipe, according to its flag and the flags of both openings.
fn patience(flags: u32, ends: &[&Description]) -> Patience {
    let impatient = |end: &&Description| end.patience() == Patience::None;
    let none = flags & NONBLOCK != 0 || ends.iter().any(impatient);
    if none { Patience::None } else { Patience::Wait }
}

fn buffer(length: u64) -> Result<Vec<u8>, Errno> {
    let length = length.min(CAPACITY as u64) as usize;
    heap::room(length)?;
    Ok(alloc::vec![0; length])
}

/// `splice(2)`: from a pipe, to a pipe, or both. The offsets are addresses, or 0 for the position.
pub fn splice(from: (i32, u64), to: (i32, u64), count: u64, flags: u32) -> Outcome {
    if count == 0 {
        return Ok(0);
    }
    check(flags)?;
    let (source, target) = (description(from.0)?, description(to.0)?);
    let pipes = (pipe_of(&*source.node), pipe_of(&*target.node));
    if pipes.0.is_some() && from.1 != 0 || pipes.1.is_some() && to.1 != 0 {
        return Err(Errno::ESPIPE);
    }
    let (reads, writes) = (source.readable()?, target.writable()?);
    match pipes {
        (Some(out), Some(into)) if core::ptr::eq(out, into) => Err(Errno::EINVAL),
        (Some(out), Some(into)) => {
            between(out, into, count, patience(flags, &[&source, &target]), Kept::No)
        }
        (Some(pipe), None) => {
            if target.flags() & O_APPEND != 0 {
                return Err(Errno::EINVAL);
            }
            let patience = patience(flags, &[&source]);
            at_offset(&target, to.1, |at| {
                from_pipe(pipe, count, patience, |done, bytes| {
                    let at = at.saturating_add(done);
                    permission::drop_set_ids(writes)?;
                    let allowed = within_limit(writes, at, bytes.len() as u64)? as usize;
                    writes.write(at, &bytes[..allowed], target.patience())
                })
            })
        }
        (None, Some(_)) if reads.kind() == Kind::Directory => Err(Errno::EINVAL),
        (None, Some(pipe)) => {
            let patience = patience(flags, &[&target]);
            at_offset(&source, from.1, |at| {
                let room = pipe.room(patience)?;
                let mut piece = buffer(count.min(room as u64))?;
                let read = reads.read(at, &mut piece, source.patience())?;
                if read == 0 {
                    return Ok(0);
                }
                Ok(pipe.write(0, &piece[..read], patience)? as u64)
            })
        }
        (None, None) => Err(Errno::EINVAL),
    }
}

/// `tee(2)`: copies the bytes of one pipe to another. They stay in the first.
pub fn tee(from: i32, to: i32, count: u64, flags: u32) -> Outcome {
    check(flags)?;
    if count == 0 {
        return Ok(0);
    }
    let (source, target) = (description(from)?, description(to)?);
    let (reads, writes) = (source.readable()?, target.writable()?);
    match (pipe_of(reads), pipe_of(writes)) {
        (Some(out), Some(into)) if !core::ptr::eq(out, into) => {
            between(out, into, count, patience(flags, &[&source, &target]), Kept::Yes)
        }
        _ => Err(Errno::EINVAL),
    }
}

/// `vmsplice(2)`: from the program's memory to a pipe, or back, depending on the descriptor's
/// access mode.
pub fn vmsplice(descriptor: i32, vector: u64, count: u64, flags: u32) -> Outcome {
    check(flags)?;
    let end = description(descriptor)?;
    let patience = patience(flags, &[&end]);
    if let Ok(node) = end.writable() {
        let segments = Segments::many(vector, count)?;
        if segments.total() == 0 {
            return Ok(0);
        }
        return from_memory(pipe_of(node).ok_or(Errno::EBADF)?, &segments, patience);
    }
    let node = end.readable()?;
    let segments = Segments::many(vector, count)?;
    if segments.total() == 0 {
        return Ok(0);
    }
    pipe_of(node).ok_or(Errno::EBADF)?;
    fill(node, 0, &segments, patience)
}

/// As many bytes of the program's memory as fit.
fn from_memory(pipe: &Pipe, segments: &Segments, patience: Patience) -> Outcome {
    segments.check()?;
    let room = pipe.room(patience)?;
    let mut piece = buffer(segments.total().min(room as u64))?;
    let space = process::current().process.space();
    let mut filled = 0;
    'all: for (at, length) in segments.list() {
        let mut done = 0;
        while done < *length && filled < piece.len() {
            let from = at.wrapping_add(done);
            // Proceeds page by page, so that the bytes before a hole count. As on Linux, which pins
            // the pages, secret memory is refused.
            let in_page = 4096 - (from % 4096);
            let part = in_page.min(length - done).min((piece.len() - filled) as u64) as usize;
            match user::read_bytes_foreign(&space, from, &mut piece[filled..filled + part]) {
                Ok(()) => {}
                Err(errno) if filled == 0 => return Err(errno),
                Err(_) => break 'all,
            }
            filled += part;
            done += part as u64;
        }
    }
    Ok(pipe.write(0, &piece[..filled], patience)? as u64)
}

/// Runs `act` at the offset in the program's memory or at the position, whichever applies, and
/// advances it.
fn at_offset(description: &Description, offset: u64, act: impl FnOnce(u64) -> Outcome) -> Outcome {
    let seekable = description.node.is_seekable();
    if offset != 0 {
        let at = user::read::<i64>(offset)?;
        if !seekable {
            return Err(Errno::EINVAL);
        }
        let at = u64::try_from(at).map_err(|_| Errno::EINVAL)?;
        let moved = act(at)?;
        user::write(offset, &(at + moved))?;
        return Ok(moved);
    }
    if !seekable {
        return act(0);
    }
    let mut position = description.position.lock();
    let moved = act(*position)?;
    *position += moved;
    Ok(moved)
}

/// Passes all bytes of a pipe to `write`; bytes that `write` does not accept stay in the pipe.
fn from_pipe(
    pipe: &Pipe,
    count: u64,
    patience: Patience,
    mut write: impl FnMut(u64, &[u8]) -> Result<usize, Errno>,
) -> Outcome {
    let mut piece = buffer(count)?;
    let mut done = 0;
    while done < count {
        let now = if done > 0 { Patience::None } else { patience };
        let length = piece.len().min((count - done) as usize);
        let moved = pipe.claim(&mut piece[..length], now).and_then(|seen| {
            if seen == 0 {
                return Ok(0);
            }
            let written = write(done, &piece[..seen]);
            pipe.take_claimed(*written.as_ref().unwrap_or(&0));
            written
        });
        match moved {
            Ok(0) => break,
            Ok(moved) => done += moved as u64,
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// The effect on bytes that are passed to another pipe.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    Yes,
    No,
}

/// Moves or copies bytes of a pipe to another, as many as fit.
fn between(out: &Pipe, into: &Pipe, count: u64, patience: Patience, kept: Kept) -> Outcome {
    let mut piece = buffer(count)?;
    // Allocated now, because an allocation between the check and the write could let other threads
    // read the pipe.
    into.make_room()?;
    loop {
        // Other readers may have taken the bytes by the time the other side has room.
        if out.peek(&mut piece[..1], patience)? == 0 {
            return Ok(0);
        }
        let room = into.room(patience)?.min(piece.len());
        let seen = match out.peek(&mut piece[..room], Patience::None) {
            Err(Errno::EAGAIN) if patience == Patience::Wait => continue,
            seen => seen?,
        };
        let written = match into.write(0, &piece[..seen], Patience::None) {
            Err(Errno::EAGAIN) if patience == Patience::Wait => continue,
            written => written?,
        };
        if kept == Kept::No {
            out.read(0, &mut piece[..written], Patience::None)?;
        }
        return Ok(written as u64);
    }
}
