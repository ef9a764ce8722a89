//! Writes to large folios that several processes map: the number of entries that the faults read,
//! and of pages that they copy.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::testing::with_reference;
use bindery::{Access, AddressSpace, Advice, Inspection, Memory, PinTime, Remap};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::{GIB, MIB, audit, fixed, options, strict, use_order};

on_every_architecture! {
    after_a_fork_writes_read_only_own_entries => plain_fork;
    the_last_process_of_a_folio_reuses_pages => last_process;
    pages_dropped_elsewhere_are_found_in_few_walks => dropped_pages;
    grandchildren_count_as_others => grandchildren;
    a_held_folio_is_copied_and_later_reused => held;
    moved_pages_are_never_wrongly_exclusive => moved;
}

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

const AT: u64 = GIB;
const FOLIOS: u64 = 2;
/// The maximum number of entries that a fault reads if it need not search for other sharers of the
/// folio: its own entry, at the decision and before it inserts the copy, and the entries that it
/// writes if it splits a contiguous run or a huge leaf.
const OWN: u64 = 8;
/// Walks over the entries of one folio, if each walk finds another process.
const WALKS: u64 = 8;

/// The folios of a test: `FOLIOS` of 2^`order` pages, touched.
struct Scene<'m, A: Walk> {
    machine: &'m Machine<A>,
    pages: u64,
}

/// The cost of a series of faults.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Cost {
    /// Faults that read more than their own entries.
    walks: u64,
    copied: u64,
    /// Entries of level 1 that were read.
    read: u64,
}

impl<A: Walk> Scene<'_, A> {
    fn page(&self, number: u64) -> VirtAddr {
        VirtAddr(AT + number * PAGE_SIZE)
    }

    /// Writes `value` and the page's number to these pages by faults. Returns the cost.
    fn write(
        &self,
        space: &Space<'_, A>,
        pages: impl IntoIterator<Item = u64>,
        value: u64,
    ) -> Cost {
        let program = Program::new(self.machine, space);
        let mut cost = Cost::default();
        for number in pages {
            let before = space.counts();
            program.store(self.page(number), value + number).unwrap();
            let one = space.counts() - before;
            cost.walks += u64::from(one.entries_read > OWN + one.entries_written);
            cost.copied += one.bytes_copied / PAGE_SIZE;
            cost.read += one.entries_read;
        }
        cost
    }

    /// Whether these pages hold what [`Scene::write`] has written.
    #[track_caller]
    fn assert_holds(&self, space: &Space<'_, A>, pages: impl IntoIterator<Item = u64>, value: u64) {
        let program = Program::new(self.machine, space);
        for number in pages {
            assert_eq!(program.load(self.page(number)), Ok(value + number), "page {number}");
        }
    }
}

const PARENT: u64 = 1 << 32;
const CHILD: u64 = 2 << 32;

/// Runs a test with folios of each interesting order and audits the result.
fn with_folios<A: Walk>(test: impl Fn(&Scene<'_, A>, &Memory<Machine<A>>, &Space<'_, A>)) {
    for order in [4, 9] {
        let (machine, memory) = strict::<A>(64 * MIB);
        use_order(&memory, order);
        let parent = AddressSpace::new(&memory, options()).unwrap();
        let pages = FOLIOS << order;
        parent.mmap(&fixed(AT, pages * PAGE_SIZE)).unwrap();
        let scene = Scene { machine: &machine, pages };
        scene.write(&parent, 0..pages, PARENT);
        let free = memory.free_frame_count();
        test(&scene, &memory, &parent);
        audit(&machine, &memory, &[&parent]);
        drop(parent);
        memory.trim();
        assert!(memory.free_frame_count() >= free + pages, "order {order}: pages are lost");
    }
}

fn plain_fork<A: Walk>() {
    with_folios::<A>(|scene, memory, parent| {
        for writer_is_child in [true, false] {
            let child = parent.fork().unwrap();
            let (writer, other) = if writer_is_child { (&child, parent) } else { (parent, &child) };
            let cost = scene.write(writer, 0..scene.pages, CHILD);
            assert_eq!((cost.walks, cost.copied), (0, scene.pages), "{cost:?}");
            scene.assert_holds(other, 0..scene.pages, PARENT);
            scene.assert_holds(writer, 0..scene.pages, CHILD);
            audit(scene.machine, memory, &[parent, &child]);
            drop(child);
            scene.write(parent, 0..scene.pages, PARENT);
        }
    });
}

fn last_process<A: Walk>() {
    with_folios::<A>(|scene, memory, parent| {
        let child = parent.fork().unwrap();
        // Some of the pages are copied in both processes while both exist.
        scene.write(&child, (0..scene.pages).step_by(5), CHILD);
        let some = scene.write(parent, (0..scene.pages).step_by(3), CHILD);
        assert_eq!(some.walks, 0, "{some:?}");
        drop(child);
        let rest = scene.write(parent, (0..scene.pages).filter(|page| page % 3 != 0), CHILD);
        assert_eq!(rest.copied, 0, "{rest:?}");
        assert!(rest.walks <= FOLIOS, "{rest:?}");
        scene.assert_holds(parent, 0..scene.pages, CHILD);
        audit(scene.machine, memory, &[parent]);
    });
}

fn dropped_pages<A: Walk>() {
    /// One process drops these pages before the other writes all pages.
    type Dropped = fn(u64, u64) -> bool;
    const PATTERNS: [(&str, Dropped); 3] = [
        ("every second page", |page, _| page % 2 == 0),
        ("all but the last of each folio", |page, folio| page % folio != folio - 1),
        ("the first half of each folio", |page, folio| page % folio < folio / 2),
    ];
    for (name, dropped) in PATTERNS {
        for (writer_is_child, unmaps) in [(true, false), (true, true), (false, false)] {
            with_folios::<A>(|scene, memory, parent| {
                let child = parent.fork().unwrap();
                let (writer, other) =
                    if writer_is_child { (&child, parent) } else { (parent, &child) };
                let folio = scene.pages / FOLIOS;
                for number in (0..scene.pages).filter(|page| dropped(*page, folio)) {
                    let at = scene.page(number);
                    if unmaps {
                        other.munmap(at, PAGE_SIZE).unwrap();
                    } else {
                        other.madvise(at, PAGE_SIZE, Advice::DontNeed).unwrap();
                    }
                }
                let cost = scene.write(writer, 0..scene.pages, CHILD);
                assert!(cost.walks <= WALKS * FOLIOS, "{name}: {cost:?}");
                let most = scene.pages * OWN + WALKS * FOLIOS * folio;
                assert!(cost.read <= most, "{name}: {cost:?}");
                scene.assert_holds(writer, 0..scene.pages, CHILD);
                let kept = (0..scene.pages).filter(|page| !dropped(*page, folio));
                scene.assert_holds(other, kept, PARENT);
                audit(scene.machine, memory, &[parent, &child]);
                if unmaps {
                    // Maps the unmapped pages again, for the frame count.
                    drop(child);
                    parent.mmap(&fixed(AT, scene.pages * PAGE_SIZE)).unwrap();
                }
                scene.write(parent, 0..scene.pages, PARENT);
            });
        }
    }
}

fn grandchildren<A: Walk>() {
    with_folios::<A>(|scene, memory, parent| {
        let child = parent.fork().unwrap();
        let grandchild = child.fork().unwrap();
        let first = scene.write(&grandchild, (0..scene.pages).step_by(2), CHILD);
        assert_eq!(first.walks, 0, "{first:?}");
        drop(child);
        let second = scene.write(&grandchild, (1..scene.pages).step_by(2), CHILD);
        assert_eq!((second.walks, second.copied), (0, scene.pages / 2), "{second:?}");
        scene.assert_holds(parent, 0..scene.pages, PARENT);
        scene.assert_holds(&grandchild, 0..scene.pages, CHILD);
        audit(scene.machine, memory, &[parent, &grandchild]);
        let alone = scene.write(parent, 0..scene.pages, PARENT + CHILD);
        assert_eq!(alone.copied, 0, "{alone:?}");
        assert!(alone.walks <= FOLIOS, "{alone:?}");
        scene.assert_holds(&grandchild, 0..scene.pages, CHILD);
    });
}

fn held<A: Walk>() {
    with_folios::<A>(|scene, memory, parent| {
        drop(parent.fork().unwrap());
        let Inspection::Page { frame, .. } = parent.inspect(scene.page(0)) else {
            panic!("no page")
        };
        // With a reference from an unknown holder, a copy is correct and leaves no record.
        let copied = with_reference(memory, frame, |_, _| scene.write(parent, [0, 1], CHILD));
        assert_eq!(copied.map(|cost| (cost.walks, cost.copied)), Some((0, 2)));
        let reused = scene.write(parent, 2..scene.pages / FOLIOS, CHILD);
        assert_eq!(reused.copied, 0, "{reused:?}");
        // With a pin, the program retains the pages and the child gets copies.
        let folio = scene.pages / FOLIOS;
        let last = scene.page(scene.pages - 1);
        let pinned = parent.pin(last, 1, Access::Read, PinTime::Long).unwrap();
        let child = parent.fork().unwrap();
        let own = scene.write(parent, [scene.pages - 1], CHILD);
        assert_eq!((own.walks, own.copied), (0, 0), "{own:?}");
        let Inspection::Page { frame, .. } = parent.inspect(last) else { panic!("no page") };
        assert_eq!(frame, pinned.first());
        // Both processes have already copied the pinned folio's other pages or copy them now.
        scene.write(&child, folio..scene.pages, CHILD + CHILD);
        scene.write(parent, folio..scene.pages, CHILD);
        scene.assert_holds(parent, 0..scene.pages, CHILD);
        scene.assert_holds(&child, folio..scene.pages, CHILD + CHILD);
        audit(scene.machine, memory, &[parent, &child]);
        drop(pinned);
        audit(scene.machine, memory, &[parent, &child]);
    });
}

fn moved<A: Walk>() {
    with_folios::<A>(|scene, memory, parent| {
        let child = parent.fork().unwrap();
        let half = scene.pages * PAGE_SIZE / 2;
        let folio = scene.pages / FOLIOS;
        // The upper half of the first folio moves to the place of the child's second one, off by a
        // page. So the child maps the folio at two places with different offsets.
        let from = VirtAddr(AT + half / 2);
        let to = VirtAddr(AT + half + PAGE_SIZE);
        child.mremap(from, half / 2, half / 2, Remap::To(to)).unwrap();
        scene.write(&child, 0..folio / 2, CHILD);
        scene.write(&child, folio + 1..folio + 1 + folio / 2, CHILD);
        scene.assert_holds(parent, 0..scene.pages, PARENT);
        audit(scene.machine, memory, &[parent, &child]);
        drop(child);
        // The same with a single process, in which neither part has all mappings.
        parent.mremap(from, half / 2, half / 2, Remap::To(to)).unwrap();
        let cost = scene.write(parent, 0..folio / 2, CHILD);
        assert!(cost.walks <= WALKS, "{cost:?}");
        let cost = scene.write(parent, folio + 1..folio + 1 + folio / 2, CHILD);
        assert!(cost.walks <= WALKS, "{cost:?}");
        scene.assert_holds(parent, 0..folio / 2, CHILD);
        audit(scene.machine, memory, &[parent]);
        parent.mmap(&fixed(AT, scene.pages * PAGE_SIZE)).unwrap();
        scene.write(parent, 0..scene.pages, PARENT);
    });
}
