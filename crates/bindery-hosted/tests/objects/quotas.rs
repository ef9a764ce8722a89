//! File systems of limited size. The total size of their objects stays within the quota. A write or
//! an allocation that does not fit fails and allocates nothing, a fault that does not fit is a bus
//! error, and writers leave the frames that are reserved for faults.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    Access, Accounting, AddressSpace, Error, FaultError, FileAccess, Growth, MapObject, MapRequest,
    Memory, Object, Protection, Quota, Sealing, Sharing, SpaceOptions,
};
use bindery_hosted::Machine;

use crate::support::objects::{PAGE, use_object_order};
use crate::support::{MIB, audit, strict};

type Arch = X86_64<4>;

fn file<'m>(memory: &'m Memory<Machine<Arch>>, quota: &'m Quota) -> Object<'m, Machine<Arch>> {
    memory.shared_memory_within(quota, 0, Sealing::Forbidden, Accounting::PerPage).unwrap()
}

#[test]
fn files_share_the_pages_of_their_quota() {
    let quota = Quota::new(8);
    let (machine, memory) = strict::<Arch>(32 * MIB);
    let (first, second) = (file(&memory, &quota), file(&memory, &quota));
    assert_eq!(first.write(0, &[1; 5 * PAGE as usize]), Ok(5 * PAGE as usize));
    // Writes the part that fits; the next call fails.
    assert_eq!(second.write(0, &[2; 5 * PAGE as usize]), Ok(3 * PAGE as usize));
    assert_eq!(second.write(3 * PAGE, &[2; 1]), Err(Error::NoSpace));
    assert_eq!((quota.used(), second.size()), (8, 3 * PAGE));
    // Existing pages can be written.
    assert_eq!(second.write(0, &[3; 3 * PAGE as usize]), Ok(3 * PAGE as usize));
    audit(&machine, &memory, &[]);
    first.punch_hole(PAGE, 2 * PAGE).unwrap();
    assert_eq!((quota.used(), second.write(3 * PAGE, &[2; 1])), (6, Ok(1)));
    first.set_size(0).unwrap();
    assert_eq!(quota.used(), 4);
    drop(second);
    assert_eq!(quota.used(), 0);
    drop(first);
    audit(&machine, &memory, &[]);
}

#[test]
fn an_allocation_that_does_not_fit_takes_nothing() {
    let quota = Quota::new(100);
    let (machine, memory) = strict::<Arch>(32 * MIB);
    for order in [0, 4] {
        use_object_order(&memory, order);
        let (one, other) = (file(&memory, &quota), file(&memory, &quota));
        assert_eq!(one.allocate(0, 50 * PAGE, Growth::Allowed), Ok(()));
        let used = quota.used();
        for length in [60 * PAGE, 100 * PAGE, 101 * PAGE, 1 << 40] {
            assert_eq!(other.allocate(0, length, Growth::Allowed), Err(Error::NoSpace), "{length}");
            assert_eq!((quota.used(), other.size(), other.resident_pages()), (used, 0, 0));
        }
        assert_eq!(one.allocate(0, 100 * PAGE, Growth::Allowed), Ok(()), "half is there already");
        audit(&machine, &memory, &[]);
    }
    assert_eq!(quota.used(), 0);
}

#[test]
fn an_allocation_that_fails_leaves_what_was_allocated() {
    let quota = Quota::new(20);
    let (machine, memory) = strict::<Arch>(32 * MIB);
    for order in [0, 2] {
        use_object_order(&memory, order);
        let (one, other) = (file(&memory, &quota), file(&memory, &quota));
        other.allocate(0, 4 * PAGE, Growth::Allowed).unwrap();
        one.allocate(0, 4 * PAGE, Growth::Allowed).unwrap();
        one.allocate(8 * PAGE, 4 * PAGE, Growth::Allowed).unwrap();
        assert_eq!(one.allocate(0, 20 * PAGE, Growth::Allowed), Err(Error::NoSpace));
        assert_eq!((one.resident_pages(), quota.used()), (8, 12));
        // The reservation keeps other objects from using the memory.
        assert_eq!(other.allocate(0, 13 * PAGE, Growth::Allowed), Err(Error::NoSpace));
        assert_eq!(one.write(0, &[1; 4 * PAGE as usize]), Ok(4 * PAGE as usize));
        audit(&machine, &memory, &[]);
    }
    assert_eq!(quota.used(), 0);
}

#[test]
fn a_fault_beyond_the_quota_is_sigbus() {
    let quota = Quota::new(2);
    let (machine, memory) = strict::<Arch>(32 * MIB);
    let object = file(&memory, &quota);
    object.set_size(8 * PAGE).unwrap();
    let space = AddressSpace::new(&memory, SpaceOptions::default()).unwrap();
    let access = FileAccess::READ | FileAccess::WRITE;
    let request = MapRequest {
        length: 8 * PAGE,
        protection: Protection::READ | Protection::WRITE,
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let at =
        space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
    for page in 0..2 {
        assert!(space.fault(VirtAddr(at.0 + page * PAGE), Access::Write).is_ok());
    }
    assert_eq!(space.fault(VirtAddr(at.0 + 2 * PAGE), Access::Write), Err(FaultError::Bus));
    quota.set_limit(3);
    assert!(space.fault(VirtAddr(at.0 + 2 * PAGE), Access::Write).is_ok());
    drop(object);
    assert_eq!(quota.used(), 3, "the mapping keeps the pages");
    audit(&machine, &memory, &[&space]);
    drop(space);
    assert_eq!(quota.used(), 0);
}

#[test]
fn writers_leave_the_frames_of_the_fault_reserve() {
    let quota = Quota::new(u64::MAX);
    let (machine, memory) = strict::<Arch>(16 * MIB);
    let reserve = 64;
    memory.set_fault_reserve(reserve);
    let object = file(&memory, &quota);
    let bytes = vec![7; 64 * PAGE as usize];
    let mut written = 0;
    let refused = loop {
        match object.write(written, &bytes) {
            Ok(count) => written += count as u64,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, Error::OutOfMemory, "the quota has room");
    // An index node may be added.
    assert!(memory.free_frame_count() + 1 >= reserve, "{} are free", memory.free_frame_count());
    let free = memory.free_frame_count();
    assert_eq!(object.allocate(0, 16 * MIB, Growth::Allowed), Err(Error::OutOfMemory));
    assert_eq!(memory.free_frame_count(), free, "an allocation that is refused leaves all of them");
    let space = AddressSpace::new(&memory, SpaceOptions::default()).unwrap();
    let request = MapRequest {
        length: PAGE,
        protection: Protection::READ | Protection::WRITE,
        ..MapRequest::default()
    };
    let at = space.mmap(&request).unwrap();
    assert!(space.fault(at, Access::Write).is_ok(), "a fault has them");
    drop(object);
    audit(&machine, &memory, &[&space]);
}

/// Memory is full and swap almost empty: writers wait until pages are swapped out. Only the quota
/// makes them fail.
#[test]
fn writers_reclaim_before_they_are_refused() {
    let quota = Quota::new(1024);
    let (machine, memory) = strict::<Arch>(16 * MIB);
    let area = memory.swap_on(1 << 14, 0).unwrap();
    memory.set_fault_reserve(memory.total_frames() / 64);
    let space = AddressSpace::new(&memory, SpaceOptions::default()).unwrap();
    let bytes = 20 * MIB;
    let request = MapRequest {
        length: bytes,
        protection: Protection::READ | Protection::WRITE,
        ..MapRequest::default()
    };
    let at = space.mmap(&request).unwrap();
    for page in 0..bytes / PAGE {
        space.write_user(VirtAddr(at.0 + page * PAGE), &(page + 1).to_ne_bytes()).unwrap();
    }
    for number in 0..32 {
        let small = file(&memory, &quota);
        assert_eq!(small.write(0, b"four"), Ok(4), "file {number}");
    }
    let large = file(&memory, &quota);
    let block = [number_of(7); 8];
    for page in 0..1024 {
        assert_eq!(large.write(page * PAGE, &block.concat()), Ok(64), "page {page}");
    }
    assert_eq!(large.write(1024 * PAGE, b"more"), Err(Error::NoSpace), "the quota is used up");
    for page in 0..bytes / PAGE {
        let mut found = [0; 8];
        space.read_user(VirtAddr(at.0 + page * PAGE), &mut found).unwrap();
        assert_eq!(u64::from_ne_bytes(found), page + 1, "page {page}");
    }
    audit(&machine, &memory, &[&space]);
    drop((large, space));
    assert_eq!(memory.swap_off(&area), Ok(()));
}

/// A driver's own pages: reclaim leaves them, so the area stays empty.
#[test]
fn an_object_kept_in_memory_takes_no_slot() {
    let quota = Quota::new(u64::MAX);
    let (machine, memory) = strict::<Arch>(16 * MIB);
    let area = memory.swap_on(1 << 14, 0).unwrap();
    let [kept, other] = [(); 2].map(|()| file(&memory, &quota));
    kept.keep_in_memory();
    for page in 0..64 {
        for object in [&kept, &other] {
            assert_eq!(object.write(page * PAGE, &number_of(page)), Ok(8));
        }
    }
    while memory.reclaim(64).freed > 0 {}
    assert_eq!((kept.swapped_pages(), other.swapped_pages()), (0, 64));
    audit(&machine, &memory, &[]);
    drop(other);
    assert_eq!(memory.swap_off(&area), Ok(()), "with the kept pages in memory");
    assert_eq!(kept.resident_pages(), 64);
}

fn number_of(page: u64) -> [u8; 8] {
    (page + 1).to_ne_bytes()
}
