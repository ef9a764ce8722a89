//! The kernel thread that collapses small folios into large ones (Linux: `khugepaged`), and
//! reclaims memory for faults that do not reclaim themselves.
//!
//! The thread starts when a policy first allows large folios and sleeps between its rounds. No
//! round runs while no policy allows the size that the thread makes. A round scans
//! [`Tunables::pages_to_scan`] pages, or all memory of all processes if that is less. Within a
//! round, the thread scans one table's span at a time and yields the CPU in between.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use bindery::addr::VirtAddr;
use bindery::{CollapseLimits, CollapseProgress};

use crate::errno::Errno;
use crate::memory::memory;
use crate::time;

use super::{WaitQueue, kernel_thread, scheduler, table};

/// The settings of the thread, as under `/sys/kernel/mm/transparent_hugepage/khugepaged`.
pub struct Tunables {
    /// Milliseconds from one round to the next.
    pub scan_sleep: AtomicU32,
    /// Milliseconds to the next round after a round that found no free large folio.
    pub alloc_sleep: AtomicU32,
    /// Base pages that one round scans.
    pub pages_to_scan: AtomicU32,
    /// As [`CollapseLimits::missing`].
    pub max_missing: AtomicU32,
    /// As [`CollapseLimits::swapped`].
    pub max_swapped: AtomicU32,
    /// As [`CollapseLimits::shared`].
    pub max_shared: AtomicU32,
    /// As [`CollapseLimits::collects`]: 0 or 1.
    pub defrag: AtomicU32,
}

/// The current settings; Linux's defaults at first.
pub static TUNABLES: Tunables = Tunables {
    scan_sleep: AtomicU32::new(10_000),
    alloc_sleep: AtomicU32::new(60_000),
    pages_to_scan: AtomicU32::new(4096),
    max_missing: AtomicU32::new(511),
    max_swapped: AtomicU32::new(64),
    max_shared: AtomicU32::new(256),
    defrag: AtomicU32::new(1),
};

/// The number of completed scans of all memory.
pub static FULL_SCANS: AtomicU64 = AtomicU64::new(0);
/// Large folios made.
pub static COLLAPSED: AtomicU64 = AtomicU64::new(0);

/// Base pages in one table's span.
const SPAN_PAGES: u32 = 512;
/// The shortest sleep, in milliseconds, because the timer interrupts only while no thread runs.
const SHORTEST_SLEEP: u32 = 1;

/// Whether the thread exists, or is being created.
static LIVES: AtomicBool = AtomicBool::new(false);
/// Whether any policy allows large folios of the size that the thread makes.
static WANTED: AtomicBool = AtomicBool::new(false);
/// The machine ends.
static ENDS: AtomicBool = AtomicBool::new(false);
/// Whether a fault has requested that memory be collected.
static COLLECT: AtomicBool = AtomicBool::new(false);
/// Whether the settings have changed, so that the next round starts at once, as on Linux.
static DUE: AtomicBool = AtomicBool::new(false);
static SLEEPER: WaitQueue = WaitQueue::new();

/// Called when the policies have changed. `wanted`: whether any large folios are allowed;
/// `scanned`: whether large folios of the thread's size are allowed.
///
/// # Errors
/// `ENOMEM` if the thread is needed and there is no memory for it.
pub fn policies_changed(wanted: bool, scanned: bool) -> Result<(), Errno> {
    if WANTED.swap(scanned, Ordering::Relaxed) != scanned {
        SLEEPER.wake_all();
    }
    // Marked before the allocation of the thread's stack, during which other threads may run.
    if wanted && !LIVES.swap(true, Ordering::Relaxed) {
        kernel_thread::begin(b"khugepaged", run)
            .inspect_err(|_| LIVES.store(false, Ordering::Relaxed))?;
    }
    Ok(())
}

/// Called when an interval has changed, so that the next round begins at once.
pub fn sleep_changed() {
    DUE.store(true, Ordering::Relaxed);
    SLEEPER.wake_all();
}

/// Requests a collection of memory soon. Does not wait.
pub fn collect() {
    COLLECT.store(true, Ordering::Relaxed);
    SLEEPER.wake_all();
}

/// Ends the thread when the machine ends.
pub(super) fn end() {
    ENDS.store(true, Ordering::Relaxed);
    SLEEPER.wake_all();
}

extern "C" fn run() -> ! {
    kernel_thread::run(work)
}

fn work() {
    let mut at = Position::default();
    let mut sleep = TUNABLES.scan_sleep.load(Ordering::Relaxed);
    let mut round = time::now();
    loop {
        let scans = WANTED.load(Ordering::Relaxed);
        let deadline = round.saturating_add(nanoseconds(sleep));
        let woken = || {
            let flags = [&ENDS, &COLLECT, &DUE];
            let woken = flags.iter().any(|flag| flag.load(Ordering::Relaxed));
            (woken || WANTED.load(Ordering::Relaxed) != scans).then_some(())
        };
        // A timeout is not a failure.
        let _ = SLEEPER.wait(scans.then_some(deadline), woken);
        if ENDS.load(Ordering::Relaxed) {
            return;
        }
        if COLLECT.swap(false, Ordering::Relaxed) {
            memory().collect();
        }
        let due = DUE.swap(false, Ordering::Relaxed);
        let wanted = WANTED.load(Ordering::Relaxed);
        if wanted && !scans {
            // Large folios were just allowed, so the first round follows after a sleep.
            round = time::now();
        }
        if !wanted || !due && time::now() < round.saturating_add(nanoseconds(sleep)) {
            continue;
        }
        let out_of_memory = scan(&mut at).out_of_memory;
        round = time::now();
        let tunable = if out_of_memory { &TUNABLES.alloc_sleep } else { &TUNABLES.scan_sleep };
        sleep = tunable.load(Ordering::Relaxed);
    }
}

fn nanoseconds(milliseconds: u32) -> u64 {
    u64::from(milliseconds.max(SHORTEST_SLEEP)) * (time::SECOND / 1000)
}

/// The position where the next round starts: a process number and an address in that process.
struct Position {
    process: u32,
    address: VirtAddr,
}

impl Default for Position {
    fn default() -> Self {
        Self { process: 0, address: VirtAddr(0) }
    }
}

/// The result of a round.
struct Round {
    out_of_memory: bool,
}

/// Scans `pages_to_scan` pages from `at` on, or up to the end of the last process.
fn scan(at: &mut Position) -> Round {
    let spans = TUNABLES.pages_to_scan.load(Ordering::Relaxed).div_ceil(SPAN_PAGES);
    let mut looked_at = 0;
    while looked_at < spans {
        let Some(progress) = look(at) else {
            FULL_SCANS.fetch_add(1, Ordering::Relaxed);
            *at = Position::default();
            break;
        };
        looked_at += progress.looked_at;
        COLLAPSED.fetch_add(progress.collapsed.into(), Ordering::Relaxed);
        if progress.out_of_memory {
            return Round { out_of_memory: true };
        }
        if ENDS.load(Ordering::Relaxed) {
            break;
        }
        // No interrupt arrives in the kernel, so expired sleepers are woken here.
        time::expired();
        scheduler::yield_now();
    }
    Round { out_of_memory: false }
}

/// Scans the next span; `None` behind the last process.
fn look(at: &mut Position) -> Option<CollapseProgress> {
    let process = table::all().into_iter().find(|process| process.id >= at.process)?;
    if process.id > at.process {
        *at = Position { process: process.id, address: VirtAddr(0) };
    }
    let limits = CollapseLimits {
        missing: TUNABLES.max_missing.load(Ordering::Relaxed),
        swapped: TUNABLES.max_swapped.load(Ordering::Relaxed),
        shared: TUNABLES.max_shared.load(Ordering::Relaxed),
        collects: TUNABLES.defrag.load(Ordering::Relaxed) != 0,
    };
    let nothing =
        CollapseProgress { looked_at: 0, collapsed: 0, next: VirtAddr(0), out_of_memory: false };
    let progress =
        process.try_space().map_or(nothing, |space| space.collapse_some(at.address, 1, &limits));
    *at = match progress.next {
        VirtAddr(0) => Position { process: process.id + 1, address: VirtAddr(0) },
        address => Position { process: process.id, address },
    };
    Some(progress)
}
