//! The index compared with a `BTreeMap`, its gaps with a brute-force search, and its readers
//! concurrent with a writer on another CPU.

extern crate std;

use std::boxed::Box;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

std::thread_local! {
    /// The number of bounds read by this thread: the cost of a search.
    static READS: Cell<usize> = const { Cell::new(0) };
}

/// A node. `owner` is the purpose of the node, and distinguishes nodes from garbage.
struct Node {
    links: SkipLinks<Node>,
    start: AtomicU64,
    end: AtomicU64,
    owner: u64,
}

impl Indexed for Node {
    fn links(&self) -> &SkipLinks<Self> {
        &self.links
    }
    fn start(&self) -> u64 {
        READS.set(READS.get() + 1);
        self.start.load(Ordering::Relaxed)
    }
    fn end(&self) -> u64 {
        READS.set(READS.get() + 1);
        self.end.load(Ordering::Relaxed)
    }
}

impl Node {
    fn new(start: u64, end: u64, owner: u64) -> Self {
        let (start, end) = (AtomicU64::new(start), AtomicU64::new(end));
        Self { links: SkipLinks::new(), start, end, owner }
    }
}

/// The node. Nodes live as long as the world, which outlives every use in a test.
fn at<'w>(node: NonNull<Node>) -> &'w Node {
    // SAFETY: the pointer came from `World::add`, and the world lives.
    unsafe { node.as_ref() }
}

/// An index with all nodes that it ever contained; they are freed after the index.
struct World {
    index: Index<Node>,
    nodes: Mutex<Vec<NonNull<Node>>>,
}

// SAFETY: the nodes consist of atomics and a constant, and the list of nodes has its own lock.
unsafe impl Sync for World {}

impl Drop for World {
    fn drop(&mut self) {
        for node in self.nodes.get_mut().unwrap().drain(..) {
            // SAFETY: the pointer came from `Box::leak`, and the index that linked the node is also
            // dropped.
            drop(unsafe { Box::from_raw(node.as_ptr()) });
        }
    }
}

impl World {
    fn new(seed: u64) -> Self {
        Self { index: Index::new([seed, 0]), nodes: Mutex::default() }
    }

    fn get(&self, node: NonNull<Node>) -> &Node {
        at(node)
    }

    fn add(&self, start: u64, end: u64, owner: u64) -> NonNull<Node> {
        let node = NonNull::from(Box::leak(Box::new(Node::new(start, end, owner))));
        self.nodes.lock().unwrap().push(node);
        // SAFETY: 1: one thread of a test writes. 2: the node is new. 3, 4: the node lives as long
        // as the world.
        unsafe { self.index.insert(node) };
        node
    }

    fn remove(&self, node: NonNull<Node>) {
        // SAFETY: 1: one thread of a test writes. 2: tests remove only nodes that they added, and
        // starts differ except in the one merge that is allowed. 3: nothing is freed or inserted
        // twice.
        unsafe { self.index.remove(node) };
    }

    fn set(&self, node: NonNull<Node>, start: u64, end: u64) {
        self.get(node).start.store(start, Ordering::Relaxed);
        self.get(node).end.store(end, Ordering::Relaxed);
    }

    fn bounds(&self, node: NonNull<Node>) -> (u64, u64) {
        (self.get(node).start(), self.get(node).end())
    }
}

/// The addresses of the model tests: few, so that nodes often touch.
const TOP: u64 = 192;

/// The next step of a test. Nodes are given by rank, modulo their number.
#[derive(Clone, Debug)]
enum Step {
    /// A start and a length, truncated at the start of the next node.
    Insert(u64, u64),
    Remove(usize),
    /// A node's new start and length, truncated to the room between its neighbors.
    Move(usize, u64, u64),
    /// A node, the length of its lower part, and whether the new node becomes the upper part.
    Split(usize, u64, bool),
    /// A node and the next one, whether the lower node remains, and whether it first grows.
    Merge(usize, bool, bool),
    /// Length, binary logarithm of the alignment, remainder, and bounds.
    Search(u64, u32, u64, u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    use Step::*;
    let nth = || any::<usize>();
    prop_oneof![
        6 => (0..TOP, 1..9u64).prop_map(|(start, len)| Insert(start, len)),
        2 => nth().prop_map(Remove),
        2 => (nth(), 0..TOP, 1..20u64).prop_map(|(nth, start, len)| Move(nth, start, len)),
        2 => (nth(), 0..9u64, any::<bool>()).prop_map(|(nth, len, upper)| Split(nth, len, upper)),
        1 => (nth(), any::<bool>(), any::<bool>()).prop_map(|(nth, low, first)| Merge(nth, low, first)),
        6 => (0..24u64, 0..6u32, 0..64u64, 0..=TOP, 0..=TOP + 9)
            .prop_map(|(len, align, rest, low, high)| Search(len, align, rest, low, high)),
    ]
}

/// The world and its model: the nodes by start.
struct Pair {
    world: World,
    model: BTreeMap<u64, NonNull<Node>>,
}

impl Pair {
    fn insert(&mut self, start: u64, end: u64) {
        let node = self.world.add(start, end, 0);
        self.model.insert(start, node);
    }

    fn nth(&self, nth: usize) -> Option<NonNull<Node>> {
        let nth = nth.checked_rem(self.model.len())?;
        self.model.values().nth(nth).copied()
    }

    fn after(&self, addr: u64) -> Option<NonNull<Node>> {
        self.model.range(addr..).next().map(|(_, node)| *node)
    }

    fn before(&self, addr: u64) -> Option<NonNull<Node>> {
        self.model.range(..addr).next_back().map(|(_, node)| *node)
    }

    /// The bounds of the free addresses around `start..end`.
    fn room(&self, start: u64, end: u64) -> (u64, u64) {
        let low = self.before(start).map_or(0, |node| self.world.bounds(node).1);
        let high = self.after(end).map_or(TOP, |node| self.world.bounds(node).0);
        (low, high)
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Insert(start, len) => {
                let (low, high) = self.room(start, start);
                if low <= start && start < high {
                    self.insert(start, high.min(start + len));
                }
            }
            Step::Remove(nth) => {
                if let Some(node) = self.nth(nth) {
                    self.model.remove(&self.world.bounds(node).0);
                    self.world.remove(node);
                }
            }
            Step::Move(nth, start, len) => {
                let Some(node) = self.nth(nth) else { return };
                let old = self.world.bounds(node);
                let (low, high) = self.room(old.0, old.1);
                let start = start.clamp(low, high - 1);
                self.model.remove(&old.0);
                self.model.insert(start, node);
                self.world.set(node, start, high.min(start + len));
                self.world.index.bounds_changed(at(node));
            }
            Step::Split(nth, len, new_is_upper) => {
                let Some(node) = self.nth(nth) else { return };
                let (start, end) = self.world.bounds(node);
                let middle = start + len;
                if middle <= start || end <= middle {
                    return;
                }
                if new_is_upper {
                    self.world.set(node, start, middle);
                    self.world.index.bounds_changed(at(node));
                    self.insert(middle, end);
                } else {
                    self.world.set(node, middle, end);
                    self.world.index.bounds_changed(at(node));
                    self.model.insert(middle, node);
                    self.insert(start, middle);
                }
            }
            Step::Merge(nth, keep_lower, bounds_first) => {
                let Some(lower) = self.nth(nth) else { return };
                let (start, end) = self.world.bounds(lower);
                let Some(upper) = self.after(end) else { return };
                let upper_bounds = self.world.bounds(upper);
                let (kept, gone) = if keep_lower { (lower, upper) } else { (upper, lower) };
                if bounds_first {
                    self.world.set(kept, start, upper_bounds.1);
                    self.world.index.bounds_changed(at(kept));
                    self.world.remove(gone);
                } else {
                    self.world.remove(gone);
                    self.world.set(kept, start, upper_bounds.1);
                    self.world.index.bounds_changed(at(kept));
                }
                self.model.remove(&upper_bounds.0);
                self.model.insert(start, kept);
            }
            Step::Search(len, align, congruent, low, high) => {
                let align = 1 << align;
                let congruent = congruent % align;
                let fits = |a: &u64| {
                    a % align == congruent
                        && len > 0
                        && self.model.values().all(|node| {
                            let (start, end) = self.world.bounds(*node);
                            a + len <= start || end <= *a
                        })
                };
                let lasts = low..(high + 1).saturating_sub(len);
                let index = &self.world.index;
                let found = index.find_gap_top_down(shape(len, align, congruent), low, high);
                assert_eq!(found, lasts.clone().rev().find(fits));
                let found = index.find_gap_bottom_up(shape(len, align, congruent), low, high);
                assert_eq!(found, lasts.clone().find(fits));
            }
        }
    }

    fn compare(&self) {
        let index = &self.world.index;
        assert!(index.check());
        assert_eq!(index.len(), self.model.len());
        assert!(index.iter().eq(self.model.values().copied()));
        for (start, node) in &self.model {
            assert_eq!(index.next(at(*node)), self.after(start + 1));
            assert_eq!(index.previous(at(*node)), self.before(*start));
        }
        for addr in 0..=TOP {
            assert_eq!(index.find_at_or_before(addr), self.before(addr + 1));
            let mut nodes = self.model.values().copied();
            let first = nodes.find(|node| self.world.bounds(*node).1 > addr);
            assert_eq!(index.first_ending_after(addr), first);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_index_agrees_with_brute_force(
        seed in any::<u64>(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut pair = Pair { world: World::new(seed), model: BTreeMap::new() };
        for step in &steps {
            pair.apply(step);
            pair.compare();
        }
    }
}

#[test]
fn an_empty_index_is_one_gap() {
    let index = Index::<Node>::new([0, 0]);
    assert!(index.check() && index.len() == 0 && index.iter().next().is_none());
    assert_eq!(index.find_at_or_before(u64::MAX), None);
    assert_eq!(index.first_ending_after(0), None);
    assert_eq!(index.find_gap_top_down(shape(0x1000, 0x1000, 0), 0x10000, 0x20000), Some(0x1f000));
    assert_eq!(index.find_gap_bottom_up(shape(0x1000, 0x1000, 0), 0x10001, 0x20000), Some(0x11000));
    assert_eq!(index.find_gap_bottom_up(shape(0x1000, 0x20_0000, 0x5000), 0, 0x5fff), None);
    assert_eq!(index.find_gap_top_down(shape(1, 1, 0), 0, u64::MAX), Some(u64::MAX - 1));
    assert_eq!(index.find_gap_top_down(shape(0x1000, 0x1000, 0), 0x2000, 0x1000), None);
}

#[test]
fn a_topmost_node_leaves_no_gap() {
    let world = World::new(3);
    world.add(0x1000, u64::MAX, 0);
    assert!(world.index.check());
    let found = world.index.find_gap_top_down(shape(0x800, 0x800, 0), 0, u64::MAX);
    assert_eq!(found, Some(0x800));
    assert_eq!(world.index.find_gap_bottom_up(shape(0x1001, 1, 0), 0, u64::MAX), None);
}

#[test]
fn check_notices_a_bound_that_nobody_told_of() {
    let world = World::new(7);
    let nodes: Vec<_> = (0..64).map(|n| world.add(n * 8, n * 8 + 4, n)).collect();
    assert!(world.index.check());
    world.set(nodes[20], 160, 161);
    assert!(!world.index.check());
    world.index.bounds_changed(at(nodes[20]));
    assert!(world.index.check());
    world.set(nodes[21], 160, 164);
    assert!(!world.index.check(), "nodes overlap");
}

#[test]
fn a_node_returns_after_a_grace_period() {
    let world = World::new(11);
    let nodes: Vec<_> = (0..32).map(|n| world.add(n * 8, n * 8 + 8, n)).collect();
    world.remove(nodes[3]);
    world.set(nodes[3], 0x1000, 0x2000);
    // SAFETY: 1, 3, 4: as in `World::add`. 2: the node was removed, and the test has no readers.
    unsafe { world.index.insert(nodes[3]) };
    assert!(world.index.check());
    assert_eq!(world.index.previous(at(nodes[3])), Some(nodes[31]));
}

#[test]
fn every_node_can_be_removed_during_iteration() {
    let world = World::new(5);
    for n in 0..500 {
        world.add(n * 8, n * 8 + 8, n);
    }
    world.index.iter().for_each(|node| world.remove(node));
    assert!(world.index.check() && world.index.len() == 0);
}

#[test]
fn searches_among_30_000_nodes_read_few() {
    let world = World::new(1);
    let nodes: Vec<_> = (0..30_000).map(|n| world.add(n * 8, n * 8 + 7, n)).collect();
    let cost = |what: &dyn Fn()| {
        let before = READS.get();
        what();
        READS.get() - before
    };
    // Two gaps that are wide enough but badly aligned for the request.
    for n in [50, 24_990] {
        world.set(nodes[n], n as u64 * 8 + 4, n as u64 * 8 + 7);
        world.index.bounds_changed(at(nodes[n]));
    }
    let mut worst = 0;
    for node in nodes.iter().skip(123).step_by(997) {
        let (start, end) = world.bounds(*node);
        worst = worst.max(cost(&|| assert!(world.index.find_at_or_before(end).is_some())));
        world.set(*node, start, start + 4);
        worst = worst.max(cost(&|| world.index.bounds_changed(at(*node))));
        let search = || world.index.find_gap_top_down(shape(3, 8, 5), 2, 200_000);
        let expected = (end <= 200_000).then_some(start + 5);
        worst = worst.max(cost(&|| assert_eq!(search(), expected)));
        let search = || world.index.find_gap_bottom_up(shape(3, 8, 5), 2, 300_000);
        worst = worst.max(cost(&|| assert_eq!(search(), Some(start + 5))));
        world.set(*node, start, end);
        world.index.bounds_changed(at(*node));
        let search = || world.index.find_gap_bottom_up(shape(2, 1, 0), start - 9, start + 9);
        worst = worst.max(cost(&|| assert_eq!(search(), None)));
    }
    assert!(world.index.check());
    assert!(worst < 400, "{worst} bounds read");
}

/// A node that never changes begins each range of addresses; the rest of the range belongs to nodes
/// that are inserted, removed, grown and shrunk.
const STRETCH: u64 = 32;
const STRETCHES: u64 = 64;

/// Makes a change in one range of addresses, chosen by `random`.
fn disturb(world: &World, random: u64) {
    let base = random % STRETCHES * STRETCH;
    let (low, high) = (base + 8 + random / 64 % 24, base + STRETCH);
    let before = world.index.find_at_or_before(low).unwrap();
    let (start, end) = world.bounds(before);
    let limit = world.index.next(at(before)).map_or(high, |next| world.bounds(next).0.min(high));
    if end <= low {
        world.add(low, limit.min(low + 1 + random / 2048 % 8), base);
    } else if random & 2048 == 0 {
        world.remove(before);
    } else if start < low && random & 4096 == 0 {
        world.set(before, start, low);
        world.index.bounds_changed(at(before));
        world.add(low, end, base);
    } else {
        world.set(before, low, limit);
        world.index.bounds_changed(at(before));
    }
}

/// Stops the readers when the writer is done or panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn readers_beside_a_writer_find_permanent_nodes() {
    let world = World::new(42);
    let permanent: Vec<_> = (0..STRETCHES)
        .map(|n| world.add(n * STRETCH, n * STRETCH + 8, n * STRETCH).addr())
        .collect();
    let (lock, done) = (Mutex::new(1_u64), AtomicBool::new(false));
    thread::scope(|scope| {
        for reader in 1..=2_u64 {
            let (world, permanent, done) = (&world, &permanent, &done);
            scope.spawn(move || {
                let mut random = reader;
                while !done.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(reader);
                    let addr = (random >> 33) % (STRETCH * STRETCHES);
                    let found = world.index.find_at_or_before(addr).expect("0 is always there");
                    let first = permanent[(addr / STRETCH) as usize];
                    assert!(addr % STRETCH >= 8 || found.addr() == first, "{addr:#x}");
                    // A moved node may now start above the address. But it was created in this
                    // range, or is the node that never moves.
                    assert_eq!(world.get(found).owner, addr / STRETCH * STRETCH);
                }
            });
        }
        let _stop = Stop(&done);
        for round in 0..if cfg!(miri) { 100 } else { 300_000 } {
            let mut random = lock.lock().unwrap();
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            disturb(&world, *random >> 8);
            assert!(round % 1000 != 0 || world.index.check());
        }
    });
    assert!(world.index.check());
}

#[test]
fn removing_all_tall_towers_keeps_searches_short() {
    // As if a program could see each tower's height: it keeps only the lowest towers.
    let world = World::new(5);
    let mut kept = Vec::new();
    let mut at = 0;
    while kept.len() < 20_000 {
        let node = world.add(at * 16, at * 16 + 8, at);
        at += 1;
        if world.get(node).links.height() > 1 {
            world.remove(node);
        } else {
            kept.push(node);
        }
    }
    // Also removes the towers that grow then, until at most one has more than one level.
    for round in 0..4 {
        let tall = |node: &NonNull<Node>| world.get(*node).links.height() > 1;
        let (gone, left): (Vec<_>, Vec<_>) = kept.into_iter().partition(tall);
        assert!(!gone.is_empty(), "round {round}");
        gone.into_iter().for_each(|node| world.remove(node));
        kept = left;
    }
    assert!(world.index.check());
    let mut most = 0;
    for node in kept.iter().step_by(7) {
        let start = world.bounds(*node).0;
        let before = world.index.looked_at();
        assert_eq!(world.index.find_at_or_before(start), Some(*node));
        most = most.max(world.index.looked_at() - before);
    }
    // 20,000 is less than 32^3, and the search reads one more on each level.
    let bound = 3 * (LINKS_BENEATH as u64 + 1) + HEIGHT as u64;
    assert!(most <= bound, "a search looks at {most} nodes of {}", kept.len());
}

fn shape(len: u64, align: u64, congruent: u64) -> GapShape {
    GapShape { len, align, congruent }
}
