//! `remap_file_pages`: replaces pages of a mapping by other pages of the object.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    AddressSpace, Error, FaultError, FileAccess, LockPages, MapFlags, MapObject, MapRequest,
    Protection, Sharing,
};
use bindery_hosted::Machine;

use crate::support::{GIB, MIB, audit, fixed, options, strict};

const AT: u64 = GIB;

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT + number * PAGE_SIZE)
}

fn byte(space: &AddressSpace<'_, Machine<X86_64>>, at: VirtAddr) -> Result<u8, FaultError> {
    let mut byte = [0];
    space.read_user(at, &mut byte).map(|()| byte[0])
}

#[test]
fn a_stretch_shows_other_pages_of_its_object() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let object = memory
        .shared_memory(8 * PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::PerPage)
        .unwrap();
    for number in 0..8_u8 {
        object.write(u64::from(number) * PAGE_SIZE, &[number]).unwrap();
    }
    let request = MapRequest { sharing: Sharing::Shared, ..fixed(AT, 4 * PAGE_SIZE) };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
    let remap = |at: VirtAddr, pages: u64, to| {
        space.remap_file_pages(at, pages * PAGE_SIZE, to, MapFlags::empty())
    };
    assert_eq!(remap(page(1), 2, 5), Ok(()));
    let shown = || [0, 1, 2, 3].map(|number| byte(&space, page(number)).ok());
    assert_eq!(shown(), [Some(0), Some(5), Some(6), Some(3)]);
    assert_eq!(space.mapping_count(), 3);
    assert_eq!(remap(VirtAddr(page(3).0 + 9), 1, 8), Ok(()), "behind the end");
    assert_eq!(shown(), [Some(0), Some(5), Some(6), None]);
    assert_eq!(remap(page(0), 4, 2), Ok(()), "over several mappings");
    assert_eq!(shown(), [Some(2), Some(3), Some(4), Some(5)]);
    assert_eq!(space.mapping_count(), 1);
    // Populated pages are present at once; protection and locks stay.
    space.mprotect(page(0), PAGE_SIZE, Protection::READ).unwrap();
    space.mlock(page(0), PAGE_SIZE, LockPages::Now).unwrap();
    space.remap_file_pages(page(0), PAGE_SIZE, 7, MapFlags::POPULATE).unwrap();
    assert_eq!(space.usage().locked, 1);
    assert_eq!(space.write_user(page(0), &[1]), Err(FaultError::Protection));
    assert_eq!(shown(), [Some(7), Some(3), Some(4), Some(5)]);
    audit(&machine, &memory, &[&space]);

    let refused = Err(Error::Invalid);
    assert_eq!(remap(page(0), 2, 1), refused, "mappings that differ");
    assert_eq!(remap(page(3), 2, 1), refused, "over the end");
    assert_eq!(remap(page(3), 0, 1), refused, "nothing");
    assert_eq!(remap(page(3), 1, u64::MAX), refused, "page numbers that wrap");
    assert_eq!(remap(page(9), 1, 1), refused, "nothing is mapped there");
    space.mmap(&fixed(page(16).0, PAGE_SIZE)).unwrap();
    assert_eq!(remap(page(16), 1, 1), refused, "private memory");
    let constant = MapRequest { protection: Protection::READ, ..request };
    let constant = MapRequest { place: bindery::Place::Fixed(page(20)), ..constant };
    let source = MapObject { object: &object, offset: 0, access: FileAccess::READ };
    space.mmap_object(&constant, &source).unwrap();
    assert_eq!(remap(page(20), 1, 1), refused, "an object that may only be read");
    assert_eq!(shown(), [Some(7), Some(3), Some(4), Some(5)], "nothing has changed");
    audit(&machine, &memory, &[&space]);
}
