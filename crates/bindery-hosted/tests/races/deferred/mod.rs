//! No call waits for readers. Its unlinked items are freed after a grace period, and no frame
//! leaks. Waits are counted.

mod cpus;
mod watched;

use std::sync::mpsc::{Receiver, channel};
use std::thread;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::{Cpu, Platform};
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, FrameRange, KernelMap, MapObject,
    MapRequest, Memory, Object, Protection, Remap, Sealing, Sharing, VmallocOptions, check,
};
use bindery_hosted::{Machine, Walk};

use crate::support::areas::Areas;
use crate::support::{GIB, KIB, MIB, READ_WRITE, anywhere, fixed, options};
use watched::{Watched, watched};

type Arch = X86_64<4>;
type Space<'m> = AddressSpace<'m, Watched<Arch>>;

const RW: FileAccess = FileAccess::READ.union(FileAccess::WRITE);
/// The number of records that count as one frame towards the limit.
const RECORDS: u64 = 8;

/// Runs `work` while CPU 1 stays in one read section.
fn beside_a_reader<A: Walk>(machine: &Machine<A>, work: impl FnOnce()) {
    let (leave, told) = channel();
    until_told(machine, told, move || {
        work();
        drop(leave);
    });
}

/// Runs `work` while CPU 1 stays in one read section, until the other end of `told` is dropped.
fn until_told<A: Walk>(machine: &Machine<A>, told: Receiver<()>, work: impl FnOnce()) {
    let (inside, wait_inside) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            machine.on_cpu(Cpu(1), || {
                machine.enter_read();
                inside.send(()).unwrap();
                let _ = told.recv();
                machine.leave_read();
            });
        });
        wait_inside.recv().unwrap();
        work();
    });
}

#[track_caller]
fn audit<A: Walk>(memory: &Memory<Watched<A>>, spaces: &[&AddressSpace<'_, Watched<A>>]) {
    memory.platform().machine.assert_clean();
    let mut scratch = vec![0; check::scratch_words(memory)];
    check::check(memory, spaces, &mut scratch).unwrap();
}

/// A round of typical calls.
fn round<A: Walk>(space: &AddressSpace<'_, Watched<A>>) {
    let at = space.mmap(&anywhere(64 * KIB)).unwrap();
    space.fault(at, Access::Write).unwrap();
    space.mprotect(at, PAGE_SIZE, Protection::READ).unwrap();
    space.mprotect(at, PAGE_SIZE, READ_WRITE).unwrap();
    space.munmap(at, 64 * KIB).unwrap();
}

/// The number of waiting frames, with records counted as for the limit.
fn waiting<A: Walk>(memory: &Memory<Watched<A>>) -> u64 {
    let deferred = memory.deferred();
    deferred.tables + deferred.records.div_ceil(RECORDS)
}

#[track_caller]
fn nothing_waits<A: Walk>(memory: &Memory<Watched<A>>) {
    assert_eq!(waiting(memory), 0, "{:?}", memory.deferred());
}

fn map_shared<'m, A: Walk>(
    space: &AddressSpace<'m, Watched<A>>,
    object: &Object<'m, Watched<A>>,
    length: u64,
) {
    let request = MapRequest { sharing: Sharing::Shared, ..fixed(GIB, length) };
    space.mmap_object(&request, &MapObject { object, offset: 0, access: RW }).unwrap();
}

/// `count` address spaces that map an object and have touched its first page.
fn mappers<'m, A: Walk>(
    memory: &'m Memory<Watched<A>>,
    object: &Object<'m, Watched<A>>,
    count: usize,
) -> Vec<AddressSpace<'m, Watched<A>>> {
    let make = |_| {
        let space = AddressSpace::new(memory, options()).unwrap();
        map_shared(&space, object, 4 * MIB);
        space.fault(VirtAddr(GIB), Access::Write).unwrap();
        space
    };
    (0..count).map(make).collect()
}

#[test]
fn a_thousand_everyday_calls_never_wait() {
    let (_machine, memory) = watched::<Arch>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    for _ in 0..1000 {
        round(&space);
        nothing_waits(&memory);
    }
    assert_eq!(memory.platform().waits(), 0);
}

fn everyday_calls_beside_a_reader<A: Walk>() {
    let (machine, memory) = watched::<A>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    round(&space);
    memory.trim();
    let free = memory.free_frame_count();
    beside_a_reader(&machine, || {
        (0..50).for_each(|_| round(&space));
        let deferred = memory.deferred();
        assert!(deferred.tables >= 50 && deferred.records >= 50, "{deferred:?}");
        audit(&memory, &[&space]);
    });
    assert_eq!(memory.platform().waits(), 0, "nobody waits for the reader");
    // The reader has left, so the next call frees the waiting items.
    for _ in 0..20 {
        round(&space);
    }
    nothing_waits(&memory);
    memory.trim();
    assert_eq!((memory.free_frame_count(), memory.platform().waits()), (free, 0));
    audit(&memory, &[&space]);
}

#[test]
fn everyday_calls_beside_a_reader_never_wait() {
    everyday_calls_beside_a_reader::<Arch>();
    everyday_calls_beside_a_reader::<AArch64>();
    everyday_calls_beside_a_reader::<Riscv64<3>>();
}

#[test]
fn a_truncation_never_waits_whatever_the_mappings() {
    let (machine, memory) = watched::<Arch>(256 * MIB);
    let object = memory.shared_memory(4 * MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
    let spaces = mappers(&memory, &object, 200);
    object.set_size(0).unwrap();
    assert_eq!(memory.platform().waits(), 0);
    object.set_size(4 * MIB).unwrap();
    for space in &spaces {
        space.fault(VirtAddr(GIB), Access::Write).unwrap();
    }
    beside_a_reader(&machine, || {
        object.set_size(0).unwrap();
        assert!(memory.deferred().tables >= 200, "{:?}", memory.deferred());
    });
    assert_eq!(memory.platform().waits(), 0);
    memory.trim();
    nothing_waits(&memory);
    audit(&memory, &spaces.iter().collect::<Vec<_>>());
}

#[test]
fn an_object_goes_with_its_mapping_despite_readers() {
    let (machine, memory) = watched::<Arch>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let object = memory.shared_memory(4 * MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
    map_shared(&space, &object, 4 * MIB);
    for at in (GIB..GIB + 4 * MIB).step_by(PAGE_SIZE as usize) {
        space.fault(VirtAddr(at), Access::Write).unwrap();
    }
    drop(object);
    let free = memory.free_frame_count();
    beside_a_reader(&machine, || {
        space.munmap(VirtAddr(GIB), 4 * MIB).unwrap();
        let freed = memory.free_frame_count() - free;
        assert!(freed >= 4 * MIB / PAGE_SIZE, "{freed} frames of the object came back");
        assert!(memory.deferred().tables > 0);
    });
}

/// If the platform does not report grace periods, waiting items accumulate up to the limit.
#[test]
fn at_the_limit_one_wait_frees_all() {
    let (_machine, memory) = watched::<Arch>(64 * MIB);
    memory.platform().tell_nothing();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let limit = memory.deferred_limit();
    assert_eq!(limit, 256, "1 MiB of 64 MiB");
    let (mut unlinked, mut waits) = (0, 0);
    for _ in 0..1000 {
        let before = waiting(&memory);
        round(&space);
        let now = memory.platform().waits();
        let after = waiting(&memory);
        assert!(after <= limit, "{after} frames wait");
        if now == waits {
            unlinked += after - before;
        } else {
            assert_eq!((now, after), (waits + 1, 0), "a wait frees everything");
            assert!(before + 8 > limit, "somebody waited when {before} frames did");
        }
        waits = now;
    }
    assert!(waits >= 1 && waits * (limit - 8) <= unlinked, "{waits} waits, {unlinked} frames");
    assert_eq!(memory.deferred().waits, waits);
    memory.drain_deferred();
    nothing_waits(&memory);
    audit(&memory, &[&space]);
}

/// The pages of a truncation exceed the limit while the call holds the object's gates. The call
/// waits only after it has released the gates.
#[test]
fn a_truncation_at_the_limit_waits_without_gates() {
    let (machine, memory) = watched::<Arch>(256 * MIB);
    let object = memory.shared_memory(4 * MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
    let spaces = mappers(&memory, &object, 600);
    assert!(600 > memory.deferred_limit());
    memory.platform().tell_nothing();
    let (ask, asked) = channel();
    let (answer, answered) = channel();
    memory.platform().before_waiting(move || {
        ask.send(()).unwrap();
        // The reader would never leave if the thread that waits for it held a lock of the object.
        answered.recv().expect("an answer");
    });
    thread::scope(|scope| {
        let object = &object;
        let machine = &machine;
        scope.spawn(move || {
            machine.on_cpu(Cpu(1), || {
                // Without a wait, the platform's hook never runs.
                let Ok(()) = asked.recv() else { return };
                // Passes the object's gates one after the other.
                object.write(0, b"free").unwrap();
                answer.send(()).unwrap();
            });
        });
        object.set_size(0).unwrap();
        *memory.platform().before_waiting.lock().unwrap() = None;
    });
    assert_eq!(memory.platform().waits(), 1);
    nothing_waits(&memory);
    audit(&memory, &spaces.iter().collect::<Vec<_>>());
}

#[test]
fn a_drain_gives_every_frame_back() {
    let (machine, memory) = watched::<Arch>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    round(&space);
    memory.trim();
    let free = memory.free_frame_count();
    let (leave, told) = channel();
    until_told(&machine, told, || {
        (0..30).for_each(|_| round(&space));
        assert!(waiting(&memory) > 0);
        // The reader leaves only when a thread waits for it.
        let mut leave = Some(leave);
        memory.platform().before_waiting(move || drop(leave.take()));
        memory.drain_deferred();
        nothing_waits(&memory);
    });
    memory.trim();
    assert_eq!((memory.free_frame_count(), memory.platform().waits()), (free, 1));
    audit(&memory, &[&space]);
}

/// Allocates all free frames.
fn exhaust<P: Platform>(memory: &Memory<P>) -> Vec<FrameRange> {
    std::iter::from_fn(|| memory.allocate_frames(Order::PAGE)).collect()
}

/// Makes tables wait, allocates all remaining memory, then runs a call that needs memory.
#[track_caller]
fn succeeds_when_memory_waits(
    what: &str,
    prepare: impl FnOnce(&Space<'_>),
    call: impl for<'m> FnOnce(&'m Memory<Watched<Arch>>, &Space<'m>),
) {
    let (_machine, memory) = watched::<Arch>(16 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(GIB, 64 * PAGE_SIZE)).unwrap();
    space.fault(VirtAddr(GIB), Access::Write).unwrap();
    prepare(&space);
    memory.platform().tell_nothing();
    for _ in 0..20 {
        round(&space);
    }
    let deferred = memory.deferred();
    assert!(deferred.tables >= 20, "{what}: {deferred:?}");
    let taken = exhaust(&memory);
    assert_eq!((memory.free_frame_count(), memory.platform().waits()), (0, 0), "{what}");
    call(&memory, &space);
    assert_eq!(memory.platform().waits(), 1, "{what}: waited for readers once");
    // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
    taken.into_iter().for_each(|frames| assert!(unsafe { memory.free_frames(frames) }));
    audit(&memory, &[&space]);
    drop(space);
    memory.drain_deferred();
    audit(&memory, &[]);
}

#[test]
fn a_call_short_of_memory_frees_deferred_items() {
    succeeds_when_memory_waits(
        "fault",
        |_| (),
        |_, space| {
            space.fault(VirtAddr(GIB + PAGE_SIZE), Access::Write).unwrap();
        },
    );
    succeeds_when_memory_waits(
        "pin",
        |_| (),
        |_, space| {
            let time = bindery::PinTime::Short;
            drop(space.pin(VirtAddr(GIB + PAGE_SIZE), 1, Access::Write, time).unwrap());
        },
    );
    succeeds_when_memory_waits(
        "write_user",
        |_| (),
        |_, space| {
            space.write_user(VirtAddr(GIB + 2 * PAGE_SIZE), b"bytes").unwrap();
        },
    );
    succeeds_when_memory_waits(
        "a new address space",
        |_| (),
        |memory, _| {
            drop(AddressSpace::new(memory, options()).unwrap());
        },
    );
    succeeds_when_memory_waits("fork", |_| (), |_, space| drop(space.fork().unwrap()));
    succeeds_when_memory_waits(
        "mremap",
        |_| (),
        |_, space| {
            let target = Remap::To(VirtAddr(900 * GIB));
            space.mremap(VirtAddr(GIB), 64 * PAGE_SIZE, 64 * PAGE_SIZE, target).unwrap();
        },
    );
    succeeds_when_memory_waits(
        "populate",
        |_| (),
        |_, space| {
            space.madvise(VirtAddr(GIB), 4 * PAGE_SIZE, Advice::PopulateWrite).unwrap();
        },
    );
    succeeds_when_memory_waits(
        "guards",
        |_| (),
        |_, space| {
            let far = VirtAddr(GIB + 600 * GIB);
            space.mmap(&fixed(far.0, PAGE_SIZE)).unwrap();
            space.madvise(far, PAGE_SIZE, Advice::GuardInstall).unwrap();
        },
    );
    succeeds_when_memory_waits(
        "write to an object",
        |_| (),
        |memory, _| {
            let object = memory.shared_memory(MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
            object.write(0, b"bytes").unwrap();
        },
    );
    succeeds_when_memory_waits(
        "allocate an object",
        |_| (),
        |memory, _| {
            let object = memory.shared_memory(MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
            object.allocate(0, PAGE_SIZE, bindery::Growth::Allowed).unwrap();
        },
    );
    succeeds_when_memory_waits(
        "vmalloc",
        |_| (),
        |memory, _| {
            let arena = VirtRange::from_len(VirtAddr(0xffff_c900_0000_0000), 64 * MIB).unwrap();
            let map = KernelMap::new(memory, arena).unwrap();
            let at = map.vmalloc(PAGE_SIZE, &VmallocOptions::default()).unwrap();
            map.free_vmalloc(at).unwrap();
        },
    );
}

/// Each piece needs its own VMA, until the frame of a slab is full.
#[test]
fn a_split_short_of_memory_frees_deferred_items() {
    succeeds_when_memory_waits(
        "mprotect",
        |space| {
            space.mmap(&fixed(2 * GIB, MIB)).unwrap();
        },
        |_, space| {
            for page in (0..64).step_by(2) {
                let at = VirtAddr(2 * GIB + page * PAGE_SIZE);
                space.mprotect(at, PAGE_SIZE, Protection::READ).unwrap();
            }
        },
    );
    succeeds_when_memory_waits(
        "madvise",
        |space| {
            space.mmap(&fixed(2 * GIB, MIB)).unwrap();
        },
        |_, space| {
            for page in (0..64).step_by(2) {
                let at = VirtAddr(2 * GIB + page * PAGE_SIZE);
                space.madvise(at, PAGE_SIZE, Advice::DontFork).unwrap();
            }
        },
    );
}

#[test]
fn where_nothing_waits_a_call_fails_at_once() {
    let (_machine, memory) = watched::<Arch>(16 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(GIB, MIB)).unwrap();
    let taken = exhaust(&memory);
    assert!(space.fault(VirtAddr(GIB), Access::Write).is_err());
    assert!(space.fork().is_err());
    assert_eq!(memory.platform().waits(), 0);
    // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
    taken.into_iter().for_each(|frames| assert!(unsafe { memory.free_frames(frames) }));
    audit(&memory, &[&space]);
}

#[test]
fn vfree_at_the_limit_does_not_wait() {
    let (machine, memory) = watched::<Arch>(64 * MIB);
    let arena = VirtRange::from_len(VirtAddr(0xffff_c900_0000_0000), 64 * MIB).unwrap();
    let map = KernelMap::new(&memory, arena).unwrap();
    map.set_purge_limit(0);
    let free = memory.free_frame_count();
    beside_a_reader(&machine, || {
        for _ in 0..20 {
            let at = map.vmalloc(4 * MIB, &VmallocOptions::default()).unwrap();
            map.free_vmalloc(at).unwrap();
        }
        let deferred = memory.deferred();
        assert!(deferred.records >= 20 && deferred.tables > 0, "{deferred:?}");
        assert!(
            memory.free_frame_count() + waiting(&memory) + 2 >= free,
            "frames wait for the reader"
        );
    });
    assert_eq!(memory.platform().waits(), 0);
    let mut scratch = vec![0; check::scratch_words(&memory)];
    check::check_with_kernel(&memory, &[], &[&map], &mut scratch).unwrap();
    drop(map);
    memory.trim();
    nothing_waits(&memory);
    audit(&memory, &[]);
}

/// Chains of forks leave groups that are contracted and then freed after a grace period.
#[test]
fn contracted_groups_wait_for_readers_and_no_longer() {
    let (machine, memory) = watched::<Arch>(64 * MIB);
    let mut space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(GIB, PAGE_SIZE)).unwrap();
    space.fault(VirtAddr(GIB), Access::Write).unwrap();
    beside_a_reader(&machine, || {
        for _ in 0..30 {
            let child = space.fork().unwrap();
            drop(std::mem::replace(&mut space, child));
        }
        assert!(memory.deferred().records > 30, "{:?}", memory.deferred());
        audit(&memory, &[&space]);
    });
    assert_eq!(memory.platform().waits(), 0);
    memory.trim();
    nothing_waits(&memory);
    audit(&memory, &[&space]);
}
