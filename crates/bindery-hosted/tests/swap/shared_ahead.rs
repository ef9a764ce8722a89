//! Pages of shared memory that are swapped in together with the page that a fault reads.

use bindery::addr::VirtAddr;
use bindery::{Access, Inspection};
use bindery_hosted::Walk;

use super::shared::{AT, PAGE, Shared, with_shared};

const PAGES: u64 = 512;

fn with_pages_out<A: Walk>(scenario: impl FnOnce(&Shared<'_, '_, A>)) {
    with_shared::<A>(0, PAGES, |shared| {
        shared.page_out(0, PAGES);
        shared.assert_has(0, PAGES);
        scenario(shared);
    });
}

fn major_faults<A: Walk>(shared: &Shared<'_, '_, A>) -> u64 {
    shared.swapping.memory.events().major_faults
}

fn is_mapped<A: Walk>(shared: &Shared<'_, '_, A>, page: u64) -> bool {
    let at = VirtAddr(AT + page * PAGE);
    matches!(shared.swapping.space.inspect(at), Inspection::Page { .. })
}

/// Sequential access swaps in 1, 2, 4, 8 pages, the rest of an aligned group of 16, and then whole
/// groups.
fn pages_in_order_come_back_and_are_mapped_together<A: Walk>() {
    with_pages_out::<A>(|shared| {
        let before = shared.swapping.space.counts();
        shared.swapping.assert_filled(AT, PAGES, AT);
        let faults = 5 + 31;
        assert_eq!(major_faults(shared), faults, "a fault for each window");
        shared.assert_has(PAGES, 0);
        let cost = shared.swapping.space.counts() - before;
        // The fault checks each page and maps it together with its neighbors.
        assert!(cost.tables_locked <= 3 * faults, "{cost:?}");
        assert_eq!(cost.entries_written, PAGES);
    });
}

fn pages_far_from_each_other_come_back_alone<A: Walk>() {
    with_pages_out::<A>(|shared| {
        for (number, page) in (1..).zip([100, 101 + 2, 17, 300, 299]) {
            assert_eq!(shared.swapping.program.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
            shared.assert_has(number, PAGES - number);
        }
    });
}

/// A write fault maps only its own page, so no other page is swapped in.
fn a_write_brings_its_page_alone<A: Walk>() {
    with_pages_out::<A>(|shared| {
        for page in 0..40 {
            let at = VirtAddr(AT + page * PAGE);
            shared.swapping.space.fault(at, Access::Write).unwrap();
        }
        shared.assert_has(40, PAGES - 40);
        assert_eq!(major_faults(shared), 40);
    });
}

/// The window ends with the mapping.
fn nothing_comes_back_behind_the_mapping<A: Walk>() {
    with_pages_out::<A>(|shared| {
        let space = shared.swapping.space;
        space.munmap(VirtAddr(AT + 20 * PAGE), (PAGES - 20) * PAGE).unwrap();
        shared.swapping.assert_filled(AT, 20, AT);
        shared.assert_has(20, PAGES - 20);
        assert!((0..20).all(|page| is_mapped(shared, page)));
    });
}

/// If memory is short, each page is swapped in singly.
fn nothing_comes_back_ahead_where_memory_is_short<A: Walk>() {
    with_pages_out::<A>(|shared| {
        let memory = shared.swapping.memory;
        let mut kept = Vec::new();
        while memory.shortage() == 0 {
            kept.push(memory.allocate_frames(bindery::addr::Order::PAGE).unwrap());
        }
        shared.swapping.assert_filled(AT, 32, AT);
        assert_eq!(major_faults(shared), 32);
        for frames in kept {
            // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
            assert!(unsafe { memory.free_frames(frames) });
        }
        shared.assert_has(32, PAGES - 32);
    });
}

on_every_architecture! {
    in_order => pages_in_order_come_back_and_are_mapped_together;
    far => pages_far_from_each_other_come_back_alone;
    write => a_write_brings_its_page_alone;
    end => nothing_comes_back_behind_the_mapping;
    short => nothing_comes_back_ahead_where_memory_is_short;
}
