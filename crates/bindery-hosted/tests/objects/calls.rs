//! Objects without mappings: reads, writes, resizes, holes, seals, folios of all sizes. Random
//! sequences match a model, the auditor finds nothing, and nothing leaks.

use std::thread;

use bindery::addr::Order;
use bindery::arch::X86_64;
use bindery::{Accounting, Error, Growth, Object, Operation, Overcommit, Sealing, Seals};
use bindery_hosted::{Config, MemoryFiles, TlbKind};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestCaseError};

use crate::support::objects::{
    Model, Op, PAGE, apply, content, in_memory, memfd, op, use_object_order,
};
use crate::support::{MIB, audit, memory_with, strict};

type Arch = X86_64<4>;

#[test]
fn written_bytes_are_read_and_holes_are_zeroes() {
    in_memory(|memory, audit| {
        let object = memfd(memory, 0);
        assert_eq!((object.size(), object.resident_pages()), (0, 0));
        assert_eq!(object.write(3 * PAGE + 100, b"hello"), Ok(5));
        assert_eq!((object.size(), object.resident_pages()), (3 * PAGE + 105, 1));
        let mut bytes = [0xee; 10];
        assert_eq!(object.read(3 * PAGE + 98, &mut bytes), Ok(7));
        assert_eq!(&bytes, b"\0\0hello\xee\xee\xee");
        assert_eq!(object.read(0, &mut bytes), Ok(10));
        assert_eq!((bytes, object.resident_pages()), ([0; 10], 1));
        assert_eq!(audit().object_pages, 1);
    });
}

#[test]
fn the_last_handle_frees_the_object() {
    in_memory(|memory, audit| {
        let first = memfd(memory, 100);
        let second = first.clone();
        first.write(0, b"abc").unwrap();
        let other = memfd(memory, 100);
        assert_eq!(first.identity(), second.identity());
        assert_ne!(first.identity(), other.identity());
        drop(first);
        assert_eq!(&content(&second)[..3], b"abc");
        assert_eq!(audit().objects, 2);
    });
}

#[test]
fn a_holed_folio_is_freed_with_its_rest() {
    in_memory(|memory, audit| {
        use_object_order(memory, 4);
        let object = memfd(memory, 16 * PAGE);
        // The other allocations of the object: its state and its index.
        object.write(0, &[7; 1]).unwrap();
        assert_eq!(object.resident_pages(), 16);
        let free = memory.free_frame_count();
        assert_eq!(object.punch_hole(4 * PAGE, 8 * PAGE), Ok(()));
        assert_eq!((object.resident_pages(), memory.free_frame_count()), (8, free));
        assert_eq!(audit().folios, 1);
        // Folios that fit fill the hole.
        object.write(5 * PAGE, &[8; 1]).unwrap();
        assert_eq!((object.resident_pages(), memory.free_frame_count()), (9, free - 1));
        assert_eq!(audit().folios, 2);
        object.punch_hole(0, 4 * PAGE).unwrap();
        assert_eq!(memory.free_frame_count(), free - 1);
        object.punch_hole(12 * PAGE, 4 * PAGE).unwrap();
        assert_eq!((object.resident_pages(), memory.free_frame_count()), (1, free + 15));
        assert_eq!(audit().folios, 1);
        let bytes = content(&object);
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1);
    });
}

#[test]
fn the_largest_folio_that_fits_is_used() {
    in_memory(|memory, audit| {
        for order in [2, 4, 9] {
            memory.shared_folio_policy().set(Order(order), bindery::SizeMode::Always);
        }
        let object = memfd(memory, 2 * MIB + 5 * PAGE);
        object.write(7 * PAGE, &[1]).unwrap();
        assert_eq!(object.resident_pages(), 512);
        object.write(2 * MIB + PAGE, &[1]).unwrap();
        assert_eq!(object.resident_pages(), 516);
        // Writes behind the last whole window, where the size in pages ends.
        object.write(2 * MIB + 4 * PAGE, &[1]).unwrap();
        assert_eq!(object.resident_pages(), 517);
        assert_eq!(audit().folios, 3);
        // A write that extends the object may use folios up to its end.
        object.set_size(0).unwrap();
        assert_eq!(object.write(0, &vec![1; 64 * PAGE as usize]), Ok(64 * PAGE as usize));
        assert_eq!((object.resident_pages(), audit().folios), (64, 4));
    });
}

#[test]
fn a_size_regrown_shows_zeroes() {
    in_memory(|memory, audit| {
        for order in [0, 3] {
            use_object_order(memory, order);
            let object = memfd(memory, 0);
            object.write(0, &[9; 5 * PAGE as usize]).unwrap();
            object.set_size(PAGE + 10).unwrap();
            assert_eq!(object.resident_pages(), 2);
            object.set_size(5 * PAGE).unwrap();
            let bytes = content(&object);
            assert!(bytes[..PAGE as usize + 10].iter().all(|byte| *byte == 9));
            assert!(bytes[PAGE as usize + 10..].iter().all(|byte| *byte == 0));
            audit();
        }
    });
}

#[test]
fn pages_beyond_the_end_wait_for_the_size() {
    in_memory(|memory, audit| {
        let object = memfd(memory, 10 * PAGE);
        object.allocate(20 * PAGE, PAGE, Growth::Forbidden).unwrap();
        assert_eq!((object.size(), object.resident_pages()), (10 * PAGE, 1));
        object.set_size(11 * PAGE).unwrap();
        assert_eq!(object.resident_pages(), 1);
        object.set_size(11 * PAGE).unwrap();
        assert_eq!(object.resident_pages(), 0);
        object.allocate(20 * PAGE - 1, 2, Growth::Allowed).unwrap();
        assert_eq!((object.size(), object.resident_pages()), (20 * PAGE + 1, 2));
        audit();
    });
}

#[test]
fn seals_can_neither_be_removed_nor_bypassed() {
    in_memory(|memory, _| {
        let object = memfd(memory, PAGE);
        assert_eq!(object.add_seals(Seals::from_bits_retain(0x100)), Err(Error::Invalid));
        assert_eq!(object.add_seals(Seals::WRITE | Seals::SHRINK), Ok(()));
        assert!(object.is_sealed_for_writing());
        assert_eq!(object.write(0, b"x"), Err(Error::SealForbids));
        assert_eq!(object.write(0, b""), Ok(0));
        assert_eq!(object.punch_hole(0, PAGE), Err(Error::SealForbids));
        assert_eq!(object.set_size(0), Err(Error::SealForbids));
        assert_eq!(object.set_size(2 * PAGE), Ok(()));
        // As on Linux: allocated pages contained zeroes before.
        assert_eq!(object.allocate(0, 3 * PAGE, Growth::Allowed), Ok(()));
        object.add_seals(Seals::SEAL).unwrap();
        assert_eq!(object.add_seals(Seals::empty()), Err(Error::SealForbids));
        assert_eq!(object.seals(), Seals::WRITE | Seals::SHRINK | Seals::SEAL);
        let forbidden = memory.shared_memory(0, Sealing::Forbidden, Accounting::None).unwrap();
        assert_eq!(forbidden.seals(), Seals::SEAL);
        assert_eq!(forbidden.add_seals(Seals::GROW), Err(Error::SealForbids));
    });
}

#[test]
fn a_write_stops_before_a_sealed_growth() {
    in_memory(|memory, _| {
        let object = memfd(memory, 6144);
        object.add_seals(Seals::GROW).unwrap();
        assert_eq!(object.write(0, &[1; 8192]), Ok(4096));
        assert_eq!(object.write(4096, &[1; 8192]), Err(Error::SealForbids));
        assert_eq!(object.write(5000, &[1; 1144]), Ok(1144));
        assert_eq!(object.write(5000, &[1; 1145]), Err(Error::SealForbids));
        assert_eq!(object.allocate(0, 6145, Growth::Forbidden), Err(Error::SealForbids));
        assert_eq!(object.size(), 6144);
    });
}

#[test]
fn extreme_numbers_are_refused_or_right() {
    const END: u64 = i64::MAX as u64;
    in_memory(|memory, audit| {
        let object = memfd(memory, 0);
        for (offset, length) in
            [(END, 1), (END - 10, 11), (u64::MAX, 1), (u64::MAX, 11), (1 << 63, 0)]
        {
            let mut bytes = vec![0; length];
            assert_eq!(object.write(offset, &bytes), Err(Error::Invalid), "{offset:#x}");
            assert_eq!(object.read(offset, &mut bytes), Err(Error::Invalid), "{offset:#x}");
        }
        assert_eq!(object.write(END, &[]), Ok(0));
        assert_eq!(object.write(END - 10, &[5; 10]), Ok(10));
        assert_eq!((object.size(), object.resident_pages()), (END, 1));
        let mut bytes = [0; 20];
        assert_eq!(object.read(END - 10, &mut bytes[..10]), Ok(10));
        assert_eq!(bytes[..10], [5; 10]);
        audit();
        for operation in
            [Object::punch_hole, |o: &Object<'_, _>, a, b| o.allocate(a, b, Growth::Allowed)]
        {
            assert_eq!(operation(&object, 0, 0), Err(Error::Invalid));
            assert_eq!(operation(&object, END, 1), Err(Error::TooLarge));
            assert_eq!(operation(&object, END, END), Err(Error::TooLarge));
            assert_eq!(operation(&object, u64::MAX, 1), Err(Error::Invalid));
            assert_eq!(operation(&object, 1, u64::MAX), Err(Error::Invalid));
            assert_eq!(operation(&object, END - 1, 1), Ok(()));
        }
        // The last page extends one byte beyond the maximum size of an object.
        assert_eq!(object.punch_hole(0, END), Ok(()));
        assert_eq!(object.resident_pages(), 1);
        assert_eq!(object.read(END - 10, &mut bytes[..10]), Ok(10));
        assert_eq!(bytes[..10], [0; 10]);
        assert_eq!(object.set_size(END + 1), Err(Error::TooLarge));
        assert_eq!(object.set_size(END), Ok(()));
        assert_eq!(object.sync(u64::MAX, u64::MAX), Ok(()));
        let huge = memory.shared_memory(END + 1, Sealing::Allowed, Accounting::None);
        assert_eq!(huge.err(), Some(Error::TooLarge));
        assert_eq!(Error::TooLarge.errno(Operation::Object) as i32, 27);
    });
}

#[test]
fn too_many_pages_are_freed_again() {
    in_memory(|memory, audit| {
        use_object_order(memory, 9);
        let object = memfd(memory, 0);
        object.write(PAGE, b"kept").unwrap();
        let (free, pages) = (memory.free_frame_count(), object.resident_pages());
        let refused = object.allocate(0, i64::MAX as u64, Growth::Allowed);
        assert_eq!(refused, Err(Error::OutOfMemory));
        assert_eq!((object.size(), object.resident_pages()), (PAGE + 4, pages));
        memory.trim();
        assert_eq!(memory.free_frame_count(), free);
        assert_eq!(&content(&object)[PAGE as usize..], b"kept");
        audit();
    });
}

#[test]
fn what_is_promised_follows_size_or_pages() {
    in_memory(|memory, audit| {
        let promised = || memory.commitment().committed();
        let whole = memory.shared_memory(10 * PAGE, Sealing::Allowed, Accounting::Whole).unwrap();
        assert_eq!(promised(), 10);
        whole.set_size(20 * PAGE + 1).unwrap();
        assert_eq!(promised(), 21);
        whole.write(29 * PAGE, &[1]).unwrap();
        assert_eq!(promised(), 30);
        audit();
        whole.set_size(0).unwrap();
        let each = memfd(memory, 100 * PAGE);
        let none = memory.shared_memory(100 * PAGE, Sealing::Allowed, Accounting::None).unwrap();
        assert_eq!(promised(), 0);
        each.allocate(0, 3 * PAGE, Growth::Forbidden).unwrap();
        none.allocate(0, 3 * PAGE, Growth::Forbidden).unwrap();
        assert_eq!(promised(), 3);
        each.punch_hole(PAGE, PAGE).unwrap();
        assert_eq!(promised(), 2);
        audit();
    });
}

#[test]
fn what_may_not_be_promised_is_refused() {
    in_memory(|memory, audit| {
        memory.commitment().set_mode(Overcommit::Never);
        memory.commitment().set_limit(8);
        let whole = memory.shared_memory(9 * PAGE, Sealing::Allowed, Accounting::Whole);
        assert_eq!(whole.err(), Some(Error::Overcommitted));
        let whole = memory.shared_memory(4 * PAGE, Sealing::Allowed, Accounting::Whole).unwrap();
        assert_eq!(whole.set_size(9 * PAGE), Err(Error::Overcommitted));
        assert_eq!(whole.write(9 * PAGE, &[1]), Err(Error::Overcommitted));
        assert_eq!((whole.size(), memory.commitment().committed()), (4 * PAGE, 4));
        let each = memfd(memory, 100 * PAGE);
        use_object_order(memory, 3);
        // A smaller folio can still be committed.
        assert_eq!(each.write(0, &[1; 6 * PAGE as usize]), Ok(4 * PAGE as usize));
        assert_eq!(each.write(50 * PAGE, &[1]), Err(Error::NoSpace));
        assert_eq!(each.allocate(0, 5 * PAGE, Growth::Forbidden), Err(Error::NoSpace));
        assert_eq!(each.resident_pages(), 4);
        assert_eq!(Error::NoSpace.errno(Operation::Object) as i32, 28);
        // An allocation that is exempt from accounting succeeds although the commit limit is
        // exceeded.
        memory.commitment().set_limit(1);
        let none = memory.shared_memory(PAGE, Sealing::Allowed, Accounting::None).unwrap();
        assert_eq!(none.write(0, &[1; 10]), Ok(10));
        each.set_size(0).unwrap();
        whole.set_size(PAGE).unwrap();
        audit();
    });
}

fn sequence_agrees(ops: &[Op], is_file: bool) -> Result<(), TestCaseError> {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<Arch>(16 * MIB);
    let free = memory.free_frame_count();
    let mut model = Model { is_file, ..Model::default() };
    {
        let object = if is_file { memory.file(&files, 1, 0).unwrap() } else { memfd(&memory, 0) };
        for op in ops {
            prop_assert_eq!(apply(&object, &memory, *op), model.apply(*op), "{:?}", op);
            prop_assert_eq!(object.size(), model.bytes.len() as u64, "{:?}", op);
            prop_assert_eq!(object.seals(), model.seals);
            audit(&machine, &memory, &[]);
        }
        prop_assert_eq!(&content(&object), &model.bytes);
    }
    if is_file {
        prop_assert_eq!(files.content(1), model.bytes);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    prop_assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    prop_assert_eq!(memory.commitment().committed(), 0);
    Ok(())
}

proptest! {
    #![proptest_config(Cases { cases: 300, failure_persistence: None, ..Cases::default() })]

    #[test]
    fn random_sequences_agree_with_bytes(ops in prop::collection::vec(op(), 1..40)) {
        sequence_agrees(&ops, false)?;
    }

    #[test]
    fn random_sequences_on_a_file_agree_with_bytes(ops in prop::collection::vec(op(), 1..40)) {
        sequence_agrees(&ops, true)?;
    }
}

#[test]
fn many_threads_use_one_object_at_once() {
    const THREADS: u16 = 4;
    let files = MemoryFiles::new();
    let (machine, memory) = memory_with::<Arch>(Config {
        memory: 32 * MIB,
        cpus: THREADS,
        tlb: TlbKind::Strict,
        ..Config::default()
    });
    let free = memory.free_frame_count();
    use_object_order(&memory, 2);
    {
        let shared = memfd(&memory, 64 * PAGE);
        let file = memory.file(&files, 1, 64 * PAGE).unwrap();
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (machine, shared, file) = (&machine, shared.clone(), file.clone());
                scope.spawn(move || {
                    let _cpu = machine.bind(bindery::platform::Cpu(number));
                    // Each thread owns every fourth page; size changes and holes affect all pages.
                    for round in 0..200_u64 {
                        let page = u64::from(number) + 4 * (round * 7 % 16);
                        let byte = (round % 250) as u8 + 1;
                        let at = page * PAGE + round;
                        for (object, is_cut) in [(&shared, true), (&file, false)] {
                            assert_eq!(object.write(at, &[byte; 100]), Ok(100));
                            let mut back = [0; 100];
                            let read = object.read(at, &mut back).unwrap();
                            // Another thread may have truncated the memfd in between.
                            assert!(read == 100 || is_cut, "{read} bytes");
                            if read < 100 {
                                continue;
                            }
                            // Reads the whole write, or zeroes if another thread has truncated the
                            // memfd.
                            assert!(back == [byte; 100] || back == [0; 100] || number != 0);
                        }
                        match (number, round % 10) {
                            (1, 3) => file.sync(0, u64::MAX).unwrap(),
                            (2, 5) => shared.punch_hole(page * PAGE, PAGE).unwrap(),
                            (3, 6) => file.punch_hole(page * PAGE, 9 * PAGE).unwrap(),
                            (3, 7) => shared.set_size(page * PAGE + 4000).unwrap(),
                            (1, 8) => shared.allocate(0, 64 * PAGE, Growth::Allowed).unwrap(),
                            _ => {}
                        }
                    }
                });
            }
        });
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.content(1), content(&file));
        audit(&machine, &memory, &[]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free);
}
