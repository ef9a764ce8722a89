//! Copies between the memory of two processes: `copy_from`, `copy_to` and `linux::process_vm`.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, X86_64};
use bindery::{AddressSpace, Errno, FaultError, PartialCopy, Protection};
use bindery_hosted::{Machine, Walk};
use bindery_linux::{CopyDirection, IoRange, process_vm, process_vm_ranges};

use crate::support::{GIB, MIB, audit, fixed, options, strict};

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

const AT: u64 = GIB;
/// The address of the arrays of ranges.
const ARRAYS: u64 = 2 * GIB;

fn pattern(length: u64) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / PAGE_SIZE) as u8).collect()
}

fn bytes<A: Walk>(space: &Space<'_, A>, at: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    space.read_user(VirtAddr(at), &mut bytes).unwrap();
    bytes
}

fn with_two<A: Walk>(scenario: impl FnOnce(&Space<'_, A>, &Space<'_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    let [one, other] = [(); 2].map(|()| {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT, 64 * PAGE_SIZE)).unwrap();
        space.mmap(&fixed(ARRAYS, 16 * PAGE_SIZE)).unwrap();
        space
    });
    scenario(&one, &other);
    audit(&machine, &memory, &[&one, &other]);
}

#[test]
fn bytes_come_over_as_they_are() {
    fn scenario<A: Walk>() {
        with_two::<A>(|one, other| {
            let data = pattern(10 * PAGE_SIZE);
            one.write_user(VirtAddr(AT + 5), &data).unwrap();
            let length = data.len() as u64;
            let (from, to) = (VirtAddr(AT + 5), VirtAddr(AT + 4000));
            assert_eq!(one.copy_to(from, other, to, length), Ok(()));
            assert_eq!(bytes(other, to.0, length), data);
            assert_eq!(one.copy_from(VirtAddr(AT + 20 * PAGE_SIZE), one, from, length), Ok(()));
            assert_eq!(bytes(one, AT + 20 * PAGE_SIZE, length), data);
        });
    }
    scenario::<X86_64>();
    scenario::<AArch64>();
}

#[test]
fn a_fault_on_either_side_ends_the_copy() {
    with_two::<X86_64>(|one, other| {
        let end = VirtAddr(AT + 64 * PAGE_SIZE - 1500);
        let stopped = Err(PartialCopy { copied: 1500, fault: FaultError::NotMapped });
        assert_eq!(other.copy_from(VirtAddr(AT + 9), one, end, PAGE_SIZE), stopped);
        assert_eq!(other.copy_from(end, one, VirtAddr(AT + 9), PAGE_SIZE), stopped);
        let constant = VirtAddr(AT + PAGE_SIZE);
        other.mprotect(constant, PAGE_SIZE, Protection::READ).unwrap();
        let stopped = Err(PartialCopy { copied: 9, fault: FaultError::Protection });
        let before = VirtAddr(constant.0 - 9);
        assert_eq!(one.copy_to(VirtAddr(AT), other, before, 100), stopped);
        assert_eq!(other.copy_to(before, one, VirtAddr(AT), 100), Ok(()));
        let stopped = Err(PartialCopy { copied: 0, fault: FaultError::NotMapped });
        let last = VirtAddr(u64::MAX);
        assert_eq!(one.copy_to(last, other, VirtAddr(AT), 100), stopped);
        assert_eq!(one.copy_to(VirtAddr(AT), other, last, 100), stopped);
    });
}

/// The bytes before the signal are copied, and the call returns their number.
#[test]
fn a_fatal_signal_ends_a_copy_early() {
    let (machine, memory) = strict::<X86_64>(64 * MIB);
    let [one, other] = [(); 2].map(|()| AddressSpace::new(&memory, options()).unwrap());
    for space in [&one, &other] {
        space.mmap(&fixed(AT, 64 * PAGE_SIZE)).unwrap();
        space.write_user(VirtAddr(AT), &vec![1; 64 * PAGE_SIZE as usize]).unwrap();
    }
    put(&one, AT, &[(AT + 16 * PAGE_SIZE, 16 * PAGE_SIZE)]);
    let arguments = [7, AT, 1, AT, 1, 0];
    for (questions, pieces) in [(0, 0), (3, 3), (17, 17), (64, 64)] {
        let interrupted = PartialCopy { copied: pieces << 10, fault: FaultError::Interrupted };
        for write in [false, true] {
            machine.fatal_signal_after(Some(questions));
            let result = if write {
                one.copy_to(VirtAddr(AT + 16 * PAGE_SIZE), &other, VirtAddr(AT), 17 * PAGE_SIZE)
            } else {
                one.copy_from(VirtAddr(AT + 16 * PAGE_SIZE), &other, VirtAddr(AT), 17 * PAGE_SIZE)
            };
            assert_eq!(result, Err(interrupted), "after {questions} questions, write: {write}");
        }
        machine.fatal_signal_after(Some(questions));
        let copied = call(&one, &other, CopyDirection::Write, arguments);
        let expected = if pieces == 0 { -(Errno::EINTR as i64) } else { (pieces << 10) as i64 };
        assert_eq!(copied, expected, "after {questions} questions");
        machine.fatal_signal_after(None);
    }
    audit(&machine, &memory, &[&one, &other]);
}

/// Writes ranges to the program's memory, beginning at `at`.
fn put<A: Walk>(space: &Space<'_, A>, at: u64, ranges: &[(u64, u64)]) {
    let words = ranges.iter().flat_map(|(start, length)| [*start, *length]);
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    space.write_user(VirtAddr(at), &bytes).unwrap();
}

fn call<A: Walk>(
    caller: &Space<'_, A>,
    other: &Space<'_, A>,
    direction: CopyDirection,
    arguments: [u64; 6],
) -> i64 {
    let mut ranges = vec![IoRange::default(); process_vm_ranges(arguments)];
    let find = |id| if id == 7 { Ok(other) } else { Err(Errno::ESRCH) };
    process_vm(caller, direction, arguments, &mut ranges, find)
}

#[test]
fn ranges_of_both_sides_are_consumed_in_order() {
    with_two::<X86_64>(|one, other| {
        let data = pattern(300);
        other.write_user(VirtAddr(AT), &data).unwrap();
        put(one, ARRAYS, &[(AT, 10), (AT + 50, 0), (AT + 100, 200)]);
        put(one, ARRAYS + 100, &[(AT, 3), (AT + 3, 100), (AT + 103, 17), (AT - 1, 5)]);
        let arguments = [7, ARRAYS, 3, ARRAYS + 100, 4, 0];
        assert_eq!(call(one, other, CopyDirection::Read, arguments), 120, "and then a fault");
        assert_eq!(bytes(one, AT, 10), data[..10]);
        assert_eq!(bytes(one, AT + 100, 110), data[10..120]);
        assert_eq!(bytes(one, AT + 210, 90), [0; 90]);
        other.write_user(VirtAddr(AT), &[0; 300]).unwrap();
        assert_eq!(call(one, other, CopyDirection::Write, arguments), 120);
        assert_eq!(bytes(other, AT, 120), data[..120]);
    });
}

#[test]
fn the_arrays_are_read_before_anything_is_copied() {
    with_two::<X86_64>(|one, other| {
        // The first 16 copied bytes overwrite the arrays themselves.
        put(one, ARRAYS, &[(ARRAYS, 16), (ARRAYS + 32, 16), (AT, 32)]);
        assert_eq!(call(one, other, CopyDirection::Read, [7, ARRAYS, 2, ARRAYS + 32, 1, 0]), 32);
        assert_eq!(bytes(one, ARRAYS, 16), [0; 16]);
    });
}

#[test]
fn refusals_have_the_order_of_linux() {
    with_two::<X86_64>(|one, other| {
        let read = |arguments| call(one, other, CopyDirection::Read, arguments);
        let refused = |errno: Errno| -(errno as i64);
        let (good, empty, negative, outside) = (ARRAYS, ARRAYS + 16, ARRAYS + 32, ARRAYS + 48);
        put(one, ARRAYS, &[(AT, 10), (AT, 0), (AT, 1 << 63), (u64::MAX - 4095, 10)]);
        assert_eq!(read([8, good, 1025, good, 1, 1]), refused(Errno::EINVAL));
        assert_eq!(read([8, good, 1, good, 1, 1 << 40]), refused(Errno::EINVAL));
        assert_eq!(read([8, good, 1025, good, 1, 0]), refused(Errno::EINVAL));
        assert_eq!(read([8, negative, 1, good, 1, 0]), refused(Errno::EINVAL));
        assert_eq!(read([8, outside, 1, good, 1025, 0]), refused(Errno::EFAULT));
        assert_eq!(read([8, 0, 1, good, 1025, 0]), refused(Errno::EFAULT));
        assert_eq!(read([8, empty, 1, 0, 1025, 0]), 0, "there is nothing to copy to");
        assert_eq!(read([8, good, 1, good, 1025, 0]), refused(Errno::EINVAL));
        assert_eq!(read([8, good, 1, negative, 1, 0]), refused(Errno::EINVAL));
        assert_eq!(read([8, good, 1, empty, 1, 0]), 0, "there is nothing to copy");
        assert_eq!(read([8, good, 1, good, 1, 0]), refused(Errno::ESRCH));
        assert_eq!(read([7, good, 1, outside, 1, 0]), refused(Errno::EFAULT));
        assert_eq!(read([7, good, 1, good, 1, 0]), 10);
        let none =
            process_vm(one, CopyDirection::Read, [7, good, 1, good, 1, 0], &mut [], |_| Ok(other));
        assert_eq!(none, refused(Errno::ENOMEM), "there is no room for the arrays");
    });
}

#[test]
fn out_of_memory_differs_from_a_fault() {
    let (machine, memory) = strict::<X86_64>(2 * MIB);
    let one = AddressSpace::new(&memory, options()).unwrap();
    let length = 4 * MIB;
    one.mmap(&fixed(AT, length)).unwrap();
    one.mmap(&fixed(ARRAYS, PAGE_SIZE)).unwrap();
    put(&one, ARRAYS, &[(AT, length), (ARRAYS, 16)]);
    let here = [7, ARRAYS, 1, ARRAYS, 1, 0];
    let copied = call(&one, &one, CopyDirection::Read, here);
    assert!(
        copied > 0 && (copied as u64) < length && (copied as u64).is_multiple_of(PAGE_SIZE),
        "{copied}"
    );
    put(&one, ARRAYS, &[(AT + copied as u64, 1), (ARRAYS, 1)]);
    let none = call(&one, &one, CopyDirection::Read, [7, ARRAYS, 1, ARRAYS + 16, 1, 0]);
    assert_eq!(none, -(Errno::ENOMEM as i64));
    audit(&machine, &memory, &[&one]);
}
