//! Calls at the limit of committed memory, held at each of their steps. Another process maps the
//! pages that the call leaves free, and is never refused. If the call commits nothing more, the
//! process gets no further page.

use std::sync::Arc;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, AddressSpace, Error, MapFlags, MapRequest, Memory, Overcommit, Protection, Remap,
};

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Stops};
use crate::support::{GIB, MIB, READ_WRITE, READ_WRITE_EXECUTE, fixed, options};

type Space<'m> = AddressSpace<'m, Stepped<X86_64<4>>>;

/// The pages of the process whose call is held.
const PAGES: u64 = 300;
/// The pages that are left for the other process.
const FREE: u64 = 200;
const AT: u64 = GIB;
const ELSEWHERE: u64 = 2 * GIB;
const HEAP: u64 = 4 * GIB;

struct Case {
    name: &'static str,
    /// The pages that the call commits, perhaps only for a time.
    adds: u64,
    call: fn(&Space<'_>),
}

const CASES: [Case; 9] = [
    Case { name: "replace", adds: 0, call: |space| map(space, at(100), 100).unwrap() },
    Case { name: "move", adds: 0, call: |space| remap(space, PAGES, PAGES) },
    Case { name: "move a part", adds: 0, call: |space| remap(space, 100, 100) },
    Case { name: "grow", adds: 50, call: |space| remap(space, PAGES, PAGES + 50) },
    Case {
        name: "protect",
        adds: 0,
        call: |space| space.mprotect(at(100), 100 * PAGE_SIZE, READ_WRITE_EXECUTE).unwrap(),
    },
    Case {
        name: "open",
        adds: 50,
        call: |space| space.mprotect(at(PAGES), 50 * PAGE_SIZE, READ_WRITE).unwrap(),
    },
    Case {
        name: "heap",
        adds: 50,
        call: |space| {
            let end = VirtAddr(HEAP + 50 * PAGE_SIZE);
            assert_eq!(space.set_break(end), end);
        },
    },
    Case {
        name: "stack",
        adds: 50,
        call: |space| {
            space.fault(VirtAddr(3 * GIB - 50 * PAGE_SIZE), Access::Write).unwrap();
        },
    },
    Case { name: "fork", adds: PAGES + 1, call: |space| drop(space.fork().unwrap()) },
];

fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE_SIZE)
}

fn map(space: &Space<'_>, at: VirtAddr, pages: u64) -> Result<(), Error> {
    space.mmap(&fixed(at.0, pages * PAGE_SIZE)).map(|_| ())
}

/// Moves the first pages, over the neighbor.
fn remap(space: &Space<'_>, pages: u64, length: u64) {
    let from = if pages < PAGES { at(100) } else { at(0) };
    let [pages, length] = [pages, length].map(|pages| pages * PAGE_SIZE);
    let to = VirtAddr(ELSEWHERE);
    assert_eq!(space.mremap(from, pages, length, Remap::To(to)), Ok(to));
}

/// A process with written pages, a neighbor that commits nothing, and a stack of one page.
fn process(memory: &Memory<Stepped<X86_64<4>>>) -> Space<'_> {
    let space = AddressSpace::new(memory, options()).unwrap();
    map(&space, at(0), PAGES).unwrap();
    for page in [0, 150, PAGES - 1] {
        space.write_user(at(page), &[1]).unwrap();
    }
    let neighbor = fixed(at(PAGES).0, 60 * PAGE_SIZE);
    space.mmap(&MapRequest { protection: Protection::READ, ..neighbor }).unwrap();
    let stack = MapRequest { flags: MapFlags::GROWS_DOWN, ..fixed(3 * GIB, PAGE_SIZE) };
    space.mmap(&stack).unwrap();
    space.set_break_start(VirtAddr(HEAP));
    space
}

/// One run. Returns whether the call reached the step.
fn run(case: &Case, hold_at: HoldAt) -> bool {
    let (machine, memory) = stepped::<X86_64<4>>(16 * MIB, Readers::Told);
    let (space, other) = (process(&memory), AddressSpace::new(&memory, options()).unwrap());
    let commitment = memory.commitment();
    commitment.set_mode(Overcommit::Never);
    commitment.set_limit(commitment.committed() + FREE + case.adds);
    let maps = || {
        let name = case.name;
        assert_eq!(map(&other, at(0), FREE), Ok(()), "{name} at {hold_at:?}: free");
        if case.adds == 0 {
            let more = map(&other, at(FREE), 1);
            assert_eq!(more, Err(Error::Overcommitted), "{name} at {hold_at:?}: full");
        }
    };
    let stops = Arc::new(Stops::default());
    let phase = stops.meet(&machine, hold_at, &|| (case.call)(&space), &maps);
    assert!(matches!(phase, None | Some(Phase::Finished)), "{}: {phase:?}", case.name);
    machine.assert_clean();
    phase.is_some()
}

#[test]
fn no_call_counts_its_pages_twice() {
    for case in &CASES {
        let steps = (0..).take_while(|step| run(case, HoldAt::Number(*step))).count();
        assert!(steps > 0, "{} was never held", case.name);
    }
}
