//! Random programs. A seed determines a list of steps with folios of one size. `calls` has the
//! arguments of each call.
//!
//! Each process has areas of memory in slots of 1 GiB. The grammar knows what is mapped, so most
//! steps are calls that succeed; the state that it does not know (whether a page is in swap,
//! whether a folio is large) may differ between kernels.

mod calls;

use bindery_cli::drivers::rng::Rng;

use crate::compare::interpreter::Program;
use crate::compare::interpreter::step::{Class, Step};
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

    fn end(&mut self) {
        for _ in 1..PROCESSES {
            self.exit();
        }
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
        let source = include_str!("../../../../../../programs/workloads/random.c");
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
