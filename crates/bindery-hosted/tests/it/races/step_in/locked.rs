//! `mlock` steps into reclaim: a page that it has returned for does not leave memory any more.

use std::sync::Arc;
use std::thread;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Absent, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, Advice, Inspection, LockPages, SizeMode};
use bindery_hosted::Walk;

use super::stepped::{Readers, stepped};
use super::stops::{HoldAt, Phase, Role, Stops};
use crate::support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
const PAGES: u64 = 32;

/// The outcome of one run.
struct Outcome {
    /// How far `mlock` was when the reclaimer was let go; `None` if that was never held.
    phase: Option<Phase>,
    /// Pages in swap when both had returned.
    out: u64,
}

/// A reclaimer is held at a step, and `mlock` runs meanwhile, if it is to run at all.
fn run<A: Walk>(hold_at: HoldAt, order: u8) -> Outcome {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    memory.swap_on(4096, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGES * PAGE_SIZE)).unwrap();
    let pages = || (0..PAGES).map(|page| VirtAddr(AT + page * PAGE_SIZE));
    pages().for_each(|page| _ = space.fault(page, Access::Write).unwrap());
    space.madvise(VirtAddr(AT), PAGES * PAGE_SIZE, Advice::Cold).unwrap();
    let stops = Arc::new(Stops::default());
    let act = |role, cpu, hold_at, call: &(dyn Fn() + Sync)| {
        machine.on_cpu(Cpu(cpu), || stops.act(role, hold_at, call)).expect("no panic");
    };
    let phase = thread::scope(|scope| {
        let reclaim = || _ = memory.reclaim(PAGES);
        let lock = || space.mlock(VirtAddr(AT), PAGES * PAGE_SIZE, LockPages::Now).unwrap();
        scope.spawn(move || act(Role::Held, 0, hold_at, &reclaim));
        let phase = (stops.wait_for(Role::Held) == Phase::Held).then(|| {
            scope.spawn(move || act(Role::Meanwhile, 1, HoldAt::Nowhere, &lock));
            stops.wait_for(Role::Meanwhile)
        });
        stops.release(Role::Held);
        phase
    });
    let is_out =
        |page: &VirtAddr| matches!(space.inspect(*page), Inspection::Absent(Absent::Swap { .. }));
    Outcome { phase, out: pages().filter(is_out).count() as u64 }
}

fn what_mlock_has_returned_for_stays<A: Walk>(order: u8) {
    assert_eq!(run::<A>(HoldAt::Nowhere, order).out, PAGES, "nothing is locked");
    let mut returned = 0;
    for step in 0.. {
        let Outcome { phase, out } = run::<A>(HoldAt::Number(step), order);
        let Some(phase) = phase else { break };
        returned += u32::from(phase == Phase::Finished);
        assert_eq!(out, 0, "step {step} of the reclaimer; mlock was {phase:?}");
    }
    assert!(returned > 0, "mlock always waited");
}

#[test]
fn on_x86_64() {
    what_mlock_has_returned_for_stays::<X86_64<4>>(0);
}

#[test]
fn on_aarch64_with_folios_of_64_kib() {
    what_mlock_has_returned_for_stays::<AArch64>(4);
}

#[test]
fn on_riscv64() {
    what_mlock_has_returned_for_stays::<Riscv64<3>>(0);
}
