//! System V segments: the count of attachments, the time of destruction, permissions.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{AddressSpace, Errno, Memory, Protection, Remap};
use bindery_hosted::Machine;
use bindery_linux::proc::{self, Unnamed};
use bindery_linux::{
    IpcClock, IpcUser, LockAccount, SegmentLocking, SegmentSlot, Segments, shmat, shmctl, shmdt,
    shmget,
};

use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict};

type M = Machine<X86_64>;
type Space<'m> = AddressSpace<'m, M>;
type All<'m> = Segments<'m, M>;

const ROOT: IpcUser<'static> = IpcUser { user: 0, group: 0, groups: &[], privileged: true };
static ROOTS: LockAccount = LockAccount::new();
const ROOT_LOCKS: SegmentLocking<'static> =
    SegmentLocking { account: &ROOTS, limit: u64::MAX, privileged: true };
const CREAT: u64 = 0o1000;
const EXCL: u64 = 0o2000;
const RMID: u64 = 0;
const SET: u64 = 1;
const STAT: u64 = 2;
const LOCK: u64 = 11;
const UNLOCK: u64 = 12;
const USAGE: u64 = 14;
const READ_ONLY: u64 = 0o10000;
const AT: u64 = GIB;
/// The address of buffers.
const BUFFER: u64 = 2 * GIB;

fn refused(errno: Errno) -> i64 {
    -(errno as i64)
}

/// A memory with segments; the last handles are dropped when `scenario` returns.
fn on<'m>(memory: &'m Memory<M>, slots: usize, scenario: impl FnOnce(&'m All<'m>)) {
    let slots: Vec<_> = (0..slots).map(|_| SegmentSlot::new()).collect();
    let clock = IpcClock { now: || 1000, process: || 7 };
    let segments = Segments::new(memory, Box::leak(slots.into_boxed_slice()), clock);
    let segments: &'m All<'m> = Box::leak(Box::new(segments));
    scenario(segments);
    segments.clear();
}

fn space(memory: &Memory<M>) -> Space<'_> {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(BUFFER, PAGE_SIZE)).unwrap();
    space
}

fn get<'m>(segments: &'m All<'m>, key: u64, size: u64, flags: u64) -> i64 {
    shmget(segments, &ROOT, [key, size, flags])
}

fn attach<'m>(segments: &'m All<'m>, space: &Space<'m>, id: i64, at: u64, flags: u64) -> i64 {
    shmat(segments, space, &ROOT, [id as u64, at, flags])
}

fn control(segments: &All<'_>, space: &Space<'_>, id: i64, command: u64) -> i64 {
    shmctl(segments, space, &ROOT, &ROOT_LOCKS, [id as u64, command, BUFFER])
}

/// A word of `struct shmid_ds`.
fn word(segments: &All<'_>, space: &Space<'_>, id: i64, index: usize) -> Option<u64> {
    if control(segments, space, id, STAT) != 0 {
        return None;
    }
    let mut bytes = [0; 8];
    space.read_user(VirtAddr(BUFFER + index as u64 * 8), &mut bytes).unwrap();
    Some(u64::from_le_bytes(bytes))
}

fn attached(segments: &All<'_>, space: &Space<'_>, id: i64) -> Option<u64> {
    word(segments, space, id, 11)
}

#[test]
fn the_last_detach_frees_a_destroyed_segment() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    let free = memory.free_frame_count();
    on(&memory, 4, |segments| {
        let space = space(&memory);
        let count = |id| attached(segments, &space, id);
        let id = get(segments, 0, 8 * PAGE_SIZE, 0o600);
        assert_eq!(attach(segments, &space, id, AT, 0), AT as i64);
        space.write_user(VirtAddr(AT), b"segment").unwrap();
        assert_eq!(count(id), Some(1));
        space.munmap(VirtAddr(AT + 2 * PAGE_SIZE), PAGE_SIZE).unwrap();
        assert_eq!(count(id), Some(2));
        let page = VirtAddr(AT + 4 * PAGE_SIZE);
        let moved = space.mremap(page, PAGE_SIZE, PAGE_SIZE, Remap::To(VirtAddr(AT + GIB / 2)));
        assert!(moved.is_ok());
        assert_eq!(count(id), Some(4));
        for protection in [Protection::READ, READ_WRITE] {
            space.mprotect(VirtAddr(AT), PAGE_SIZE, protection).unwrap();
        }
        assert_eq!(count(id), Some(5), "parts of a segment are not joined");
        let child = space.fork().unwrap();
        assert_eq!(count(id), Some(10));
        assert_eq!(control(segments, &space, id, RMID), 0);
        assert_eq!(shmdt(&space, AT), 0);
        assert_eq!(count(id), Some(6), "what was moved away stays");
        assert_eq!(shmdt(&space, AT), refused(Errno::EINVAL));
        drop(child);
        assert_eq!(count(id), Some(1));
        audit(&machine, &memory, &[&space]);
        space.munmap(VirtAddr(AT + GIB / 2), PAGE_SIZE).unwrap();
        assert_eq!(count(id), None, "it went with the last");
        audit(&machine, &memory, &[&space]);
        drop(space);
        memory.trim();
        assert_eq!(memory.free_frame_count(), free, "while the registry lives");
    });
}

#[test]
fn an_attachment_beside_a_part_counts() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    on(&memory, 4, |segments| {
        let space = space(&memory);
        let id = get(segments, 0, 2 * PAGE_SIZE, 0o600);
        assert_eq!(attach(segments, &space, id, AT, 0), AT as i64);
        let grown = space.mremap(VirtAddr(AT), 2 * PAGE_SIZE, 4 * PAGE_SIZE, Remap::InPlace);
        assert_eq!(grown, Ok(VirtAddr(AT)));
        space.munmap(VirtAddr(AT), 2 * PAGE_SIZE).unwrap();
        // What is left continues the new attachment.
        assert_eq!(attach(segments, &space, id, AT, 0), AT as i64);
        assert_eq!(attached(segments, &space, id), Some(2));
        assert_eq!(space.mapping_count(), 3);
        audit(&machine, &memory, &[&space]);
    });
}

#[test]
fn identifiers_and_keys_behave_like_linux() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    on(&memory, 2, |segments| {
        let space = space(&memory);
        assert_eq!(get(segments, 5, PAGE_SIZE, 0o600), refused(Errno::ENOENT));
        assert_eq!(get(segments, 5, 0, CREAT), refused(Errno::EINVAL));
        assert_eq!(get(segments, 5, u64::MAX, CREAT), refused(Errno::EINVAL));
        assert_eq!(get(segments, 5, 1 << 63, CREAT), refused(Errno::EINVAL));
        assert_eq!(get(segments, 5, PAGE_SIZE, CREAT | 0o4000), refused(Errno::EINVAL));
        let id = get(segments, 5, 5000, CREAT | 0o600);
        assert_eq!(get(segments, 5, 5000, CREAT | 0o600), id);
        assert_eq!(get(segments, 5, 5001, 0), refused(Errno::EINVAL));
        assert_eq!(get(segments, 5, 1, CREAT | EXCL), refused(Errno::EEXIST));
        assert_eq!(get(segments, 5, 1, EXCL), id, "EXCL alone says nothing");
        let other = get(segments, 0, 1, CREAT);
        assert_ne!(other, id);
        assert_eq!(get(segments, 0, 1, CREAT), refused(Errno::ENOSPC), "there are two slots");
        assert_eq!(control(segments, &space, other, RMID), 0);
        assert_eq!(control(segments, &space, other, STAT), refused(Errno::EINVAL));
        let again = get(segments, 0, 1, CREAT);
        assert!(again > 0 && again != other, "the slot has another identifier");
        assert_eq!(control(segments, &space, other, RMID), refused(Errno::EINVAL));
        assert_eq!(control(segments, &space, -1, STAT), refused(Errno::EINVAL));
        assert_eq!(control(segments, &space, id, 77), refused(Errno::EINVAL));
        let nowhere = shmctl(segments, &space, &ROOT, &ROOT_LOCKS, [id as u64, STAT, 8]);
        assert_eq!(nowhere, refused(Errno::EFAULT));
        assert_eq!(attach(segments, &space, id, AT + 1, 0), refused(Errno::EINVAL));
        assert_eq!(attach(segments, &space, id, BUFFER, 0), refused(Errno::EINVAL));
        assert_eq!(attach(segments, &space, id, 0, 0o40000), refused(Errno::EINVAL));
        assert_eq!(attach(segments, &space, id, AT + 1, 0o20000), AT as i64, "SHM_RND");
        let constant = attach(segments, &space, id, 0, READ_ONLY);
        let constant = VirtAddr(constant as u64);
        assert!(space.mprotect(constant, PAGE_SIZE, READ_WRITE).is_err());
        assert_eq!(attached(segments, &space, id), Some(2), "what was refused does not count");
        audit(&machine, &memory, &[&space]);
    });
}

#[test]
fn permissions_bind_those_without_privilege() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    on(&memory, 2, |segments| {
        let space = space(&memory);
        let user = |user, group| IpcUser { user, group, groups: &[], privileged: false };
        let (owner, friend, stranger) = (user(5, 50), user(6, 50), user(7, 70));
        let member = IpcUser { groups: &[71, 50], ..stranger };
        let id = shmget(segments, &owner, [9, PAGE_SIZE, CREAT | 0o640]);
        let of = |user: &IpcUser<'_>, flags| shmget(segments, user, [9, 1, flags]);
        assert_eq!([of(&owner, 0o600), of(&friend, 0o400), of(&stranger, 0)], [id; 3]);
        let denied = refused(Errno::EACCES);
        assert_eq!([of(&friend, 0o600), of(&stranger, 0o400)], [denied; 2]);
        assert_eq!([of(&member, 0o400), of(&member, 0o600)], [id, denied], "by another group");
        let attach = |user, flags| shmat(segments, &space, user, [id as u64, AT, flags]);
        assert_eq!(attach(&stranger, READ_ONLY), denied);
        assert_eq!(attach(&friend, 0), denied);
        assert_eq!(attach(&owner, 0o100_000), denied, "to execute");
        assert_eq!(attach(&friend, READ_ONLY), AT as i64);
        let account = LockAccount::new();
        let account: &'static LockAccount = Box::leak(Box::new(account));
        let locking = SegmentLocking { account, limit: u64::MAX, privileged: false };
        let control =
            |user, command| shmctl(segments, &space, user, &locking, [id as u64, command, BUFFER]);
        assert_eq!([control(&stranger, STAT), control(&friend, STAT)], [denied, 0]);
        let forbidden = refused(Errno::EPERM);
        assert_eq!([RMID, SET, LOCK].map(|command| control(&friend, command)), [forbidden; 3]);
        // The owner transfers the segment and keeps the creator's rights.
        assert_eq!(control(&owner, STAT), 0);
        space.write_user(VirtAddr(BUFFER + 4), &7_u32.to_le_bytes()).unwrap();
        assert_eq!(control(&owner, SET), 0);
        assert_eq!([control(&stranger, STAT), control(&stranger, LOCK)], [0; 2]);
        assert_eq!(word(segments, &space, id, 2).unwrap() >> 32, 0o2640);
        assert_eq!(control(&owner, RMID), 0);
        audit(&machine, &memory, &[&space]);
    });
}

#[test]
fn locked_segments_count_for_their_locker() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    let (own, other) = (LockAccount::new(), LockAccount::new());
    let (own, other): (&'static _, &'static _) =
        (Box::leak(Box::new(own)), Box::leak(Box::new(other)));
    on(&memory, 4, |segments| {
        let space = space(&memory);
        let owner = IpcUser { user: 5, group: 5, groups: &[], privileged: false };
        let make = |pages: u64| shmget(segments, &owner, [0, pages * PAGE_SIZE - 1, 0o600]);
        let control = |account, limit, privileged, id: i64, command| {
            let locking = SegmentLocking { account, limit, privileged };
            shmctl(segments, &space, &owner, &locking, [id as u64, command, 0])
        };
        let limited = |limit, id, command| control(own, limit, false, id, command);
        let four = 4 * PAGE_SIZE;
        let (large, small) = (make(4), make(1));
        assert_eq!(limited(0, large, LOCK), refused(Errno::EPERM));
        assert_eq!(limited(four - 1, large, LOCK), refused(Errno::ENOMEM));
        assert_eq!((own.used(), word(segments, &space, large, 2).unwrap() >> 32), (0, 0o600));
        assert_eq!([limited(four, large, LOCK), limited(four, large, LOCK)], [0; 2]);
        assert_eq!(own.used(), 4, "once");
        assert_eq!(limited(four, small, LOCK), refused(Errno::ENOMEM));
        assert_eq!(limited(u64::MAX, small, LOCK), 0, "no limit");
        assert_eq!(limited(0, small, UNLOCK), 0, "needs no limit");
        assert_eq!(control(other, 0, true, small, LOCK), 0, "with privilege");
        assert_eq!(limited(four, small, LOCK), 0, "is locked already");
        assert_eq!((own.used(), other.used()), (4, 1));
        assert_eq!(limited(four, small, UNLOCK), 0);
        assert_eq!((own.used(), other.used()), (4, 0), "returns to the user that locked");
        // Detaching the last attachment destroys the segment.
        assert_eq!(shmat(segments, &space, &owner, [large as u64, AT, 0]), AT as i64);
        assert_eq!(limited(four, large, RMID), 0);
        assert_eq!(own.used(), 4);
        assert_eq!(shmdt(&space, AT), 0);
        assert_eq!(own.used(), 0, "destroyed");
        assert_eq!(limited(four, small, LOCK), 0);
        audit(&machine, &memory, &[&space]);
    });
    assert_eq!(own.used(), 0, "cleared");
}

/// The owner and the creator of a segment may lock and unlock it. Any other user needs
/// `CAP_IPC_LOCK`; the privilege that overrides permissions is not enough.
#[test]
fn strangers_neither_lock_nor_unlock_segments() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    let account: &'static _ = Box::leak(Box::new(LockAccount::new()));
    on(&memory, 1, |segments| {
        let space = space(&memory);
        let user = |user, privileged| IpcUser { user, group: 1, groups: &[], privileged };
        let (maker, owner, stranger) = (user(5, false), user(6, false), user(7, false));
        let id = shmget(segments, &maker, [0, 3 * PAGE_SIZE, 0o666]);
        let control = |user: &IpcUser<'_>, privileged, command| {
            let locking = SegmentLocking { account, limit: u64::MAX, privileged };
            shmctl(segments, &space, user, &locking, [id as u64, command, BUFFER])
        };
        assert_eq!(control(&maker, false, STAT), 0);
        space.write_user(VirtAddr(BUFFER + 4), &6_u32.to_le_bytes()).unwrap();
        assert_eq!(control(&maker, false, SET), 0);
        let forbidden = refused(Errno::EPERM);
        for refused in [stranger, user(7, true)] {
            assert_eq!([LOCK, UNLOCK].map(|call| control(&refused, false, call)), [forbidden; 2]);
            assert_eq!(account.used(), 0);
            assert_eq!(control(&owner, false, LOCK), 0);
            assert_eq!([LOCK, UNLOCK].map(|call| control(&refused, false, call)), [forbidden; 2]);
            assert_eq!(account.used(), 3);
            assert_eq!(control(&maker, false, UNLOCK), 0);
        }
        for (privileged, user) in [(false, maker), (false, owner), (true, stranger)] {
            assert_eq!(control(&user, privileged, LOCK), 0);
            assert_eq!(account.used(), 3);
            assert_eq!(control(&user, privileged, UNLOCK), 0);
            assert_eq!(account.used(), 0);
        }
        audit(&machine, &memory, &[&space]);
    });
}

#[test]
fn reclaim_finds_an_unlocked_segment() {
    const PAGES: u64 = 64;
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    memory.swap_on(4096, 0).unwrap();
    on(&memory, 1, |segments| {
        let space = space(&memory);
        let id = get(segments, 0, PAGES * PAGE_SIZE, 0o600);
        assert_eq!(attach(segments, &space, id, AT, 0), AT as i64);
        for page in 0..PAGES {
            space.write_user(VirtAddr(AT + page * PAGE_SIZE), &[page as u8 + 1]).unwrap();
        }
        assert_eq!(control(segments, &space, id, LOCK), 0);
        let searches: Vec<_> = (0..8).map(|_| memory.reclaim(u64::MAX)).collect();
        assert_eq!(searches.last().unwrap().scanned, 64, "nothing is left, and that is known");
        assert_eq!(control(segments, &space, id, UNLOCK), 0);
        assert_eq!(memory.reclaim(u64::MAX).freed, PAGES);
        audit(&machine, &memory, &[&space]);
    });
}

#[test]
fn reclaim_spares_only_locked_segments_within_the_limit() {
    let (machine, memory) = strict::<X86_64>(32 * MIB);
    memory.swap_on(4096, 0).unwrap();
    on(&memory, 2, |segments| {
        let space = space(&memory);
        let owner = IpcUser { user: 5, group: 5, groups: &[], privileged: false };
        let account: &'static LockAccount = Box::leak(Box::new(LockAccount::new()));
        let locking = SegmentLocking { account, limit: 16 * PAGE_SIZE, privileged: false };
        let results = [16, 48].map(|pages| {
            let id = shmget(segments, &owner, [0, pages * PAGE_SIZE, 0o600]);
            let at = AT + pages * MIB;
            assert_eq!(shmat(segments, &space, &owner, [id as u64, at, 0]), at as i64);
            for page in 0..pages {
                space.write_user(VirtAddr(at + page * PAGE_SIZE), &[page as u8 + 1]).unwrap();
            }
            shmctl(segments, &space, &owner, &locking, [id as u64, LOCK, 0])
        });
        assert_eq!(results, [0, refused(Errno::ENOMEM)]);
        memory.reclaim(u64::MAX);
        assert!(control(segments, &space, 0, USAGE) >= 0);
        let mut words = [0; 16];
        space.read_user(VirtAddr(BUFFER + 16), &mut words).unwrap();
        assert_eq!(words, [16_u64, 48].map(u64::to_le_bytes).as_flattened(), "resident, in swap");
        audit(&machine, &memory, &[&space]);
    });
}

#[test]
fn listings_name_segments() {
    let (_machine, memory) = strict::<X86_64>(32 * MIB);
    on(&memory, 2, |segments| {
        let space = space(&memory);
        get(segments, 0, 1, CREAT);
        let id = get(segments, 0xabcd, 5000, CREAT | 0o600);
        attach(segments, &space, id, AT, 0);
        space.write_user(VirtAddr(AT), &[1]).unwrap();
        let mut text = String::new();
        proc::maps_entry(&space, &Unnamed, VirtAddr(0), &mut text).unwrap();
        let squeeze = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
        let expected = "40000000-40002000 rw-s 00000000 00:01 1 /SYSV0000abcd (deleted)";
        assert_eq!(squeeze(&text), squeeze(expected));
        text.clear();
        proc::sysvipc_shm(segments, &mut text).unwrap();
        let line = "     43981          1   600                  5000     7     7      1     0     \
                    0     0     0       1000          0       1000                  4096          \
                    0";
        let found = text.lines().nth(2).unwrap();
        assert_eq!(squeeze(found), squeeze(line));
        assert_eq!(found.len(), text.lines().next().unwrap().len(), "columns stand below names");
    });
}

#[test]
fn memory_that_runs_out_leaves_no_segment() {
    let (machine, memory) = strict::<X86_64>(2 * MIB);
    on(&memory, 2, |segments| {
        let space = space(&memory);
        memory.commitment().set_mode(bindery::Overcommit::Never);
        assert_eq!(get(segments, 3, GIB, CREAT), refused(Errno::ENOMEM));
        assert_eq!(get(segments, 3, PAGE_SIZE, 0), refused(Errno::ENOENT));
        let id = get(segments, 3, PAGE_SIZE, CREAT);
        assert_eq!(id, 0);
        assert_eq!(memory.commitment().committed(), 2, "with the buffer's");
        assert_eq!(control(segments, &space, id, RMID), 0);
        assert_eq!(memory.commitment().committed(), 1);
        audit(&machine, &memory, &[&space]);
    });
}
