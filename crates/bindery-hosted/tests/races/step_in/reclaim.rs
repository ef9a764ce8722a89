//! Calls that run during reclaim and keep their page: `mlock`, and a reference taken at any step.

use std::sync::Arc;

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Absent, Riscv64, X86_64};
use bindery::check;
use bindery::testing::with_reference;
use bindery::{Access, AddressSpace, Advice, Inspection, LockPages, SizeMode};
use bindery_hosted::Walk;

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Role, Stops};
use crate::support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
const PAGES: u64 = 32;
/// The number of tables; one page in each is cold as well.
const TABLES: u64 = 8;

/// The outcome of one run.
struct Outcome {
    /// The progress of the second call when the reclaimer was released; `None` if the reclaimer was
    /// never held.
    phase: Option<Phase>,
    /// Pages in swap when both had returned.
    out: u64,
}

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;

fn pages() -> impl Iterator<Item = VirtAddr> {
    (0..PAGES).map(|page| VirtAddr(AT + page * PAGE_SIZE))
}

fn content(page: VirtAddr) -> [u8; 8] {
    (page.0 | 7).to_le_bytes()
}

/// Holds a reclaimer at a step and runs `call` with the frame of the first page and a function that
/// releases the reclaimer.
fn run<A: Walk>(
    hold_at: HoldAt,
    order: u8,
    call: impl Fn(&Space<'_, A>, Frame, &dyn Fn()) + Sync,
) -> Outcome {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    memory.swap_on(4096, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let length = TABLES * 2 * MIB;
    space.mmap(&fixed(AT, length)).unwrap();
    let far = (1..TABLES).map(|table| VirtAddr(AT + table * 2 * MIB));
    for page in pages().chain(far) {
        space.fault(page, Access::Write).unwrap();
        space.write_user(page, &content(page)).unwrap();
    }
    space.madvise(VirtAddr(AT), length, Advice::Cold).unwrap();
    let Inspection::Page { frame: first, .. } = space.inspect(VirtAddr(AT)) else {
        panic!("the first page is not there");
    };
    let stops = Arc::new(Stops::default());
    let reclaim = || _ = memory.reclaim(1024);
    let goes_on = || {
        stops.release(Role::Held);
        stops.wait_for(Role::Held);
    };
    let call = || call(&space, first, &goes_on);
    let phase = stops.meet(&machine, hold_at, &reclaim, &call);
    let is_out =
        |page: &VirtAddr| matches!(space.inspect(*page), Inspection::Absent(Absent::Swap { .. }));
    let out = pages().filter(is_out).count() as u64;
    let mut scratch = vec![0; check::scratch_words(&memory)];
    check::check(&memory, &[&space], &mut scratch).unwrap();
    for page in pages() {
        let mut found = [0; 8];
        space.read_user(page, &mut found).unwrap();
        assert_eq!(found, content(page), "{page}");
    }
    machine.assert_clean();
    Outcome { phase, out }
}

fn what_mlock_has_returned_for_stays<A: Walk>(order: u8) {
    assert_eq!(run::<A>(HoldAt::Nowhere, order, |_, _, _| ()).out, PAGES, "nothing is locked");
    let mut returned = 0;
    for step in 0.. {
        let Outcome { phase, out } = run::<A>(HoldAt::Number(step), order, |space, _, _| {
            space.mlock(VirtAddr(AT), PAGES * PAGE_SIZE, LockPages::Now).unwrap();
        });
        let Some(phase) = phase else { break };
        returned += u32::from(phase == Phase::Finished);
        assert_eq!(out, 0, "step {step} of the reclaimer; mlock was {phase:?}");
    }
    assert!(returned > 0, "mlock always waited");
}

/// The page stays in memory as long as the reference lasts, and its content survives as long as it
/// is mapped.
fn what_somebody_holds_stays<A: Walk>(order: u8) {
    for step in 0.. {
        let outcome = run::<A>(HoldAt::Number(step), order, |space, frame, goes_on| {
            // `None` if the frame was already freed.
            let _ = with_reference(space.memory(), frame, |_, _| goes_on());
        });
        if outcome.phase.is_none() {
            break;
        }
    }
}

fn all<A: Walk>(order: u8) {
    what_mlock_has_returned_for_stays::<A>(order);
    what_somebody_holds_stays::<A>(order);
}
#[test]
fn on_x86_64() {
    all::<X86_64<4>>(0);
}

#[test]
fn on_aarch64_with_folios_of_64_kib() {
    all::<AArch64>(4);
}

#[test]
fn on_riscv64() {
    all::<Riscv64<3>>(0);
}
