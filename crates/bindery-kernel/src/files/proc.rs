//! `/proc`: what programs learn of processes and of the machine. What concerns memory is written by
//! the core (`bindery::linux::proc`).

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::ops::Range;

use bindery::addr::VirtAddr;
use bindery::linux::proc::{
    Backing, ClearRefs, Naming, PhysicalAddresses, clear_refs, maps_entry, pagemap, procmap_query,
    smaps_entry, smaps_rollup, statm, status,
};
use linux_raw_sys::general::procmap_query as MapsQuery;

use crate::errno::{Errno, Outcome};
use crate::memory::Space;
use crate::process::{self, Process};
use crate::sync::Mutex;
use crate::{heap, time, user};

use super::generated::{Shelf, Window};
use super::listing::{EntryText, Reader};
use super::node::{Attributes, Entry, Kind, Node, Patience, Place};

mod frames;
mod machine;

/// The paths by which files were opened, for `maps`; by the identity of the object.
static PATHS: Mutex<BTreeMap<u64, Found>> = Mutex::new(BTreeMap::new());

/// A file, and the path that it was found by.
type Found = (Weak<dyn Node>, Arc<[u8]>);

/// `PROCMAP_QUERY`: as `_IOWR('f', 17, struct procmap_query)` has it.
const PROCMAP_QUERY: u32 =
    3 << 30 | (size_of::<MapsQuery>() as u32) << 16 | (b'f' as u32) << 8 | 17;

/// The most paths that are remembered.
const PATHS_MAX: usize = 4096;

/// Remembers the path of a file that was opened.
pub fn remember(place: &Arc<Place>) {
    let Some(object) = place.node.object() else { return };
    let mut paths = PATHS.lock();
    if paths.len() >= PATHS_MAX {
        paths.retain(|_, (node, _)| node.strong_count() > 0);
    }
    if paths.len() < PATHS_MAX && heap::room(1024).is_ok() {
        paths.insert(object.identity(), (Arc::downgrade(&place.node), place.path().into()));
    }
}

/// What `maps` and `smaps` call things.
struct Names {
    stack: u64,
}

impl Names {
    fn of(process: &Process) -> Self {
        Self { stack: process.with_facts(|facts| facts.stack) }
    }
}

impl Naming for Names {
    fn write_path(&self, identity: u64, backing: Backing, out: &mut dyn Write) -> fmt::Result {
        if backing == Backing::SharedAnonymous {
            return out.write_str("/dev/zero (deleted)");
        }
        // What may be the last handle of a file is let go without the lock.
        let known = PATHS.lock().get(&identity).cloned();
        let Some((node, path)) = known else { return out.write_str("/memfd: (deleted)") };
        out.write_str(&String::from_utf8_lossy(&path))?;
        let named = node.upgrade().is_some_and(|node| node.attributes().links > 0);
        let tells = path.ends_with(b" (deleted)");
        if named || tells { Ok(()) } else { out.write_str(" (deleted)") }
    }

    fn stack(&self) -> Option<VirtAddr> {
        Some(VirtAddr(self.stack)).filter(|at| at.0 != 0)
    }
}

/// A file in a process' folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sort {
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
    KillScore,
}

const FILES: [(&str, Sort); 16] = [
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
    ("oom_score_adj", Sort::KillScore),
    ("oom_score", Sort::KillScore),
];

/// The root of `/proc`.
pub fn root() -> Arc<dyn Node> {
    Arc::new(Root { machine: machine::shelf() })
}

/// The numbers of `/proc`'s nodes: of process 5, the file 3 has 5,003 and some.
fn number(process: u32, index: usize) -> u64 {
    (1 << 40) + u64::from(process) * 1000 + index as u64
}

struct Root {
    machine: Arc<Shelf>,
}

impl Node for Root {
    fn kind(&self) -> Kind {
        Kind::Folder
    }

    fn attributes(&self) -> Attributes {
        Attributes { links: 2, ..Attributes::plain(number(0, 0), 0o555) }
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        let text = core::str::from_utf8(name).map_err(|_| Errno::ENOENT)?;
        if text == "self" || text == "thread-self" {
            let thread = process::current();
            let (process, thread) = (thread.process.id, thread.id());
            let own = text == "self";
            let target =
                if own { format!("{process}") } else { format!("{process}/task/{thread}") };
            return Ok(Arc::new(Jump { target: target.into_bytes(), place: None }));
        }
        if let Ok(id) = text.parse::<u32>() {
            process::find(id).ok_or(Errno::ENOENT)?;
            return Ok(Arc::new(Folder { process: id, sort: FolderSort::Process }));
        }
        self.machine.child(name)
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let mut entries = self.machine.children()?;
        let link =
            Entry { name: b"self".into(), number: number(0, 1), kind: Kind::Link, cookie: 999 };
        entries.push(link);
        entries.extend(process::all().iter().map(|process| Entry {
            name: format!("{}", process.id).into_bytes(),
            number: number(process.id, 0),
            kind: Kind::Folder,
            cookie: 1000 + u64::from(process.id),
        }));
        Ok(entries)
    }

    fn open(self: Arc<Self>, _: u32) -> Result<Arc<dyn Node>, Errno> {
        Ok(self)
    }

    fn read(&self, _: u64, _: &mut [u8], _: Patience) -> Result<usize, Errno> {
        Err(Errno::EISDIR)
    }

    fn is_seekable(&self) -> bool {
        true
    }
}

/// A link that leads to a place without a path, where it has one.
struct Jump {
    target: Vec<u8>,
    place: Option<Arc<Place>>,
}

impl Jump {
    fn to(place: Arc<Place>) -> Arc<dyn Node> {
        Arc::new(Self { target: place.path(), place: Some(place) })
    }
}

impl Node for Jump {
    fn kind(&self) -> Kind {
        Kind::Link
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(number(0, 2), 0o777)
    }

    fn target(&self) -> Result<Vec<u8>, Errno> {
        Ok(self.target.clone())
    }

    fn jump(&self) -> Option<Arc<Place>> {
        self.place.clone()
    }

    fn open(self: Arc<Self>, _: u32) -> Result<Arc<dyn Node>, Errno> {
        Err(Errno::ELOOP)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FolderSort {
    Process,
    Descriptors,
    Tasks,
}

struct Folder {
    process: u32,
    sort: FolderSort,
}

impl Folder {
    fn process(&self) -> Result<Arc<Process>, Errno> {
        process::find(self.process).ok_or(Errno::ENOENT)
    }
}

impl Node for Folder {
    fn kind(&self) -> Kind {
        Kind::Folder
    }

    fn attributes(&self) -> Attributes {
        let number = number(self.process, self.sort as usize);
        Attributes { links: 2, ..Attributes::plain(number, 0o555) }
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        let process = self.process()?;
        let text = core::str::from_utf8(name).map_err(|_| Errno::ENOENT)?;
        let id = self.process;
        match self.sort {
            FolderSort::Descriptors => {
                let files = process.try_files().ok_or(Errno::ENOENT)?;
                let descriptor = text.parse().map_err(|_| Errno::ENOENT)?;
                let description = files.get(descriptor).map_err(|_| Errno::ENOENT)?;
                Ok(Jump::to(description.place.clone()))
            }
            FolderSort::Tasks => {
                let thread: u32 = text.parse().map_err(|_| Errno::ENOENT)?;
                if !process.thread_ids().contains(&thread) {
                    return Err(Errno::ENOENT);
                }
                Ok(Arc::new(Folder { process: id, sort: FolderSort::Process }))
            }
            FolderSort::Process => match text {
                "fd" => Ok(Arc::new(Folder { process: id, sort: FolderSort::Descriptors })),
                "task" => Ok(Arc::new(Folder { process: id, sort: FolderSort::Tasks })),
                "exe" => match process.facts().path {
                    path if path.is_empty() => Err(Errno::ENOENT),
                    path => Ok(Arc::new(Jump { target: path, place: None })),
                },
                "cwd" => Ok(Jump::to(process.try_files().ok_or(Errno::ENOENT)?.directory())),
                "root" => Ok(Jump::to(super::root())),
                _ => {
                    let found = FILES.iter().position(|(known, _)| *known == text);
                    let index = found.ok_or(Errno::ENOENT)?;
                    Ok(Arc::new(File::new(id, index, Weak::new())))
                }
            },
        }
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let process = self.process()?;
        let entry = |name: String, kind, index: usize| Entry {
            name: name.into_bytes(),
            number: number(self.process, index + 10),
            kind,
            cookie: index as u64 + 3,
        };
        Ok(match self.sort {
            FolderSort::Descriptors => {
                let open = process.try_files().map_or(Vec::new(), |files| files.open_descriptors());
                open.iter().map(|at| entry(format!("{at}"), Kind::Link, *at as usize)).collect()
            }
            FolderSort::Tasks => {
                let threads = process.thread_ids();
                let entries = threads.iter();
                entries.map(|id| entry(format!("{id}"), Kind::Folder, *id as usize)).collect()
            }
            FolderSort::Process => {
                let links = ["exe", "cwd", "root"].map(|name| (name, Kind::Link));
                let folders = ["fd", "task"].map(|name| (name, Kind::Folder));
                let files = FILES.iter().map(|(name, _)| (*name, Kind::Regular));
                let all = files.chain(links).chain(folders).enumerate();
                all.map(|(index, (name, kind))| entry(name.into(), kind, index)).collect()
            }
        })
    }

    fn open(self: Arc<Self>, _: u32) -> Result<Arc<dyn Node>, Errno> {
        Ok(self)
    }

    fn read(&self, _: u64, _: &mut [u8], _: Patience) -> Result<usize, Errno> {
        Err(Errno::EISDIR)
    }

    fn is_seekable(&self) -> bool {
        true
    }
}

/// A file of a process; opened, it has a reader.
struct File {
    process: u32,
    index: usize,
    sort: Sort,
    /// The memory that the process had when the file was opened. As on Linux, files about memory tell
    /// of that, and are empty when it is gone, by `exec` or otherwise.
    space: Weak<Space>,
    reader: Reader,
}

impl File {
    fn new(process: u32, index: usize, space: Weak<Space>) -> Self {
        Self { process, index, sort: FILES[index].1, space, reader: Reader::new() }
    }

    fn process(&self) -> Result<Arc<Process>, Errno> {
        process::find(self.process).ok_or(Errno::ESRCH)
    }

    /// Reads a text that is made entry by entry, or as one entry.
    fn read_text(&self, process: &Process, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let names = Names::of(process);
        let space = match self.sort {
            Sort::Maps | Sort::Smaps | Sort::SmapsRollup => self.space.upgrade(),
            _ => process.try_space(),
        };
        // Texts of the kernel's own heap refuse nothing.
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
    fn make(&self, process: &Process, space: Option<&Space>, out: &mut EntryText) -> fmt::Result {
        match (self.sort, space) {
            (Sort::SmapsRollup, Some(space)) => smaps_rollup(space, out),
            (Sort::Statm, Some(space)) => {
                let code = process.with_facts(|facts| facts.code.end - facts.code.start);
                statm(space, code.div_ceil(4096), out)
            }
            (Sort::Name, _) => {
                out.push(&process.name())?;
                out.write_str("\n")
            }
            (Sort::Status, _) => self.make_status(process, space, out),
            (Sort::Stat, _) => make_stat(process, space, out),
            (Sort::Limits, _) => make_limits(process, out),
            (Sort::KillScore, _) => out.write_str("0\n"),
            _ => Ok(()),
        }
    }

    fn make_status(
        &self,
        process: &Process,
        space: Option<&Space>,
        out: &mut EntryText,
    ) -> fmt::Result {
        out.write_str("Name:\t")?;
        out.push(&process.name())?;
        let (letter, parent) = (process.letter(), process.parent_id());
        writeln!(out, "\nUmask:\t{:04o}", process.try_files().map_or(0, |files| files.umask()))?;
        writeln!(out, "State:\t{letter} ({})", state_name(letter))?;
        writeln!(out, "Tgid:\t{0}\nNgid:\t0\nPid:\t{0}\nPPid:\t{parent}", process.id)?;
        writeln!(out, "TracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0")?;
        writeln!(out, "FDSize:\t64\nGroups:\t0 ")?;
        if let Some(space) = space {
            status(space, out)?;
        }
        let [pending, blocked, ignored, caught] = process.signal_sets();
        writeln!(out, "Threads:\t{}", process.thread_ids().len())?;
        writeln!(out, "ShdPnd:\t{pending:016x}\nSigBlk:\t{blocked:016x}")?;
        writeln!(out, "SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}")?;
        writeln!(out, "Cpus_allowed:\t1\nCpus_allowed_list:\t0")
    }
}

fn state_name(letter: char) -> &'static str {
    match letter {
        'R' => "running",
        'S' => "sleeping",
        'T' => "stopped",
        _ => "zombie",
    }
}

/// Reads the texts in a range of a program's memory, as they stand there.
fn read_texts(space: &Space, range: &Range<u64>, at: u64, into: &mut [u8]) -> usize {
    let start = range.start.saturating_add(at).min(range.end);
    let length = into.len().min((range.end - start) as usize);
    // What is not mapped any more reads as nothing.
    read_memory(space, start, &mut into[..length]).unwrap_or(0)
}

/// `stat`: one line of numbers; those that mean nothing here are 0 (see proc_pid_stat(5)).
fn make_stat(process: &Process, space: Option<&Space>, out: &mut EntryText) -> fmt::Result {
    const TICK: u64 = time::SECOND / 100;
    let (usage, resident) = match space {
        Some(space) => (space.usage().total << 12, bindery::linux::proc::resident(space).total()),
        None => (0, 0),
    };
    write!(out, "{} (", process.id)?;
    out.push(&process.name())?;
    let (letter, parent, group) = (process.letter(), process.parent_id(), process.group());
    let (time, children) = (process.processor_time() / TICK, process.children_time() / TICK);
    write!(out, ") {letter} {parent} {group} {} 0 -1 0 0 0 0 0 ", process.session())?;
    write!(out, "{time} 0 {children} 0 20 0 {} 0 ", process.thread_ids().len())?;
    let facts = process.facts();
    write!(out, "{} {usage} {resident} ", process.start_time / TICK)?;
    write!(out, "{} {} {} {} ", u64::MAX, facts.code.start, facts.code.end, facts.stack)?;
    write!(out, "0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 ")?;
    let (arguments, environment) = (facts.arguments, facts.environment);
    write!(out, "{} {} ", arguments.start, arguments.end)?;
    writeln!(out, "{} {} 0", environment.start, environment.end)
}

fn make_limits(process: &Process, out: &mut EntryText) -> fmt::Result {
    const NAMES: [(&str, u32, &str); 9] = [
        ("Max cpu time", 0, "seconds"),
        ("Max file size", 1, "bytes"),
        ("Max data size", 2, "bytes"),
        ("Max stack size", 3, "bytes"),
        ("Max resident set", 5, "bytes"),
        ("Max processes", 6, "processes"),
        ("Max open files", 7, "files"),
        ("Max locked memory", 8, "bytes"),
        ("Max address space", 9, "bytes"),
    ];
    writeln!(out, "{:<26}{:<21}{:<21}Units", "Limit", "Soft Limit", "Hard Limit")?;
    for (name, resource, unit) in NAMES {
        let limit = process.limit(resource);
        let text = |limit| if limit == u64::MAX { "unlimited".into() } else { format!("{limit}") };
        let (current, maximum) = (text(limit.current), text(limit.maximum));
        writeln!(out, "{name:<26}{current:<21}{maximum:<21}{unit}")?;
    }
    Ok(())
}

impl Node for File {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        let mode = match self.sort {
            Sort::Memory => 0o600,
            Sort::ClearRefs => 0o200,
            Sort::Name | Sort::KillScore => 0o644,
            Sort::Pagemap | Sort::Environment => 0o400,
            _ => 0o444,
        };
        Attributes::plain(number(self.process, self.index + 10), mode)
    }

    fn open(self: Arc<Self>, _: u32) -> Result<Arc<dyn Node>, Errno> {
        let space = self.process()?.try_space();
        let space = space.as_ref().map_or(Weak::new(), Arc::downgrade);
        Ok(Arc::new(Self::new(self.process, self.index, space)))
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let process = self.process()?;
        let opened = || self.space.upgrade();
        match self.sort {
            Sort::Pagemap => opened().map_or(Ok(0), |space| {
                frames::read_words(at, into, |first, words| {
                    pagemap(&space, first, PhysicalAddresses::Shown, words)
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
                let mut window = Window::new(at, into);
                // An error means that the window is full.
                let _ = machine::mounts(&mut window);
                Ok(window.filled())
            }
            _ => self.read_text(&process, at, into),
        }
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        if self.sort != Sort::Maps || request != PROCMAP_QUERY {
            return Err(Errno::ENOTTY);
        }
        let names = process::find(self.process).map_or(Names { stack: 0 }, |it| Names::of(&it));
        let space = self.space.upgrade();
        process::with_space(|caller| {
            procmap_query(space.as_deref(), caller, argument, &names)?;
            Ok(0)
        })
    }

    fn has_end(&self) -> bool {
        false
    }

    fn write(&self, at: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let process = self.process()?;
        let space = process.try_space().ok_or(Errno::ESRCH)?;
        match self.sort {
            Sort::ClearRefs => {
                let text = core::str::from_utf8(from).map_err(|_| Errno::EINVAL)?;
                clear_refs(&space, ClearRefs::parse(text)?)?;
            }
            Sort::Memory => {
                user::write_bytes_of(&space, at, from).map_err(|_| Errno::EIO)?;
            }
            Sort::Name => process.set_name(from.strip_suffix(b"\n").unwrap_or(from)),
            Sort::KillScore => {}
            _ => return Err(Errno::EACCES),
        }
        Ok(from.len())
    }

    fn is_seekable(&self) -> bool {
        true
    }
}

/// `mem`: a program's memory by address, as far as it can be read.
fn read_memory(space: &Space, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < into.len() {
        let from = at.checked_add(done as u64).ok_or(Errno::EIO)?;
        let length = (4096 - (from % 4096) as usize).min(into.len() - done);
        match user::read_bytes_of(space, from, &mut into[done..done + length]) {
            Ok(()) => done += length,
            Err(_) if done > 0 => break,
            Err(_) => return Err(Errno::EIO),
        }
    }
    Ok(done)
}
