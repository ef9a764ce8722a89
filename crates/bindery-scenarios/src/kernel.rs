//! Helpers for the scenarios of kernel maps.

use std::sync::atomic::{AtomicBool, Ordering};

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use bindery::check::{self, Report};
use bindery::{FrameRange, KernelMap, KernelPiece, Memory, Reach};
use bindery_hosted::{AccessKind, Machine, MmuFault, Walk};

/// The first address of the kernel's half, plus the span of a table of the highest level, so that
/// the arena does not begin at the half's first entry.
pub fn base<A: Walk>() -> u64 {
    let top = 12 + A::INDEX_BITS * u32::from(A::LEVELS);
    if top < 32 { 1 << (top - 1) } else { (!0 << (top - 1)) + (3 << (top - A::INDEX_BITS)) }
}

/// An arena of `bytes` in the kernel's half.
pub fn arena<A: Walk>(bytes: u64) -> VirtRange {
    VirtRange::from_len(VirtAddr(base::<A>()), bytes).unwrap()
}

/// A kernel map with an arena of 8 GiB.
pub fn map<A: Walk>(memory: &Memory<Machine<A>>) -> KernelMap<'_, Machine<A>> {
    map_with(memory, 1 << 33, Reach::Table)
}

pub fn map_with<A: Walk>(
    memory: &Memory<Machine<A>>,
    bytes: u64,
    reach: Reach,
) -> KernelMap<'_, Machine<A>> {
    KernelMap::with_reach(memory, arena::<A>(bytes), reach).expect("a kernel map")
}

/// Purges, because TLBs may still hold freed areas, then audits the core and the TLBs. Panics with
/// the first violation.
#[track_caller]
pub fn audit<A: Walk>(
    machine: &Machine<A>,
    memory: &Memory<Machine<A>>,
    maps: &[&KernelMap<'_, Machine<A>>],
) -> Report {
    maps.iter().for_each(|map| map.purge());
    machine.assert_clean();
    check_core(memory, maps)
}

/// Like [`audit`], without a purge: audits only the core.
#[track_caller]
pub fn check_core<A: Walk>(
    memory: &Memory<Machine<A>>,
    maps: &[&KernelMap<'_, Machine<A>>],
) -> Report {
    let mut scratch = vec![0; check::scratch_words(memory)];
    match check::check_with_kernel(memory, &[], maps, &mut scratch) {
        Ok(report) => report,
        Err(violation) => panic!("the audit found: {violation}"),
    }
}

/// The MMU's translation of an address for a load of the kernel.
pub fn translate<A: Walk>(
    machine: &Machine<A>,
    map: &KernelMap<'_, Machine<A>>,
    at: VirtAddr,
) -> Result<PhysAddr, MmuFault> {
    machine.translate_kernel(map.root(), at, AccessKind::Read)
}

/// Obtains frames through a permanent area: every `step`-th of many.
pub fn scattered<A: Walk>(
    map: &KernelMap<'_, Machine<A>>,
    pages: u64,
    step: usize,
) -> (VirtAddr, Vec<Frame>) {
    let size = pages * step as u64 * PAGE_SIZE;
    let area = map.vmalloc(size, &bindery::VmallocOptions::huge()).expect("frames to be mapped");
    let frame = |page: u64| {
        let at = VirtAddr(area.0 + page * PAGE_SIZE);
        Frame((map.physical(at).expect("mapped").0 / PAGE_SIZE) as u32)
    };
    (area, (0..pages * step as u64).step_by(step).map(frame).collect())
}

/// A range of frames.
pub fn frames(first: u32, count: u32) -> FrameRange {
    FrameRange { first: Frame(first), count }
}

/// `count` pages from an address on.
#[track_caller]
pub fn pages(at: VirtAddr, count: u64) -> VirtRange {
    VirtRange::from_len(at, count * PAGE_SIZE).unwrap()
}

/// The mapped pieces of a range.
pub fn pieces<A: Walk>(map: &KernelMap<'_, Machine<A>>, range: VirtRange) -> Vec<KernelPiece> {
    let mut found = Vec::new();
    map.for_each_piece(range, |piece| found.push(piece));
    found
}

/// All areas and all mapped pieces: the state that a refused call must not change.
pub fn picture<A: Walk>(map: &KernelMap<'_, Machine<A>>) -> String {
    let mut areas = Vec::new();
    map.for_each_area(|area| areas.push(area));
    format!("{areas:?} {:?}", pieces(map, map.arena()))
}

/// Writes a distinct value to every page of a range.
#[track_caller]
pub fn fill<A: Walk>(machine: &Machine<A>, root: Frame, range: VirtRange, stamp: u64) {
    for at in (range.start().0..range.end().0).step_by(PAGE_SIZE as usize) {
        machine.write_kernel(root, VirtAddr(at), &(at ^ stamp).to_ne_bytes()).unwrap();
    }
}

/// Asserts that a range has the values that [`fill`] wrote at `from`.
#[track_caller]
pub fn assert_filled<A: Walk>(
    machine: &Machine<A>,
    root: Frame,
    range: VirtRange,
    from: VirtAddr,
    stamp: u64,
) {
    for offset in (0..range.len()).step_by(PAGE_SIZE as usize) {
        let mut bytes = [0; 8];
        let at = VirtAddr(range.start().0 + offset);
        machine.read_kernel(root, at, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), (from.0 + offset) ^ stamp, "{at} of {range}");
    }
}

/// The number of rounds, which `BINDERY_DEEPER=1` multiplies by twenty.
pub fn rounds(usual: u64) -> u64 {
    if std::env::var_os("BINDERY_DEEPER").is_some() { 20 * usual } else { usual }
}

/// Pseudo-random numbers, the same in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// At least 1, below 2^`bits`, with each number of bits equally likely.
    pub fn of_any_size(&mut self, bits: u64) -> u64 {
        let bits = self.below(bits);
        (1 << bits) + self.below(1 << bits)
    }
}

/// Sets the flag when it is dropped, so that no thread waits for a panicked thread. Created before
/// the threads that read the flag.
pub struct Finished<'a>(pub &'a AtomicBool);

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
