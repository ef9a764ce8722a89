//! A fixture with a swap area: when the scenario is over, nothing is left in it, and nothing has
//! leaked.

use bindery::addr::VirtAddr;
use bindery::arch::Absent;
use bindery::{AddressSpace, Inspection, Memory, SwapArea};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::{MIB, audit, options, strict, use_order};

/// What a scenario may use.
pub struct Swapping<'s, 'm, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub space: &'s AddressSpace<'m, Machine<A>>,
    pub program: Program<'s, 'm, A>,
    pub area: SwapArea,
}

/// Lets `scenario` have an address space on a machine with folios of 2^`order` pages and `slots`
/// slots.
#[track_caller]
pub fn with_swap<A: Walk>(order: u8, slots: u64, scenario: impl FnOnce(&Swapping<'_, '_, A>)) {
    with_little_memory(64 * MIB, order, slots, scenario);
}

/// As [`with_swap`], on a machine of so many bytes.
#[track_caller]
pub fn with_little_memory<A: Walk>(
    bytes: u64,
    order: u8,
    slots: u64,
    scenario: impl FnOnce(&Swapping<'_, '_, A>),
) {
    let (machine, memory) = strict::<A>(bytes);
    use_order(&memory, order);
    let free = memory.free_frame_count();
    let area = memory.swap_on(slots, 0).expect("a swap area");
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let program = Program::new(&machine, &space);
        let swapping =
            Swapping { machine: &machine, memory: &memory, space: &space, program, area };
        scenario(&swapping);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    assert_eq!(memory.swap_areas().next().map(|area| area.taken), Some(0), "slots have leaked");
    memory.swap_off(&area).expect("nothing is in it");
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl<A: Walk> Swapping<'_, '_, A> {
    /// Writes to every page a value that tells it from all others.
    pub fn fill(&self, at: u64, pages: u64) {
        for page in 0..pages {
            self.program.store(VirtAddr(at + page * 4096), at + page).unwrap();
        }
    }

    /// Whether the pages hold what [`Swapping::fill`] wrote at `from`.
    #[track_caller]
    pub fn assert_filled(&self, at: u64, pages: u64, from: u64) {
        for page in 0..pages {
            let there = self.program.load(VirtAddr(at + page * 4096));
            assert_eq!(there, Ok(from + page), "page {page} at {at:#x}");
        }
    }

    /// Slots that are taken.
    pub fn taken(&self) -> u64 {
        self.memory.swap_areas().map(|area| area.taken).sum()
    }

    /// How many of the pages are in swap.
    pub fn swapped(&self, at: u64, pages: u64) -> u64 {
        let is_out = |page: &u64| {
            let at = VirtAddr(at + page * 4096);
            matches!(self.space.inspect(at), Inspection::Absent(Absent::Swap { .. }))
        };
        (0..pages).filter(is_out).count() as u64
    }
}
