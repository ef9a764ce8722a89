//! Helpers for the scenarios about objects: their operations, a model of an object, and a pager
//! that fails.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bindery::addr::{Order, VirtAddr};
use bindery::arch::X86_64;
use bindery::check::Report;
use bindery::{
    Accounting, Errno, Error, Growth, Memory, Object, Operation, Pager, PagerError, ReadBuffer,
    Sealing, Seals, SizeMode, StoredBytes,
};
use bindery_hosted::{Machine, MemoryFiles, Walk};
use proptest::prelude::*;

use crate::{MIB, audit, strict};

pub const PAGE: u64 = 4096;

/// Runs `scenario` with a memory and verifies that no object is left and nothing has leaked.
#[track_caller]
pub fn in_memory(scenario: impl FnOnce(&Memory<Machine<X86_64<4>>>, &dyn Fn() -> Report)) {
    let (machine, memory) = strict::<X86_64<4>>(32 * MIB);
    let free = memory.free_frame_count();
    scenario(&memory, &|| audit(&machine, &memory, &[]));
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    assert_eq!(memory.commitment().committed(), 0);
}

/// Pseudo-random numbers, and pages of a range.
pub struct Chance {
    state: u64,
    range: (u64, u64),
}

impl Chance {
    /// Selects pages from the `span` bytes at `at`. The seed is not 0.
    pub fn new(seed: u64, (at, span): (u64, u64)) -> Self {
        Self { state: seed, range: (at, span) }
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) % limit
    }

    pub fn one_of<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.below(these.len() as u64) as usize]
    }

    pub fn page(&mut self) -> VirtAddr {
        let (at, span) = self.range;
        VirtAddr(at + self.below(span / PAGE) * PAGE)
    }
}

/// An operation on an object.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    Read(u64, u64),
    /// Offset, number of bytes, and the value of every byte.
    Write(u64, u64, u8),
    SetSize(u64),
    Punch(u64, u64),
    Allocate(u64, u64, Growth),
    AddSeals(Seals),
    Sync,
    /// Allows folios of this order from now on.
    Order(u8),
}

/// The result of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    Bytes(Vec<u8>),
    Count(usize),
    Failed(Errno),
}

pub fn outcome<T>(result: Result<T, Error>, to: impl FnOnce(T) -> Outcome) -> Outcome {
    result.map_or_else(|error| Outcome::Failed(error.errno(Operation::Object)), to)
}

/// Allows shared memory and files to use folios of 2^`order` pages wherever they fit.
pub fn use_object_order<A: Walk>(memory: &Memory<Machine<A>>, order: u8) {
    for policy in [memory.shared_folio_policy(), memory.file_folio_policy()] {
        (1..=9).for_each(|order| policy.set(Order(order), SizeMode::Never));
        policy.set(Order(order), SizeMode::Always);
    }
}

/// Applies the operation to the object.
pub fn apply<A: Walk>(
    object: &Object<'_, Machine<A>>,
    memory: &Memory<Machine<A>>,
    op: Op,
) -> Outcome {
    let done = |()| Outcome::Done;
    match op {
        Op::Read(offset, length) => {
            let mut bytes = vec![0xee; length as usize];
            outcome(object.read(offset, &mut bytes), |count| {
                bytes.truncate(count);
                Outcome::Bytes(bytes)
            })
        }
        Op::Write(offset, length, byte) => {
            outcome(object.write(offset, &vec![byte; length as usize]), Outcome::Count)
        }
        Op::SetSize(bytes) => outcome(object.set_size(bytes), done),
        Op::Punch(offset, length) => outcome(object.punch_hole(offset, length), done),
        Op::Allocate(offset, length, growth) => {
            outcome(object.allocate(offset, length, growth), done)
        }
        Op::AddSeals(seals) => outcome(object.add_seals(seals), done),
        Op::Sync => outcome(object.sync(0, u64::MAX), done),
        Op::Order(order) => {
            use_object_order(memory, order);
            Outcome::Done
        }
    }
}

/// The expected state of an object: bytes and seals.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub bytes: Vec<u8>,
    pub seals: Seals,
    pub is_file: bool,
}

impl Model {
    pub fn apply(&mut self, op: Op) -> Outcome {
        self.answer(op).unwrap_or_else(Outcome::Failed)
    }

    fn forbid(&self, seals: Seals) -> Result<(), Errno> {
        if self.seals.intersects(seals) { Err(Errno::EPERM) } else { Ok(()) }
    }

    fn answer(&mut self, op: Op) -> Result<Outcome, Errno> {
        let size = self.bytes.len() as u64;
        match op {
            Op::Read(offset, length) => {
                let end = (offset + length).min(size);
                let range = offset.min(end) as usize..end as usize;
                return Ok(Outcome::Bytes(self.bytes[range].to_vec()));
            }
            Op::Write(_, 0, _) => return Ok(Outcome::Count(0)),
            Op::Write(offset, length, byte) => {
                self.forbid(Seals::WRITE | Seals::FUTURE_WRITE)?;
                let mut end = offset + length;
                if self.seals.contains(Seals::GROW) && end > size {
                    end = size - size % PAGE;
                    if end <= offset {
                        return Err(Errno::EPERM);
                    }
                }
                if end > size {
                    self.bytes.resize(end as usize, 0);
                }
                self.bytes[offset as usize..end as usize].fill(byte);
                return Ok(Outcome::Count((end - offset) as usize));
            }
            Op::SetSize(bytes) => {
                if bytes > size {
                    self.forbid(Seals::GROW)?;
                } else if bytes < size {
                    self.forbid(Seals::SHRINK)?;
                }
                self.bytes.resize(bytes as usize, 0);
            }
            Op::Punch(_, 0) | Op::Allocate(_, 0, _) => return Err(Errno::EINVAL),
            Op::Punch(offset, length) => {
                self.forbid(Seals::WRITE | Seals::FUTURE_WRITE)?;
                let end = (offset + length).min(size);
                self.bytes[offset.min(end) as usize..end as usize].fill(0);
            }
            Op::Allocate(..) if self.is_file => return Err(Errno::EOPNOTSUPP),
            Op::Allocate(offset, length, growth) => {
                let end = offset + length;
                if end > size {
                    self.forbid(Seals::GROW)?;
                    if growth == Growth::Allowed {
                        self.bytes.resize(end as usize, 0);
                    }
                }
            }
            Op::AddSeals(seals) => {
                if self.is_file || seals.bits() & !Seals::all().bits() != 0 {
                    return Err(Errno::EINVAL);
                }
                self.forbid(Seals::SEAL)?;
                self.seals |= seals;
            }
            Op::Sync | Op::Order(_) => {}
        }
        Ok(Outcome::Done)
    }
}

/// An offset or length, mostly close to the bounds of pages and folios.
fn place() -> impl Strategy<Value = u64> {
    let edge = prop::sample::select(vec![0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 64, 128]);
    let jitter = prop_oneof![2 => Just(0), 2 => 0..PAGE, 1 => prop::sample::select(vec![1, 7, 8, 100, 4095])];
    (edge, jitter).prop_map(|(page, bytes)| page * PAGE + bytes)
}

fn seals() -> impl Strategy<Value = Seals> {
    let bits = prop_oneof![
        8 => prop::sample::select(vec![0_u32, 2, 4, 8, 16, 6, 14]),
        1 => Just(1),
        1 => prop::sample::select(vec![0x100, 0x41]),
    ];
    bits.prop_map(Seals::from_bits_retain)
}

pub fn op() -> impl Strategy<Value = Op> {
    let growth = prop_oneof![Just(Growth::Allowed), Just(Growth::Forbidden)];
    prop_oneof![
        6 => (place(), place()).prop_map(|(at, length)| Op::Read(at, length)),
        8 => (place(), place(), 1..=255_u8).prop_map(|(at, n, byte)| Op::Write(at, n, byte)),
        3 => place().prop_map(Op::SetSize),
        4 => (place(), place()).prop_map(|(at, length)| Op::Punch(at, length)),
        2 => (place(), place(), growth).prop_map(|(at, n, growth)| Op::Allocate(at, n, growth)),
        1 => seals().prop_map(Op::AddSeals),
        1 => Just(Op::Sync),
        2 => prop::sample::select(vec![0_u8, 1, 2, 4, 6]).prop_map(Op::Order),
    ]
}

/// A memfd.
pub fn memfd<A: Walk>(memory: &Memory<Machine<A>>, size: u64) -> Object<'_, Machine<A>> {
    memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).expect("shared memory")
}

/// The whole content.
pub fn content<A: Walk>(object: &Object<'_, Machine<A>>) -> Vec<u8> {
    let mut bytes = vec![0xee; object.size() as usize];
    assert_eq!(object.read(0, &mut bytes), Ok(bytes.len()));
    bytes
}

/// Files whose reads or writes fail after a number of successes.
#[derive(Default)]
pub struct Failing {
    pub files: MemoryFiles,
    pub reads_left: AtomicU64,
    pub writes_left: AtomicU64,
    /// A page that can never be read.
    pub bad_page: AtomicU64,
}

impl Failing {
    pub fn new() -> Self {
        let failing = Self::default();
        failing.never();
        failing
    }

    pub fn never(&self) {
        self.reads_left.store(u64::MAX, Relaxed);
        self.writes_left.store(u64::MAX, Relaxed);
        self.bad_page.store(u64::MAX, Relaxed);
    }

    fn ask(left: &AtomicU64) -> Result<(), PagerError> {
        let fewer = |left: u64| left.checked_sub(1);
        left.fetch_update(Relaxed, Relaxed, fewer).map(|_| ()).map_err(|_| PagerError::InputOutput)
    }
}

impl Pager for Failing {
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        let pages = first_page..first_page + into.length() as u64 / PAGE;
        let asked = Self::ask(&self.reads_left);
        if asked.is_err() || pages.contains(&self.bad_page.load(Relaxed)) {
            // The bytes appended before the failure must not become visible.
            into.append_all(0xdd);
            return Err(PagerError::InputOutput);
        }
        self.files.read(file, first_page, into)
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        Self::ask(&self.writes_left)?;
        self.files.write(file, first_page, from)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.resize(file, size)
    }

    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        self.files.discard(file, first_page, pages)
    }

    fn removed(&self, file: u64) {
        self.files.removed(file);
    }
}
