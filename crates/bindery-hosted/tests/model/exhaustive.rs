//! Small scope, exhaustively: every sequence of calls and accesses up to a depth, on an
//! architecture of 64 pages. After each step the auditor and the strict TLB verify the state, and a
//! model verifies results, mappings and contents.
//!
//! Three walks over the operations of [`operations`], for each set of folio sizes and each reach:
//! - *plain*: all sequences of up to 3 operations, from an empty address space and from two written
//!   mappings, which take 3 more;
//! - *distinct*: sequences of up to 4 operations. A sequence that leads to a known state is not
//!   extended. The state is everything visible without an access: the mappings with their flags,
//!   every entry, the TLB's translations, dirty pages, the number of free frames. The forms that
//!   move page by page exist only for comparison, and skip this walk;
//! - *scarce*: all sequences of up to 3 operations. During the last one, all allocations from the
//!   n-th on fail, for each n.
//!
//! The walks run about 900,000 sequences in each of the five tests, and 350,000 in each of the four
//! tests that move page by page. A sequence is repeated from the beginning for each of its
//! continuations. `BINDERY_DEEPER=1` makes all sequences one operation longer, which takes ten
//! minutes per test.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Instant;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, Tiny};
use bindery::platform::Cpu;
use bindery::{
    AddressSpace, Error, FaultError, Inspection, Memory, Place, Protection, Reach, Remap,
    SpaceOptions,
};
use bindery_hosted::Machine;

use super::shadow::{self, Op, Outcome, Rules, Shadow, audit, run};
use crate::support::{READ_WRITE, strict, use_order};

const MINIMUM: u64 = PAGE_SIZE;
const PAGES: u64 = Tiny::USER_END / PAGE_SIZE;

/// The possible next steps. Steps of the child require a child.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Step {
    Parent(Op),
    Fork,
    Child(Op),
    ChildExits,
}

fn at(page: u64) -> u64 {
    page * PAGE_SIZE
}

/// The operations of the sequences. A level-1 table covers 4 pages, a level-2 table 16; contiguous
/// runs are 2 pages, huge leaves 4.
fn operations() -> Vec<Step> {
    let none = Protection::empty();
    let read = Protection::READ;
    let map =
        |page, pages, protection| Op::Map(Place::Fixed(VirtAddr(at(page))), at(pages), protection);
    let unmap = |page, pages| Op::Unmap(at(page), at(pages));
    let protect = |page, pages, protection| Op::Protect(at(page), at(pages), protection);
    let remap = |page, old, new, to| Op::Remap(at(page), at(old), at(new), to);
    let to = |page| Remap::To(VirtAddr(at(page)));
    let leave = |page| Remap::Leave(VirtAddr(at(page)));
    let leave_to = |page| Remap::LeaveTo(VirtAddr(at(page)));
    let parent = [
        map(16, 8, READ_WRITE),
        map(32, 16, READ_WRITE),
        map(18, 4, read),
        Op::Map(Place::Anywhere, at(5), READ_WRITE),
        unmap(16, 4),
        unmap(17, 2),
        unmap(22, 12),
        protect(16, 8, none),
        protect(16, 8, read),
        protect(16, 8, READ_WRITE),
        protect(17, 2, none),
        protect(19, 3, read),
        protect(32, 4, READ_WRITE),
        // Whole level-1 tables, and a whole level-2 table.
        remap(16, 8, 8, to(32)),
        remap(32, 8, 8, to(16)),
        remap(32, 16, 16, to(48)),
        // Moves to an address congruent modulo the block, by a table and a half; then by an odd
        // number of pages.
        remap(16, 4, 4, to(22)),
        remap(16, 8, 8, to(25)),
        remap(25, 8, 8, to(16)),
        remap(17, 3, 3, to(34)),
        // Before and behind the source, in the same mapping.
        remap(18, 2, 2, to(16)),
        // Shrinks and grows, each also with a move.
        remap(16, 8, 3, Remap::InPlace),
        remap(16, 8, 12, Remap::MayMove),
        remap(20, 4, 8, Remap::InPlace),
        remap(18, 2, 6, Remap::MayMove),
        remap(16, 8, 4, to(40)),
        remap(16, 3, 6, to(44)),
        // Moves a range of several mappings, if the state has them, to a destination that overlaps
        // the last one.
        remap(16, 20, 20, to(40)),
        // The source stays. Whole tables, a table and a half, a few pages; to distant, near and
        // overlapping addresses.
        remap(16, 8, 8, leave_to(32)),
        remap(32, 16, 16, leave_to(48)),
        remap(16, 6, 6, leave_to(22)),
        remap(17, 3, 3, leave(40)),
        remap(16, 8, 8, leave(0)),
        Op::Discard(at(17), at(6)),
        Op::SplitFolio(at(16), 0),
        Op::Collapse(at(16)),
        Op::Write(at(16), 1),
        Op::Write(at(17), 2),
        Op::Write(at(22), 3),
        Op::Write(at(33), 4),
        Op::Read(at(16)),
        Op::Read(at(19)),
        Op::Read(at(34)),
    ];
    let child = [
        Op::Read(at(16)),
        Op::Write(at(17), 5),
        Op::Write(at(22), 6),
        unmap(16, 3),
        remap(16, 8, 8, to(33)),
        remap(16, 8, 8, leave_to(33)),
    ];
    let parent = parent.into_iter().map(Step::Parent);
    let child = child.into_iter().map(Step::Child);
    parent.chain([Step::Fork, Step::ChildExits]).chain(child).collect()
}

/// The beginning of every sequence.
#[derive(Clone, Copy, Debug)]
enum Start {
    Nothing,
    /// A writable mapping with some written pages.
    Written,
    /// A mapping that begins in the middle of a table, so that it has folios of two sizes.
    Uneven,
}

impl Start {
    fn steps(self) -> Vec<Step> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Written => vec![
                Step::Parent(Op::Map(Place::Fixed(VirtAddr(at(16))), at(8), READ_WRITE)),
                Step::Parent(Op::Write(at(17), 7)),
                Step::Parent(Op::Write(at(20), 8)),
            ],
            Self::Uneven => vec![
                Step::Parent(Op::Map(Place::Fixed(VirtAddr(at(18))), at(6), READ_WRITE)),
                Step::Parent(Op::Write(at(18), 7)),
                Step::Parent(Op::Write(at(22), 8)),
            ],
        }
    }
}

/// A machine that runs sequences one after the other.
struct Scope {
    machine: Machine<Tiny>,
    memory: Memory<Machine<Tiny>>,
    options: SpaceOptions,
    reach: Reach,
    scratch: RefCell<Vec<u32>>,
    /// Completed steps, including the repeated prefixes.
    steps: Cell<u64>,
}

/// The state after a sequence.
struct State<'m> {
    parent: AddressSpace<'m, Machine<Tiny>>,
    child: Option<AddressSpace<'m, Machine<Tiny>>>,
    model: Shadow,
    child_model: Option<Shadow>,
}

impl State<'_> {
    /// The model's expectation of a step.
    fn expect(&mut self, step: Step) -> Option<Outcome> {
        match (step, &mut self.child_model) {
            (Step::Parent(op), _) => return Some(self.model.expect(op)),
            (Step::Child(op), Some(model)) => return Some(model.expect(op)),
            (Step::Fork, None) => self.child_model = Some(self.model.clone()),
            (Step::ChildExits, Some(_)) => self.child_model = None,
            _ => return None,
        }
        Some(Outcome::Done(0))
    }

    /// Adopts the result of a step that ran out of memory half-way, if the step allows this result.
    fn accept_what_failed(&mut self, machine: &Machine<Tiny>, step: Step) {
        let (space, model, op) = match (step, &self.child, &mut self.child_model) {
            (Step::Parent(op), ..) => (&self.parent, &mut self.model, op),
            (Step::Child(op), Some(child), Some(model)) => (child, model, op),
            _ => return,
        };
        let mut allowed = model.half_way(op).into_iter();
        let reached = allowed.find(|half| half.agrees(machine, space, (0..PAGES).map(at)));
        *model = reached.unwrap_or_else(|| panic!("left half-way: {:x?}", shadow::areas(space)));
    }

    /// Passes the borders of mappings to the model of the acting process.
    fn adopt(&mut self, step: Step) {
        match (step, &self.child, &mut self.child_model) {
            (Step::Parent(_), ..) => self.model.adopt(&self.parent),
            (Step::Child(_), Some(child), Some(model)) => model.adopt(child),
            _ => {}
        }
    }
}

/// Prints the current sequence when a test fails.
struct Trying<'a>(&'a [Step], Step);

impl Drop for Trying<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the sequence was:");
            self.0.iter().chain([&self.1]).for_each(|step| eprintln!("    {step:x?}"));
        }
    }
}

impl Scope {
    fn new(orders: &[u8], zeroes: Zeroes, reach: Reach) -> Self {
        let (machine, memory) = strict::<Tiny>(1 << 20);
        memory.set_huge_zero_page(zeroes == Zeroes::Huge);
        orders.iter().for_each(|order| use_order(&memory, *order));
        let minimum_address = VirtAddr(MINIMUM);
        let options = SpaceOptions { minimum_address, ..SpaceOptions::default() };
        Self { machine, memory, options, reach, scratch: RefCell::default(), steps: Cell::new(0) }
    }

    fn begin(&self) -> State<'_> {
        State {
            parent: AddressSpace::with_reach(&self.memory, self.options, self.reach).unwrap(),
            child: None,
            model: Shadow::new(Rules::of::<Tiny>(MINIMUM)),
            child_model: None,
        }
    }

    /// Performs one step. `None` if it does not apply.
    fn outcome<'m>(&'m self, state: &mut State<'m>, step: Step) -> Option<Outcome> {
        self.steps.set(self.steps.get() + 1);
        state.adopt(step);
        match (step, &state.child) {
            (Step::Parent(op), _) => Some(run(&self.machine, &state.parent, op)),
            (Step::Child(op), Some(child)) => Some(run(&self.machine, child, op)),
            (Step::Fork, None) => Some(match state.parent.fork() {
                Ok(child) => {
                    state.child = Some(child);
                    Outcome::Done(0)
                }
                Err(error) => Outcome::Refused(error),
            }),
            (Step::ChildExits, Some(_)) => {
                state.child = None;
                Some(Outcome::Done(0))
            }
            _ => None,
        }
    }

    /// Performs one step and compares its result with the model's. `None` if it does not apply.
    fn step<'m>(&'m self, state: &mut State<'m>, step: Step) -> Option<()> {
        let outcome = self.outcome(state, step)?;
        assert_eq!(Some(outcome), state.expect(step), "{step:x?}");
        Some(())
    }

    fn replay(&self, sequence: &[Step]) -> State<'_> {
        let mut state = self.begin();
        for step in sequence {
            self.step(&mut state, *step).expect("it applied before");
        }
        state
    }

    fn verify(&self, state: &State<'_>) {
        let scratch = &mut self.scratch.borrow_mut();
        state.model.compare(&self.machine, &state.parent);
        state.model.compare_zeroes(&self.machine, &state.parent, (0..PAGES).map(at));
        match (&state.child, &state.child_model) {
            (Some(child), Some(model)) => {
                model.compare(&self.machine, child);
                model.compare_zeroes(&self.machine, child, (0..PAGES).map(at));
                audit(&self.machine, &self.memory, &[&state.parent, child], scratch);
            }
            _ => audit(&self.machine, &self.memory, &[&state.parent], scratch),
        }
    }

    /// Runs `sequence`, then `next`; returns the new state.
    fn attempt(&self, sequence: &[Step], next: Step) -> Option<State<'_>> {
        let _trying = Trying(sequence, next);
        let mut state = self.replay(sequence);
        self.step(&mut state, next)?;
        self.verify(&state);
        Some(state)
    }

    /// Runs `next` after `sequence` repeatedly, with a growing number of allocations that succeed,
    /// until it succeeds. A failure changes only what its operation allows, and the call succeeds
    /// once memory is available again.
    fn starve(&self, sequence: &[Step], next: Step) -> Option<()> {
        let _trying = Trying(sequence, next);
        for succeed in 0..100 {
            let mut state = self.replay(sequence);
            self.memory.fail_allocations_after(Some(succeed));
            let outcome = self.outcome(&mut state, next);
            self.memory.fail_allocations_after(None);
            let starved = match outcome? {
                Outcome::Refused(error) => error == Error::OutOfMemory,
                Outcome::Signal(error) => error == FaultError::OutOfMemory,
                Outcome::Done(_) => false,
            };
            if !starved {
                assert_eq!(outcome, state.expect(next), "with {succeed} allocations");
                self.verify(&state);
                return Some(());
            }
            state.accept_what_failed(&self.machine, next);
            self.verify(&state);
            self.step(&mut state, next);
            self.verify(&state);
        }
        panic!("it needs more allocations than there are pages");
    }

    /// A number for a state.
    fn fingerprint(&self, state: &State<'_>) -> u64 {
        let mut hasher = DefaultHasher::new();
        let mut groups = Vec::new();
        // Folios are aligned, so only a frame's position in its folio matters.
        let mut name = |frame: u32| {
            let known = groups.iter().position(|group| *group == frame / 4);
            let group = known.unwrap_or_else(|| {
                groups.push(frame / 4);
                groups.len() - 1
            });
            (group, frame % 4)
        };
        self.memory.free_frame_count().hash(&mut hasher);
        let models = [Some(&state.model), state.child_model.as_ref()];
        for (space, model) in [Some(&state.parent), state.child.as_ref()].into_iter().zip(models) {
            let (Some(space), Some(model)) = (space, model) else { continue };
            space.for_each_mapping(|mapping| {
                let (start, end) = (mapping.range.start(), mapping.range.end());
                (start, end, mapping.flags.bits(), mapping.page_offset).hash(&mut hasher);
            });
            for page in (0..PAGES).map(at) {
                let found = space.inspect(VirtAddr(page));
                shadow::frame_of(found).map(|frame| name(frame.0)).hash(&mut hasher);
                // The model's words equal the words in memory, as was just verified.
                (model.words(page).first, space.is_dirty(VirtAddr(page))).hash(&mut hasher);
                if let Inspection::Page { attributes, level, contiguous, .. } = found {
                    let bits = (attributes.permissions.bits(), attributes.accessed);
                    (bits, attributes.dirty, attributes.soft_dirty, level, contiguous)
                        .hash(&mut hasher);
                }
            }
            for cached in self.machine.cached(Cpu(0), space.root()) {
                (cached.start, cached.order, cached.permissions.bits(), cached.dirty)
                    .hash(&mut hasher);
            }
            usize::MAX.hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// The zero pages that exist.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Zeroes {
    Small,
    Huge,
}

/// The sequences to continue.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Walk {
    Plain,
    /// Only sequences that lead to a new state.
    Distinct,
    /// All sequences; memory runs out in their last operation.
    Scarce,
}

/// Runs all sequences of up to `depth` operations after `start`. Returns the number of sequences
/// and, if states are distinguished, the number of states that shorter sequences reach.
fn explore(scope: &Scope, start: Start, depth: usize, walk: Walk) -> (u64, usize) {
    let operations = operations();
    let mut seen = HashSet::new();
    let mut tried = 0;
    let mut frontier = vec![Vec::<u8>::new()];
    for length in 1..=depth {
        let mut next = Vec::new();
        for path in frontier {
            let mut sequence = start.steps();
            sequence.extend(path.iter().map(|index| operations[usize::from(*index)]));
            for (index, step) in operations.iter().enumerate() {
                let is_new = match walk {
                    Walk::Scarce => scope.starve(&sequence, *step).map(|()| true),
                    Walk::Distinct if length < depth => scope
                        .attempt(&sequence, *step)
                        .map(|state| seen.insert(scope.fingerprint(&state))),
                    Walk::Plain | Walk::Distinct => scope.attempt(&sequence, *step).map(|_| true),
                };
                let Some(is_new) = is_new else { continue };
                tried += 1;
                if length < depth && is_new {
                    let mut longer = path.clone();
                    longer.push(index as u8);
                    next.push(longer);
                }
            }
        }
        frontier = next;
    }
    (tried, seen.len())
}

fn small_scope(orders: &[u8], zeroes: Zeroes, reach: Reach) {
    let begun = Instant::now();
    let deeper = usize::from(std::env::var_os("BINDERY_DEEPER").is_some());
    let scope = Scope::new(orders, zeroes, reach);
    let walks = [
        (Start::Nothing, 3, Walk::Plain),
        (Start::Written, 3, Walk::Plain),
        (Start::Uneven, 3, Walk::Plain),
        (Start::Written, 4, Walk::Distinct),
        (Start::Written, 3, Walk::Scarce),
    ];
    let walks =
        walks.into_iter().filter(|(.., walk)| reach == Reach::Table || *walk != Walk::Distinct);
    for (start, depth, walk) in walks {
        let (count, states) = explore(&scope, start, depth + deeper, walk);
        println!(
            "folios {orders:?}, {zeroes:?}, {reach:?}, {walk:?} from {start:?}: {count} sequences of up to {} \
             operations, {states} states told apart, {} steps in all, {:.1} s",
            depth + deeper,
            scope.steps.get(),
            begun.elapsed().as_secs_f32()
        );
        assert!(count > 80_000, "the walk has ended early");
        assert!(walk != Walk::Distinct || states > 8_000, "few states are told apart");
    }
    audit(&scope.machine, &scope.memory, &[], &mut scope.scratch.borrow_mut());
}

macro_rules! small_scope {
    ($($test:ident: $orders:expr, $zeroes:ident, $reach:ident;)*) => {
        $(#[test]
        fn $test() { small_scope(&$orders, Zeroes::$zeroes, Reach::$reach); })*
    };
}

small_scope! {
    every_sequence_agrees_with_the_model_with_base_pages: [0], Small, Table;
    every_sequence_agrees_with_the_model_with_base_pages_page_by_page: [0], Small, Page;
    every_sequence_agrees_with_the_model_with_blocks: [1], Small, Table;
    every_sequence_agrees_with_the_model_with_blocks_page_by_page: [1], Small, Page;
    every_sequence_agrees_with_the_model_with_huge_leaves: [2], Small, Table;
    every_sequence_agrees_with_the_model_with_huge_leaves_of_zeroes: [2], Huge, Table;
    every_sequence_agrees_with_the_model_with_huge_leaves_page_by_page: [2], Small, Page;
    every_sequence_agrees_with_the_model_with_all_sizes: [1, 2], Small, Table;
    every_sequence_agrees_with_the_model_with_all_sizes_page_by_page: [1, 2], Small, Page;
}
