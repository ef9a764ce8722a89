//! Protection keys: their owners, the mappings and entries with keys, and the effect of a thread's
//! rights on a fault.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{KeyRights, Level, ProtectionKey};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, Inspection, Memory, ProtectFrom, Protection,
    Remap, testing,
};
use bindery_hosted::{Config, Machine, Program, Walk};
use bindery_linux::proc::{self, Unnamed};

use crate::support::{self, GIB, MIB, READ_WRITE, audit, fixed, memory_with, options, use_order};

const AT: VirtAddr = VirtAddr(GIB);

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT.0 + number * PAGE_SIZE)
}

fn key(number: u8) -> ProtectionKey {
    ProtectionKey::new(number).unwrap()
}

/// A machine that supports all keys of the entries.
fn with_keys<A: Walk>() -> (Machine<A>, Memory<Machine<A>>) {
    memory_with(Config { protection_keys: A::PROTECTION_KEYS, ..Config::default() })
}

fn protect<A: Walk>(
    space: &AddressSpace<'_, Machine<A>>,
    at: VirtAddr,
    pages: u64,
    number: u8,
) -> Result<(), Error> {
    space.pkey_mprotect(ProtectFrom::Address(at), pages * PAGE_SIZE, READ_WRITE, key(number))
}

/// The key of the entry at an address.
fn entry_key<A: Walk>(space: &AddressSpace<'_, Machine<A>>, at: VirtAddr, level: Level<A>) -> u8 {
    A::attributes(testing::raw_entry(space, at, level).unwrap()).key.number()
}

fn vma_keys<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> Vec<(u64, u8)> {
    let mut keys = Vec::new();
    space.for_each_mapping(|mapping| {
        keys.push((mapping.range.pages(), mapping.flags.key().number()));
    });
    keys
}

type X86 = bindery::arch::X86_64;

fn keys_are_taken_from_the_lowest_on_and_given_back<A: Walk>() {
    let (_machine, memory) = with_keys::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let count = space.protection_keys();
    assert_eq!(count, A::PROTECTION_KEYS);
    for number in 1..count {
        assert_eq!(space.pkey_alloc(), Ok(key(number)));
    }
    assert_eq!(space.pkey_alloc(), Err(Error::NoSpace));
    space.mmap(&fixed(AT.0, 4 * PAGE_SIZE)).unwrap();
    assert_eq!(protect(&space, AT, 1, 0), Ok(()), "key 0 always exists");
    if count == 1 {
        assert_eq!(protect(&space, AT, 1, 1), Err(Error::Invalid));
        assert_eq!(space.pkey_free(key(1)), Err(Error::Invalid));
        return;
    }
    let child = space.fork().unwrap();
    assert_eq!(child.pkey_alloc(), Err(Error::NoSpace), "a child has its parent's keys");
    assert_eq!(space.pkey_free(key(3)), Ok(()));
    assert_eq!(space.pkey_free(key(3)), Err(Error::Invalid));
    assert_eq!(protect(&space, AT, 1, 3), Err(Error::Invalid));
    assert_eq!(vma_keys(&space), [(4, 0)], "what is refused changes nothing");
    assert_eq!(space.pkey_alloc(), Ok(key(3)));
    assert_eq!(space.pkey_free(key(0)), Ok(()), "even key 0, as on Linux");
    assert_eq!(protect(&space, AT, 1, 0), Err(Error::Invalid));
    assert_eq!(child.pkey_free(key(3)), Ok(()), "the parent's are its own");
}

#[test]
fn a_machine_without_keys_has_none_to_give() {
    let (_machine, memory) = support::strict::<X86>(MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    assert_eq!(space.pkey_alloc(), Err(Error::NoSpace));
}

#[test]
fn each_entry_and_tlb_has_its_key() {
    let (machine, memory) = with_keys::<X86>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 8 * PAGE_SIZE)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 4 * PAGE_SIZE, 7).unwrap();
    program.load(page(5)).unwrap(); // the zero page
    assert_eq!(space.pkey_alloc(), Ok(key(1)));
    assert_eq!(space.pkey_alloc(), Ok(key(2)));
    protect(&space, page(1), 6, 1).unwrap();
    assert_eq!(vma_keys(&space), [(1, 0), (6, 1), (1, 0)]);
    let cached = machine.cached(Cpu(0), space.root());
    assert!(cached.iter().all(|leaf| leaf.start == AT.0), "{cached:?}");
    program.store(page(5), 1).unwrap(); // a copy of the zero page
    program.store(page(6), 1).unwrap(); // a first touch
    for (number, expected) in [0, 1, 1, 1, 0, 1, 1].into_iter().enumerate() {
        if number != 4 {
            assert_eq!(
                entry_key(&space, page(number as u64), Level::PTE),
                expected,
                "page {number}"
            );
        }
    }
    assert_eq!(program.load(page(1)), Ok(0x0707_0707_0707_0707));
    audit(&machine, &memory, &[&space]);
    // `mprotect` retains the key, even through PROT_NONE.
    space.mprotect(page(1), 3 * PAGE_SIZE, Protection::empty()).unwrap();
    space.mprotect(page(1), 3 * PAGE_SIZE, READ_WRITE).unwrap();
    assert_eq!(vma_keys(&space), [(1, 0), (6, 1), (1, 0)]);
    assert_eq!(entry_key(&space, page(2), Level::PTE), 1);
    // Neighbors with equal keys become one.
    protect(&space, page(3), 1, 2).unwrap();
    assert_eq!(vma_keys(&space), [(1, 0), (2, 1), (1, 2), (3, 1), (1, 0)]);
    protect(&space, page(3), 1, 1).unwrap();
    assert_eq!(vma_keys(&space), [(1, 0), (6, 1), (1, 0)]);
    protect(&space, AT, 8, 0).unwrap();
    assert_eq!(vma_keys(&space), [(8, 0)]);
    audit(&machine, &memory, &[&space]);
}

#[test]
fn moves_forks_and_large_leaves_keep_the_key() {
    let (machine, memory) = with_keys::<X86>();
    use_order(&memory, 9);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 4 * MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 4 * MIB, 7).unwrap();
    assert_eq!(space.pkey_alloc(), Ok(key(1)));
    protect(&space, AT, 1024, 1).unwrap();
    assert_eq!(entry_key(&space, AT, Level::PMD), 1);
    // The leaf is cut by a change of one page, then restored.
    protect(&space, page(3), 1, 0).unwrap();
    assert_eq!([2, 3, 4].map(|number| entry_key(&space, page(number), Level::PTE)), [1, 0, 1]);
    protect(&space, page(3), 1, 1).unwrap();
    space.madvise(AT, 2 * MIB, Advice::Collapse).unwrap();
    assert_eq!(entry_key(&space, AT, Level::PMD), 1);
    audit(&machine, &memory, &[&space]);

    let child = space.fork().unwrap();
    assert_eq!(vma_keys(&child), [(1024, 1)]);
    Program::new(&machine, &child).store(AT, 9).unwrap();
    program.store(page(600), 9).unwrap();
    audit(&machine, &memory, &[&space, &child]);
    drop(child);

    let to = VirtAddr(8 * GIB);
    space.mremap(AT, 4 * MIB, 6 * MIB, Remap::To(to)).unwrap();
    assert_eq!(vma_keys(&space), [(1536, 1)]);
    program.store(VirtAddr(to.0 + 5 * MIB), 1).unwrap();
    assert_eq!(program.load(to), Ok(0x0707_0707_0707_0707));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_thread_without_rights_faults_with_the_key() {
    let (machine, memory) = with_keys::<X86>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 4 * PAGE_SIZE)).unwrap();
    Program::new(&machine, &space).store(AT, 1).unwrap();
    assert_eq!(space.pkey_alloc(), Ok(key(1)));
    protect(&space, AT, 4, 1).unwrap();
    let violation = Err(FaultError::ProtectionKey(key(1)));
    let none = KeyRights::ALL.with(key(1), 1);
    let read_only = KeyRights::ALL.with(key(1), 2);
    for at in [AT, page(1)] {
        let before = space.inspect(at);
        for (access, rights) in
            [(Access::Read, none), (Access::Write, none), (Access::Write, read_only)]
        {
            let done = space.fault_with_keys(at, access, rights).map(|_| ());
            assert_eq!(done, violation, "{access:?} with {rights:?}");
        }
        assert_eq!(space.inspect(at), before, "nothing has come");
    }
    assert_eq!(space.inspect(page(1)), Inspection::Empty);
    assert!(space.fault_with_keys(page(1), Access::Read, read_only).is_ok());
    // Keys do not restrict fetches; the mapping does.
    let fetch = space.fault_with_keys(AT, Access::Execute, none);
    assert!(matches!(fetch, Err(FaultError::Protection) | Ok(_)), "{fetch:?}");
    // As on Linux, the key is checked before the mapping's permissions.
    space.mprotect(AT, PAGE_SIZE, Protection::empty()).unwrap();
    assert_eq!(space.fault_with_keys(AT, Access::Read, none).map(|_| ()), violation);
    let refused = space.fault_with_keys(AT, Access::Read, KeyRights::ALL);
    assert_eq!(refused.map(|_| ()), Err(FaultError::Protection));
}

#[test]
fn sealed_unwritable_memory_may_not_be_dropped() {
    let (_machine, memory) = with_keys::<X86>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, PAGE_SIZE)).unwrap();
    assert_eq!(space.pkey_alloc(), Ok(key(1)));
    protect(&space, AT, 1, 1).unwrap();
    let read_only = KeyRights::ALL.with(key(1), 2);
    let discard = |rights| space.madvise_with_keys(AT, PAGE_SIZE, Advice::DontNeed, rights);
    assert_eq!(discard(read_only), Ok(()), "it is not sealed");
    space.mseal(AT, PAGE_SIZE).unwrap();
    assert_eq!(discard(read_only), Err(Error::Sealed(AT)));
    assert_eq!(discard(KeyRights::ALL), Ok(()));
}

#[test]
fn smaps_shows_the_key_where_there_are_keys() {
    let text = |keys| {
        let (_machine, memory) =
            memory_with::<X86>(Config { protection_keys: keys, ..Config::default() });
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT.0, PAGE_SIZE)).unwrap();
        if let Ok(key) = space.pkey_alloc() {
            protect(&space, AT, 1, key.number()).unwrap();
        }
        let mut text = String::new();
        proc::smaps(&space, &Unnamed, &mut text).unwrap();
        text
    };
    assert!(text(16).contains("\nProtectionKey:         1\nVmFlags: "), "{}", text(16));
    assert!(!text(1).contains("ProtectionKey"));
}

#[test]
fn the_raw_calls_refuse_as_linux_does() {
    use bindery_linux::{self as linux, Call};
    struct Caller<'a, 'm, A: Walk>(&'a AddressSpace<'m, Machine<A>>);
    impl<'m, A: Walk> linux::Process<'m, Machine<A>> for Caller<'_, 'm, A> {
        fn space(&self) -> &AddressSpace<'m, Machine<A>> {
            self.0
        }
        fn file(&self, _: i32) -> Option<linux::OpenFile<'m, Machine<A>>> {
            None
        }
        fn process(&self, _: i32) -> Option<&AddressSpace<'m, Machine<A>>> {
            None
        }
    }
    const EINVAL: i64 = -22;
    const ENOSPC: i64 = -28;
    const ENOMEM: i64 = -12;
    fn answers<A: Walk>() -> Vec<i64> {
        let (_machine, memory) = with_keys::<A>();
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT.0, 4 * PAGE_SIZE)).unwrap();
        let call = |call, arguments: [u64; 4]| {
            let [a, b, c, d] = arguments;
            linux::call(&Caller(&space), call, [a, b, c, d, 0, 0])
        };
        let protect =
            |at, length, key: i32| call(Call::PkeyMprotect, [at, length, 3, key as u32 as u64]);
        vec![
            call(Call::PkeyAlloc, [1, 0, 0, 0]),
            call(Call::PkeyAlloc, [0, 4, 0, 0]),
            call(Call::PkeyAlloc, [0, 16, 0, 0]),
            call(Call::PkeyAlloc, [0, 2, 0, 0]),
            protect(AT.0, PAGE_SIZE, 1),
            protect(AT.0, PAGE_SIZE, -1),
            protect(AT.0, PAGE_SIZE, 0),
            protect(AT.0, PAGE_SIZE, 16),
            protect(AT.0, PAGE_SIZE, -2),
            protect(AT.0, 0, 99),
            protect(AT.0 + 1, 0, 99),
            protect(AT.0, u64::MAX - PAGE_SIZE, 99),
            call(Call::PkeyFree, [1, 0, 0, 0]),
            call(Call::PkeyFree, [16, 0, 0, 0]),
            call(Call::PkeyFree, [u64::MAX, 0, 0, 0]),
        ]
    }
    let refused = [EINVAL, EINVAL, 0, EINVAL, ENOMEM];
    let tail =
        |first: i64| [&[EINVAL, EINVAL][..], &refused[2..], &[first, EINVAL, EINVAL]].concat();
    assert_eq!(answers::<X86>()[..7], [EINVAL, EINVAL, EINVAL, 1, 0, 0, 0]);
    assert_eq!(answers::<X86>()[7..], tail(0));
    let none = answers::<bindery::arch::AArch64>();
    assert_eq!(none[..7], [EINVAL, ENOSPC, EINVAL, ENOSPC, EINVAL, 0, 0]);
    assert_eq!(none[7..], tail(EINVAL));
}

on_every_architecture! {
    allocation => keys_are_taken_from_the_lowest_on_and_given_back;
}
