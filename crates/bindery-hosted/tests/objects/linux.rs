//! The same random sequence of calls on an object and on a memfd of the host's Linux: results,
//! errno, content, size, and the number of allocated pages agree. Linux must have large folios of
//! shared memory disabled, which is its default.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs;
use std::os::fd::OwnedFd;

use bindery::arch::X86_64;
use bindery::{Errno, Growth, Seals};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestCaseError};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::{Errno as LinuxErrno, pread, pwrite};

use crate::support::objects::{Op, Outcome, PAGE, apply, content, memfd, op};
use crate::support::{MIB, audit, strict};

struct Linux(OwnedFd);

fn errno(error: LinuxErrno) -> Outcome {
    let known =
        [Errno::EPERM, Errno::EINVAL, Errno::EFBIG, Errno::EBUSY, Errno::ENOMEM, Errno::ENOSPC];
    let ours = known.into_iter().find(|known| *known as i32 == error.raw_os_error());
    Outcome::Failed(ours.unwrap_or_else(|| panic!("Linux says {error}")))
}

fn to<T>(result: Result<T, LinuxErrno>, outcome: impl FnOnce(T) -> Outcome) -> Outcome {
    result.map_or_else(errno, outcome)
}

impl Linux {
    fn new() -> Self {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        Self(memfd_create("objects_linux", flags).expect("a memfd"))
    }

    fn apply(&self, op: Op) -> Outcome {
        let done = |()| Outcome::Done;
        match op {
            Op::Read(offset, length) => {
                let mut bytes = vec![0; length as usize];
                to(pread(&self.0, &mut bytes, offset), |count| {
                    bytes.truncate(count);
                    Outcome::Bytes(bytes)
                })
            }
            Op::Write(offset, length, byte) => {
                to(pwrite(&self.0, &vec![byte; length as usize], offset), Outcome::Count)
            }
            Op::SetSize(bytes) => to(ftruncate(&self.0, bytes), done),
            Op::Punch(offset, length) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                to(fallocate(&self.0, flags, offset, length), done)
            }
            Op::Allocate(offset, length, growth) => {
                let flags = match growth {
                    Growth::Allowed => FallocateFlags::empty(),
                    Growth::Forbidden => FallocateFlags::KEEP_SIZE,
                };
                to(fallocate(&self.0, flags, offset, length), done)
            }
            Op::AddSeals(seals) => {
                to(fcntl_add_seals(&self.0, SealFlags::from_bits_retain(seals.bits())), done)
            }
            Op::Sync | Op::Order(_) => Outcome::Done,
        }
    }

    fn size(&self) -> u64 {
        fstat(&self.0).unwrap().st_size as u64
    }

    fn pages(&self) -> u64 {
        fstat(&self.0).unwrap().st_blocks as u64 * 512 / PAGE
    }

    fn seals(&self) -> Seals {
        Seals::from_bits_retain(fcntl_get_seals(&self.0).unwrap().bits())
    }
}

/// Calls whose arguments mostly overflow.
fn far() -> impl Strategy<Value = Op> {
    const END: u64 = i64::MAX as u64;
    let offset = prop::sample::select(vec![
        0,
        1,
        PAGE,
        END - PAGE,
        END - 10,
        END - 1,
        END,
        END + 1,
        u64::MAX,
    ]);
    let few = prop::sample::select(vec![0, 1, 10, 11, PAGE]);
    let many = prop::sample::select(vec![0, 1, 2, PAGE, END - 1, END, END + 1, u64::MAX]);
    prop_oneof![
        (offset.clone(), few.clone()).prop_map(|(at, length)| Op::Read(at, length)),
        (offset.clone(), few.clone()).prop_map(|(at, length)| Op::Write(at, length, 7)),
        (offset.clone(), many).prop_map(|(at, length)| Op::Punch(at, length)),
        (offset.clone(), few).prop_map(|(at, n)| Op::Allocate(at, n, Growth::Forbidden)),
        offset.prop_filter("negative for Linux", |at| *at <= END).prop_map(Op::SetSize),
    ]
}

fn agree(ops: &[Op]) -> Result<(), TestCaseError> {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let object = memfd::<X86_64<4>>(&memory, 0);
    let linux = Linux::new();
    for op in ops {
        if matches!(op, Op::Order(_)) {
            continue;
        }
        let ours = apply(&object, &memory, *op);
        prop_assert_eq!(ours, linux.apply(*op), "{:x?}", op);
        prop_assert_eq!(object.size(), linux.size(), "{:x?}", op);
        prop_assert_eq!(object.resident_pages(), linux.pages(), "{:x?}", op);
        prop_assert_eq!(object.seals(), linux.seals(), "{:x?}", op);
    }
    if object.size() <= MIB {
        let Outcome::Bytes(bytes) = linux.apply(Op::Read(0, MIB)) else {
            return Err(TestCaseError::fail("Linux does not read"));
        };
        prop_assert_eq!(content(&object), bytes);
    }
    audit::<X86_64<4>>(&machine, &memory, &[]);
    Ok(())
}

/// Whether Linux allocates base pages for shared memory.
fn small_folios() -> bool {
    let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    fs::read_to_string(setting).is_ok_and(|modes| modes.contains("[never]"))
}

proptest! {
    #![proptest_config(Cases { cases: 500, failure_persistence: None, ..Cases::default() })]

    #[test]
    fn random_sequences_agree_with_linux(ops in prop::collection::vec(op(), 1..30)) {
        if small_folios() {
            agree(&ops)?;
        }
    }

    #[test]
    fn numbers_at_their_ends_agree_with_linux(
        ops in prop::collection::vec(prop_oneof![4 => far(), 1 => op()], 1..12)
    ) {
        if small_folios() {
            agree(&ops)?;
        }
    }
}
