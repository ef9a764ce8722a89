//! The stack usage of a call, including any reclaim. docs/embedding.md lists these figures for
//! embedders that choose the size of their kernel stacks.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, X86_64};
use bindery::{
    Access, Accounting, AddressSpace, FileAccess, MapObject, MapRequest, Sealing, Sharing,
};
use bindery_hosted::Walk;

use crate::support::measured::{measured, stack_taken};
use crate::support::{GIB, MIB, fixed, options};

const AT: VirtAddr = VirtAddr(GIB);
const PAGE: u64 = 4096;
const BYTES: u64 = 8 * MIB;
/// The bounds of docs/embedding.md, in bytes: with anonymous memory, and with shared memory.
const MOST: [usize; 2] = [13_800, 18_200];

/// A fault when memory is full: `fill` leaves only the frames that the core needs.
fn fault_that_reclaims<A: Walk>(shared: bool) -> usize {
    let (_machine, memory) = measured::<A>(BYTES);
    let area = memory.swap_on(4 * BYTES / PAGE, 0).unwrap();
    let object = memory.shared_memory(2 * BYTES, Sealing::Forbidden, Accounting::PerPage).unwrap();
    let taken = {
        let spaces = [(); 3].map(|()| AddressSpace::new(&memory, options()).unwrap());
        for space in &spaces {
            if shared {
                let access = FileAccess::READ | FileAccess::WRITE;
                let all = MapObject { object: &object, offset: 0, access };
                let request = MapRequest { sharing: Sharing::Shared, ..fixed(AT.0, 2 * BYTES) };
                space.mmap_object(&request, &all).unwrap();
            } else {
                space.mmap(&fixed(AT.0, 2 * BYTES)).unwrap();
            }
        }
        let mut taken = 0;
        for page in 0..2 * BYTES / PAGE {
            for space in &spaces {
                let touch = || _ = space.fault(VirtAddr(AT.0 + page * PAGE), Access::Write);
                taken = taken.max(stack_taken(touch));
            }
        }
        taken
    };
    drop(object);
    assert!(area.slots > 0 && memory.events().pages_swapped_out > 0, "memory was never short");
    taken
}

#[test]
fn a_reclaiming_fault_fits_the_documented_stack() {
    for shared in [false, true] {
        for taken in
            [fault_that_reclaims::<X86_64<4>>(shared), fault_that_reclaims::<AArch64>(shared)]
        {
            println!("shared memory {shared}: {taken} bytes");
            assert!(
                taken <= MOST[usize::from(shared)],
                "{taken} bytes of stack, shared memory: {shared}"
            );
        }
    }
}
