//! Faults of every kind, with folios of every usual size. Each fault reads a few entries besides
//! the entries that it changes, so the total cost of touching a folio is linear in its size.

use std::collections::BTreeSet;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{
    Access, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Memory, Place, Protection,
    Resolved, Sharing, SyncFlags,
};
use bindery_hosted::{Machine, Walk};
use bindery_linux::proc::{self, ClearRefs};

use crate::support::objects::{memfd, use_object_order};
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict, use_order};

on_every_architecture! {
    each_fault_examines_few_entries_besides_its_own => faults;
}

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

const AT: VirtAddr = VirtAddr(GIB);
const FOLIOS: u64 = 2;
/// Level-1 entries that any fault may read, not counting a contiguous run in which it sets every
/// accessed bit.
const OWN: u64 = 8;
/// Reads per written entry: for the decision, for the change, and afterwards.
const EACH: u64 = 3;

/// The work of faults.
struct Kinds {
    pages: u64,
    order: u8,
    seen: BTreeSet<&'static str>,
}

fn name(resolved: Resolved) -> &'static str {
    match resolved {
        Resolved::New(_) => "new",
        Resolved::ZeroPage => "zero page",
        Resolved::Copied => "copied",
        Resolved::Mapped(_) => "mapped",
        Resolved::FromSwap(_) => "from swap",
        Resolved::MadeWritable => "made writable",
        Resolved::Spurious => "spurious",
        other => panic!("{other:?} is no kind of fault that this test knows"),
    }
}

impl Kinds {
    fn page(&self, number: u64) -> VirtAddr {
        VirtAddr(AT.0 + number * PAGE_SIZE)
    }

    fn bytes(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    /// Faults at each page in turn. All but one change only their own entry; `walks` of them may
    /// read all entries of a folio.
    #[track_caller]
    fn touch<A: Walk>(&mut self, space: &Space<'_, A>, access: Access, walks: u64, what: &str) {
        let own = if A::CONTIG_ENTRIES > 1 { OWN + u64::from(A::CONTIG_ENTRIES) } else { OWN };
        let mut walked = 0;
        for number in 0..self.pages {
            let before = space.counts();
            let resolved = space.fault(self.page(number), access).unwrap();
            let cost = space.counts() - before;
            self.seen.insert(name(resolved));
            let few = own + EACH * cost.entries_written;
            let ways = (OWN + cost.entries_written) * u64::from(A::LEVELS);
            assert!(cost.entries_descended <= ways, "{what}, {resolved:?}: {cost:?}");
            if cost.entries_read > few {
                walked += 1;
                let most = few + (1 << self.order);
                assert!(cost.entries_read <= most, "{what}, {resolved:?}: {cost:?}");
            }
        }
        assert!(walked <= walks, "{what}, order {}: {walked} walks", self.order);
    }
}

fn faults<A: Walk>() {
    for order in [0, 4, 9] {
        let (machine, memory) = strict::<A>(64 * MIB);
        use_order(&memory, order);
        use_object_order(&memory, order);
        let area = memory.swap_on(4 << 10, 0).expect("a swap area");
        let mut kinds = Kinds { pages: FOLIOS << order, order, seen: BTreeSet::new() };
        anonymous(&mut kinds, &memory);
        forked(&mut kinds, &memory);
        swapped(&mut kinds, &memory);
        for sharing in [Sharing::Private, Sharing::Shared] {
            of_an_object(&mut kinds, &memory, sharing);
        }
        audit(&machine, &memory, &[]);
        memory.swap_off(&area).unwrap();
        let all =
            ["new", "zero page", "copied", "mapped", "from swap", "made writable", "spurious"];
        assert_eq!(kinds.seen, BTreeSet::from(all), "each kind of fault was met");
    }
}

fn new_space<'m, A: Walk>(kinds: &Kinds, memory: &'m Memory<Machine<A>>) -> Space<'m, A> {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(AT.0, kinds.bytes())).unwrap();
    space
}

fn anonymous<A: Walk>(kinds: &mut Kinds, memory: &Memory<Machine<A>>) {
    let space = new_space(kinds, memory);
    kinds.touch(&space, Access::Write, 0, "first writes");
    kinds.touch(&space, Access::Write, 0, "faults of stale TLBs");
    space.discard(AT, kinds.bytes()).unwrap();
    kinds.touch(&space, Access::Read, 0, "first reads");
    kinds.touch(&space, Access::Write, 0, "writes to zero pages");
    for protection in [Protection::READ, READ_WRITE] {
        space.mprotect(AT, kinds.bytes(), protection).unwrap();
    }
    kinds.touch(&space, Access::Write, 0, "writes after mprotect");
    proc::clear_refs(&space, ClearRefs::SoftDirty).unwrap();
    kinds.touch(&space, Access::Write, 0, "writes that are watched");
}

fn forked<A: Walk>(kinds: &mut Kinds, memory: &Memory<Machine<A>>) {
    let space = new_space(kinds, memory);
    kinds.touch(&space, Access::Write, 0, "first writes");
    for watched in [false, true] {
        let child = space.fork().unwrap();
        if watched {
            proc::clear_refs(&child, ClearRefs::SoftDirty).unwrap();
            proc::clear_refs(&space, ClearRefs::SoftDirty).unwrap();
        }
        kinds.touch(&child, Access::Read, 0, "reads after a fork");
        kinds.touch(&child, Access::Write, 0, "the child's writes");
        drop(child);
        kinds.touch(&space, Access::Write, FOLIOS, "writes after the child has gone");
    }
    // The other process drops pages one by one, so the counts do not show which process is the
    // last.
    let child = space.fork().unwrap();
    for number in (0..kinds.pages).step_by(2) {
        space.madvise(kinds.page(number), PAGE_SIZE, Advice::DontNeed).unwrap();
    }
    kinds.touch(&child, Access::Write, 8 * FOLIOS, "writes beside a sparse parent");
    let grandchild = child.fork().unwrap();
    kinds.touch(&space, Access::Read, 0, "reads of what was dropped");
    drop((space, child));
    kinds.touch(&grandchild, Access::Write, FOLIOS, "writes of the last process");
}

fn swapped<A: Walk>(kinds: &mut Kinds, memory: &Memory<Machine<A>>) {
    for (access, forks) in
        [(Access::Read, false), (Access::Write, false), (Access::Read, true), (Access::Write, true)]
    {
        let space = new_space(kinds, memory);
        kinds.touch(&space, Access::Write, 0, "first writes");
        let child = forks.then(|| space.fork().unwrap());
        space.madvise(AT, kinds.bytes(), Advice::PageOut).unwrap();
        if let Some(child) = &child {
            child.madvise(AT, kinds.bytes(), Advice::PageOut).unwrap();
            kinds.touch(child, access, 0, "swap-in of a child");
        }
        kinds.touch(&space, access, 0, "swap-in");
        kinds.touch(&space, Access::Write, 8 * FOLIOS, "writes after swap-in");
    }
}

fn of_an_object<A: Walk>(kinds: &mut Kinds, memory: &Memory<Machine<A>>, sharing: Sharing) {
    let object = memfd(memory, kinds.bytes());
    let request = MapRequest {
        length: kinds.bytes(),
        protection: READ_WRITE,
        place: Place::Fixed(AT),
        sharing,
        ..MapRequest::default()
    };
    let source =
        MapObject { object: &object, offset: 0, access: FileAccess::READ | FileAccess::WRITE };
    for reads_first in [true, false] {
        let space = AddressSpace::new(memory, options()).unwrap();
        space.mmap_object(&request, &source).unwrap();
        if reads_first {
            kinds.touch(&space, Access::Read, 0, "reads of an object");
        }
        kinds.touch(&space, Access::Write, 0, "writes to an object");
        space.msync(AT, kinds.bytes(), SyncFlags::SYNC).unwrap();
        proc::clear_refs(&space, ClearRefs::SoftDirty).unwrap();
        kinds.touch(&space, Access::Write, 0, "writes to a saved object");
        let child = space.fork().unwrap();
        kinds.touch(&child, Access::Write, 0, "a child's writes to an object");
        drop(child);
        kinds.touch(&space, Access::Write, FOLIOS, "writes after the child has gone");
    }
}
