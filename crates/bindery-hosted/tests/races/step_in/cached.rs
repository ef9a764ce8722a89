//! Calls that run while another call swaps out pages of the swap cache again or unmaps them. A
//! parent's entries refer to the slots of these pages.

use std::sync::Arc;

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::check;
use bindery::testing::with_reference;
use bindery::{AddressSpace, Advice, Inspection, SizeMode};
use bindery_hosted::Walk;

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Role, Stops};
use crate::support::{GIB, MIB, fixed, options};

const AT: VirtAddr = VirtAddr(GIB);
const PAGES: u64 = 16;
const LENGTH: u64 = PAGES * PAGE_SIZE;

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;

/// A parent with all pages in swap, and a child that has read them.
struct Family<'s, 'm, A: Walk> {
    parent: &'s Space<'m, A>,
    child: &'s Space<'m, A>,
    /// The frame of the first page.
    frame: Frame,
    /// Pages that the parent has dropped.
    dropped: u64,
}

fn pages() -> impl Iterator<Item = VirtAddr> {
    (0..PAGES).map(|page| VirtAddr(AT.0 + page * PAGE_SIZE))
}

fn content(page: VirtAddr) -> [u8; 8] {
    (page.0 | 7).to_le_bytes()
}

#[track_caller]
fn assert_kept<A: Walk>(space: &Space<'_, A>, dropped: u64) {
    for page in pages().skip(dropped as usize) {
        let mut found = [0; 8];
        space.read_user(page, &mut found).unwrap();
        assert_eq!(found, content(page), "{page}");
    }
}

/// Holds `held` at a step and runs `call` with a function that releases `held`. Returns whether
/// `held` reached that step.
fn run<A: Walk>(
    hold_at: HoldAt,
    order: u8,
    dropped: u64,
    held: impl Fn(&Space<'_, A>) + Sync,
    call: impl Fn(&Family<'_, '_, A>, &dyn Fn()) + Sync,
) -> bool {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    memory.swap_on(4096, 0).unwrap();
    let parent = AddressSpace::new(&memory, options()).unwrap();
    parent.mmap(&fixed(AT.0, LENGTH)).unwrap();
    pages().for_each(|page| parent.write_user(page, &content(page)).unwrap());
    parent.madvise(AT, LENGTH, Advice::PageOut).unwrap();
    let child = parent.fork().unwrap();
    assert_kept(&child, 0);
    if dropped > 0 {
        parent.discard(AT, dropped * PAGE_SIZE).unwrap();
    }
    let Inspection::Page { frame, .. } = child.inspect(AT) else { panic!("the page is away") };
    let family = Family { parent: &parent, child: &child, frame, dropped };
    let stops = Arc::new(Stops::default());
    let goes_on = || {
        stops.release(Role::Held);
        stops.wait_for(Role::Held);
    };
    let call = || call(&family, &goes_on);
    let was_held = stops.meet(&machine, hold_at, &|| held(&child), &call).is_some();
    let mut scratch = vec![0; check::scratch_words(&memory)];
    check::check(&memory, &[&parent, &child], &mut scratch).unwrap();
    assert_kept(&parent, dropped);
    if !matches!(child.inspect(AT), Inspection::Empty) {
        assert_kept(&child, 0);
    }
    machine.assert_clean();
    was_held
}

/// Runs each call of the other process, of the same process, and of no process, at each step.
fn each_call<A: Walk>(order: u8, dropped: u64, held: impl Fn(&Space<'_, A>) + Sync + Copy) {
    type Call<A> = fn(&Family<'_, '_, A>, &dyn Fn());
    let calls: [Call<A>; 4] = [
        |family, goes_on| {
            // `None` if the frame was already freed.
            let _ = with_reference(family.child.memory(), family.frame, |_, _| goes_on());
        },
        |family, _| assert_kept(family.parent, family.dropped),
        |family, _| pages().for_each(|at| family.parent.write_user(at, &content(at)).unwrap()),
        |family, _| {
            for page in pages() {
                // Fails if the first call unmaps the page.
                let _ = family.child.write_user(page, &content(page));
            }
        },
    ];
    for call in calls {
        let mut step = 0;
        while run::<A>(HoldAt::Number(step), order, dropped, held, call) {
            step += 1;
        }
        assert!(step > 0, "the first call was never held");
    }
}

fn all<A: Walk>(order: u8) {
    for dropped in [0, 3] {
        let page_out = |child: &Space<'_, A>| child.madvise(AT, LENGTH, Advice::PageOut).unwrap();
        each_call::<A>(order, dropped, page_out);
        each_call::<A>(order, dropped, |child| child.munmap(AT, LENGTH).unwrap());
    }
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
