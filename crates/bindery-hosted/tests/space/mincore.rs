//! `mincore` of a file reveals nothing to a caller that may neither write the file nor owns it.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, Accounting, AddressSpace, FileAccess, MapObject, MapRequest, Object, Place, Protection,
    Sealing, Sharing,
};
use bindery_hosted::{Machine, MemoryFiles};
use bindery_linux::{self as linux, OpenFile, Process};

use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict};

type Hosted = Machine<X86_64<4>>;

const AT: u64 = GIB;
/// The address of the answers.
const ANSWERS: u64 = 2 * GIB;
const PAGES: u64 = 4;

/// A process without files.
struct Caller<'s, 'm>(&'s AddressSpace<'m, Hosted>);

impl<'m> Process<'m, Hosted> for Caller<'_, 'm> {
    fn space(&self) -> &AddressSpace<'m, Hosted> {
        self.0
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, Hosted>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&AddressSpace<'m, Hosted>> {
        None
    }
}

fn map<'m>(
    space: &AddressSpace<'m, Hosted>,
    object: &Object<'m, Hosted>,
    access: FileAccess,
    (protection, sharing): (Protection, Sharing),
) {
    let length = PAGES * PAGE_SIZE;
    let place = Place::Fixed(VirtAddr(AT));
    let request = MapRequest { length, protection, place, sharing, ..MapRequest::default() };
    space.mmap_object(&request, &MapObject { object, offset: 0, access }).unwrap();
}

/// The call's answer for each page.
fn mincore(space: &AddressSpace<'_, Hosted>) -> [u8; PAGES as usize] {
    let arguments = [AT, PAGES * PAGE_SIZE, ANSWERS, 0, 0, 0];
    assert_eq!(linux::call(&Caller(space), linux::Call::Mincore, arguments), 0);
    let mut answers = [0xff; PAGES as usize];
    space.read_user(VirtAddr(ANSWERS), &mut answers).unwrap();
    answers
}

#[test]
fn residence_is_shown_only_to_writers_and_owners() {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let file = memory.file(&files, 1, PAGES * PAGE_SIZE).unwrap();
    // Somebody else has read the second page.
    file.read(PAGE_SIZE, &mut [0]).unwrap();
    let truth = [0, 1, 0, 0];
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(ANSWERS, PAGE_SIZE)).unwrap();
    let (read, write) = (FileAccess::READ, FileAccess::WRITE);
    for sharing in [Sharing::Shared, Sharing::Private] {
        for access in [read | write, read | FileAccess::OWNER, read | write | FileAccess::OWNER] {
            map(&space, &file, access, (Protection::READ, sharing));
            assert_eq!(mincore(&space), truth, "{sharing:?}, {access:?}");
        }
        map(&space, &file, read, (Protection::READ, sharing));
        assert_eq!(mincore(&space), [1; 4], "{sharing:?}: a stranger's");
    }
    // A page of its own tells a stranger no more.
    map(&space, &file, read, (READ_WRITE, Sharing::Private));
    space.fault(VirtAddr(AT), Access::Write).unwrap();
    assert_eq!(mincore(&space), [1; 4]);
    // A move keeps the answer, and two mappings do not merge if only one hides.
    let half = PAGES / 2 * PAGE_SIZE;
    map(&space, &file, read, (Protection::READ, Sharing::Shared));
    let request = MapRequest {
        length: half,
        protection: Protection::READ,
        place: Place::Fixed(VirtAddr(AT + half)),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let source = MapObject { object: &file, offset: half, access: read | FileAccess::OWNER };
    space.mmap_object(&request, &source).unwrap();
    assert_eq!((mincore(&space), space.mapping_count()), ([1, 1, 0, 0], 3));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn shared_memory_tells_whoever_maps_it() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let size = PAGES * PAGE_SIZE;
    let object = memory.shared_memory(size, Sealing::Forbidden, Accounting::PerPage).unwrap();
    object.write(PAGE_SIZE, &[1]).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(ANSWERS, PAGE_SIZE)).unwrap();
    map(&space, &object, FileAccess::READ, (Protection::READ, Sharing::Shared));
    assert_eq!(mincore(&space), [0, 1, 0, 0]);
    audit(&machine, &memory, &[&space]);
}
