//! Secret memory, which is accessible only to programs that map it.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, AddressSpace, Advice, Errno, Error, FaultError, FileAccess, Limits, LockAll, LockPages,
    MapFlags, MapObject, MapRequest, MappingFlags, Memory, Object, PinError, PinTime, Seals,
    Sharing,
};
use bindery_hosted::Machine;
use bindery_linux::proc::{self, Unnamed};
use bindery_linux::{self as linux, OpenFile};

use crate::support::{GIB, MIB, audit, fixed, options, strict};

type M = Machine<X86_64>;

const AT: u64 = GIB;
const BOTH: FileAccess = FileAccess::READ.union(FileAccess::WRITE);

fn map<'m>(
    space: &AddressSpace<'m, M>,
    object: &Object<'m, M>,
    request: MapRequest,
) -> Result<VirtAddr, Error> {
    space.mmap_object(&request, &MapObject { object, offset: 0, access: BOTH })
}

fn shared(at: u64, length: u64) -> MapRequest {
    MapRequest { sharing: Sharing::Shared, ..fixed(at, length) }
}

fn with_secret(scenario: impl FnOnce(&Machine<X86_64>, &Memory<M>)) {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    scenario(&machine, &memory);
    audit(&machine, &memory, &[]);
}

#[test]
fn handles_say_nothing_of_it() {
    with_secret(|_, memory| {
        let object = linux::memfd_secret(memory, 0).unwrap();
        assert_eq!(linux::memfd_secret(memory, 1).map(drop), Err(Errno::EINVAL));
        assert_eq!(object.set_size(0), Ok(()));
        assert_eq!(object.set_size(5 * PAGE_SIZE), Ok(()));
        for size in [0, PAGE_SIZE, 5 * PAGE_SIZE, 9 * PAGE_SIZE] {
            assert_eq!(object.set_size(size), Err(Error::Invalid));
        }
        assert_eq!(object.read(0, &mut [0]), Err(Error::Invalid));
        assert_eq!(object.write(0, &[0]), Err(Error::Invalid));
        assert_eq!(object.punch_hole(0, PAGE_SIZE), Err(Error::NotSupported));
        let file = OpenFile { object, access: BOTH };
        let refused = |errno: Errno| -(errno as i64);
        assert_eq!(linux::fallocate(&file, 0, 0, 1), refused(Errno::EOPNOTSUPP));
        assert_eq!(linux::add_seals(&file, Seals::GROW.bits()), refused(Errno::EINVAL));
        assert_eq!(linux::get_seals(&file), refused(Errno::EINVAL));
        assert_eq!(linux::ftruncate(&file, 1), refused(Errno::EINVAL));
    });
}

#[test]
fn only_the_program_reads_and_writes_it() {
    with_secret(|machine, memory| {
        let object = memory.secret_memory().unwrap();
        object.set_size(4 * PAGE_SIZE).unwrap();
        let (one, other) = (
            AddressSpace::new(memory, options()).unwrap(),
            AddressSpace::new(memory, options()).unwrap(),
        );
        other.mmap(&fixed(AT, PAGE_SIZE)).unwrap();
        assert_eq!(map(&one, &object, fixed(AT, PAGE_SIZE)), Err(Error::Invalid), "private");
        map(&one, &object, shared(AT, 4 * PAGE_SIZE)).unwrap();
        assert_eq!(object.resident_pages(), 0, "its pages come when they are touched");
        one.write_user(VirtAddr(AT), b"secret").unwrap();
        let mut bytes = [0; 6];
        assert_eq!(one.read_foreign(VirtAddr(AT), &mut bytes), Err(FaultError::Protection));
        assert_eq!(one.write_foreign(VirtAddr(AT), &bytes), Err(FaultError::Protection));
        assert!(other.copy_from(VirtAddr(AT), &one, VirtAddr(AT), 6).is_err());
        assert!(other.copy_to(VirtAddr(AT), &one, VirtAddr(AT), 6).is_err());
        let pinned = one.pin(VirtAddr(AT), 1, Access::Read, PinTime::Short).map(drop);
        assert_eq!(pinned, Err(PinError::Fault(FaultError::Protection)));
        assert_eq!(bytes, [0; 6]);
        // A copy that the program requests is its own access.
        assert!(one.copy_to(VirtAddr(AT), &other, VirtAddr(AT), 6).is_ok());
        let child = one.fork().unwrap();
        child.read_user(VirtAddr(AT), &mut bytes).unwrap();
        assert_eq!(&bytes, b"secret");
        assert!(child.read_foreign(VirtAddr(AT), &mut bytes).is_err());
        assert_eq!(child.usage().locked, 0, "a child has no locked memory");
        audit(machine, memory, &[&one, &other, &child]);
    });
}

#[test]
fn it_is_locked_for_good() {
    with_secret(|machine, memory| {
        let object = memory.secret_memory().unwrap();
        object.set_size(4 * PAGE_SIZE).unwrap();
        let space = AddressSpace::new(memory, options()).unwrap();
        space.set_limits(&Limits { locked: 4 * PAGE_SIZE, ..Limits::default() });
        assert_eq!(map(&space, &object, shared(AT, 5 * PAGE_SIZE)), Err(Error::LockLimit));
        let populate = MapRequest { flags: MapFlags::POPULATE, ..shared(AT, 4 * PAGE_SIZE) };
        map(&space, &object, populate).unwrap();
        assert_eq!((space.usage().locked, object.resident_pages()), (4, 0));
        let at = VirtAddr(AT);
        space.munlock(at, PAGE_SIZE).unwrap();
        space.munlockall();
        assert_eq!(space.usage().locked, 4);
        assert_eq!(space.mapping_count(), 1);
        assert_eq!(space.mlock(at, PAGE_SIZE, LockPages::Now), Err(Error::Fault(at)));
        assert_eq!(space.mlockall(LockAll::CURRENT), Ok(()));
        space.write_user(at, b"kept").unwrap();
        assert_eq!(space.madvise(at, PAGE_SIZE, Advice::DontNeed), Err(Error::Invalid));
        assert_eq!(space.madvise(at, PAGE_SIZE, Advice::Remove), Err(Error::Invalid));
        assert_eq!(space.madvise(at, PAGE_SIZE, Advice::PopulateRead), Err(Error::Invalid));
        let mut text = String::new();
        proc::smaps(&space, &Unnamed, &mut text).unwrap();
        assert!(text.contains("/secretmem (deleted)\n"));
        assert!(text.contains("VmFlags: rd wr sh mr mw me ms lo dd"), "{text}");
        space.for_each_mapping(|mapping| assert!(mapping.flags.contains(MappingFlags::SECRET)));
        audit(machine, memory, &[&space]);
    });
}
