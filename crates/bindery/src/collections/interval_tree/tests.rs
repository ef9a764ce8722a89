//! Compares the tree with a list, and bounds its cost.

extern crate std;

use std::boxed::Box;
use std::cell::Cell;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

std::thread_local! {
    /// The number of intervals that this thread has read: the cost of a search.
    static READS: Cell<usize> = const { Cell::new(0) };
}

struct Node {
    links: IntervalLinks<Self>,
    first: AtomicU64,
    last: AtomicU64,
}

struct OfTest;

impl Member<Node> for OfTest {
    fn links(node: &Node) -> &IntervalLinks<Node> {
        &node.links
    }

    fn interval(node: &Node) -> Interval {
        READS.set(READS.get() + 1);
        Interval { first: node.first.load(Relaxed), last: node.last.load(Relaxed) }
    }
}

type Tree = IntervalTree<Node, OfTest>;

fn node(first: u64, last: u64) -> Box<Node> {
    let (first, last) = (AtomicU64::new(first), AtomicU64::new(last));
    Box::new(Node { links: IntervalLinks::new(), first, last })
}

fn insert(tree: &Tree, node: &Node) {
    // SAFETY: 1. no other thread can find the tree; 2. callers keep nodes until the end of the test
    // and insert each once; 3. `set` renews.
    unsafe { tree.insert(node) };
}

fn look(tree: &Tree) -> LockedTree<'_, Node, OfTest> {
    // SAFETY: 1. no other thread can find the tree; nodes remain until the end of the test.
    unsafe { tree.locked() }
}

fn remove(tree: &Tree, node: &Node) {
    // SAFETY: 1. no other thread can find the tree; 2. callers track which nodes are in it.
    unsafe { tree.remove(node) };
}

fn set(tree: &Tree, node: &Node, first: u64, last: u64) {
    node.first.store(first, Relaxed);
    node.last.store(last, Relaxed);
    // SAFETY: as in `remove`.
    unsafe { tree.renew(node) };
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u64, u64),
    Remove(prop::sample::Index),
    Change(prop::sample::Index, u64, u64),
    Ask { first: u64, length: u64, since: u64, after: Option<prop::sample::Index> },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Few indexes, so that many intervals have the same start.
    let (first, length) = (0..24_u64, 0..12_u64);
    let place = any::<prop::sample::Index>;
    let step = prop_oneof![
        4 => (first.clone(), length.clone()).prop_map(|(first, more)| Step::Insert(first, more)),
        2 => place().prop_map(Step::Remove),
        2 => (place(), first.clone(), length.clone())
            .prop_map(|(which, first, more)| Step::Change(which, first, more)),
        4 => (first, length, 0..80_u64, prop::option::of(place())).prop_map(
            |(first, length, since, after)| Step::Ask { first, length, since, after }
        ),
    ];
    prop::collection::vec(step, 1..160)
}

proptest! {
    #[test]
    fn the_tree_answers_as_a_sorted_list_does(steps in steps()) {
        let tree = Tree::new();
        // In any order, with their expected stamps.
        let mut nodes: Vec<(Box<Node>, u64)> = Vec::new();
        let mut clock = 0;
        for step in steps {
            match step {
                Step::Insert(first, more) => {
                    clock += 1;
                    nodes.push((node(first, first + more), clock));
                    insert(&tree, &nodes[nodes.len() - 1].0);
                }
                Step::Remove(which) if !nodes.is_empty() => {
                    let (gone, _) = nodes.swap_remove(which.index(nodes.len()));
                    remove(&tree, &gone);
                    prop_assert!(!look(&tree).contains(&gone));
                }
                Step::Change(which, first, more) if !nodes.is_empty() => {
                    clock += 1;
                    let index = which.index(nodes.len());
                    nodes[index].1 = clock;
                    set(&tree, &nodes[index].0, first, first + more);
                }
                Step::Ask { first, length, since, after } => {
                    let after = after
                        .filter(|_| !nodes.is_empty())
                        .map(|which| Tree::place(&nodes[which.index(nodes.len())].0));
                    let last = first + length;
                    let asked = Asked { first, last, since, after };
                    let mut model: Vec<_> = nodes
                        .iter()
                        .map(|(node, stamp)| (Tree::place(node), node.last.load(Relaxed), *stamp))
                        .filter(|(place, end, stamp)| {
                            place.first <= last
                                && *end >= first
                                && *stamp > since
                                && after.is_none_or(|after| *place > after)
                        })
                        .map(|(place, _, _)| place)
                        .collect();
                    model.sort();
                    let told: Vec<_> = look(&tree).iter(asked).map(Tree::place).collect();
                    prop_assert_eq!(told, model);
                }
                Step::Remove(_) | Step::Change(..) => {}
            }
            prop_assert!(look(&tree).check());
            prop_assert_eq!(tree.now(), clock);
            let all = nodes
                .iter()
                .all(|(node, stamp)| look(&tree).contains(node) && Tree::place(node).stamp == *stamp);
            prop_assert!(all);
        }
    }
}

/// The number of reads of `work`.
fn reads(work: impl FnOnce()) -> usize {
    READS.set(0);
    work();
    READS.get()
}

#[test]
fn calls_cost_a_logarithm_whatever_the_order() {
    let orders: [fn(u64, u64) -> u64; 4] = [
        |n, _| n,
        |n, count| count - n,
        |_, _| 7,
        |n, count| if n % 2 == 0 { n } else { 2 * count - n },
    ];
    for order in orders {
        for bits in [6, 10, 14, 17] {
            let count = 1_u64 << bits;
            let nodes: Vec<_> =
                (0..count).map(|n| node(2 * order(n, count), 2 * order(n, count))).collect();
            let tree = Tree::new();
            let most = nodes.iter().map(|node| reads(|| insert(&tree, node))).max().unwrap_or(0);
            // Each level is read during the descent, and with a child and a rotation during the
            // ascent.
            let bound = 12 * bits;
            assert!(most <= bound, "one of {count} inserts reads {most}");
            for node in nodes.iter().step_by(61) {
                let at = node.first.load(Relaxed);
                let asked = Asked { first: at, last: at, ..Asked::ALL };
                let found = reads(|| assert!(look(&tree).first(&asked).is_some()));
                assert!(found <= bound, "a search among {count} reads {found}");
                // Between two intervals.
                let asked = Asked { first: at + 1, last: at + 1, ..Asked::ALL };
                let missed = reads(|| assert!(look(&tree).first(&asked).is_none()));
                assert!(missed <= bound, "a search in vain among {count} reads {missed}");
                let renewed = reads(|| set(&tree, node, at, at));
                assert!(renewed <= 2 * bound, "a renewal among {count} reads {renewed}");
                // A search for nodes newer than all but one node does not read the other nodes.
                let asked = Asked { since: tree.now() - 1, ..Asked::ALL };
                let newest = reads(|| assert_eq!(look(&tree).iter(asked).count(), 1));
                assert!(newest <= 2 * bound, "the newest among {count} takes {newest}");
            }
            let most = nodes.iter().map(|node| reads(|| remove(&tree, node))).max().unwrap_or(0);
            assert!(most <= 2 * bound, "one of {count} removals reads {most}");
            assert!(tree.is_empty());
        }
    }
}

#[test]
fn an_interrupted_walk_meets_all_that_stay() {
    let tree = Tree::new();
    let nodes: Vec<_> = (0..100).map(|n| node(n / 4, n / 4 + 3)).collect();
    nodes.iter().for_each(|node| insert(&tree, node));
    let mut asked = Asked::ALL;
    let (mut met, mut gone) = (Vec::new(), Vec::new());
    while let Some(found) = look(&tree).first(&asked) {
        let place = Tree::place(found);
        asked.after = Some(place);
        met.push(ptr::from_ref(found));
        // During the walk, the node that it has reached is removed, as is a node far after it.
        let far =
            nodes.iter().rev().find(|node| look(&tree).contains(node) && !ptr::eq(&***node, found));
        let far = far.map(|node| &**node).filter(|node| Tree::place(node) > place);
        for node in [Some(found), far].into_iter().flatten() {
            remove(&tree, node);
            gone.push(ptr::from_ref(node));
        }
    }
    assert!(tree.is_empty());
    assert_eq!((met.len(), gone.len()), (50, 100));
    assert!(met.is_sorted_by_key(|node| nodes.iter().position(|own| ptr::eq(&**own, *node))));
}

#[test]
fn the_auditor_finds_a_silently_changed_interval() {
    let tree = Tree::new();
    let nodes: Vec<_> = (0..9).map(|n| node(n, n)).collect();
    nodes.iter().for_each(|node| insert(&tree, node));
    assert!(look(&tree).check());
    nodes[8].last.store(99, Relaxed);
    assert!(!look(&tree).check());
    set(&tree, &nodes[8], 8, 99);
    assert!(look(&tree).check());
    nodes[0].first.store(5, Relaxed);
    nodes[0].last.store(5, Relaxed);
    assert!(!look(&tree).check());
}
