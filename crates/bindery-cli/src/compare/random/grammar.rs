//! Random programs. A seed determines a list of steps with folios of one size.
//!
//! Each process has areas of memory in slots of 1 GiB. The grammar knows what is mapped, so most
//! steps are calls that succeed; the state that it does not know (whether a page is in swap,
//! whether a folio is large) may differ between kernels.

use bindery_cli::drivers::rng::Rng;

use super::super::interpreter::Program;
use super::super::interpreter::step::{Class, Step, size};
use crate::size::{FolioSize, GIB, KIB, MIB};

/// The program of a seed.
pub fn program(seed: u64) -> Program {
    let mut rng = Rng::new(seed);
    let folio = rng.one(&[FolioSize::BASE, FolioSize::KIB_64, FolioSize::MIB_2]);
    let mut grammar =
        Grammar { rng, processes: Default::default(), files: [0; FILES], steps: Vec::new() };
    grammar.processes[0].alive = true;
    let count = 24 + grammar.rng.below(24);
    for _ in 0..count {
        grammar.step();
    }
    grammar.end();
    Program { seed, folio, steps: grammar.steps }
}

const PAGE: u64 = 4 * KIB;
const PROCESSES: usize = 4;
const FILES: usize = 4;
/// The first address of slot 0.
const BASE: u64 = 64 * GIB;
const SLOTS: u64 = 24;
/// The maximum number of bytes that a program touches in an area; more would take the machine
/// minutes.
const MOST: u64 = 16 * MIB;

/// Kinds of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Private,
    Shared,
    /// Shared memory of a file, by its number.
    File(usize),
    /// A private mapping of a file.
    PrivateFile(usize),
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Private => "anonymous memory",
            Self::Shared => "shared anonymous memory",
            Self::File(_) => "a shared file",
            Self::PrivateFile(_) => "a private file",
        }
    }
}

/// A mapping. Parts of it may have been unmapped or protected since.
#[derive(Clone, Copy, Debug)]
struct Area {
    start: u64,
    length: u64,
    kind: Kind,
    /// Whether the area was written to.
    touched: bool,
    /// Whether a userfaultfd of its process serves the area.
    served: bool,
}

#[derive(Clone, Default, Debug)]
struct Process {
    alive: bool,
    parent: usize,
    areas: Vec<Area>,
    /// The number of slots used so far. No slot is used twice, so that addresses identify mappings.
    slots: u64,
}

struct Grammar {
    rng: Rng,
    processes: [Process; PROCESSES],
    /// The sizes of the files; 0 for a file that does not exist.
    files: [u64; FILES],
    steps: Vec<Step>,
}

/// A part of an area.
struct Part {
    start: u64,
    length: u64,
    kind: Kind,
}

impl Grammar {
    fn push(
        &mut self,
        process: usize,
        operation: char,
        arguments: &[u64],
        class: Class,
        detail: String,
    ) {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        self.steps.push(Step { process, operation, arguments: all, class, detail });
    }

    /// Each magnitude is equally likely.
    fn any_size(&mut self, most: u64) -> u64 {
        let pages = most / PAGE;
        let bits = self.rng.below(u64::from(pages.ilog2()) + 1);
        let pages = ((1 << bits) + self.rng.below(1 << bits)).min(pages);
        // Programs mostly ask for round sizes.
        let pages = if self.rng.once_in(2) { 1 << bits } else { pages };
        pages * PAGE
    }

    fn alive(&mut self) -> usize {
        let alive: Vec<_> =
            (0..PROCESSES).filter(|&process| self.processes[process].alive).collect();
        self.rng.one(&alive)
    }

    /// A new slot of the process, and an address in the slot, aligned to 2 MiB or less.
    fn new_place(&mut self, process: usize) -> Option<u64> {
        let slot = self.processes[process].slots;
        if slot == SLOTS {
            return None;
        }
        self.processes[process].slots += 1;
        let offset = match self.rng.below(4) {
            0 => PAGE * (1 + self.rng.below(511)),
            1 => 64 * KIB * (1 + self.rng.below(31)),
            _ => 2 * MIB * self.rng.below(8),
        };
        Some(BASE + slot * GIB + offset)
    }

    /// An area of the process, by its index in the list.
    fn area(&mut self, process: usize) -> Option<usize> {
        match self.processes[process].areas.len() {
            0 => None,
            count => Some(self.rng.index(count)),
        }
    }

    /// All of an area or a part of it.
    fn part(&mut self, process: usize, area: usize) -> Part {
        let Area { start, length, kind, .. } = self.processes[process].areas[area];
        if self.rng.once_in(2) {
            return Part { start, length, kind };
        }
        let part = self.any_size(length);
        let offset = self.rng.below((length - part) / PAGE + 1) * PAGE;
        // As in real programs, at a multiple of the size if such an address fits.
        let aligned = offset / part.next_power_of_two() * part.next_power_of_two();
        let offset = if self.rng.once_in(2) { aligned } else { offset };
        Part { start: start + offset, length: part, kind }
    }

    fn step(&mut self) {
        let process = self.alive();
        if self.processes[process].areas.len() < 2 {
            return self.map(process);
        }
        match self.rng.below(32) {
            0..=3 => self.map(process),
            4..=9 => self.access(process),
            10..=11 => self.protect(process),
            12..=14 => self.remap(process),
            15..=20 => self.advise(process),
            21..=22 => self.unmap(process),
            23..=24 => self.fork(process),
            25 => self.exit(),
            26 => self.file(process),
            27 => self.look(process),
            28 => self.lock(process),
            _ => self.userfault(process),
        }
    }

    fn map(&mut self, process: usize) {
        let Some(start) = self.new_place(process) else { return };
        let length = self.any_size(MOST);
        let kind = match self.rng.below(8) {
            0 => Kind::Shared,
            1 => Kind::File(self.rng.index(FILES)),
            2 => Kind::PrivateFile(self.rng.index(FILES)),
            _ => Kind::Private,
        };
        const SHARED: u64 = 1;
        const PRIVATE: u64 = 2;
        const FIXED: u64 = 0x10;
        const ANONYMOUS: u64 = 0x20;
        const POPULATE: u64 = 0x8000;
        let mut flags = FIXED
            | match kind {
                Kind::Private => PRIVATE | ANONYMOUS,
                Kind::Shared => SHARED | ANONYMOUS,
                Kind::File(_) => SHARED,
                Kind::PrivateFile(_) => PRIVATE,
            };
        let populate = self.rng.once_in(6);
        if populate {
            flags |= POPULATE;
        }
        let mut file = 0;
        if let Kind::File(number) | Kind::PrivateFile(number) = kind {
            file = number as u64 + 1;
            if self.files[number] < length {
                // The first process makes the files of all processes, before any fork.
                let Some(grown) = self.grow(process, number, length) else { return };
                self.files[number] = grown;
            }
        }
        let operation = if populate { "mmap with MAP_POPULATE" } else { "mmap" };
        let class = Class { operation, memory: kind.name() };
        self.push(process, 'M', &[start, length, 3, flags, file, 0], class, size(length));
        self.processes[process].areas.push(Area {
            start,
            length,
            kind,
            touched: populate,
            served: false,
        });
        if !populate && self.rng.once_in(2) {
            let area = self.processes[process].areas.len() - 1;
            self.touch(process, area);
        }
    }

    /// Creates a file, or a larger one. `None` if other processes exist, which would not have the
    /// file.
    fn grow(&mut self, process: usize, number: usize, length: u64) -> Option<u64> {
        let class = |operation| Class { operation, memory: "" };
        if self.files[number] > 0 {
            self.push(
                process,
                'T',
                &[number as u64, length],
                class("ftruncate, larger"),
                size(length),
            );
            return Some(length);
        }
        let alone = self.processes.iter().filter(|process| process.alive).count() == 1;
        if !alone {
            return None;
        }
        self.push(
            process,
            'K',
            &[number as u64, length],
            class("memfd_create, ftruncate"),
            size(length),
        );
        Some(length)
    }

    /// Writes all of an area.
    fn touch(&mut self, process: usize, area: usize) {
        let Area { start, length, kind, touched, .. } = self.processes[process].areas[area];
        let content = if length > 2 * MIB { 1 } else { 1 + self.rng.below(2) };
        let operation = if touched { "writes again" } else { "first writes" };
        let class = Class { operation, memory: kind.name() };
        let detail = format!("{}{}", size(length), if content == 2 { ", whole pages" } else { "" });
        self.push(process, 'W', &[start, length, PAGE, content], class, detail);
        self.processes[process].areas[area].touched = true;
    }

    fn access(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        if self.rng.once_in(3) {
            return self.touch(process, area);
        }
        let Part { start, length, kind } = self.part(process, area);
        let stride = if self.rng.once_in(4) { PAGE * (2 + self.rng.below(30)) } else { PAGE };
        let sparse =
            if stride > PAGE { format!(", every {}", size(stride)) } else { String::new() };
        let detail = size(length) + &sparse;
        if self.rng.once_in(2) {
            let class = Class { operation: "writes", memory: kind.name() };
            let content = self.rng.below(2);
            self.push(process, 'W', &[start, length, stride, content], class, detail);
        } else {
            let class = Class { operation: "reads", memory: kind.name() };
            self.push(process, 'D', &[start, length, stride], class, detail);
        }
    }

    fn protect(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let (operation, bits) = self.rng.one(&[
            ("mprotect to read", 1),
            ("mprotect to read and write", 3),
            ("mprotect to nothing", 0),
        ]);
        let class = Class { operation, memory: kind.name() };
        self.push(process, 'P', &[start, length, bits], class, size(length));
        if bits != 3 && self.rng.once_in(2) {
            let class = Class { operation: "mprotect to read and write", memory: kind.name() };
            self.push(process, 'P', &[start, length, 3], class, size(length));
        }
    }

    fn remap(&mut self, process: usize) {
        const MAY_MOVE: u64 = 1;
        const FIXED: u64 = 2;
        let Some(area) = self.area(process) else { return };
        let Area { start, length, kind, .. } = self.processes[process].areas[area];
        if self.rng.once_in(4) {
            // Grows or shrinks in place.
            let new = self.any_size(MOST);
            let grows = matches!(kind, Kind::Private) || new < length;
            if new == length || !grows {
                return;
            }
            let operation = if new > length { "mremap, larger" } else { "mremap, smaller" };
            let class = Class { operation, memory: kind.name() };
            let detail = format!("{} to {}", size(length), size(new));
            self.push(process, 'R', &[start, length, new, 0, 0], class, detail);
            self.processes[process].areas[area].length = new;
            return;
        }
        let Some(mut to) = self.new_place(process) else { return };
        if self.rng.once_in(2) {
            // At the same offset from a multiple of 2 MiB as before, so that whole tables can move.
            to = to / (2 * MIB) * (2 * MIB) + start % (2 * MIB);
        }
        let class = Class { operation: "mremap, moved", memory: kind.name() };
        let far = if to % (2 * MIB) == start % (2 * MIB) { ", congruent" } else { "" };
        let detail = size(length) + far;
        self.push(process, 'R', &[start, length, length, MAY_MOVE | FIXED, to], class, detail);
        self.processes[process].areas[area].start = to;
    }

    fn advise(&mut self, process: usize) {
        const ADVICE: &[(&str, u64)] = &[
            ("MADV_DONTNEED", 4),
            ("MADV_DONTNEED", 4),
            ("MADV_FREE", 8),
            ("MADV_COLD", 20),
            ("MADV_PAGEOUT", 21),
            ("MADV_PAGEOUT", 21),
            ("MADV_WILLNEED", 3),
            ("MADV_POPULATE_READ", 22),
            ("MADV_POPULATE_WRITE", 23),
            ("MADV_HUGEPAGE", 14),
            ("MADV_NOHUGEPAGE", 15),
            ("MADV_RANDOM", 1),
        ];
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let (operation, advice) = self.rng.one(ADVICE);
        let served = self.processes[process].areas[area].served;
        if served && matches!(advice, 22 | 23) {
            return;
        }
        let class = Class { operation, memory: kind.name() };
        self.push(process, 'A', &[start, length, advice], class, size(length));
    }

    fn unmap(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let whole = length == self.processes[process].areas[area].length;
        let operation = if whole { "munmap" } else { "munmap of a part" };
        self.push(
            process,
            'U',
            &[start, length],
            Class { operation, memory: kind.name() },
            size(length),
        );
        // No call covers all of an area with a hole.
        self.processes[process].areas.remove(area);
    }

    fn fork(&mut self, process: usize) {
        let free = (0..PROCESSES).find(|&child| !self.processes[child].alive);
        let Some(child) = free else { return self.exit() };
        let bytes: u64 = self.processes[process].areas.iter().map(|area| area.length).sum();
        let class = Class { operation: "fork", memory: "" };
        self.push(process, 'F', &[child as u64], class, format!("{} mapped", size(bytes)));
        let mut areas = self.processes[process].areas.clone();
        areas.iter_mut().for_each(|area| area.served = false);
        let slots = self.processes[process].slots;
        self.processes[child] = Process { alive: true, parent: process, areas, slots };
    }

    /// Ends a process without children, from its parent.
    fn exit(&mut self) {
        let has_children = |parent: usize| {
            self.processes.iter().enumerate().any(|(child, process)| {
                child != parent && process.alive && process.parent == parent && child != 0
            })
        };
        let leaves: Vec<_> = (1..PROCESSES)
            .filter(|&child| self.processes[child].alive && !has_children(child))
            .collect();
        if leaves.is_empty() {
            return;
        }
        let child = self.rng.one(&leaves);
        let parent = self.processes[child].parent;
        let bytes: u64 = self.processes[child].areas.iter().map(|area| area.length).sum();
        let class = Class { operation: "exit and wait", memory: "" };
        self.push(parent, 'X', &[child as u64], class, format!("{} mapped", size(bytes)));
        self.processes[child] = Process::default();
    }

    fn end(&mut self) {
        for _ in 1..PROCESSES {
            self.exit();
        }
    }

    fn file(&mut self, process: usize) {
        let number = self.rng.index(FILES);
        let bytes = self.files[number];
        if bytes == 0 {
            return;
        }
        let length = self.any_size(bytes);
        let offset = self.rng.below((bytes - length) / PAGE + 1) * PAGE;
        let class = Class { operation: "fallocate, a hole", memory: "" };
        self.push(process, 'H', &[number as u64, offset, length], class, size(length));
    }

    fn look(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let (operation, letter) = self.rng.one(&[("mincore", 'I'), ("msync", 'S')]);
        const SYNC: u64 = 4;
        let class = Class { operation, memory: kind.name() };
        self.push(process, letter, &[start, length, SYNC], class, size(length));
    }

    fn lock(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        if self.processes[process].areas[area].served {
            return;
        }
        let length = length.min(4 * MIB);
        for (operation, letter) in [("mlock", 'L'), ("munlock", 'N')] {
            let class = Class { operation, memory: kind.name() };
            self.push(process, letter, &[start, length], class, size(length));
        }
    }

    /// Applies only to the first process, so that no fork leaves a child with a userfaultfd of its
    /// parent.
    fn userfault(&mut self, process: usize) {
        const MISSING: u64 = 1;
        const WRITE_PROTECT: u64 = 2;
        let whole = self.processes[process]
            .areas
            .iter()
            .find(|area| area.kind == Kind::Private && area.touched && !area.served);
        let Some(&Area { start: from, length, .. }) = whole else { return };
        if process != 0 {
            return;
        }
        let Some(to) = self.new_place(process) else { return };
        let class = |operation| Class { operation, memory: Kind::Private.name() };
        let private = 0x32;
        self.push(process, 'M', &[to, length, 3, private], class("mmap"), size(length));
        self.push(
            process,
            'O',
            &[to, length, MISSING | WRITE_PROTECT],
            class("UFFDIO_REGISTER"),
            size(length),
        );
        let piece = if self.rng.once_in(2) { length } else { self.any_size(length) };
        let mut at = 0;
        let mut calls = 0;
        while at < length && calls < 12 {
            let bytes = piece.min(length - at);
            let (operation, letter) = self.rng.one(&[
                ("UFFDIO_COPY", 'Y'),
                ("UFFDIO_MOVE", 'V'),
                ("UFFDIO_ZEROPAGE", 'Z'),
            ]);
            let arguments = match letter {
                'Z' => [to + at, bytes, 0],
                _ => [to + at, bytes, from + at],
            };
            self.push(process, letter, &arguments, class(operation), size(bytes));
            at += bytes;
            calls += 1;
        }
        if self.rng.once_in(2) {
            let bytes = self.any_size(length);
            self.push(process, 'E', &[to, bytes, 1], class("UFFDIO_WRITEPROTECT"), size(bytes));
            self.push(
                process,
                'E',
                &[to, bytes, 0],
                class("UFFDIO_WRITEPROTECT, removed"),
                size(bytes),
            );
        }
        self.push(process, 'Q', &[to, length], class("UFFDIO_UNREGISTER"), size(length));
        let area = Area { start: to, length, kind: Kind::Private, touched: true, served: false };
        self.processes[process].areas.push(area);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_seed_makes_the_same_program_each_time() {
        let text = |seed| program(seed).text();
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
    }

    #[test]
    fn programs_have_all_operations_and_fit() {
        let source = include_str!("../../../../../programs/workloads/random.c");
        let limit = |name: &str| -> u64 {
            let line =
                source.lines().find_map(|line| line.strip_prefix(&format!("#define {name} ")));
            line.unwrap().parse().unwrap()
        };
        let mut operations = BTreeSet::new();
        let mut folios = BTreeSet::new();
        for seed in 0..300 {
            let program = program(seed);
            assert!(program.steps.len() as u64 <= limit("STEPS"), "{}", program.steps.len());
            folios.insert(program.folio.bytes());
            for step in &program.steps {
                assert!((step.process as u64) < limit("PROCESSES"));
                operations.insert(step.operation);
            }
        }
        assert_eq!(operations.into_iter().collect::<String>(), "ADEFHIKLMNOPQRSTUVWXYZ");
        assert_eq!(folios.len(), 3);
    }

    #[test]
    fn only_processes_that_are_there_make_steps() {
        for seed in 0..300 {
            let mut alive = [true, false, false, false];
            for step in program(seed).steps {
                assert!(alive[step.process], "seed {seed}: {step:?}");
                match step.operation {
                    'F' => alive[step.arguments[0] as usize] = true,
                    'X' => alive[step.arguments[0] as usize] = false,
                    _ => {}
                }
            }
            assert_eq!(alive, [true, false, false, false], "seed {seed}");
        }
    }
}
