//! Runs an operation repeatedly, with a different allocation failing each time.

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Error, FaultError, FolioError, testing};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::fixture::{Fixture, layout};
use crate::support::{GIB, MIB, audit, fixed, options, strict, use_order};

const PAGE: u64 = 4096;
/// An address where a huge leaf fits.
pub const AT: u64 = GIB;
/// Sixteen pages here lie in two tables.
pub const CROSSING: u64 = AT + 2 * MIB - 8 * PAGE;

/// Pages that contain what [`Fixture::fill`] wrote at `from`, or zeroes.
#[derive(Clone, Copy, Debug)]
pub enum Stretch {
    Filled { at: u64, pages: u64, from: u64 },
    Zero { at: u64, pages: u64 },
}

/// Pages that are still at the address where they were filled.
pub fn filled(at: u64, pages: u64) -> Stretch {
    Stretch::Filled { at, pages, from: at }
}

pub fn moved(from: u64, at: u64, pages: u64) -> Stretch {
    Stretch::Filled { at, pages, from }
}

pub fn zero(at: u64, pages: u64) -> Stretch {
    Stretch::Zero { at, pages }
}

impl Stretch {
    #[track_caller]
    fn check<A: Walk>(self, program: &Program<'_, '_, A>) {
        let (at, pages, from) = match self {
            Self::Filled { at, pages, from } => (at, pages, Some(from)),
            Self::Zero { at, pages } => (at, pages, None),
        };
        for page in 0..pages {
            let there = program.load(VirtAddr(at + page * PAGE));
            let expected = from.map_or(0, |from| from + page);
            assert_eq!(there, Ok(expected), "page {page} of {self:x?}");
        }
    }
}

/// Whether an operation that ran out of memory must leave all mappings unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    Untouched,
    /// The operation's documentation lists the possible changes.
    MayDiffer,
}

/// Whether another process maps the same folios.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Folios {
    Own,
    SharedWithChild,
}

/// The result of an operation: an address (0 if it has none), and a new address space.
pub type Given<'m, A> = (u64, Option<AddressSpace<'m, Machine<A>>>);

/// An operation with its arguments.
pub type VerbOf<A> = for<'m> fn(&AddressSpace<'m, Machine<A>>) -> Result<Given<'m, A>, Error>;

/// An operation, with the state before and after it.
#[derive(Clone)]
pub struct Case<A: Walk> {
    /// Faults may use folios of 2^order pages.
    pub order: u8,
    pub folios: Folios,
    pub set_up: fn(&Fixture<'_, '_, A>),
    pub operation: VerbOf<A>,
    /// The mappings before the operation, which still exist after a failure.
    pub before: Vec<Stretch>,
    /// The state after success, given the returned address.
    pub after: fn(u64) -> Vec<Stretch>,
    pub layout: Layout,
}

/// The allocations that fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failing {
    AllFrom(u64),
    Only(u64),
}

/// Makes memory run out at every single point of the operation. Returns the number of allocations.
pub fn at_every_point<A: Walk>(case: &Case<A>) -> u64 {
    let mut points = 0;
    let mut beyond = 0;
    for point in 0.. {
        let all = once(case, Failing::AllFrom(point));
        let only = once(case, Failing::Only(point));
        assert_eq!(all, only, "point {point}");
        if all == Failed::Yes {
            assert_eq!(beyond, 0, "allocation {point} fails and one before it never happens");
            points += 1;
            continue;
        }
        beyond += 1;
        if beyond == 3 {
            break;
        }
    }
    points
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failed {
    No,
    Yes,
}

fn once<A: Walk>(case: &Case<A>, failing: Failing) -> Failed {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, case.order);
    let free = memory.free_frame_count();
    let failed = {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let program = Program::new(&machine, &space);
        let fixture = Fixture { machine: &machine, memory: &memory, space: &space, program };
        (case.set_up)(&fixture);
        let child = (case.folios == Folios::SharedWithChild).then(|| space.fork().unwrap());
        // A new VMA must allocate memory instead of reusing a freed record.
        let failed = perform(case, &fixture, child.as_ref(), failing);
        if let Some(child) = &child {
            let program = Program::new(&machine, child);
            case.before.iter().for_each(|stretch| stretch.check(&program));
        }
        failed
    };
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked, {failing:?}");
    failed
}

fn perform<'m, A: Walk>(
    case: &Case<A>,
    fixture: &Fixture<'_, 'm, A>,
    child: Option<&AddressSpace<'m, Machine<A>>>,
    failing: Failing,
) -> Failed {
    let check = |given: Option<&AddressSpace<'m, Machine<A>>>| {
        let spaces: Vec<_> = [Some(fixture.space), child, given].into_iter().flatten().collect();
        audit(fixture.machine, fixture.memory, &spaces);
    };
    let old = layout(fixture.space);
    match failing {
        Failing::AllFrom(point) => fixture.memory.fail_allocations_after(Some(point)),
        Failing::Only(point) => testing::fail_one_allocation(fixture.memory, Some(point)),
    }
    let result = (case.operation)(fixture.space);
    let failures = testing::failed_allocations(fixture.memory);
    fixture.memory.fail_allocations_after(None);
    let given = match result {
        Ok(given) => given,
        Err(error) => {
            assert_eq!(error, Error::OutOfMemory, "{failing:?}");
            assert_ne!(failures, 0, "{failing:?}: memory ran out, and none was refused");
            check(None);
            if case.layout == Layout::Untouched {
                assert_eq!(layout(fixture.space), old, "{failing:?}");
            }
            case.before.iter().for_each(|stretch| stretch.check(&fixture.program));
            rewrite(case, fixture);
            check(None);
            // Memory is available again.
            (case.operation)(fixture.space).expect("the second try")
        }
    };
    check(given.1.as_ref());
    let after = (case.after)(given.0);
    after.iter().for_each(|stretch| stretch.check(&fixture.program));
    if let Some(space) = &given.1 {
        let program = Program::new(fixture.machine, space);
        after.iter().for_each(|stretch| stretch.check(&program));
    }
    check(given.1.as_ref());
    if failures == 0 { Failed::No } else { Failed::Yes }
}

/// Writable pages are still writable.
fn rewrite<A: Walk>(case: &Case<A>, fixture: &Fixture<'_, '_, A>) {
    for stretch in &case.before {
        if let Stretch::Filled { at, pages, from } = *stretch {
            assert_eq!(at, from, "the mappings before are at the places that were filled");
            fixture.fill(at, pages);
        }
    }
}

/// The error of a fault, if it is a lack of memory.
pub fn no_memory(error: FaultError) -> Error {
    assert_eq!(error, FaultError::OutOfMemory);
    Error::OutOfMemory
}

/// The error of a folio operation, if it is a lack of memory.
pub fn no_memory_for_folio(error: FolioError) -> Error {
    assert_eq!(error, FolioError::OutOfMemory);
    Error::OutOfMemory
}

/// Sixteen private pages of this address space, in two tables.
pub fn two_tables<A: Walk>() -> Case<A> {
    Case {
        order: 0,
        folios: Folios::Own,
        set_up: |fixture| {
            fixture.space.mmap(&fixed(CROSSING, 16 * PAGE)).unwrap();
            fixture.fill(CROSSING, 16);
        },
        operation: |_| Ok((0, None)),
        before: vec![filled(CROSSING, 16)],
        after: |_| vec![filled(CROSSING, 16)],
        layout: Layout::Untouched,
    }
}

/// A huge leaf.
pub fn huge<A: Walk>() -> Case<A> {
    Case {
        order: 9,
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
            fixture.fill(AT, 512);
        },
        before: vec![filled(AT, 512)],
        after: |_| vec![filled(AT, 512)],
        ..two_tables()
    }
}
