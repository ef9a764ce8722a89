//! A swap area is removed while a call that has found a cluster of the area is about to lock the
//! cluster.
//!
//! The lock of a folio in the swap cache does not keep the area alive, because the last entries
//! that refer to its slots may be removed concurrently. Only the call's read section does.
//!
//! ```text
//! CPU 0   A: finds the cluster ....... held before its lock .......... goes on
//! CPU 1        B: discards the parent's entries, turns the area off: waits ... is done
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::{AddressSpace, Advice, check};
use bindery_hosted::Walk;

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Stops};
use crate::support::{GIB, MIB, fixed, options};

const AT: VirtAddr = VirtAddr(GIB);

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;

/// Holds a child's call before its lock of a cluster with this number. The child has read a page,
/// which is in the swap cache for the parent. Returns whether the area was removed, and the
/// progress of the removal while the call was held; `None` if the call locks fewer clusters.
fn run<A: Walk>(number: u32, held: impl Fn(&Space<'_, A>) + Sync) -> Option<(bool, Phase)> {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    let area = memory.swap_on(512, 0).unwrap();
    let parent = AddressSpace::new(&memory, options()).unwrap();
    parent.mmap(&fixed(AT.0, PAGE_SIZE)).unwrap();
    parent.write_user(AT, &[7; 8]).unwrap();
    parent.madvise(AT, PAGE_SIZE, Advice::PageOut).unwrap();
    let child = parent.fork().unwrap();
    child.read_user(AT, &mut [0; 8]).unwrap();
    let stops = Arc::new(Stops::default());
    // Counting slots takes the locks of the clusters, and no other spin lock.
    stops.watch(|| {
        let _ = memory.swap_usage();
    });
    let went = AtomicBool::new(false);
    let other = || {
        parent.discard(AT, PAGE_SIZE).unwrap();
        went.store(memory.swap_off(&area).is_ok(), Relaxed);
    };
    let phase = stops.meet(&machine, HoldAt::SpinLock(number), &|| held(&child), &other);
    let mut scratch = vec![0; check::scratch_words(&memory)];
    check::check(&memory, &[&parent, &child], &mut scratch).unwrap();
    machine.assert_clean();
    phase.map(|phase| (went.load(Relaxed), phase))
}

fn each_lock<A: Walk>(held: impl Fn(&Space<'_, A>) + Sync + Copy) -> usize {
    let runs = (0..).map_while(|number| run::<A>(number, held));
    let went = runs.filter(|(went, _)| *went);
    went.inspect(|(_, phase)| assert_eq!(*phase, Phase::Waiting, "clusters in use were freed"))
        .count()
}

fn clusters_stay_until_they_are_unlocked<A: Walk>() {
    let page_out = |child: &Space<'_, A>| child.madvise(AT, PAGE_SIZE, Advice::PageOut).unwrap();
    let unmap = |child: &Space<'_, A>| child.munmap(AT, PAGE_SIZE).unwrap();
    let write = |child: &Space<'_, A>| child.write_user(AT, &[8; 8]).unwrap();
    let went = [each_lock::<A>(page_out), each_lock::<A>(unmap), each_lock::<A>(write)];
    assert!(went.iter().any(|went| *went > 0), "no call met an area that went: {went:?}");
}

#[test]
fn on_x86_64() {
    clusters_stay_until_they_are_unlocked::<X86_64<4>>();
}

#[test]
fn on_aarch64() {
    clusters_stay_until_they_are_unlocked::<AArch64>();
}

#[test]
fn on_riscv64() {
    clusters_stay_until_they_are_unlocked::<Riscv64<3>>();
}
