//! Accessed and dirty bits that another CPU's MMU sets during an operation are not lost.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Absent, Riscv64};
use bindery::platform::Cpu;
use bindery::{AddressSpace, Inspection, Protection, testing};
use bindery_hosted::{Config, Machine, Program, Walk};

use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options, use_order};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// One table, 32 contiguous runs.
const PAGES: u64 = 512;
/// A multiple of 512, so that each delay occurs equally often.
const ROUNDS: usize = 1024;
/// The number of half rounds at the end.
const OVER: usize = usize::MAX;

/// The progress of both sides, in half rounds. The sides synchronize by spinning, so that they
/// start together.
struct Meeting(AtomicUsize);

impl Meeting {
    fn tell(&self, half: usize) {
        self.0.store(half, Ordering::Release);
    }

    /// Returns the other side's progress once it is at least `half`.
    fn wait_for(&self, half: usize) -> usize {
        loop {
            for _ in 0..1 << 12 {
                let now = self.0.load(Ordering::Acquire);
                if now >= half {
                    return now;
                }
                std::hint::spin_loop();
            }
            // The other side may need this CPU.
            thread::yield_now();
        }
    }
}

/// Notifies the other side when this side ends, even by a panic.
struct Leaving<'a>(&'a Meeting);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.tell(OVER);
    }
}

/// This CPU makes the pages `PROT_NONE` from the first on; on another CPU a program writes to them
/// from the last on. The two cross somewhere in between. The MMU records a write to a block in any
/// of its entries, perhaps in an entry that becomes `PROT_NONE` later than that of the written
/// page.
fn hide_under_writes<A: Walk>() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_order(&memory, 4);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
    Program::new(&machine, &space).fill(VirtAddr(AT), PAGES * PAGE, 1).unwrap();
    let (meeting, lowest) = (Meeting(AtomicUsize::new(0)), AtomicU64::new(0));
    let (mut written, mut lost) = (0_u64, Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| machine.on_cpu(Cpu(1), || write_down(&machine, &space, &meeting, &lowest)));
        let _leaving = Leaving(&meeting);
        for round in 0..ROUNDS {
            testing::clear_accessed_and_dirty(&space, VirtAddr(AT), PAGES as u32);
            meeting.tell(2 * round + 1);
            for _ in 0..round % 512 {
                std::hint::spin_loop();
            }
            space.mprotect(VirtAddr(AT), PAGES * PAGE, Protection::empty()).unwrap();
            if meeting.wait_for(2 * round + 2) == OVER {
                break;
            }
            for page in lowest.load(Ordering::Relaxed)..PAGES {
                written += 1;
                let found = space.inspect(VirtAddr(AT + page * PAGE));
                if !matches!(found, Inspection::Absent(Absent::ProtNone { dirty: true, .. })) {
                    lost.push((round, page));
                }
            }
            space.mprotect(VirtAddr(AT), PAGES * PAGE, READ_WRITE).unwrap();
        }
    });
    audit(&machine, &memory, &[&space]);
    assert!(lost.is_empty(), "of {written} writes {} were not recorded: {lost:?}", lost.len());
}

/// In each round, writes to the pages one by one, downwards, until one is `PROT_NONE`.
fn write_down<A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'_, Machine<A>>,
    meeting: &Meeting,
    lowest: &AtomicU64,
) {
    let _leaving = Leaving(meeting);
    let program = Program::new(machine, space);
    let mut round = 0;
    while meeting.wait_for(2 * round + 1) != OVER {
        let prot_none = |page: &u64| program.store(VirtAddr(AT + page * PAGE), *page).is_err();
        let first_prot_none = (0..PAGES).rev().find(prot_none);
        lowest.store(first_prot_none.map_or(0, |page| page + 1), Ordering::Relaxed);
        meeting.tell(2 * round + 2);
        round += 1;
    }
}

#[test]
fn writes_to_blocks_becoming_prot_none_are_recorded() {
    hide_under_writes::<AArch64>();
    hide_under_writes::<Riscv64<3>>();
}
