//! `bindery bench compaction`: compacts the live half of a heap, by MOVE and by COPY, in ranges of
//! each size.
//!
//! Objects are gathered through the direct map, since a program with an MMU gathers them without a
//! call. One thread makes all calls; `examples/compactor.rs` of `bindery-hosted` and the workload
//! `compaction` of `bindery compare` have threads that use the heap during the compaction.

use std::path::PathBuf;
use std::time::Instant;

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::platform::{Cpu, Platform};
use bindery::{
    Access, AddressSpace, Advice, Counts, FillMode, Inspection, MapRequest, Memory, MoveMode,
    Place, Protection, Reach, SpaceOptions, Userfault, UserfaultFeatures, UserfaultModes,
    UserfaultScope,
};
use bindery_hosted::{ArchitectureName, Config, Machine, TlbKind, Visitor, Walk, dispatch};
use serde::Serialize;

use super::report::table;
use super::statistics::Summary;
use super::{enough_memory, parse_architecture};
use crate::Problem;
use crate::output::{JsonFile, show, thousands};
use crate::size::{GIB, KIB, MIB, show_bytes};

const HELP: &str = "\
What is measured
  The live objects of a heap of 32 MiB, half of all, are gathered range by range, and brought to a
  range that a userfaultfd serves. COPY has one buffer. MOVE takes the buffer's own pages:
  recycled: the buffer is a part of the old heap that has no live objects any more. The parts that
  no buffer needs are given back (MADV_DONTNEED), by COPY too.
  fresh: the buffer is memory that was never touched. Nothing is given back.
  Times are those of a whole compaction, with the gathering: the median of several. \"page by page\"
  is the engine with pieces of one base page (Reach::Page). Copied and zeroed bytes are those of
  the engine.

The JSON
  bindery; architecture; quick; results[]: range_bytes, pages (\"recycled\", \"fresh\"), call (\"COPY\",
  \"MOVE\"), and for each of page and whole: nanoseconds {...}, entries_written, invalidations,
  bytes_copied, bytes_zeroed; move_to_copy (whole, medians; with MOVE alone).";

/// Measure the compaction of a heap by MOVE and by COPY
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More: bindery bench compaction --help")]
pub struct Arguments {
    /// The page-table format of the hosted machine
    #[arg(long, value_name = "ARCH", default_value = "x86-64", value_parser = parse_architecture)]
    arch: ArchitectureName,

    /// Write all figures to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// A heap of 8 MiB, and fewer repetitions
    #[arg(long)]
    quick: bool,
}

const OLD: u64 = GIB;
const NEW: u64 = 2 * GIB;
const BUFFER: u64 = 3 * GIB;

/// Every second object of the old heap is alive.
const OBJECT: u64 = 256;

const RANGES: [u64; 3] = [4 * KIB, 64 * KIB, 2 * MIB];

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Pages {
    Recycled,
    Fresh,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Call {
    Copy,
    Move,
}

/// One kind of compaction.
#[derive(Clone, Copy)]
struct Kind {
    range: u64,
    pages: Pages,
    call: Call,
}

/// The cost of one compaction.
#[derive(Clone, Copy, Serialize)]
struct Sample {
    nanoseconds: Summary,
    entries_written: u64,
    invalidations: u64,
    bytes_copied: u64,
    bytes_zeroed: u64,
}

#[derive(Serialize)]
struct Row {
    range_bytes: u64,
    pages: Pages,
    call: Call,
    /// Page by page.
    page: Sample,
    /// The cost in the largest possible pieces.
    whole: Sample,
    /// Time of MOVE divided by that of COPY.
    move_to_copy: Option<f64>,
}

/// All figures of a run. Fields are only ever added.
#[derive(Serialize)]
struct Document<'a> {
    /// The version of the program.
    bindery: &'static str,
    architecture: String,
    quick: bool,
    results: &'a [Row],
}

/// Runs the measurement of the arguments.
///
/// # Errors
/// The message for the user.
pub fn run(arguments: &Arguments) -> Result<(), Problem> {
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let (heap, repeats) = if arguments.quick { (8 * MIB, 2) } else { (32 * MIB, 9) };
    enough_memory(4 * heap)?;
    let rows = dispatch(arguments.arch, Run { heap, repeats })?;
    show(&report(&rows))?;
    if let Some(file) = file {
        let document = Document {
            bindery: env!("CARGO_PKG_VERSION"),
            architecture: arguments.arch.to_string(),
            quick: arguments.quick,
            results: &rows,
        };
        file.write(&document)?;
    }
    Ok(())
}

/// All kinds, on an architecture known by name.
struct Run {
    heap: u64,
    repeats: usize,
}

impl Visitor for Run {
    type Output = Result<Vec<Row>, String>;

    fn visit<A: Walk>(self) -> Self::Output {
        let Self { heap, repeats } = self;
        let config = Config { memory: 4 * heap, cpus: 1, tlb: TlbKind::Plain, ..Config::default() };
        let machine = Machine::<A>::new(config);
        let memory = machine.memory().map_err(|error| {
            format!("cannot hand the hosted machine's memory to the engine: {error}")
        })?;
        memory.folio_policy().set_global(bindery::SizeMode::Never);
        let _on_cpu = machine.bind(Cpu(0));
        let mut rows: Vec<Row> = Vec::new();
        for range in RANGES {
            for pages in [Pages::Recycled, Pages::Fresh] {
                for call in [Call::Copy, Call::Move] {
                    let kind = Kind { range, pages, call };
                    let measure = |reach| measure(&machine, &memory, reach, kind, heap, repeats);
                    let (page, whole) = (measure(Reach::Page)?, measure(Reach::Table)?);
                    let copied = rows.last().filter(|_| call == Call::Move);
                    let move_to_copy = copied.map(|copied| {
                        let median = |sample: &Sample| sample.nanoseconds.median as f64;
                        median(&whole) / median(&copied.whole).max(1.0)
                    });
                    rows.push(Row { range_bytes: range, pages, call, page, whole, move_to_copy });
                }
            }
        }
        Ok(rows)
    }
}

fn measure<A: Walk>(
    machine: &Machine<A>,
    memory: &Memory<Machine<A>>,
    reach: Reach,
    kind: Kind,
    heap: u64,
    repeats: usize,
) -> Result<Sample, String> {
    let mut times = Vec::new();
    let mut counts = Counts::default();
    // One more round, as a warm-up.
    for _ in 0..=repeats {
        let space = AddressSpace::with_reach(memory, SpaceOptions::default(), reach);
        let space = space.map_err(|error| error.to_string())?;
        space.enter();
        let compacted = compact(machine, &space, kind, heap);
        let (time, counted) = compacted?;
        times.push(time);
        counts = counted;
    }
    let nanoseconds = Summary::of(&times[1..]).ok_or("no compaction was timed")?;
    let Counts { entries_written, invalidations, bytes_copied, bytes_zeroed, .. } = counts;
    Ok(Sample { nanoseconds, entries_written, invalidations, bytes_copied, bytes_zeroed })
}

/// An old heap, a new empty one, and buffers.
struct Compactor<'a, 'm, A: Walk> {
    machine: &'a Machine<A>,
    space: &'a AddressSpace<'m, Machine<A>>,
    userfault: Userfault<'m, Machine<A>>,
    kind: Kind,
    /// The frames of the old heap's pages.
    frames: Vec<Frame>,
    /// The source of COPY.
    gathered: Vec<u8>,
}

/// Compacts a heap of this size once. Returns the nanoseconds and the work.
fn compact<A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'_, Machine<A>>,
    kind: Kind,
    heap: u64,
) -> Result<(u64, Counts), String> {
    let failed = |error: bindery::Error| format!("cannot set the compaction up: {error}");
    for (start, length) in [(OLD, heap), (NEW, heap / 2), (BUFFER, heap / 2)] {
        let place = Place::FixedNoReplace(VirtAddr(start));
        let protection = Protection::READ | Protection::WRITE;
        let request = MapRequest { length, protection, place, ..MapRequest::default() };
        space.mmap(&request).map_err(failed)?;
    }
    let userfault = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All);
    let userfault = userfault.map_err(failed)?;
    let modes = UserfaultModes::MISSING;
    space.register_userfault(&userfault, VirtAddr(NEW), heap / 2, modes).map_err(failed)?;
    let mut compactor = Compactor {
        machine,
        space,
        userfault,
        kind,
        frames: Vec::new(),
        gathered: vec![0; kind.range as usize],
    };
    compactor.frames = compactor.touch(OLD, heap)?;
    // The first range is gathered while no part of the old heap is free yet.
    let first = match kind.pages {
        Pages::Recycled => compactor.touch(BUFFER, kind.range)?,
        Pages::Fresh => Vec::new(),
    };
    let (before, begin) = (space.counts(), Instant::now());
    for range in 0..heap / 2 / kind.range {
        compactor.serve(range, &first)?;
    }
    space.memory().drain_deferred();
    let time = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let counts = space.counts() - before;
    space.close_userfault(compactor.userfault);
    Ok((time, counts))
}

impl<A: Walk> Compactor<'_, '_, A> {
    /// Touches all pages of a range and returns their frames.
    fn touch(&self, start: u64, length: u64) -> Result<Vec<Frame>, String> {
        let page = |at: u64| {
            let fault = self.space.fault(VirtAddr(at), Access::Write);
            fault.map_err(|error| format!("the first touch at {at:#x} failed: {error}"))?;
            match self.space.inspect(VirtAddr(at)) {
                Inspection::Page { frame, .. } => Ok(frame),
                other @ (Inspection::Empty | Inspection::Absent(_)) => {
                    Err(format!("the first touch at {at:#x} left no page there ({other:?})"))
                }
            }
        };
        (start..start + length).step_by(PAGE_SIZE as usize).map(page).collect()
    }

    /// Collects the objects of a new range and moves them there.
    fn serve(&mut self, range: u64, first: &[Frame]) -> Result<(), String> {
        let Kind { range: bytes, pages, call } = self.kind;
        let to = VirtAddr(NEW + range * bytes);
        let done = match call {
            Call::Copy => {
                let mut gathered = std::mem::take(&mut self.gathered);
                for page in 0..bytes / PAGE_SIZE {
                    let start = (page * PAGE_SIZE) as usize;
                    let into = &mut gathered[start..start + PAGE_SIZE as usize];
                    // SAFETY: the buffer is as long as a page, and ours.
                    unsafe { self.gather(range * bytes + page * PAGE_SIZE, into.as_mut_ptr()) };
                }
                let mut source = |offset: u64, piece: &mut [u8]| {
                    let start = offset as usize;
                    piece.copy_from_slice(&gathered[start..start + piece.len()]);
                    Ok(())
                };
                let mode = FillMode::empty();
                let done =
                    self.space.handler(&self.userfault).fill_copy(to, bytes, mode, &mut source);
                self.gathered = gathered;
                done
            }
            Call::Move => {
                let (from, frames) = self.buffer(range, first)?;
                for (page, frame) in (0..).zip(frames) {
                    let into = self.machine.direct_map(frame).as_ptr();
                    // SAFETY: the frame is a page of the buffer, which no thread uses.
                    unsafe { self.gather(range * bytes + page * PAGE_SIZE, into) };
                }
                self.space.handler(&self.userfault).move_pages(to, from, bytes, MoveMode::empty())
            }
        };
        done.map_err(|partial| {
            let name = format!("UFFDIO_{call:?}").to_uppercase();
            format!("{name} failed after {} bytes: {}", partial.done, partial.error)
        })?;
        if pages == Pages::Recycled { self.recycle(range) } else { Ok(()) }
    }

    /// Copies the objects of the page at `offset` of the new heap.
    ///
    /// # Safety
    /// 1. `into` is valid for writes of a page, and not a page of the old heap that still has
    ///    objects.
    unsafe fn gather(&self, offset: u64, into: *mut u8) {
        for object in 0..PAGE_SIZE / OBJECT {
            let from = 2 * (offset + object * OBJECT);
            let frame = self.frames[(from / PAGE_SIZE) as usize];
            let page = self.machine.direct_map(frame).as_ptr();
            let (source, target) = (from % PAGE_SIZE, object * OBJECT);
            // SAFETY: the object lies in its page, whose frame the old heap has; and (1).
            unsafe {
                let source = page.add(source as usize);
                into.add(target as usize).copy_from_nonoverlapping(source, OBJECT as usize);
            }
        }
    }

    /// The buffer for a new range, and its frames.
    fn buffer(&self, range: u64, first: &[Frame]) -> Result<(VirtAddr, Vec<Frame>), String> {
        let bytes = self.kind.range;
        if self.kind.pages == Pages::Fresh {
            let start = BUFFER + range * bytes;
            return Ok((VirtAddr(start), self.touch(start, bytes)?));
        }
        if range == 0 {
            return Ok((VirtAddr(BUFFER), first.to_vec()));
        }
        // The first of the two old ranges that were emptied into the last new one.
        let old = 2 * (range - 1);
        let pages = bytes / PAGE_SIZE;
        let frames = &self.frames[(old * pages) as usize..((old + 1) * pages) as usize];
        Ok((VirtAddr(OLD + old * bytes), frames.to_vec()))
    }

    /// Recycles two empty old ranges: MOVE takes the next buffer from the first.
    fn recycle(&self, range: u64) -> Result<(), String> {
        let bytes = self.kind.range;
        let kept = if self.kind.call == Call::Move { bytes } else { 0 };
        let start = VirtAddr(OLD + 2 * range * bytes + kept);
        let done = self.space.madvise(start, 2 * bytes - kept, Advice::DontNeed);
        done.map_err(|error| format!("MADV_DONTNEED of an empty range failed: {error}"))
    }
}

fn report(rows: &[Row]) -> String {
    let header = [
        "ranges",
        "pages",
        "call",
        "page by page",
        "whole",
        "MOVE/COPY",
        "entries",
        "inval.",
        "copied",
        "zeroed",
    ];
    let mut shown = table(&header, 3);
    for row in rows {
        let time = |sample: &Sample| format!("{:.2} ms", sample.nanoseconds.median as f64 / 1e6);
        let Sample { entries_written, invalidations, bytes_copied, bytes_zeroed, .. } = row.whole;
        shown.add_row([
            show_bytes(row.range_bytes),
            format!("{:?}", row.pages).to_lowercase(),
            format!("{:?}", row.call).to_uppercase(),
            time(&row.page),
            time(&row.whole),
            row.move_to_copy.map_or_else(String::new, |ratio| format!("{:.0} %", ratio * 100.0)),
            thousands(entries_written),
            thousands(invalidations),
            thousands(bytes_copied),
            thousands(bytes_zeroed),
        ]);
    }
    format!(
        "{}\n\nOne compaction each: times are medians, with the gathering; counts are those of the last, \
         whole.\n",
        shown.trim_fmt()
    )
}
