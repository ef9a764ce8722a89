//! The engine as a subject: an address space on a hosted machine.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use bindery::platform::{Cpu, CpuSet, Invalidation, Platform, Tables};
use bindery::{
    Access, AddressSpace, Advice, MapRequest, Memory, Place, Protection, Reach, Remap, Resolved,
    SizeMode, SpaceOptions,
};
use bindery_hosted::{Config, Machine, Program, TlbKind, Walk};

use super::kernel::{self, KernelEngine};
use super::linux::Linux;
use super::measure::{Candidate, Clock, Outcome, Subject, Tally, measure};
use super::pageout;
use super::workload::{self, Call, Script, Workload};
use crate::size::{FolioSize, GIB, MAX_ORDER, MIB};

/// The three subjects, in the order of [`Comparison::outcomes`].
pub const PAGE: usize = 0;
pub const FULL: usize = 1;
pub const LINUX: usize = 2;

/// The results of one script on all three subjects.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub outcomes: [Outcome; 3],
    /// Nanoseconds that the hosted machine takes to invalidate 1 MiB in its one TLB. The engine's
    /// times include this cost once per invalidation.
    pub invalidation: u64,
}

/// Scripts that share a machine.
pub struct Bench<'a> {
    pub scripts: &'a [Script],
    /// Bytes of memory that the machine has.
    pub memory: u64,
    /// The reason why Linux is left out, if it is.
    pub linux: Result<(), String>,
    pub clock: Clock,
}

impl Bench<'_> {
    /// Runs all scripts on one hosted machine, at [`Reach::Page`] and at full reach, and on Linux.
    /// `tick` is called as in [`measure`], and `done` with the figures of each script.
    ///
    /// # Errors
    /// A problem that keeps the engine from working at all, or the error of `done`. A problem of a
    /// single subject is reported in its outcome.
    pub fn run<A: Walk>(
        &self,
        tick: impl Fn(),
        mut done: impl FnMut(&Script, Comparison) -> Result<(), String>,
    ) -> Result<(), String> {
        let config =
            Config { memory: self.memory, cpus: 1, tlb: TlbKind::Plain, ..Config::default() };
        let machine = Machine::<A>::new(config);
        let memory = machine.memory().map_err(|error| {
            format!("cannot hand the hosted machine's memory to the engine: {error}")
        })?;
        // Only base pages, unless the caller chooses.
        memory.folio_policy().set_global(bindery::SizeMode::Never);
        // The thread stays on the CPU, as in a kernel, because otherwise each call would bind it
        // again.
        let _on_cpu = machine.bind(Cpu(0));
        touch_all(&memory)
            .map_err(|error| format!("cannot map all memory before the workload: {error}"))?;
        let invalidation = time_invalidation(&machine, self.clock);
        if self.scripts.iter().any(|script| script.workload == Workload::Pageout) {
            pageout::swap_on(&memory)?;
        }
        for script in self.scripts {
            if script.workload == Workload::KernelMap {
                let outcomes = self.run_kernel(&memory, script, &tick)?;
                done(script, Comparison { outcomes, invalidation })?;
                continue;
            }
            use_folios(&memory, script.folio);
            let engine =
                |reach| -> Candidate<'_> { warmed(script, Engine::new(&machine, &memory, reach)?) };
            let linux = self.linux.clone().and_then(|()| Linux::new(script));
            let linux = linux.map(|linux| Box::new(linux) as _);
            let candidates = [engine(Reach::Page), engine(Reach::Table), linux];
            let outcomes = measure(script, candidates, self.clock, &tick);
            done(script, Comparison { outcomes, invalidation })?;
        }
        Ok(())
    }

    /// Runs a script of calls to the kernel's maps, for which the host's Linux has no figures.
    fn run_kernel<A: Walk>(
        &self,
        memory: &Memory<Machine<A>>,
        script: &Script,
        tick: &impl Fn(),
    ) -> Result<[Outcome; 3], String> {
        let frames = kernel::Frames::take(memory, script)?;
        let engine =
            |reach| -> Candidate<'_> { warmed(script, KernelEngine::new(memory, &frames, reach)?) };
        let linux = Err(kernel::NO_LINUX.to_owned());
        let candidates = [engine(Reach::Page), engine(Reach::Table), linux];
        Ok(measure(script, candidates, self.clock, tick))
    }
}

/// A subject that has run the script once as a warm-up: Linux's code and data are also warm.
fn warmed<'a>(script: &Script, mut subject: impl Subject + 'a) -> Candidate<'a> {
    script.steps.iter().try_for_each(|step| subject.perform(step.call))?;
    Ok(Box::new(subject))
}

fn time_invalidation<A: Walk>(machine: &Machine<A>, clock: Clock) -> u64 {
    let range = workload::range(GIB, MIB);
    let what = Invalidation { range, stride: PAGE_SIZE, tables: Tables::Unchanged };
    let mut cpus = CpuSet::EMPTY;
    cpus.insert(Cpu(0));
    let (root, _) = machine.frames();
    clock.median(1_001, || machine.invalidate(root, &cpus, &what))
}

/// Allows first touches only folios of this size, wherever they fit.
fn use_folios<A: Walk>(memory: &Memory<Machine<A>>, folio: FolioSize) {
    for order in 1..=MAX_ORDER {
        let mode = if order == folio.order() { SizeMode::Always } else { SizeMode::Never };
        memory.folio_policy().set(Order(order), mode);
    }
}

/// Uses all of the machine's memory once, so that the host has allocated it to this process before
/// the measurement.
fn touch_all<A: Walk>(memory: &Memory<Machine<A>>) -> Result<(), bindery::Error> {
    let space = AddressSpace::new(memory, SpaceOptions::default())?;
    let length = memory.free_frame_count() * PAGE_SIZE;
    let start = space.mmap(&request(length, Place::Anywhere))?;
    let mut at = start;
    // The loop ends when memory has run out. Tables use some of it too.
    while let Ok(Resolved::New(range)) = space.fault(at, Access::Write) {
        at = range.end();
        if at.0 >= start.0 + length {
            break;
        }
    }
    Ok(())
}

fn request(length: u64, place: Place) -> MapRequest {
    MapRequest {
        length,
        protection: Protection::READ | Protection::WRITE,
        place,
        ..MapRequest::default()
    }
}

/// An address space that is loaded on the machine's CPU.
struct Engine<'m, A: Walk> {
    machine: &'m Machine<A>,
    space: AddressSpace<'m, Machine<A>>,
}

impl<'m, A: Walk> Engine<'m, A> {
    fn new(
        machine: &'m Machine<A>,
        memory: &'m Memory<Machine<A>>,
        reach: Reach,
    ) -> Result<Self, String> {
        let options = SpaceOptions::default();
        let space = AddressSpace::with_reach(memory, options, reach);
        let space = space.map_err(|error| error.to_string())?;
        // From here on invalidations are really sent.
        space.enter();
        Ok(Self { machine, space })
    }

    /// Writes a distinct value to each page.
    fn write(&self, range: VirtRange) -> Result<(), String> {
        let program = Program::new(self.machine, &self.space);
        for at in (range.start().0..range.end().0).step_by(PAGE_SIZE as usize) {
            let stored = program.store(VirtAddr(at), at);
            stored.map_err(|error| format!("the first write at {at:#x} failed: {error}"))?;
        }
        Ok(())
    }

    /// Faults where the hardware would fault next, that is, after the range that the last fault
    /// mapped.
    fn touch(&self, mut at: VirtAddr, end: VirtAddr) -> Result<(), String> {
        while at < end {
            at = match self.space.fault(at, Access::Write) {
                Ok(Resolved::New(range)) => range.end(),
                Ok(other) => {
                    return Err(format!(
                        "the first touch at {at} found the page present ({other:?})"
                    ));
                }
                Err(error) => return Err(format!("the first touch at {at} failed: {error}")),
            };
        }
        Ok(())
    }
}

impl<A: Walk> Subject for Engine<'_, A> {
    fn perform(&mut self, call: Call) -> Result<(), String> {
        let result = match call {
            // The policy of the whole machine already provides for the advice.
            Call::Advise(_) => Ok(()),
            Call::Map(at) => {
                let request = request(at.len(), Place::FixedNoReplace(at.start()));
                self.space.mmap(&request).map(|_| ())
            }
            Call::Touch(at) => return self.touch(at.start(), at.end()),
            Call::Write(at) => return self.write(at),
            Call::PageOut(at) => self.space.madvise(at.start(), at.len(), Advice::PageOut),
            Call::Move { from, to } => {
                let length = from.len();
                self.space.mremap(from.start(), length, length, Remap::To(to)).map(|_| ())
            }
            Call::Unmap(at) => self.space.munmap(at.start(), at.len()),
            Call::Kernel(_) => return Err(format!("{}: not a call of a user's", call.name())),
        };
        // Deferred work of the call counts, too.
        self.space.memory().drain_deferred();
        result.map_err(|error| format!("{}: {error}", call.name()))
    }

    fn tally(&self) -> Option<Tally> {
        let local_invalidations = self.machine.statistics().local_invalidations;
        Some(Tally { counts: self.space.counts(), local_invalidations })
    }
}
