//! Swap: `swapon`, `swapoff` and `/proc/swaps`. The one device is `/dev/zram0`, whose area is the
//! core's compressed memory.

mod content;
mod device;
mod failing;
mod header;

use core::fmt::{self, Write};

use bindery::{Error, SwapError};
use linux_raw_sys::general::AT_FDCWD;

use crate::errno::{Errno, Outcome};
use crate::memory::memory;
use crate::process::{self, Capability, scheduler, signal};

use super::attributes::Kind;
use super::node::Place;
use super::path::{LastLink, user_place};
use super::proc;
use super::sequence::SequenceBuffer;

use device::Active;
pub use device::{DISK, Device, NUMBER, SECTOR, end};
use failing::FAILING;

/// Flags of `swapon`: a priority, whether it is valid, and three for devices that can discard.
const PRIORITY_MASK: u32 = 0x7fff;
const PREFER: u32 = 0x8000;
const DISCARD: u32 = 0x7_0000;
/// The priority of an area without an explicit one.
const PRIORITY: i16 = -2;

/// `swapon(2)`.
pub fn turn_on(path: u64, flags: u32) -> Outcome {
    if flags & !(PRIORITY_MASK | PREFER | DISCARD) != 0 {
        return Err(Errno::EINVAL);
    }
    process::credentials().demand(Capability::Admin)?;
    let place = user_place(AT_FDCWD, path, LastLink::Followed)?;
    check_kind(&place)?;
    let mut disk = DISK.lock();
    if disk.active.is_some() {
        return Err(Errno::EBUSY);
    }
    let slots = disk.slots()?;
    let chosen = (flags & PRIORITY_MASK) as i16;
    let priority = if flags & PREFER != 0 { chosen } else { PRIORITY };
    let area = match FAILING.wanted(slots)? {
        Some(device) => memory().swap_on_device(device, priority),
        None => memory().swap_on(slots, priority),
    };
    let area = area.map_err(|problem| {
        FAILING.forget();
        match problem {
            SwapError::OutOfMemory => Errno::ENOMEM,
            SwapError::TooMany => Errno::EPERM,
            // Linux without CONFIG_SWAP answers the same.
            SwapError::NotBuilt => Errno::ENOSYS,
            SwapError::Size
            | SwapError::NotThere
            | SwapError::InUse
            | SwapError::Interrupted
            | _ => Errno::EINVAL,
        }
    })?;
    disk.active = Some(Active { area, path: place.path(), leaves: false });
    proc::renew_commit_limit();
    Ok(0)
}

/// Refuses files that cannot be a swap area. As on Linux, these are the files of a file system in
/// memory.
fn check_kind(place: &Place) -> Result<(), Errno> {
    match place.node.kind() {
        Kind::Block => Ok(()),
        Kind::Directory => Err(Errno::EISDIR),
        Kind::Regular | Kind::Link | Kind::Device | Kind::Pipe | Kind::Socket | Kind::Anonymous => {
            Err(Errno::EINVAL)
        }
    }
}

/// `swapoff(2)`.
pub fn turn_off(path: u64) -> Outcome {
    process::credentials().demand(Capability::Admin)?;
    let place = user_place(AT_FDCWD, path, LastLink::Followed)?;
    check_kind(&place)?;
    let active = {
        let mut disk = DISK.lock();
        let active = disk.active.as_mut().filter(|active| !active.leaves).ok_or(Errno::EINVAL)?;
        active.leaves = true;
        active.clone()
    };
    // The device is not locked while the area is emptied, because this takes long and other calls
    // read the device.
    let outcome = empty(&active);
    let mut disk = DISK.lock();
    match (outcome, &mut disk.active) {
        (Ok(()), active) => {
            *active = None;
            FAILING.forget();
            proc::renew_commit_limit();
        }
        (Err(_), Some(active)) => {
            active.leaves = false;
            memory().resume_swapping_to(&active.area);
        }
        (Err(_), None) => {}
    }
    outcome.map(|()| 0)
}

/// Reads everything in the area back into memory and removes the area.
fn empty(active: &Active) -> Result<(), Errno> {
    let area = &active.area;
    memory().stop_swapping_to(area);
    let errno = |problem| {
        if matches!(problem, Error::OutOfMemory) {
            Errno::ENOMEM
        } else if matches!(problem, Error::Interrupted) {
            Errno::EINTR
        } else {
            Errno::EIO
        }
    };
    loop {
        for space in process::spaces() {
            space.swap_in_area(area).map_err(errno)?;
        }
        memory().swap_in_objects(area).map_err(errno)?;
        match memory().swap_off(area) {
            Ok(()) => return Ok(()),
            Err(SwapError::InUse) => {}
            Err(_) => return Err(Errno::EINVAL),
        }
        // An address space was forked during the pass, or one is ending.
        if signal::is_waiting(&process::current()) {
            return Err(Errno::EINTR);
        }
        scheduler::yield_now();
    }
}

/// `/proc/swaps`.
pub fn listing(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    out.write_str("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")?;
    let Some(active) = DISK.lock().active.clone() else { return Ok(()) };
    let areas = memory().swap_areas();
    for area in areas.filter(|area| area.number == active.area.number) {
        out.push(&active.path)?;
        let padding = 40_usize.saturating_sub(active.path.len()).max(1);
        write!(out, "{:padding$}partition", "")?;
        for kilobytes in [area.slots * 4, area.taken * 4] {
            // One more tab after a short number keeps the columns aligned.
            let tab = if kilobytes < 10_000_000 { "\t" } else { "" };
            write!(out, "\t{kilobytes}{tab}")?;
        }
        writeln!(out, "\t{}", area.priority)?;
    }
    Ok(())
}
