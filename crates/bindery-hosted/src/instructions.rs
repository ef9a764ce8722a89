//! The content that instruction fetches see: current memory, or memory as last synchronized.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use bindery::addr::{Frame, PAGE_SIZE};
use parking_lot::Mutex;

use crate::memory::DirectMap;
use crate::violation::{Log, Place, Violation};

/// The behavior of a machine's instruction caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InstructionCache {
    /// A fetch sees current memory.
    #[default]
    Coherent,
    /// A fetch of user mode sees a frame as it was when it was last synchronized
    /// ([`Platform::synchronize_instructions`](bindery::Platform::synchronize_instructions)), and
    /// reads no bytes of a frame that was released since. A difference from memory is a
    /// [`Violation::StaleInstructions`]. For architectures with incoherent fetches.
    Stale,
}

type Page = Box<[u8; PAGE_SIZE as usize]>;

/// The instruction caches of all CPUs: one synchronization reaches all of them.
pub(crate) struct Instructions {
    /// The content that fetches see of each frame; `None` if they see memory itself.
    seen: Option<Mutex<HashMap<u32, Page>>>,
    calls: AtomicU64,
}

impl fmt::Debug for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instructions").field("calls", &self.calls).finish_non_exhaustive()
    }
}

/// The number of compared bytes of an instruction.
const INSTRUCTION: usize = 4;

impl Instructions {
    pub(crate) fn new(kind: InstructionCache) -> Self {
        let seen = (kind == InstructionCache::Stale).then(Mutex::default);
        Self { seen, calls: AtomicU64::new(0) }
    }

    /// The number of synchronizations that the core has requested.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    pub(crate) fn synchronize(&self, memory: &DirectMap, first: Frame, count: u32) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let Some(seen) = &self.seen else { return };
        let mut seen = seen.lock();
        for frame in (0..count).map(|offset| first.plus(offset)) {
            let mut page = Box::new([0; PAGE_SIZE as usize]);
            memory.read(frame, 0, &mut page[..]);
            seen.insert(frame.0, page);
        }
    }

    pub(crate) fn released(&self, first: Frame, count: u32) {
        if let Some(seen) = &self.seen {
            let mut seen = seen.lock();
            (first.0..first.0 + count).for_each(|frame| drop(seen.remove(&frame)));
        }
    }

    /// Fetches the instruction at `offset` of a frame.
    pub(crate) fn fetch(
        &self,
        memory: &DirectMap,
        log: &Log,
        place: Place,
        (frame, offset): (Frame, usize),
    ) {
        let Some(seen) = &self.seen else { return };
        let start = offset & !(INSTRUCTION - 1);
        let mut now = [0; INSTRUCTION];
        memory.read(frame, start, &mut now);
        let is_current =
            seen.lock().get(&frame.0).is_some_and(|page| page[start..start + INSTRUCTION] == now);
        if !is_current {
            log.report(Violation::StaleInstructions { place, frame });
        }
    }
}
