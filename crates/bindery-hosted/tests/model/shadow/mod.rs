//! Common parts of the tests with sequences: the calls, the model, and reads of memory that bypass
//! the MMU.

mod model;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use bindery::addr::{Frame, Order, VirtAddr};
use bindery::arch::{Absent, Arch};
use bindery::platform::Platform;
use bindery::{
    AddressSpace, Error, FaultError, Inspection, MapRequest, Memory, Place, Protection, Remap,
};
use bindery_hosted::{Machine, Program, Walk};

pub use model::{Area, Rules, Shadow, Words, joined};

/// One call or one access of a program; addresses and lengths in bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Op {
    Map(Place, u64, Protection),
    Unmap(u64, u64),
    Protect(u64, u64, Protection),
    /// Old address, old length, new length.
    Remap(u64, u64, u64, Remap),
    Discard(u64, u64),
    Read(u64),
    Write(u64, u64),
    /// Fills whole pages with one byte.
    Fill(u64, u64, u8),
    Execute(u64),
    /// Splits the folio there, down to an order. Invisible to programs.
    SplitFolio(u64, u8),
    /// Collapses the pages there to a huge leaf. Invisible to programs.
    Collapse(u64),
}

/// The result of an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Outcome {
    /// The address of a mapping, or the word that was read; otherwise 0.
    Done(u64),
    Refused(Error),
    Signal(FaultError),
}

impl<T: Into<VirtAddr>> From<Result<T, Error>> for Outcome {
    fn from(result: Result<T, Error>) -> Self {
        match result {
            Ok(at) => Self::Done(at.into().0),
            Err(error) => Self::Refused(error),
        }
    }
}

fn done(result: Result<(), Error>) -> Outcome {
    result.map(|()| VirtAddr(0)).into()
}

fn signal(result: Result<u64, FaultError>) -> Outcome {
    result.map_or_else(Outcome::Signal, Outcome::Done)
}

/// Performs `op` in `space`.
pub fn run<A: Walk>(machine: &Machine<A>, space: &AddressSpace<'_, Machine<A>>, op: Op) -> Outcome {
    let program = Program::new(machine, space);
    match op {
        Op::Map(place, length, protection) => {
            space.mmap(&MapRequest { length, protection, place, ..MapRequest::default() }).into()
        }
        Op::Unmap(at, length) => done(space.munmap(VirtAddr(at), length)),
        Op::Protect(at, length, to) => done(space.mprotect(VirtAddr(at), length, to)),
        Op::Remap(old, old_length, length, remap) => {
            space.mremap(VirtAddr(old), old_length, length, remap).into()
        }
        Op::Discard(at, length) => done(space.discard(VirtAddr(at), length)),
        Op::Read(at) => signal(program.load(VirtAddr(at))),
        Op::Write(at, value) => signal(program.store(VirtAddr(at), value).map(|()| 0)),
        Op::Fill(at, length, byte) => signal(program.fill(VirtAddr(at), length, byte).map(|()| 0)),
        Op::Execute(at) => signal(program.execute(VirtAddr(at)).map(|()| 0)),
        Op::SplitFolio(at, order) => {
            let _ = space.split_folio(VirtAddr(at), Order(order));
            Outcome::Done(0)
        }
        Op::Collapse(at) => {
            let _ = space.join_leaves(VirtAddr(at));
            Outcome::Done(0)
        }
    }
}

impl Shadow {
    /// Copies the borders between neighboring mappings with equal permissions from the core,
    /// because `mremap` depends on them. The model does not know all conditions of a merge
    /// (`tests/oracle` verifies those). The model must already know the mapped ranges and their
    /// permissions.
    #[track_caller]
    pub fn adopt<A: Walk>(&mut self, space: &AddressSpace<'_, Machine<A>>) {
        let found = areas(space);
        assert_eq!(joined(&found), joined(&self.areas), "the mappings differ");
        self.areas = found;
    }

    /// Compares the mappings and all contents with `space` without a program access.
    pub fn compare<A: Walk>(&self, machine: &Machine<A>, space: &AddressSpace<'_, Machine<A>>) {
        if let Some(difference) = self.difference(machine, space) {
            panic!("{difference}");
        }
    }

    /// The differences of mappings or contents between `space` and the model.
    fn difference<A: Walk>(
        &self,
        machine: &Machine<A>,
        space: &AddressSpace<'_, Machine<A>>,
    ) -> Option<String> {
        let (found, expected) = (joined(&areas(space)), joined(&self.areas));
        if found != expected {
            return Some(format!("the mappings differ: {found:x?} and not {expected:x?}"));
        }
        self.pages.iter().find_map(|(page, words)| {
            let found = look(machine, space, *page);
            if found != *words {
                return Some(format!(
                    "the content at {page:#x} differs: {found:x?}, not {words:x?}"
                ));
            }
            let clean = *words != Words::default() && !space.is_dirty(VirtAddr(*page));
            clean.then(|| format!("{page:#x} was written and is clean"))
        })
    }

    /// As [`Shadow::compare`], for pages that were never written and so hold zeroes.
    pub fn compare_zeroes<A: Walk>(
        &self,
        machine: &Machine<A>,
        space: &AddressSpace<'_, Machine<A>>,
        pages: impl Iterator<Item = u64>,
    ) {
        if let Some(page) = self.not_zero(machine, space, pages) {
            panic!("{page:#x} is not zero");
        }
    }

    fn not_zero<A: Walk>(
        &self,
        machine: &Machine<A>,
        space: &AddressSpace<'_, Machine<A>>,
        pages: impl Iterator<Item = u64>,
    ) -> Option<u64> {
        let mut unwritten = pages.filter(|page| !self.pages.contains_key(page));
        unwritten.find(|page| look(machine, space, *page) != Words::default())
    }

    /// Whether `space` equals the model, at least in `pages` and at written addresses.
    pub fn agrees<A: Walk>(
        &self,
        machine: &Machine<A>,
        space: &AddressSpace<'_, Machine<A>>,
        pages: impl Iterator<Item = u64>,
    ) -> bool {
        self.difference(machine, space).is_none() && self.not_zero(machine, space, pages).is_none()
    }
}

/// The mappings of `space`.
pub fn areas<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> BTreeMap<u64, Area> {
    let mut areas = BTreeMap::new();
    space.for_each_mapping(|mapping| {
        let area = Area { end: mapping.range.end().0, protection: mapping.protection };
        areas.insert(mapping.range.start().0, area);
    });
    areas
}

/// The frame to which the table maps a page, if any, even if the MMU does not see the entry.
pub fn frame_of<A: Arch>(inspection: Inspection<A>) -> Option<Frame> {
    match inspection {
        Inspection::Page { frame, .. } | Inspection::Absent(Absent::ProtNone { frame, .. }) => {
            Some(frame)
        }
        _ => None,
    }
}

/// The contents of a page in memory, read without the MMU.
pub fn look<A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'_, Machine<A>>,
    page: u64,
) -> Words {
    let Some(frame) = frame_of(space.inspect(VirtAddr(page))) else { return Words::default() };
    let window = machine.direct_map(frame).cast::<AtomicU64>();
    let word = |index: usize| {
        // SAFETY: the frame is one of the machine, whose window shows 512 aligned words that all
        // threads access as atomics; the machine outlives the reference.
        unsafe { window.add(index).as_ref() }.load(Ordering::Relaxed)
    };
    Words { first: word(0), last: word(511) }
}

/// Audits the core and the TLBs; `scratch` is kept between calls.
#[track_caller]
pub fn audit<A: Walk>(
    machine: &Machine<A>,
    memory: &Memory<Machine<A>>,
    spaces: &[&AddressSpace<'_, Machine<A>>],
    scratch: &mut Vec<u32>,
) {
    machine.assert_clean();
    scratch.resize(bindery::check::scratch_words(memory), 0);
    if let Err(violation) = bindery::check::check(memory, spaces, scratch) {
        panic!("the audit found: {violation}");
    }
}
