//! Random sequences of calls and accesses of a program and its child, on all architectures, with
//! the strict TLB. Results, mappings and contents match the model, no dirty bit is lost, and the
//! auditor finds nothing. Addresses and lengths are close to the edges of contiguous blocks, huge
//! leaves and level-2 tables.
//!
//! `PROPTEST_CASES` sets the number of sequences for each architecture. A sequence that fails is
//! kept in `properties.regressions` and tried first from then on.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Memory, Place, Protection, Remap, SizeMode};
use bindery_hosted::{Machine, Walk};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestError, TestRunner};

use super::shadow::{Op, Rules, Shadow, audit, run};
use crate::support::{GIB, KIB, MIB, READ_WRITE, READ_WRITE_EXECUTE, options, strict};

on_every_architecture! {
    random_sequences_agree_with_the_model => random_sequences;
}

/// An address.
#[derive(Clone, Copy, Debug)]
enum At {
    /// This address.
    Fixed(u64),
    /// An offset in pages from the beginning of a mapping, or, if negative, from its end. The
    /// number chooses among the current mappings.
    Area(u8, i64),
}

#[derive(Clone, Copy, Debug)]
enum Length {
    Fixed(u64),
    /// To the end of the mapping.
    Rest,
    /// To the end of a later mapping, across gaps.
    Through(u8),
}

/// The destination of a mapping.
#[derive(Clone, Copy, Debug)]
enum Target {
    InPlace,
    Anywhere,
    To(At),
    /// At this address, adjusted to be congruent with the source modulo 2 MiB.
    Congruent(At),
    /// The source stays.
    Leaving(Leaving),
}

/// The destination of contents whose mapping stays.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    Anywhere,
    Near(At),
    To(At),
    Congruent(At),
}

#[derive(Clone, Copy, Debug)]
enum Spot {
    Anywhere,
    Near(At),
    Fixed(At),
    NoReplace(At),
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Map(Spot, u64, Protection),
    Unmap(At, Length),
    Protect(At, Length, Protection),
    Remap(At, Length, Option<u64>, Target),
    Discard(At, Length),
    Read(At),
    Write(At),
    Fill(At, u64, u8),
    Execute(At),
    SplitFolio(At, u8),
    Collapse(At),
    /// The folio sizes in use from now on, one bit for each order; bit 0 is the huge zero page.
    Policy(u16),
    Fork,
    ChildExits,
}

/// An action, and whether the child performs it, if a child exists.
type Step = (Action, bool);

fn address() -> impl Strategy<Value = At> {
    let edges =
        [0, 64 * KIB, 2 * MIB, 2 * MIB + 64 * KIB, 4 * MIB, GIB - 2 * MIB, GIB - 64 * KIB, GIB];
    let edge =
        (prop::sample::select(vec![GIB, 2 * GIB, 4 * GIB]), prop::sample::select(edges.to_vec()));
    let jitter = prop_oneof![6 => Just(0), 3 => -2..=2_i64, 2 => -20..=20_i64];
    let fixed = (edge, jitter).prop_map(|((base, edge), pages)| {
        At::Fixed((base + edge).wrapping_add_signed(pages * PAGE_SIZE as i64))
    });
    let inside = prop_oneof![4 => Just(0), 4 => -18..=18_i64, 2 => 0..=600_i64, 1 => prop::sample::select(vec![16, 512, -16, -512])];
    let area = (any::<u8>(), inside).prop_map(|(which, pages)| At::Area(which, pages));
    prop_oneof![1 => fixed, 3 => area]
}

fn pages() -> impl Strategy<Value = u64> {
    let pages = prop_oneof![
        4 => 1..=4_u64,
        3 => 14..=18_u64,
        2 => 30..=200_u64,
        3 => 510..=514_u64,
        2 => prop::sample::select(vec![528_u64, 1024, 1025, 1536]),
    ];
    pages.prop_map(|pages| pages * PAGE_SIZE)
}

/// Lengths of mappings. Some cover whole level-2 tables, and some are not multiples of a page.
fn long() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => pages(),
        1 => prop::sample::select(vec![GIB, GIB + 2 * MIB, 2 * GIB - PAGE_SIZE]),
        1 => pages().prop_map(|length| length - 5),
    ]
}

fn length() -> impl Strategy<Value = Length> {
    prop_oneof![
        3 => long().prop_map(Length::Fixed),
        2 => Just(Length::Rest),
        1 => (1..=3_u8).prop_map(Length::Through),
    ]
}

fn protection() -> impl Strategy<Value = Protection> {
    prop_oneof![
        5 => Just(READ_WRITE),
        2 => Just(Protection::READ),
        2 => Just(Protection::empty()),
        1 => Just(Protection::READ | Protection::EXECUTE),
        1 => Just(READ_WRITE_EXECUTE),
    ]
}

fn spot() -> impl Strategy<Value = Spot> {
    prop_oneof![
        3 => Just(Spot::Anywhere),
        1 => address().prop_map(Spot::Near),
        3 => address().prop_map(Spot::Fixed),
        1 => address().prop_map(Spot::NoReplace),
    ]
}

fn target() -> impl Strategy<Value = Target> {
    prop_oneof![
        1 => Just(Target::InPlace),
        2 => Just(Target::Anywhere),
        3 => address().prop_map(Target::To),
        3 => address().prop_map(Target::Congruent),
        3 => leaving().prop_map(Target::Leaving),
    ]
}

fn leaving() -> impl Strategy<Value = Leaving> {
    prop_oneof![
        1 => Just(Leaving::Anywhere),
        1 => address().prop_map(Leaving::Near),
        2 => address().prop_map(Leaving::To),
        2 => address().prop_map(Leaving::Congruent),
    ]
}

fn action() -> impl Strategy<Value = Action> {
    let order = prop_oneof![Just(0_u8), Just(2), Just(4), 0..9_u8];
    let orders = prop_oneof![
        Just(0_u16),
        Just(1 << 4),
        Just(1 << 9),
        Just(1 << 4 | 1 << 9 | 1),
        (0..1024_u16)
    ];
    prop_oneof![
        5 => (spot(), long(), protection()).prop_map(|(spot, l, p)| Action::Map(spot, l, p)),
        2 => (address(), length()).prop_map(|(at, l)| Action::Unmap(at, l)),
        4 => (address(), length(), protection()).prop_map(|(at, l, p)| Action::Protect(at, l, p)),
        6 => (address(), length(), prop::option::of(long()), target())
            .prop_map(|(at, old, new, to)| {
                // A mapping that stays at the source has the length of its contents.
                let new = new.filter(|_| !matches!(to, Target::Leaving(_)));
                Action::Remap(at, old, new, to)
            }),
        1 => (address(), length()).prop_map(|(at, l)| Action::Discard(at, l)),
        3 => address().prop_map(Action::Read),
        8 => address().prop_map(Action::Write),
        4 => (address(), pages(), 1..=255_u8).prop_map(|(at, l, byte)| Action::Fill(at, l, byte)),
        1 => address().prop_map(Action::Execute),
        1 => (address(), order).prop_map(|(at, order)| Action::SplitFolio(at, order)),
        1 => address().prop_map(Action::Collapse),
        2 => orders.prop_map(Action::Policy),
        1 => Just(Action::Fork),
        1 => Just(Action::ChildExits),
    ]
}

fn sequence() -> impl Strategy<Value = Vec<Step>> {
    let begin = (
        0..5_usize,
        prop::sample::select(vec![0_u16, 1 << 4, 1 << 9, 0b10_0001_0000, 0b10_0000_0001]),
    );
    let steps = prop::collection::vec((action(), any::<bool>()), 10..50);
    (begin, steps).prop_map(|((jitter, orders), steps)| {
        let at = At::Fixed(GIB + jitter as u64 / 3 * 7 * PAGE_SIZE);
        let begin = [
            Action::Policy(orders),
            Action::Map(Spot::Fixed(at), 4 * MIB, READ_WRITE),
            Action::Fill(at, 64 * KIB + PAGE_SIZE, 1),
        ];
        begin.into_iter().map(|action| (action, false)).chain(steps).collect()
    })
}

fn resolve(at: At, model: &Shadow) -> u64 {
    match at {
        At::Fixed(at) => at,
        At::Area(which, pages) => {
            let count = model.areas.len().max(1);
            let area = model.areas.iter().nth(usize::from(which) % count);
            let (start, end) = area.map_or((GIB, 2 * GIB), |(start, area)| (*start, area.end));
            let base = if pages < 0 { end } else { start };
            base.saturating_add_signed(pages * PAGE_SIZE as i64)
        }
    }
}

fn extent(at: u64, length: Length, model: &Shadow) -> u64 {
    match length {
        Length::Fixed(length) => length,
        Length::Rest => model.area(at).map_or(PAGE_SIZE, |(_, area)| area.end - at),
        Length::Through(count) => {
            let ends = model.areas.values().map(|area| area.end).filter(|end| *end > at);
            ends.take(usize::from(count) + 1).last().map_or(PAGE_SIZE, |end| end - at)
        }
    }
}

/// The operation of an action in the present state. A write writes `stamp`.
fn operation(action: Action, model: &Shadow, stamp: u64) -> Option<Op> {
    let place = |at| resolve(at, model);
    let stretch = |at, length| {
        let at = resolve(at, model);
        (at, extent(at, length, model))
    };
    Some(match action {
        Action::Map(spot, length, protection) => {
            let spot = match spot {
                Spot::Anywhere => Place::Anywhere,
                Spot::Near(at) => Place::Near(VirtAddr(place(at))),
                Spot::Fixed(at) => Place::Fixed(VirtAddr(place(at))),
                Spot::NoReplace(at) => Place::FixedNoReplace(VirtAddr(place(at))),
            };
            Op::Map(spot, length, protection)
        }
        Action::Unmap(at, length) => {
            let (at, length) = stretch(at, length);
            Op::Unmap(at, length)
        }
        Action::Protect(at, length, protection) => {
            let (at, length) = stretch(at, length);
            Op::Protect(at, length, protection)
        }
        Action::Remap(at, length, new, target) => {
            let (at, length) = stretch(at, length);
            let mask = 2 * MIB - 1;
            let there = |to| VirtAddr(place(to));
            let congruent = |to| VirtAddr(place(to) & !mask | at & mask);
            let target = match target {
                Target::InPlace => Remap::InPlace,
                Target::Anywhere => Remap::MayMove,
                Target::To(to) => Remap::To(there(to)),
                Target::Congruent(to) => Remap::To(congruent(to)),
                Target::Leaving(Leaving::Anywhere) => Remap::Leave(VirtAddr(0)),
                Target::Leaving(Leaving::Near(to)) => Remap::Leave(there(to)),
                Target::Leaving(Leaving::To(to)) => Remap::LeaveTo(there(to)),
                Target::Leaving(Leaving::Congruent(to)) => Remap::LeaveTo(congruent(to)),
            };
            Op::Remap(at, length, new.unwrap_or(length), target)
        }
        Action::Discard(at, length) => {
            let (at, length) = stretch(at, length);
            Op::Discard(at, length)
        }
        Action::Read(at) => Op::Read(place(at)),
        Action::Write(at) => Op::Write(place(at), stamp),
        Action::Fill(at, length, byte) => Op::Fill(place(at), length, byte),
        Action::Execute(at) => Op::Execute(place(at)),
        Action::SplitFolio(at, order) => Op::SplitFolio(place(at), order),
        Action::Collapse(at) => Op::Collapse(place(at)),
        Action::Policy(_) | Action::Fork | Action::ChildExits => return None,
    })
}

/// A process and, after a fork, its child, each with its model.
struct Family<'m, A: Walk> {
    machine: &'m Machine<A>,
    memory: &'m Memory<Machine<A>>,
    parent: (AddressSpace<'m, Machine<A>>, Shadow),
    child: Option<(AddressSpace<'m, Machine<A>>, Shadow)>,
    scratch: Vec<u32>,
}

impl<A: Walk> Family<'_, A> {
    fn step(&mut self, (action, by_child): Step, stamp: u64) {
        let (space, model) = match &mut self.child {
            Some(child) if by_child => child,
            _ => &mut self.parent,
        };
        model.adopt(space);
        if let Some(op) = operation(action, model, stamp) {
            let written = match op {
                Op::Remap(old, length, ..) => model.pages.range(old..old.saturating_add(length)),
                _ => model.pages.range(0..0),
            };
            let written: Vec<u64> = written.map(|(page, _)| *page).collect();
            assert_eq!(run(self.machine, space, op), model.expect(op), "{op:x?}");
            // Removed contents read as zeroes, in particular if the source stays.
            model.compare_zeroes(self.machine, space, written.into_iter());
            return;
        }
        match action {
            Action::Fork => self.child = Some((space.fork().unwrap(), model.clone())),
            Action::ChildExits => self.child = None,
            Action::Policy(orders) => {
                for order in 1..=9 {
                    let used = orders >> order & 1 == 1;
                    let mode = if used { SizeMode::Always } else { SizeMode::Never };
                    self.memory.folio_policy().set(Order(order), mode);
                }
                self.memory.set_huge_zero_page(orders & 1 == 1);
            }
            _ => {}
        }
    }

    fn verify(&mut self) {
        let both = [Some(&self.parent), self.child.as_ref()].into_iter().flatten();
        let mut spaces = Vec::new();
        for (space, model) in both {
            model.compare(self.machine, space);
            // Compares around everything that is or was mapped, including the last pages of each
            // mapping.
            let edges = model.areas.iter().flat_map(|(start, area)| {
                [start - PAGE_SIZE, *start, area.end - PAGE_SIZE, area.end]
            });
            model.compare_zeroes(self.machine, space, edges);
            spaces.push(space);
        }
        audit(self.machine, self.memory, &spaces, &mut self.scratch);
    }
}

fn scenario<A: Walk>(steps: &[Step]) {
    let (machine, memory) = strict::<A>(256 * MIB);
    let rules = Rules::of::<A>(options().minimum_address.0);
    let mut family = Family {
        machine: &machine,
        memory: &memory,
        parent: (AddressSpace::new(&memory, options()).unwrap(), Shadow::new(rules)),
        child: None,
        scratch: Vec::new(),
    };
    for (number, step) in (1..).zip(steps) {
        family.step(*step, number);
        if number % 4 == 0 {
            family.verify();
        }
    }
    family.verify();
    let mut scratch = std::mem::take(&mut family.scratch);
    drop(family);
    audit(&machine, &memory, &[], &mut scratch);
}

fn random_sequences<A: Walk>() {
    let persistence = FileFailurePersistence::WithSource("regressions");
    let mut config = Config {
        failure_persistence: Some(Box::new(persistence)),
        source_file: Some(file!()),
        ..Config::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 800;
    }
    let mut runner = TestRunner::new(config);
    let result = runner.run(&sequence(), |steps| {
        scenario::<A>(&steps);
        Ok(())
    });
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, steps)) => {
            let lines: Vec<_> = steps.iter().map(|step| format!("    {step:x?},")).collect();
            panic!("{reason}, after\n{}", lines.join("\n"));
        }
        Err(error) => panic!("{error}"),
    }
}

/// A mapping of 4 MiB with its first pages written.
fn four_mebibytes(pages: u64) -> [Step; 2] {
    let at = At::Fixed(GIB);
    let map = Action::Map(Spot::Fixed(at), 4 * MIB, READ_WRITE);
    [(map, false), (Action::Fill(at, pages * PAGE_SIZE, 1), false)]
}

fn moves(source: u64, length: u64, target: u64) -> Step {
    let (source, target) = (At::Fixed(source), Target::To(At::Fixed(target)));
    (Action::Remap(source, Length::Fixed(length), None, target), false)
}

on_every_architecture! {
    // The part behind the source was inserted into the index twice.
    pages_move_right_in_front_of_themselves => in_front;
    // The target's last pages share a table with the source's. The mover took pages that had
    // arrived there for more pages to move, and had allocated no table for them.
    pages_move_right_behind_themselves => behind;
    // The level-2 table was not freed although it was empty, because nothing was mapped at the
    // destination of its last part.
    a_gibibyte_with_one_page_moves_tables => one_page;
}

fn in_front<A: Walk>() {
    let [map, fill] = four_mebibytes(17);
    scenario::<A>(&[map, fill, moves(GIB + 3 * PAGE_SIZE, 3 * PAGE_SIZE, GIB)]);
}

fn behind<A: Walk>() {
    let [map, fill] = four_mebibytes(17);
    let source = GIB + PAGE_SIZE;
    scenario::<A>(&[map, fill, moves(source, 2 * MIB, source + 2 * MIB)]);
}

fn one_page<A: Walk>() {
    let at = At::Fixed(4 * GIB);
    let map = Action::Map(Spot::Fixed(at), GIB, READ_WRITE);
    let touch = Action::Read(At::Fixed(4 * GIB + PAGE_SIZE));
    scenario::<A>(&[(map, false), (touch, false), moves(4 * GIB, GIB, 8 * GIB + PAGE_SIZE)]);
}
