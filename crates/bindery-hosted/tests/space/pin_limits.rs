//! One process cannot prevent others from pinning shared pages.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, Accounting, AddressSpace, Error, FaultError, FileAccess, Limits, Locking, MapObject,
    MapRequest, Memory, Object, Operation, PinError, PinTime, Pinned, Place, Sealing, Sharing,
};
use bindery_hosted::Machine;

use crate::support::{GIB, MIB, READ_WRITE, audit, options, strict};

type Hosted = Machine<X86_64<4>>;
type Space<'m> = AddressSpace<'m, Hosted>;
type Pins<'m> = Vec<Pinned<'m, Hosted>>;

const AT: VirtAddr = VirtAddr(GIB);
/// The pages that a process may have pinned by default.
const LIMIT: usize = 2048;

fn shared(memory: &Memory<Hosted>) -> Object<'_, Hosted> {
    let size = 8 * PAGE_SIZE;
    memory.shared_memory(size, Sealing::Forbidden, Accounting::PerPage).unwrap()
}

/// An address space that maps the object.
fn process<'m>(object: &Object<'m, Hosted>, memory: &'m Memory<Hosted>) -> Space<'m> {
    let space = AddressSpace::new(memory, options()).unwrap();
    let request = MapRequest {
        length: 8 * PAGE_SIZE,
        protection: READ_WRITE,
        place: Place::Fixed(AT),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object, offset: 0, access }).unwrap();
    space
}

/// Pins the first page as often as possible. Returns the number of pins and the final error.
fn pin_until_refused<'m>(space: &Space<'m>, pins: &mut Pins<'m>) -> (usize, PinError) {
    let before = pins.len();
    loop {
        match space.pin(AT, 1, Access::Write, PinTime::Long) {
            Ok(pinned) => pins.push(pinned),
            Err(error) => return (pins.len() - before, error),
        }
    }
}

fn privileged(space: &Space<'_>) {
    space.set_limits(&Limits { locking: Locking::Privileged, ..space.limits() });
}

#[test]
fn one_processes_pin_limit_leaves_another_free() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let object = shared(&memory);
    let (greedy, other) = (process(&object, &memory), process(&object, &memory));
    let mut pins = Vec::new();
    assert_eq!(pin_until_refused(&greedy, &mut pins), (LIMIT, PinError::LimitReached));
    assert_eq!(greedy.usage().pinned, LIMIT as u64);
    let pinned = other.pin(AT, 1, Access::Write, PinTime::Long).unwrap();
    assert_eq!(pinned.pages(), 1);
    assert_eq!(other.usage().pinned, 1);
    // The limit counts pages, wherever they are mapped.
    let behind = VirtAddr(AT.0 + PAGE_SIZE);
    let refused = greedy.pin(behind, 1, Access::Read, PinTime::Short).unwrap_err();
    assert_eq!(refused, PinError::LimitReached);
    pins.pop();
    assert!(greedy.pin(behind, 1, Access::Read, PinTime::Short).is_ok());
    audit(&machine, &memory, &[&greedy, &other]);
}

#[test]
fn an_unlimited_process_leaves_half_the_room() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let object = shared(&memory);
    let greedy = process(&object, &memory);
    privileged(&greedy);
    let mut pins = Vec::new();
    assert_eq!(pin_until_refused(&greedy, &mut pins), (1 << 14, PinError::FolioLimit));
    // All pins except sixteen times 1,024 are left to other processes.
    let others: Vec<_> = (0..16).map(|_| process(&object, &memory)).collect();
    for other in &others {
        let mut share = Vec::new();
        assert_eq!(pin_until_refused(other, &mut share), (1024, PinError::FolioLimit));
        pins.extend(share);
    }
    let last = process(&object, &memory);
    let refused = last.pin(AT, 1, Access::Read, PinTime::Short).unwrap_err();
    assert_eq!(refused, PinError::FolioLimit, "sixteen others have all of it");
    assert_eq!(last.usage().pinned, 0, "what is refused does not count");
    let spaces: Vec<_> = others.iter().chain([&greedy, &last]).collect();
    audit(&machine, &memory, &spaces);
}

#[test]
fn pins_outlive_their_address_space_without_leaks() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let free = memory.free_frame_count();
    let object = shared(&memory);
    let space = process(&object, &memory);
    let pins = [1, 8].map(|pages| space.pin(AT, pages, Access::Write, PinTime::Long).unwrap());
    let child = space.fork().unwrap();
    assert_eq!(child.usage().pinned, 0, "a child has pinned nothing");
    drop((space, child));
    audit(&machine, &memory, &[]);
    drop(pins);
    drop(object);
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free);
}

#[test]
fn a_limit_holds_for_later_pins() {
    let (_machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let object = shared(&memory);
    let space = process(&object, &memory);
    let first = space.pin(AT, 1, Access::Read, PinTime::Short).unwrap();
    space.set_limits(&Limits { pinned: PAGE_SIZE, ..space.limits() });
    let refused = space.pin(AT, 1, Access::Read, PinTime::Short).unwrap_err();
    assert_eq!(refused, PinError::LimitReached);
    drop(first);
    assert!(space.pin(AT, 1, Access::Read, PinTime::Short).is_ok());
    assert_eq!(PinError::LimitReached.errno(), Error::OutOfMemory.errno(Operation::Mlock));
    assert_eq!(PinError::FolioLimit.errno(), PinError::LimitReached.errno());
    let fault = space.pin(VirtAddr(0), 1, Access::Read, PinTime::Short).unwrap_err();
    assert_eq!(fault, PinError::Fault(FaultError::NotMapped));
    assert_eq!(fault.errno() as i32, 14);
}
