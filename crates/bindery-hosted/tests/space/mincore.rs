//! `mincore`: its answer for each page, in runs, and the files about which it reveals nothing.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Object, Place,
    Protection, Residence, Sealing, Sharing,
};
use bindery_hosted::{Machine, MemoryFiles, Walk};
use bindery_linux::{self as linux, OpenFile, Process};

use crate::support::kernel::Numbers;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict, use_order};

on_every_architecture! {
    each_page_is_told_as_it_is => every_state;
}

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
    // The second page was read by a call, not through the mapping.
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
        assert_eq!(mincore(&space), [1; 4], "{sharing:?}, of a stranger");
    }
    // Without access rights, a process learns nothing more about a private page.
    map(&space, &file, read, (READ_WRITE, Sharing::Private));
    space.fault(VirtAddr(AT), Access::Write).unwrap();
    assert_eq!(mincore(&space), [1; 4]);
    // A move keeps the answer, and two mappings do not merge if only one hides residence.
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

/// The answers page by page, whatever the runs in which they are reported.
fn residence<A: Walk>(space: &AddressSpace<'_, Machine<A>>, at: u64, pages: u64) -> Vec<bool> {
    let mut told = Vec::new();
    let tell = |residence, count: u64| {
        assert!(count > 0);
        told.extend((0..count).map(|_| residence == Residence::Resident));
    };
    space.mincore(VirtAddr(at), pages * PAGE_SIZE, tell).unwrap();
    told
}

/// Private and shared memory over four tables: stretches of all lengths, touched or untouched, some
/// of which are then made inaccessible, dropped or guarded.
fn every_state<A: Walk>() {
    const COUNT: u64 = 1600;
    for order in [0, 4] {
        let (machine, memory) = strict::<A>(64 * MIB);
        use_order(&memory, order);
        let size = COUNT * PAGE_SIZE;
        let object = memory.shared_memory(size, Sealing::Forbidden, Accounting::PerPage).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        // The mappings start in the middle of a table.
        let [private, shared] = [AT - 37 * PAGE_SIZE, 2 * AT - 37 * PAGE_SIZE];
        space.mmap(&fixed(private, size)).unwrap();
        let request = MapRequest {
            length: size,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(shared)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
        let mut random = Numbers(11);
        let mut expected = [vec![false; COUNT as usize], vec![false; COUNT as usize]];
        let stretch = |random: &mut Numbers| {
            let first = random.below(COUNT);
            first..(first + random.of_any_size(7)).min(COUNT)
        };
        for (start, expected) in [private, shared].into_iter().zip(&mut expected) {
            let address = |page: u64| VirtAddr(start + page * PAGE_SIZE);
            for _ in 0..40 {
                for page in stretch(&mut random) {
                    if let Ok(bindery::Resolved::New(range) | bindery::Resolved::Mapped(range)) =
                        space.fault(address(page), Access::Write)
                    {
                        let first = (range.start().0 - start) / PAGE_SIZE;
                        expected[first as usize..][..range.pages() as usize].fill(true);
                    }
                }
            }
            for _ in 0..10 {
                let pages = stretch(&mut random);
                let length = (pages.end - pages.start) * PAGE_SIZE;
                space.mprotect(address(pages.start), length, Protection::empty()).unwrap();
                let dropped = stretch(&mut random);
                let length = (dropped.end - dropped.start) * PAGE_SIZE;
                let advice = [Advice::DontNeed, Advice::GuardInstall][random.below(2) as usize];
                space.madvise(address(dropped.start), length, advice).unwrap();
                if start == private {
                    // The object of the shared mapping keeps its pages.
                    expected[dropped.start as usize..dropped.end as usize].fill(false);
                }
            }
        }
        for (start, expected) in [private, shared].into_iter().zip(&expected) {
            assert_eq!(&residence(&space, start, COUNT), expected, "order {order}");
            for _ in 0..200 {
                let pages = stretch(&mut random);
                let told =
                    residence(&space, start + pages.start * PAGE_SIZE, pages.end - pages.start);
                assert_eq!(told, expected[pages.start as usize..pages.end as usize]);
            }
        }
        audit(&machine, &memory, &[&space]);
    }
}
