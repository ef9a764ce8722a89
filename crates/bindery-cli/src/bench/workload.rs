//! The workloads, as lists of calls. The engine and Linux run the same list.

use bindery::addr::{VirtAddr, VirtRange};
use clap::ValueEnum;

use super::floor::{Floor, Geometry};
use super::kernel::{self, KernelCall};
use super::pageout;
use crate::size::{FolioSize, GIB, KIB, MIB, show_bytes};

/// Workloads by the names that users type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Workload {
    /// mmap 1 MiB, touch it, mremap it, munmap it, again and again (system 1)
    #[value(name = "remap-1m")]
    Remap1m,
    /// mremap of 1 GiB of touched memory to four kinds of places, and its munmap (system 2)
    #[value(name = "remap-1g")]
    Remap1g,
    /// 64 MiB of written memory goes to swap by MADV_PAGEOUT, and is unmapped there (system 3)
    #[value(name = "pageout")]
    Pageout,
    /// vmalloc, vmap and ioremap of 1 MiB, and of more, in the kernel's half (system 5)
    #[value(name = "kernel-map")]
    KernelMap,
}

/// One call to a memory manager. A script has at most one mapping of user memory at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// Map anonymous private memory there.
    Map(VirtRange),
    /// Request folios for the range (only Linux requires a request for each mapping).
    Advise(VirtRange),
    /// Write to each page for the first time.
    Touch(VirtRange),
    /// Write to each page for the first time, so that no two words are the same.
    Write(VirtRange),
    /// Swap the pages out.
    PageOut(VirtRange),
    /// Move the mapping.
    Move { from: VirtRange, to: VirtAddr },
    /// Unmap it.
    Unmap(VirtRange),
    /// Create, change or free areas of the kernel.
    Kernel(KernelCall),
}

impl Call {
    /// The call's name in error messages and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Map(_) => "mmap",
            Self::Advise(_) => "madvise",
            Self::Touch(_) => "first touch",
            Self::Write(_) => "first write",
            Self::PageOut(_) => "MADV_PAGEOUT",
            Self::Move { .. } => "mremap",
            Self::Unmap(_) => "munmap",
            Self::Kernel(call) => call.name(),
        }
    }

    /// The user addresses that are mapped after the call or before it.
    pub fn ranges(self) -> Vec<VirtRange> {
        match self {
            Self::Map(at)
            | Self::Advise(at)
            | Self::Touch(at)
            | Self::Write(at)
            | Self::PageOut(at)
            | Self::Unmap(at) => vec![at],
            Self::Move { from, to } => vec![from, range(to.0, from.len())],
            Self::Kernel(_) => Vec::new(),
        }
    }

    /// The number of calls that this value represents.
    pub fn repetitions(self) -> u64 {
        match self {
            Self::Kernel(call) => call.areas(),
            Self::Map(_)
            | Self::Advise(_)
            | Self::Touch(_)
            | Self::Write(_)
            | Self::PageOut(_)
            | Self::Move { .. }
            | Self::Unmap(_) => 1,
        }
    }
}

/// A measured phase: one row of the table. All calls of a phase have equal floors.
#[derive(Clone, PartialEq, Debug)]
pub struct Phase {
    pub name: String,
    pub floor: Floor,
    /// The number of calls measured together. The time is for one call; floor and counts are for
    /// all.
    pub repetitions: u64,
    /// The published speedup by large pieces.
    pub published: Option<f64>,
}

/// A call and the number of the phase to which its cost belongs. A call without a phase is not
/// measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    pub call: Call,
    pub phase: Option<usize>,
}

/// A workload in one variant: the calls of one round, which leaves nothing mapped.
#[derive(Clone, PartialEq, Debug)]
pub struct Script {
    pub workload: Workload,
    pub variant: String,
    pub folio: FolioSize,
    pub steps: Vec<Step>,
    pub phases: Vec<Phase>,
    /// Whether the phases, each run once, form the loop whose published figure covers the whole.
    pub is_loop: bool,
    pub effort: Effort,
    geometry: Geometry,
}

/// The number of runs of a script. In each of `turns` turns, every subject runs the script
/// `repeats` times, so that a slow period of the host does not affect only one subject.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    pub turns: usize,
    pub repeats: usize,
}

impl Effort {
    /// A tenth of the turns and half of the repeats.
    fn least(self) -> Self {
        Self { turns: self.turns.div_ceil(10), repeats: self.repeats.div_ceil(2) }
    }
}

/// The first address of the mapping, and the distance of its move.
const SOURCE_1M: u64 = GIB;
const SOURCE_1G: u64 = 64 * GIB;
const FAR: u64 = 64 * GIB;

impl Workload {
    /// The name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Remap1m => "remap-1m",
            Self::Remap1g => "remap-1g",
            Self::Pageout => "pageout",
            Self::KernelMap => "kernel-map",
        }
    }

    /// Whether the workload uses user memory, which consists of folios.
    pub fn has_folios(self) -> bool {
        self != Self::KernelMap
    }

    /// The default folio sizes.
    pub fn default_folios(self, quick: bool) -> &'static [FolioSize] {
        match self {
            Self::Remap1m | Self::Pageout => &[FolioSize::KIB_64, FolioSize::BASE],
            // A list of one, for one table.
            Self::KernelMap => &[FolioSize::BASE],
            // Touching 1 GiB takes Linux a large part of a second.
            Self::Remap1g if quick => &[FolioSize::BASE],
            Self::Remap1g => &[FolioSize::BASE, FolioSize::KIB_64],
        }
    }

    /// Bytes of physical memory that the machine needs: data, tables, metadata, and some to spare.
    pub fn memory(self) -> u64 {
        match self {
            Self::Remap1m => 64 * MIB,
            Self::Remap1g => GIB + 256 * MIB,
            Self::Pageout => 2 * pageout::DATA,
            Self::KernelMap => 192 * MIB,
        }
    }

    /// Bytes that are mapped at a time.
    pub fn data(self) -> u64 {
        match self {
            Self::Remap1m => MIB,
            Self::Remap1g => GIB,
            Self::Pageout => pageout::DATA,
            // Linux does not run it.
            Self::KernelMap => 0,
        }
    }

    /// The workload's variants; with few repetitions if `quick`.
    pub fn scripts(self, folio: FolioSize, geometry: Geometry, quick: bool) -> Vec<Script> {
        let mut scripts = match self {
            Self::Remap1m => [MIB, MIB + 4 * KIB].map(|by| remap_1m(by, folio, geometry)).into(),
            Self::Remap1g => vec![remap_1g(folio, geometry)],
            Self::Pageout => vec![pageout::script(folio, geometry)],
            Self::KernelMap => vec![kernel::script(geometry)],
        };
        if quick {
            scripts.iter_mut().for_each(|script| script.effort = script.effort.least());
        }
        scripts
    }
}

/// The loop of system 1.
fn remap_1m(by: u64, folio: FolioSize, geometry: Geometry) -> Script {
    let source = range(SOURCE_1M, MIB);
    let target = range(SOURCE_1M + by, MIB);
    let variant = format!("1 MiB at 1 GiB, moved by {}", show_distance(by, MIB));
    let mut script = Script::new(Workload::Remap1m, variant, folio, geometry);
    script.is_loop = true;
    script.effort = Effort { turns: 40, repeats: 100 };
    script.timed("mmap", Call::Map(source));
    script.untimed(Call::Advise(source));
    script.timed("first touch", Call::Touch(source));
    script.timed("mremap", Call::Move { from: source, to: target.start() });
    script.timed("munmap", Call::Unmap(target));
    script
}

/// System 2. Touching 1 GiB again for every move would take most of the time, so base pages are
/// moved and, unmeasured, moved back. Larger folios cannot be reused, because a move may split them
/// or break contiguous runs.
fn remap_1g(folio: FolioSize, geometry: Geometry) -> Script {
    let source = range(SOURCE_1G, GIB);
    let reusable = folio == FolioSize::BASE;
    let moves = if reusable { 4 } else { 1 };
    let variant = "1 GiB at 64 GiB, moved by 64 GiB and a bit".to_owned();
    let mut script = Script::new(Workload::Remap1g, variant, folio, geometry);
    script.effort = Effort { turns: if reusable { 5 } else { 3 }, repeats: 1 };
    let targets = [
        ("mremap by 1 GiB", 0),
        ("mremap by 2 MiB", 2 * MIB),
        ("mremap off by 64 KiB", 64 * KIB),
        ("mremap off by 4 KiB", 4 * KIB),
    ];
    script.fill(source);
    for (name, off) in targets {
        let target = range(SOURCE_1G + FAR + off, GIB);
        for _ in 0..moves {
            script.timed(name, Call::Move { from: source, to: target.start() });
            script.untimed(Call::Move { from: target, to: source.start() });
        }
        if !reusable {
            script.untimed(Call::Unmap(source));
            script.fill(source);
        }
    }
    script.timed("munmap", Call::Unmap(source));
    script
}

impl Script {
    pub(super) fn new(
        workload: Workload,
        variant: String,
        folio: FolioSize,
        geometry: Geometry,
    ) -> Self {
        let (steps, phases) = (Vec::new(), Vec::new());
        let effort = Effort { turns: 1, repeats: 1 };
        Self { workload, variant, folio, steps, phases, is_loop: false, effort, geometry }
    }

    /// Maps the range and touches it as a measured phase.
    fn fill(&mut self, range: VirtRange) {
        self.untimed(Call::Map(range));
        self.untimed(Call::Advise(range));
        self.timed("first touch", Call::Touch(range));
    }

    pub(super) fn untimed(&mut self, call: Call) {
        self.steps.push(Step { call, phase: None });
    }

    pub(super) fn timed(&mut self, name: &str, call: Call) {
        let known = self.phases.iter().position(|phase| phase.name == name);
        let phase = known.unwrap_or_else(|| {
            let floor = Floor::of(call, self.folio, self.geometry);
            let repetitions = call.repetitions();
            self.phases.push(Phase { name: name.to_owned(), floor, repetitions, published: None });
            self.phases.len() - 1
        });
        self.steps.push(Step { call, phase: Some(phase) });
    }

    /// All user addresses that the script uses.
    pub fn ranges(&self) -> impl Iterator<Item = VirtRange> {
        self.steps.iter().flat_map(|step| step.call.ranges())
    }
}

/// The range of `len` bytes at `start`; both are constants of this module, far below 2^64.
pub fn range(start: u64, len: u64) -> VirtRange {
    VirtRange::from_len(VirtAddr(start), len).expect("workloads stay inside user space")
}

/// `by` as a multiple of `unit` and the rest.
fn show_distance(by: u64, unit: u64) -> String {
    match by % unit {
        0 => show_bytes(by),
        rest => format!("{} + {}", show_bytes(by - rest), show_bytes(rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::kernel::Operation;

    const GEOMETRY: Geometry = Geometry::FOUR_LEVELS;

    fn all() -> Vec<Script> {
        let scripts = |workload: &Workload| {
            let sizes = [FolioSize::BASE, FolioSize::KIB_64].into_iter();
            sizes.flat_map(|folio| workload.scripts(folio, GEOMETRY, false)).collect::<Vec<_>>()
        };
        Workload::value_variants().iter().flat_map(scripts).collect()
    }

    #[test]
    fn every_script_works_on_one_mapping() {
        for script in all() {
            let mut mapped = None;
            let mut areas = None;
            for step in &script.steps {
                mapped = match step.call {
                    Call::Map(at) => {
                        assert_eq!(mapped, None);
                        Some(at)
                    }
                    Call::Move { from, to } => {
                        let target = range(to.0, from.len());
                        assert_eq!(mapped, Some(from));
                        assert!(!from.overlaps(target));
                        Some(target)
                    }
                    Call::Unmap(at) => {
                        assert_eq!(mapped, Some(at));
                        None
                    }
                    Call::Touch(at) | Call::Write(at) | Call::PageOut(at) | Call::Advise(at) => {
                        assert_eq!(mapped, Some(at));
                        mapped
                    }
                    Call::Kernel(call) => {
                        let before = (call.operation != Operation::Map).then_some(call.area);
                        assert_eq!(areas, before, "{call:?}");
                        areas = (call.operation != Operation::Unmap).then_some(call.area);
                        mapped
                    }
                };
            }
            assert_eq!((mapped, areas), (None, None), "{}", script.variant);
        }
    }

    #[test]
    fn calls_of_one_phase_have_its_floor() {
        for script in all() {
            for step in &script.steps {
                if let Some(phase) = step.phase {
                    let floor = Floor::of(step.call, script.folio, GEOMETRY);
                    let phase = &script.phases[phase];
                    assert_eq!((phase.floor, phase.repetitions), (floor, step.call.repetitions()));
                }
            }
        }
    }

    #[test]
    fn users_type_the_names_that_tables_show() {
        for workload in Workload::value_variants() {
            let typed = workload.to_possible_value().map(|value| value.get_name().to_owned());
            assert_eq!(typed.as_deref(), Some(workload.name()));
        }
    }
}
