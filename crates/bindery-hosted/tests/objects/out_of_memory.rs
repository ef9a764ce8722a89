//! Memory runs out at every single allocation of every operation of an object. The operation fails
//! or completes partially, the object loses no data, nothing leaks, and the operation succeeds once
//! memory is available again.

use bindery::arch::X86_64;
use bindery::{Accounting, Error, Growth, Memory, Object, Sealing, testing};
use bindery_hosted::{Machine, MemoryFiles};

use crate::support::objects::{PAGE, content, use_object_order};
use crate::support::{MIB, audit, strict};

type Hosted = Machine<X86_64<4>>;

/// The allocations that fail.
#[derive(Clone, Copy, Debug)]
enum Failing {
    AllFrom(u64),
    Only(u64),
}

impl Failing {
    fn begin(self, memory: &Memory<Hosted>) {
        match self {
            Self::AllFrom(point) => memory.fail_allocations_after(Some(point)),
            Self::Only(point) => testing::fail_one_allocation(memory, Some(point)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Backing {
    Memory,
    File,
}

/// The operation, and the object's content after it; a write may be short.
struct Case {
    backing: Backing,
    order: u8,
    operation: fn(&Object<'_, Hosted>) -> Result<usize, Error>,
    after: fn(&[u8], usize) -> Vec<u8>,
}

/// Present pages with holes between them, and some pages far away.
fn before() -> Vec<u8> {
    let mut bytes = vec![0; 40 * PAGE as usize + 10];
    for page in [0, 1, 7, 20, 39] {
        bytes[page * PAGE as usize..][..PAGE as usize].fill(page as u8 + 1);
    }
    bytes
}

/// Makes the operation fail at one point. Returns whether it reached that point.
fn once(case: &Case, failing: Failing) -> bool {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let free = memory.free_frame_count();
    let failed = {
        let before = before();
        let object = match case.backing {
            Backing::Memory => {
                memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage).unwrap()
            }
            Backing::File => {
                files.put(1, &before);
                memory.file(&files, 1, before.len() as u64).unwrap()
            }
        };
        if case.backing == Backing::Memory {
            for page in [0, 1, 7, 20, 39] {
                let at = page * PAGE;
                object.write(at, &before[at as usize..][..PAGE as usize]).unwrap();
            }
            object.set_size(before.len() as u64).unwrap();
        }
        use_object_order(&memory, case.order);
        let promised = memory.commitment().committed();
        assert_eq!(promised, if case.backing == Backing::Memory { 5 } else { 0 });
        failing.begin(&memory);
        let result = (case.operation)(&object);
        let failures = testing::failed_allocations(&memory);
        memory.fail_allocations_after(None);
        audit(&machine, &memory, &[]);
        let done = match result {
            Ok(done) => done,
            Err(error) => {
                assert_eq!(error, Error::OutOfMemory, "{failing:?}");
                assert_ne!(failures, 0);
                if case.backing == Backing::Memory {
                    assert_eq!((object.resident_pages(), memory.commitment().committed()), (5, 5));
                }
                0
            }
        };
        let there = if result.is_ok() { (case.after)(&before, done) } else { before.clone() };
        assert_eq!(content(&object), there, "{failing:?}, {result:?}");
        // Memory is available again.
        let done = (case.operation)(&object).expect("the second try");
        assert_eq!(content(&object), (case.after)(&before, done), "{failing:?}");
        audit(&machine, &memory, &[]);
        failures > 0
    };
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked, {failing:?}");
    assert_eq!(memory.commitment().committed(), 0);
    failed
}

/// Makes memory run out at every point. Returns the number of points.
#[track_caller]
fn at_every_point(case: &Case) -> u64 {
    for point in 0.. {
        let all = once(case, Failing::AllFrom(point));
        let only = once(case, Failing::Only(point));
        assert_eq!(all, only, "point {point}");
        if !all {
            return point;
        }
    }
    0
}

/// Writes over present pages, holes and the end of the object.
const WRITE: Case = Case {
    backing: Backing::Memory,
    order: 0,
    operation: |object| object.write(PAGE / 2, &[9; 48 * PAGE as usize]),
    after: |before, done| {
        let (start, mut bytes) = (PAGE as usize / 2, before.to_vec());
        bytes.resize(bytes.len().max(start + done), 0);
        bytes[start..start + done].fill(9);
        bytes
    },
};

const ALLOCATE: Case = Case {
    backing: Backing::Memory,
    order: 0,
    operation: |object| object.allocate(PAGE, 100 * PAGE, Growth::Allowed).map(|()| 0),
    after: |before, _| {
        let mut bytes = before.to_vec();
        bytes.resize(101 * PAGE as usize, 0);
        bytes
    },
};

const PUNCH: Case = Case {
    backing: Backing::Memory,
    order: 0,
    operation: |object| object.punch_hole(PAGE + 100, 19 * PAGE).map(|()| 0),
    after: |before, _| {
        let mut bytes = before.to_vec();
        bytes[PAGE as usize + 100..20 * PAGE as usize + 100].fill(0);
        bytes
    },
};

const CUT: Case = Case {
    backing: Backing::Memory,
    order: 0,
    operation: |object| object.set_size(7 * PAGE + 100).map(|()| 0),
    after: |before, _| before[..7 * PAGE as usize + 100].to_vec(),
};

const READ: Case = Case {
    backing: Backing::File,
    order: 0,
    operation: |object| object.read(0, &mut [0; 41 * PAGE as usize]),
    after: |before, _| before.to_vec(),
};

const SYNC: Case = Case {
    backing: Backing::File,
    order: 0,
    operation: |object| object.sync(0, u64::MAX).map(|()| 0),
    after: |before, _| before.to_vec(),
};

#[test]
fn writing_shared_memory() {
    // Of pages 0 to 48, five are present, as is an index node for 64 pages.
    assert_eq!(at_every_point(&WRITE), 44);
    assert!(at_every_point(&Case { order: 3, ..WRITE }) >= 6);
}

#[test]
fn writing_a_file() {
    let file = Case { backing: Backing::File, ..WRITE };
    assert!(at_every_point(&file) >= 49);
    assert!(at_every_point(&Case { order: 4, ..file }) >= 4);
}

#[test]
fn allocating() {
    // Four of 100 pages are present; the index needs a second node, and one above both.
    assert_eq!(at_every_point(&ALLOCATE), 96 + 2);
    assert!(at_every_point(&Case { order: 2, ..ALLOCATE }) >= 24 + 2);
}

#[test]
fn reading_a_file() {
    assert!(at_every_point(&READ) >= 41);
    assert!(at_every_point(&Case { order: 3, ..READ }) >= 6);
}

#[test]
fn punching_a_file_in_part() {
    // Allocations for the two partly removed pages, an index node, and a record for each read.
    assert_eq!(at_every_point(&Case { backing: Backing::File, ..PUNCH }), 5);
}

#[test]
fn what_takes_away_or_stores_needs_no_memory() {
    for order in [0, 3] {
        assert_eq!(at_every_point(&Case { order, ..PUNCH }), 0);
        assert_eq!(at_every_point(&Case { order, ..CUT }), 0);
        assert_eq!(at_every_point(&Case { order, backing: Backing::File, ..CUT }), 0);
        assert_eq!(at_every_point(&Case { order, ..SYNC }), 0);
    }
}

#[test]
fn creating() {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let free = memory.free_frame_count();
    memory.fail_allocations_after(Some(0));
    let shared = memory.shared_memory(PAGE, Sealing::Allowed, Accounting::Whole);
    assert_eq!(shared.err(), Some(Error::OutOfMemory));
    assert_eq!(memory.file(&files, 1, PAGE).err(), Some(Error::OutOfMemory));
    memory.fail_allocations_after(None);
    assert_eq!(files.counts().removed, 0);
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!((memory.free_frame_count(), memory.commitment().committed()), (free, 0));
}
