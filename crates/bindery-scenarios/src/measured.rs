//! A platform that adds up the work of each read section and records the maximum.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use bindery::addr::{Frame, PAGE_SIZE};
use bindery::platform::{Platform, Work};
use bindery::{FrameRange, Memory, Overcommit};
use bindery_hosted::{Config, Contents, Machine, Walk, pass_on};

use super::waiting::{self, TellingLock};

thread_local! {
    /// Whether this thread calls the hook.
    static HOOKED: Cell<bool> = const { Cell::new(false) };
    /// The nesting depth of read sections of this thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The lowest stack address at which the core has called the platform.
    static LOWEST: Cell<usize> = const { Cell::new(usize::MAX) };
    /// The work since this thread entered its outermost section.
    static DONE: Cell<Section> = const { Cell::new(Section { entries: 0, tables: 0, bytes: 0 }) };
}

/// The work of one read section; tables are locked only in read sections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Section {
    /// Entries examined.
    pub entries: u64,
    /// Tables marked as detached.
    pub tables: u64,
    /// Bytes copied and zeroed.
    pub bytes: u64,
}

pub struct Measured<A: Walk> {
    machine: Machine<A>,
    entries: AtomicU64,
    tables: AtomicU64,
    bytes: AtomicU64,
    steps: AtomicU64,
    pieces: AtomicU64,
    hook: Mutex<Option<Hook>>,
}

type Hook = Box<dyn FnMut() + Send>;

impl<A: Walk> Measured<A> {
    /// During `work`, makes this thread call `hook` before it enters an outermost read section.
    pub fn with_hook(&self, hook: Hook, work: impl FnOnce()) {
        *self.hook.lock().unwrap() = Some(hook);
        HOOKED.set(true);
        work();
        HOOKED.set(false);
        *self.hook.lock().unwrap() = None;
    }

    /// The maximum of each field since the last call.
    pub fn take_most(&self) -> Section {
        Section {
            entries: self.entries.swap(0, Relaxed),
            tables: self.tables.swap(0, Relaxed),
            bytes: self.bytes.swap(0, Relaxed),
        }
    }

    /// Entries examined, read sections, and checks for signals so far: each iteration of a loop
    /// performs one or more.
    pub fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    /// The number of work reports so far, one for each run of entries.
    pub fn pieces(&self) -> u64 {
        self.pieces.load(Relaxed)
    }

    fn moved(&self, frames: u32) {
        note_stack();
        add(Section { bytes: u64::from(frames) * PAGE_SIZE, ..Section::default() });
    }
}

/// The bytes of stack that `work` uses, down to the deepest call of the platform that this module
/// sees: read sections, and zeroing or copying of bytes.
#[inline(never)]
pub fn stack_taken(work: impl FnOnce()) -> usize {
    let here = address_of_a_local();
    LOWEST.set(here);
    work();
    here - LOWEST.get()
}

#[inline(never)]
fn address_of_a_local() -> usize {
    let local = 0_u8;
    std::hint::black_box(&raw const local).addr()
}

fn note_stack() {
    LOWEST.set(LOWEST.get().min(address_of_a_local()));
}

fn add(more: Section) {
    let done = DONE.get();
    DONE.set(Section {
        entries: done.entries + more.entries,
        tables: done.tables + more.tables,
        bytes: done.bytes + more.bytes,
    });
}

// SAFETY: the inner machine meets all obligations.
unsafe impl<A: Walk> Platform for Measured<A> {
    type Arch = A;
    type Mutex = TellingLock;
    type SpinLock = TellingLock;

    pass_on! { machine:
        direct_map invalidate invalidate_local invalidate_kernel publish_entries cpu unpark synchronize
        grace_period is_over seed allocation_may_wait frames_released
    }

    fn fatal_signal(&self) -> bool {
        self.steps.fetch_add(1, Relaxed);
        self.machine.fatal_signal()
    }

    fn zero(&self, first: Frame, count: u32) {
        self.moved(count);
        self.machine.zero(first, count);
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        self.moved(count);
        self.machine.copy(from, to, count);
    }

    fn relax(&self) {
        waiting::relaxes();
        self.machine.relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        if word.load(SeqCst) == expected {
            waiting::sleeps();
        }
        self.machine.park(word, expected);
    }

    fn enter_read(&self) {
        if DEPTH.get() == 0
            && HOOKED.get()
            && let Some(hook) = self.hook.lock().unwrap().as_mut()
        {
            hook();
        }
        note_stack();
        self.machine.enter_read();
        self.steps.fetch_add(1, Relaxed);
        if DEPTH.get() == 0 {
            DONE.set(Section::default());
        }
        DEPTH.set(DEPTH.get() + 1);
    }

    fn leave_read(&self) {
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() == 0 {
            let done = DONE.get();
            self.entries.fetch_max(done.entries, Relaxed);
            self.tables.fetch_max(done.tables, Relaxed);
            self.bytes.fetch_max(done.bytes, Relaxed);
        }
        self.machine.leave_read();
    }

    fn worked(&self, work: Work) {
        self.steps.fetch_add(work.entries, Relaxed);
        self.pieces.fetch_add(1, Relaxed);
        add(Section { entries: work.entries, tables: work.tables_marked, bytes: 0 });
    }
}

/// A measuring machine, and its memory, managed by the core.
pub fn measured<A: Walk>(bytes: u64) -> (Machine<A>, Memory<Measured<A>>) {
    let machine = Machine::<A>::new(Config {
        memory: bytes,
        contents: Contents::Anything,
        cpus: 2,
        ..Config::default()
    });
    let (first, count) = machine.frames();
    let platform = Measured {
        machine: machine.clone(),
        entries: AtomicU64::new(0),
        tables: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        steps: AtomicU64::new(0),
        pieces: AtomicU64::new(0),
        hook: Mutex::new(None),
    };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(platform, &[FrameRange { first, count }]) }.expect("memory");
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    (machine, memory)
}
