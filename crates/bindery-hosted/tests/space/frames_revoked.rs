//! Frames that are not the core's: revoked, freed, and inherited by children.

use std::sync::atomic::Ordering;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{Absent, MemoryType};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Error, FaultError, Inspection, MapRequest, Memory, Object, Protection,
};
use bindery_hosted::{Config, Machine, Program, Walk};

use super::frames::{AT, HUGE, stored};
use crate::support::devices::{DEVICE, Driver, leaf, map, shared};
use crate::support::{MIB, READ_WRITE, audit, memory_with, options, strict};

on_every_architecture! {
    frames_of_the_embedder_stay_while_a_program_maps_them => embedder_frames;
    after_a_revoke_the_source_is_asked_again => revoked;
    a_child_has_the_frames_of_its_parent => forked;
    forks_beside_revokes_keep_no_frame => forked_beside_revokes;
    faults_beside_revokes_see_no_frame_of_before => revoked_beside_faults;
}

fn embedder_frames<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let block = memory.allocate_frames(Order(9)).unwrap();
    let driver = Driver::of(&[(0, block.first, 512), (512, DEVICE, 4)]);
    let object = memory.frame_object(&driver, 4 * MIB, MemoryType::Normal).unwrap();
    let (one, other) = (
        AddressSpace::new(&memory, options()).unwrap(),
        AddressSpace::new(&memory, options()).unwrap(),
    );
    map(&one, &object, &shared(AT, 4 * MIB)).unwrap();
    map(&other, &object, &shared(AT + PAGE_SIZE, HUGE)).unwrap();
    let program = Program::new(&machine, &one);
    program.store(VirtAddr(AT + 8), 77).unwrap();
    let program = Program::new(&machine, &other);
    assert_eq!(program.load(VirtAddr(AT + PAGE_SIZE + 8)), Ok(77));
    audit(&machine, &memory, &[&one, &other]);
    // SAFETY: 1. the test allocated the block; 2. the call refuses to free a block that a program
    // maps.
    let free = || unsafe { memory.free_frames(block) };
    assert!(!free(), "two programs map it");
    one.munmap(VirtAddr(AT + PAGE_SIZE), 3 * PAGE_SIZE).unwrap();
    drop(other);
    assert!(!free(), "one program maps a part of it");
    audit(&machine, &memory, &[&one]);
    let kept = (VirtAddr(AT + 4 * PAGE_SIZE), HUGE - 4 * PAGE_SIZE);
    one.munmap(VirtAddr(AT), PAGE_SIZE).unwrap();
    one.mprotect(kept.0, kept.1, Protection::empty()).unwrap();
    assert!(!free(), "an entry without permissions refers to it");
    driver.set(&[]);
    object.revoke(0, HUGE).unwrap();
    assert!(free());
    audit(&machine, &memory, &[&one]);
    // Frames that the core uses are never shown.
    let page =
        memory.shared_memory(PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::None);
    let page = page.unwrap();
    page.write(0, b"mine").unwrap();
    map(&one, &page, &shared(2 * AT, PAGE_SIZE)).unwrap();
    one.fault(VirtAddr(2 * AT), Access::Read).unwrap();
    let (frame, ..) = leaf(&one, 2 * AT).unwrap();
    driver.set(&[(4, frame, 1)]);
    one.mprotect(kept.0, kept.1, READ_WRITE).unwrap();
    assert_eq!(one.fault(kept.0, Access::Read), Err(FaultError::Bus));
    audit(&machine, &memory, &[&one]);
}

fn revoked<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let [old, new] = [(); 2].map(|()| memory.allocate_frames(Order(2)).unwrap());
    let driver = Driver::of(&[(0, old.first, 4)]);
    let object = memory.frame_object(&driver, 4 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 4 * PAGE_SIZE)).unwrap();
    let child = space.fork().unwrap();
    let program = Program::new(&machine, &space);
    for page in 0..4 {
        program.store(VirtAddr(AT + page * PAGE_SIZE), page).unwrap();
    }
    child.fault(VirtAddr(AT), Access::Read).unwrap();
    driver.set(&[(0, new.first, 4)]);
    object.revoke(PAGE_SIZE, PAGE_SIZE + 1).unwrap();
    let frames = [0, 1, 2, 3].map(|page| leaf(&space, AT + page * PAGE_SIZE).map(|leaf| leaf.0));
    assert_eq!(frames, [Some(old.first), None, None, Some(old.first.plus(3))]);
    program.store(VirtAddr(AT + PAGE_SIZE), 5).unwrap();
    assert_eq!(leaf(&space, AT + PAGE_SIZE).map(|leaf| leaf.0), Some(new.first.plus(1)));
    object.revoke(0, u64::MAX).unwrap();
    assert_eq!((leaf(&space, AT), leaf(&child, AT)), (None, None));
    for block in [old, new] {
        // SAFETY: 1. the test allocated the block; 2. the block was revoked.
        assert!(unsafe { memory.free_frames(block) });
    }
    driver.set(&[]);
    assert_eq!(program.store(VirtAddr(AT), 1), Err(FaultError::Bus));
    audit(&machine, &memory, &[&space, &child]);
    let memory_object =
        memory.shared_memory(PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::None);
    assert_eq!(memory_object.unwrap().revoke(0, PAGE_SIZE), Err(Error::Invalid));
}

/// By the time of the fork, the source has other frames than those that the parent maps.
fn forked<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let [old, new] = [(); 2].map(|()| memory.allocate_frames(Order(9)).unwrap());
    let driver = Driver::of(&[(0, old.first, 512), (512, DEVICE, 16)]);
    let object = memory.frame_object(&driver, 4 * MIB, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 4 * MIB)).unwrap();
    map(&space, &object, &MapRequest { protection: Protection::READ, ..shared(2 * AT, HUGE) })
        .unwrap();
    for at in [AT, AT + HUGE, 2 * AT + 5 * PAGE_SIZE] {
        space.fault(VirtAddr(at), Access::Read).unwrap();
    }
    space.mprotect(VirtAddr(2 * AT), PAGE_SIZE, Protection::empty()).unwrap();
    driver.set(&[(0, new.first, 512)]);
    let child = space.fork().unwrap();
    let found = |at| [&space, &child].map(|space| leaf(space, at));
    let huge = |first| Some((first, stored::<A>(MemoryType::Normal), 2));
    assert_eq!(found(AT), [huge(old.first); 2]);
    let [ours, theirs] = found(AT + HUGE + 3 * PAGE_SIZE);
    assert_eq!((ours, theirs.map(|leaf| leaf.0)), (theirs, Some(DEVICE.plus(3))));
    assert!(matches!(
        child.inspect(VirtAddr(2 * AT)),
        Inspection::Absent(Absent::ProtNone { frame, .. }) if frame == old.first
    ));
    audit(&machine, &memory, &[&space, &child]);
    // Both may write at once, and see what the other wrote.
    let [ours, theirs] = [&space, &child].map(|space| Program::new(&machine, space));
    ours.store(VirtAddr(AT), 7).unwrap();
    assert_eq!(theirs.load(VirtAddr(AT)), Ok(7));
    theirs.store(VirtAddr(AT), 8).unwrap();
    assert_eq!(ours.load(VirtAddr(2 * AT + PAGE_SIZE)), theirs.load(VirtAddr(2 * AT + PAGE_SIZE)));
    drop(space);
    // SAFETY: 1. the test allocated the block; 2. the call refuses a block that a program maps.
    let free = |block| unsafe { memory.free_frames(block) };
    assert!(!free(old), "the child maps it");
    object.revoke(0, u64::MAX).unwrap();
    assert!(free(old));
    assert_eq!(leaf(&child, AT), None);
    child.fault(VirtAddr(AT), Access::Read).unwrap();
    assert_eq!(leaf(&child, AT), huge(new.first));
    audit(&machine, &memory, &[&child]);
}

/// Two CPUs, and a mapping of 64 pages whose frames change.
struct Changing<'c, 'm, A: Walk> {
    machine: &'c Machine<A>,
    memory: &'m Memory<Machine<A>>,
    driver: &'c Driver,
    object: Object<'m, Machine<A>>,
    space: AddressSpace<'m, Machine<A>>,
}

fn with_changing_frames<A: Walk>(scenario: impl for<'c, 'm> FnOnce(&Changing<'c, 'm, A>)) {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let driver = Driver::default();
    let object = memory.frame_object(&driver, 64 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 64 * PAGE_SIZE)).unwrap();
    let (machine, memory, driver) = (&machine, &memory, &driver);
    let changing = Changing { machine, memory, driver, object, space };
    scenario(&changing);
    audit(machine, memory, &[&changing.space]);
}

/// Each block is freed although a child that was forked during the revoke still exists.
fn forked_beside_revokes<A: Walk>() {
    with_changing_frames::<A>(|changing| {
        let Changing { machine, memory, driver, object, space } = changing;
        // The rounds that the revoker has begun and ended, and the children that were forked.
        let [begun, ended, forked] = [(); 3].map(|()| std::sync::atomic::AtomicU64::new(0));
        let rounds = 200;
        std::thread::scope(|scope| {
            let forker = scope.spawn(|| {
                let _cpu = machine.bind(Cpu(1));
                for round in 1..=rounds {
                    while begun.load(Ordering::Acquire) < round {
                        std::thread::yield_now();
                    }
                    let child = space.fork().unwrap();
                    forked.store(round, Ordering::Release);
                    while ended.load(Ordering::Acquire) < round {
                        std::thread::yield_now();
                    }
                    drop(child);
                }
            });
            let _cpu = machine.bind(Cpu(0));
            let mut unfreed = 0;
            for round in 1..=rounds {
                let block = memory.allocate_frames(Order(6)).unwrap();
                driver.set(&[(0, block.first, 64)]);
                space.fault(VirtAddr(AT), Access::Write).unwrap();
                driver.set(&[]);
                begun.store(round, Ordering::Release);
                object.revoke(0, 64 * PAGE_SIZE).unwrap();
                while forked.load(Ordering::Acquire) < round && !forker.is_finished() {
                    std::thread::yield_now();
                }
                // SAFETY: 1. the test allocated the block; 2. the block was revoked.
                unfreed += u32::from(!unsafe { memory.free_frames(block) });
                ended.store(round, Ordering::Release);
            }
            assert_eq!(unfreed, 0, "children map frames that were revoked");
        });
    });
}

/// A block is freed once no leaf maps it. If a fault had mapped the source's earlier answer, the
/// strict TLB or the block's count would show it.
fn revoked_beside_faults<A: Walk>() {
    with_changing_frames::<A>(|changing| {
        let Changing { machine, memory, driver, object, space } = changing;
        let done = std::sync::atomic::AtomicBool::new(false);
        let stores = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            let storer = scope.spawn(|| {
                let _cpu = machine.bind(Cpu(1));
                let program = Program::new(machine, space);
                let mut page = 0;
                while !done.load(Ordering::Relaxed) {
                    page = (page + 7) % 64;
                    let stored = program.store(VirtAddr(AT + page * PAGE_SIZE), page);
                    assert!(matches!(stored, Ok(()) | Err(FaultError::Bus)), "{stored:?}");
                    stores.fetch_add(u64::from(stored.is_ok()), Ordering::Relaxed);
                }
            });
            let _cpu = machine.bind(Cpu(0));
            for _ in 0..200 {
                let block = memory.allocate_frames(Order(6)).unwrap();
                let before = stores.load(Ordering::Relaxed);
                driver.set(&[(0, block.first, 64)]);
                // Each block has a store, which is usually in progress when the block is revoked.
                while stores.load(Ordering::Relaxed) == before && !storer.is_finished() {
                    std::thread::yield_now();
                }
                driver.set(&[]);
                object.revoke(0, 64 * PAGE_SIZE).unwrap();
                // SAFETY: 1. the test allocated the block; 2. the block was revoked.
                assert!(unsafe { memory.free_frames(block) });
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}
