//! The files of a process.

use alloc::sync::{Arc, Weak};
use core::fmt::{self, Write};
use core::ops::Range;

use bindery::FaultError;
use bindery::addr::VirtAddr;
use bindery_linux::proc::{
    CallerMemory, ClearRefs, PAGEMAP_SCAN, PhysicalAddresses, SCAN_END, SCAN_WORDS, clear_refs,
    maps_entry, pagemap, pagemap_scan, procmap_query, smaps_entry, smaps_rollup, statm,
};
use linux_raw_sys::general::procmap_query as MapsQuery;

use crate::errno::{Errno, Outcome};
use crate::memory::Space;
use crate::process::{self, Capability, Process};
use crate::user;

use super::super::attributes::{Attributes, Kind, Patience};
use super::super::listing::{EntryText, Reader};
use super::super::node::Node;
use super::super::sequence::SequenceBuffer;
use super::names::Names;
use super::{frames, machine, number, texts};

/// The memory of the running program, which the kernel copies at the program's own addresses.
struct RunningProgram;

impl CallerMemory for RunningProgram {
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), bindery::Errno> {
        user::read_bytes(at, into).map_err(|_| bindery::Errno::EFAULT)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), bindery::Errno> {
        user::write_bytes(at, from).map_err(|_| bindery::Errno::EFAULT)
    }
}

/// `PROCMAP_QUERY`: the number of `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u32 =
    3 << 30 | (size_of::<MapsQuery>() as u32) << 16 | (b'f' as u32) << 8 | 17;

/// A file in a process's directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    Arguments,
    Environment,
    Name,
    Maps,
    Smaps,
    SmapsRollup,
    Pagemap,
    ClearRefs,
    Status,
    Stat,
    Statm,
    Memory,
    Limits,
    Mounts,
    KillAdjustment,
    OldKillAdjustment,
    KillScore,
}

pub(super) const FILES: [(&str, Sort); 17] = [
    ("cmdline", Sort::Arguments),
    ("environ", Sort::Environment),
    ("comm", Sort::Name),
    ("maps", Sort::Maps),
    ("smaps", Sort::Smaps),
    ("smaps_rollup", Sort::SmapsRollup),
    ("pagemap", Sort::Pagemap),
    ("clear_refs", Sort::ClearRefs),
    ("status", Sort::Status),
    ("stat", Sort::Stat),
    ("statm", Sort::Statm),
    ("mem", Sort::Memory),
    ("limits", Sort::Limits),
    ("mounts", Sort::Mounts),
    ("oom_score_adj", Sort::KillAdjustment),
    ("oom_adj", Sort::OldKillAdjustment),
    ("oom_score", Sort::KillScore),
];

/// A file of a process. Its opening has a reader.
pub(super) struct File {
    process: u32,
    /// The thread in whose directory it is.
    thread: u32,
    index: usize,
    sort: Sort,
    /// The memory of the process when the file was opened. As on Linux, files about memory describe
    /// that memory, and are empty once the memory is dropped, by `exec` or otherwise.
    space: Weak<Space>,
    reader: Reader,
}

impl File {
    pub(super) fn new((process, thread): (u32, u32), index: usize, space: Weak<Space>) -> Self {
        Self { process, thread, index, sort: FILES[index].1, space, reader: Reader::new() }
    }

    fn process(&self) -> Result<Arc<Process>, Errno> {
        process::find(self.process).ok_or(Errno::ESRCH)
    }

    /// Reads a text that is generated entry by entry, or as one entry.
    fn read_text(&self, process: &Process, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let names = Names::of(process);
        let space = match self.sort {
            Sort::Maps | Sort::Smaps | Sort::SmapsRollup => self.space.upgrade(),
            Sort::Arguments
            | Sort::Environment
            | Sort::Name
            | Sort::Pagemap
            | Sort::ClearRefs
            | Sort::Status
            | Sort::Stat
            | Sort::Statm
            | Sort::Memory
            | Sort::Limits
            | Sort::Mounts
            | Sort::KillAdjustment
            | Sort::OldKillAdjustment
            | Sort::KillScore => process.try_space(),
        };
        // Texts in the kernel's own heap refuse nothing.
        let failed = |_| Errno::ENOMEM;
        self.reader.read(at, into, |key, out| {
            let address = VirtAddr(key);
            match (self.sort, &space) {
                (Sort::Maps | Sort::Smaps | Sort::SmapsRollup | Sort::Statm, None) => Ok(None),
                (Sort::Maps, Some(space)) => maps_entry(space, &names, address, out)
                    .map_or_else(|error| Err(failed(error)), |next| Ok(next.map(|at| at.0))),
                (Sort::Smaps, Some(space)) => smaps_entry(space, &names, address, out)
                    .map_or_else(|error| Err(failed(error)), |next| Ok(next.map(|at| at.0))),
                _ if key > 0 => Ok(None),
                _ => self.make(process, space.as_deref(), out).map_err(failed).map(|()| Some(1)),
            }
        })
    }

    /// Writes a text that is one entry.
    #[inline(never)]
    fn make(&self, process: &Process, space: Option<&Space>, out: &mut EntryText) -> fmt::Result {
        match (self.sort, space) {
            (Sort::SmapsRollup, Some(space)) => smaps_rollup(space, out),
            (Sort::Statm, Some(space)) => {
                let code = process.with_facts(|facts| facts.code.end - facts.code.start);
                statm(space, code.div_ceil(4096), out)
            }
            (Sort::Name, _) => {
                out.push(&process.name_of(self.thread))?;
                out.write_str("\n")
            }
            (Sort::Status, _) => texts::status(process, self.thread, space, out),
            (Sort::Stat, _) => texts::stat(process, self.thread, space, out),
            (Sort::Limits, _) => texts::limits(process, out),
            (Sort::KillAdjustment, _) => writeln!(out, "{}", process.kill_adjustment()),
            (Sort::OldKillAdjustment, _) => texts::old_kill_adjustment(process, out),
            (Sort::KillScore, _) => writeln!(out, "{}", process.kill_score()),
            _ => Ok(()),
        }
    }
}

/// Reads the texts in a range of a program's memory, unchanged.
fn read_texts(space: &Space, range: &Range<u64>, at: u64, into: &mut [u8]) -> usize {
    let start = range.start.saturating_add(at).min(range.end);
    let length = into.len().min((range.end - start) as usize);
    // Unmapped memory reads as empty.
    read_memory(space, start, &mut into[..length]).unwrap_or(0)
}

impl File {
    /// `PAGEMAP_SCAN`.
    fn scan(&self, argument: u64) -> Outcome {
        let space = self.space.upgrade().ok_or(Errno::ESRCH)?;
        let mut words: [u64; SCAN_WORDS] = user::read(argument)?;
        let before = words[SCAN_END];
        let mut write = |at: VirtAddr, bytes: &[u8]| {
            user::write_bytes(at.0, bytes).map_err(|_| FaultError::NotMapped)
        };
        let done = pagemap_scan(&space, &mut words, &mut write);
        if words[SCAN_END] != before {
            user::write(argument.wrapping_add(8 * SCAN_END as u64), &words[SCAN_END])?;
        }
        Ok(done?)
    }
}

impl Node for File {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        let mode = match self.sort {
            Sort::Memory => 0o600,
            Sort::ClearRefs => 0o200,
            Sort::Name | Sort::KillAdjustment | Sort::OldKillAdjustment => 0o644,
            Sort::Pagemap | Sort::Environment => 0o400,
            Sort::Arguments
            | Sort::Maps
            | Sort::Smaps
            | Sort::SmapsRollup
            | Sort::Status
            | Sort::Stat
            | Sort::Statm
            | Sort::Limits
            | Sort::Mounts
            | Sort::KillScore => 0o444,
        };
        let owner = super::owner(self.process);
        Attributes { owner, ..Attributes::plain(number(self.process, self.index + 10), mode) }
    }

    fn open(&self, _: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        let process = self.process()?;
        let is_inside = matches!(
            self.sort,
            Sort::Maps
                | Sort::Smaps
                | Sort::SmapsRollup
                | Sort::Pagemap
                | Sort::Memory
                | Sort::Environment
        );
        if is_inside && !process::may_look_into(&process) {
            return Err(Errno::EACCES);
        }
        let space = process.try_space();
        let space = space.as_ref().map_or(Weak::new(), Arc::downgrade);
        Ok(Some(Arc::new(Self::new((self.process, self.thread), self.index, space))))
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let process = self.process()?;
        let opened = || self.space.upgrade();
        match self.sort {
            Sort::Pagemap => opened().map_or(Ok(0), |space| {
                frames::read_words(at, into, |first, words| {
                    let shown = if process::credentials().can(Capability::Admin) {
                        PhysicalAddresses::Shown
                    } else {
                        PhysicalAddresses::Withheld
                    };
                    pagemap(&space, first, shown, words)
                })
            }),
            Sort::Memory => opened().map_or(Ok(0), |space| read_memory(&space, at, into)),
            Sort::Environment => {
                let range = process.with_facts(|facts| facts.environment.clone());
                Ok(opened().map_or(0, |space| read_texts(&space, &range, at, into)))
            }
            Sort::Arguments => {
                let range = process.with_facts(|facts| facts.arguments.clone());
                let space = process.try_space();
                Ok(space.map_or(0, |space| read_texts(&space, &range, at, into)))
            }
            Sort::Mounts => {
                let mut buffer = SequenceBuffer::new(at, into);
                // An error means that the buffer is full.
                let _ = machine::mounts(&mut buffer);
                Ok(buffer.filled())
            }
            Sort::Name
            | Sort::Maps
            | Sort::Smaps
            | Sort::SmapsRollup
            | Sort::ClearRefs
            | Sort::Status
            | Sort::Stat
            | Sort::Statm
            | Sort::Limits
            | Sort::KillAdjustment
            | Sort::OldKillAdjustment
            | Sort::KillScore => self.read_text(&process, at, into),
        }
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        match (self.sort, request) {
            (Sort::Maps, PROCMAP_QUERY) => {}
            (Sort::Pagemap, PAGEMAP_SCAN) => return self.scan(argument),
            _ => return Err(Errno::ENOTTY),
        }
        let names = process::find(self.process).map_or(Names { stack: 0 }, |it| Names::of(&it));
        let space = self.space.upgrade();
        procmap_query(space.as_deref(), &RunningProgram, argument, &names)?;
        Ok(0)
    }

    fn has_end(&self) -> bool {
        false
    }

    fn write(&self, at: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        if self.sort == Sort::Memory {
            let space = self.space.upgrade();
            return space.map_or(Ok(0), |space| write_memory(&space, at, from));
        }
        let process = self.process()?;
        if matches!(self.sort, Sort::KillAdjustment | Sort::OldKillAdjustment) {
            let text = core::str::from_utf8(from).map_err(|_| Errno::EINVAL)?;
            let number = text.trim().parse().map_err(|_| Errno::EINVAL)?;
            let old = self.sort == Sort::OldKillAdjustment;
            process.set_kill_adjustment(if old {
                texts::new_adjustment(number)?
            } else {
                number
            })?;
            return Ok(from.len());
        }
        match self.sort {
            Sort::ClearRefs => {
                let space = process.try_space().ok_or(Errno::ESRCH)?;
                let text = core::str::from_utf8(from).map_err(|_| Errno::EINVAL)?;
                clear_refs(&space, ClearRefs::parse(text)?)?;
            }
            Sort::Name => {
                process.set_name_of(self.thread, from.strip_suffix(b"\n").unwrap_or(from))?;
            }
            // Linux also refuses only the call; root may open the files.
            Sort::Arguments
            | Sort::Environment
            | Sort::Maps
            | Sort::Smaps
            | Sort::SmapsRollup
            | Sort::Pagemap
            | Sort::Status
            | Sort::Stat
            | Sort::Statm
            | Sort::Memory
            | Sort::Limits
            | Sort::Mounts
            | Sort::KillAdjustment
            | Sort::OldKillAdjustment
            | Sort::KillScore => return Err(Errno::EINVAL),
        }
        Ok(from.len())
    }
}

/// `mem`: a program's memory by address, up to the first unreadable page.
fn read_memory(space: &Space, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
    page_by_page(at, into.len(), |at, part| user::read_bytes_foreign(space, at, &mut into[part]))
}

/// As [`read_memory`], for a write, up to the first unwritable page.
fn write_memory(space: &Space, at: u64, from: &[u8]) -> Result<usize, Errno> {
    page_by_page(at, from.len(), |at, part| user::write_bytes_foreign(space, at, &from[part]))
}

/// Calls `act` with the address and the range of each page's bytes, until it fails. Returns the
/// number of bytes before the failure.
fn page_by_page(
    at: u64,
    length: usize,
    mut act: impl FnMut(u64, Range<usize>) -> Result<(), Errno>,
) -> Result<usize, Errno> {
    let mut done = 0;
    while done < length {
        let next = at.checked_add(done as u64);
        let acted = next.ok_or(Errno::EIO).and_then(|at| {
            let end = length.min(done + 4096 - (at % 4096) as usize);
            act(at, done..end).map(|()| end)
        });
        match acted {
            Ok(end) => done = end,
            Err(_) if done > 0 => break,
            Err(_) => return Err(Errno::EIO),
        }
    }
    Ok(done)
}
