//! Findings of random sequences, in reduced form. In each sequence the core once differed from
//! Linux.

use super::names::*;
use super::operation::*;
use super::place::{
    CLOSED, FILES, FIRST_PROCESS, NO_FILE, READ_ONLY, SCRATCH, WRITE_ONLY, ZEROES, page, pages,
};
use super::run::agrees;

const RW: u64 = PROT_READ | PROT_WRITE;
const PRIVATE: u64 = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
const SHARED: u64 = MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED;
/// Moves the contents and leaves the source mapped and empty.
const DUPLICATE: u64 = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;

/// Private anonymous memory of the process.
fn private(first: u64, count: u64) -> Operation {
    mmap(page(first), pages(count), RW, PRIVATE, NO_FILE, 0)
}

/// Anonymous memory that a child shares.
fn shared(first: u64, count: u64) -> Operation {
    mmap(page(first), pages(count), RW, SHARED, NO_FILE, 0)
}

#[test]
fn a_stacks_mapping_wants_no_large_folios() {
    agrees(&[mmap(page(500), pages(1), RW, PRIVATE | MAP_STACK, NO_FILE, 0)]);
}

#[test]
fn the_heap_does_not_merge_below_its_beginning() {
    agrees(&[private(501, 35), brk(page(536) + 1)]);
}

#[test]
fn an_exec_seal_seals_an_executables_content() {
    agrees(&[add_seals(FILES[0], F_SEAL_EXEC)]);
    let map = mmap(page(500), pages(1), RW, MAP_SHARED | MAP_FIXED, FILES[0], 0);
    agrees(&[map, add_seals(FILES[0], F_SEAL_EXEC)]);
}

#[test]
fn fault_around_is_bounded_by_the_mapping() {
    agrees(&[
        mmap(page(489), pages(20), RW, MAP_SHARED | MAP_FIXED, FILES[0], 0),
        write_at(FILES[0], pages(7), 1, 1),
        load(page(489)),
    ]);
    agrees(&[shared(518, 11), fork(), exit(), madvise(page(518), pages(1), MADV_POPULATE_READ)]);
    agrees(&[
        mmap(page(490), pages(20), RW, MAP_SHARED | MAP_FIXED, FILES[0], 0),
        ftruncate(FILES[0], pages(7)),
        load(page(500)),
    ]);
}

#[test]
fn locked_private_memory_made_writable_is_copied() {
    agrees(&[
        mmap(page(505), pages(1), PROT_READ, PRIVATE | MAP_LOCKED, NO_FILE, 0),
        mprotect(page(505), pages(1), RW),
    ]);
    agrees(&[
        mmap(page(518), pages(2), PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_LOCKED, FILES[0], 0),
        ftruncate(FILES[0], pages(2)),
        mprotect(page(518), pages(1), RW),
    ]);
    agrees(&[
        mmap(page(502), pages(30), 0, PRIVATE | MAP_LOCKED, NO_FILE, 0),
        mprotect(page(505), pages(1), PROT_READ),
        mprotect(page(507), pages(1), RW),
        mprotect(page(502), pages(5), RW),
    ]);
    // Pages that were writable before do not change.
    agrees(&[
        private(487, 29),
        mmap(page(514), pages(1), PROT_READ, PRIVATE, NO_FILE, 0),
        mlock(page(507), pages(10)),
        mprotect(page(500), pages(15), RW),
    ]);
}

#[test]
fn a_moves_remainder_is_unlocked_and_separate() {
    agrees(&[
        private(484, 47),
        mlock(page(522), pages(1)),
        mremap(page(514), pages(9), pages(9), DUPLICATE, page(464)),
    ]);
}

#[test]
fn a_copied_locked_shared_mapping_is_populated() {
    agrees(&[
        mlockall(MCL_FUTURE),
        shared(513, 10),
        mremap(page(513), 0, pages(1), MREMAP_MAYMOVE | MREMAP_FIXED, page(500)),
    ]);
}

#[test]
fn a_replaced_mapping_frees_its_share_of_limits() {
    agrees(&[
        private(480, 40),
        limit(RLIMIT_AS, 0),
        mremap(page(500), pages(1), pages(1), DUPLICATE, page(510)),
    ]);
}

#[test]
fn a_data_limit_of_zero_is_no_limit() {
    agrees(&[limit(RLIMIT_DATA, NOTHING), private(500, 1)]);
    agrees(&[limit(RLIMIT_DATA, NOTHING), brk(page(540))]);
    agrees(&[private(480, 33), limit(RLIMIT_DATA, NOTHING), brk(page(537))]);
}

#[test]
fn write_only_pages_cannot_be_populated_for_reading() {
    agrees(&[
        mmap(page(501), pages(8), PROT_WRITE, PRIVATE, NO_FILE, 0),
        madvise(page(501), pages(1), MADV_POPULATE_READ),
    ]);
    agrees(&[
        private(488, 29),
        mprotect(page(502), pages(12), PROT_WRITE),
        madvise(page(500), pages(3), MADV_POPULATE_READ),
    ]);
    agrees(&[
        mmap(page(509), pages(2), PROT_WRITE, MAP_SHARED | MAP_FIXED, FILES[0], pages(6)),
        madvise(page(509), pages(1), MADV_POPULATE_READ),
    ]);
}

#[test]
fn shared_memory_without_large_folios_is_not_collapsed() {
    agrees(&[shared(2559, 528), madvise(page(2561), pages(511), MADV_COLLAPSE)]);
    agrees(&[shared(2064, 1024), madvise(page(2048), pages(512), MADV_COLLAPSE)]);
}

#[test]
fn a_sealed_file_mapping_may_be_dropped() {
    let map =
        |protection| mmap(page(500), pages(13), protection, MAP_PRIVATE | MAP_FIXED, FILES[0], 0);
    let seal = mseal(page(500), pages(4), 0);
    agrees(&[map(PROT_READ), seal.clone(), madvise(page(500), pages(3), MADV_DONTNEED)]);
    agrees(&[map(RW), seal.clone(), madvise(page(500), pages(3), MADV_DONTNEED)]);
    agrees(&[map(PROT_READ), seal.clone(), madvise(page(500), pages(1), MADV_FREE)]);
    agrees(&[map(PROT_READ), seal, madvise(page(469), pages(32), MADV_DONTNEED_LOCKED)]);
}

#[test]
fn process_madvise_ignores_empty_ranges() {
    agrees(&[process_madvise(FIRST_PROCESS, &[(page(500) + 1, 0)], MADV_DONTNEED, 0)]);
    agrees(&[process_madvise(FIRST_PROCESS, &[], 5, 0)]);
    let ranges = [(page(2048), pages(1)), (page(500) + 1, 0), (page(2048), pages(1))];
    agrees(&[private(2048, 512), process_madvise(FIRST_PROCESS, &ranges, MADV_DONTNEED, 0)]);
    // Unless a range requires work, which the first operation does.
    let ranges = [(page(500) + 1, 0), (page(500), pages(1))];
    agrees(&[process_madvise(FIRST_PROCESS, &ranges, MADV_DONTNEED, 0)]);
    agrees(&[private(480, 35), process_madvise(FIRST_PROCESS, &ranges, MADV_DONTNEED, 0)]);
    agrees(&[private(480, 35), process_madvise(FIRST_PROCESS, &ranges, MADV_POPULATE_READ, 0)]);
}

#[test]
fn mmap_checks_the_place_before_the_file() {
    let there = private(500, 4);
    let no_replace = MAP_SHARED | MAP_FIXED_NOREPLACE;
    agrees(&[there.clone(), mmap(page(500), pages(1), RW, no_replace, READ_ONLY, 0)]);
    agrees(&[there, mmap(page(500), pages(1), RW, no_replace | MAP_GROWSDOWN, FILES[0], 0)]);
}

#[test]
fn mmap_refuses_in_the_order_of_linux() {
    let fixed = |at, flags, file, offset| mmap(at, pages(1), RW, flags | MAP_FIXED, file, offset);
    agrees(&[fixed(page(500) + 1, MAP_SHARED, READ_ONLY, 0)]);
    agrees(&[fixed(page(500), MAP_SHARED | MAP_GROWSDOWN, READ_ONLY, 0)]);
    let huge = 0x7fff_ffff_ffff_f000;
    agrees(&[fixed(page(500), 0, FILES[0], huge)]);
    agrees(&[limit(RLIMIT_MEMLOCK, 0), fixed(page(500), MAP_PRIVATE | MAP_LOCKED, WRITE_ONLY, 0)]);
    agrees(&[
        mlockall(MCL_FUTURE),
        limit(RLIMIT_MEMLOCK, NOTHING),
        fixed(page(500), 0, FILES[0], 0),
    ]);
    agrees(&[fixed(page(500), MAP_SHARED, CLOSED, 0)]);
}

#[test]
fn a_file_ends_before_63_bit_offsets_do() {
    let map = |offset| mmap(page(500), pages(2), RW, MAP_SHARED | MAP_FIXED, FILES[0], offset);
    agrees(&[map(0x7fff_ffff_ffff_f000)]);
    agrees(&[map(0x8000_0000_0000_0000)]);
    agrees(&[map(0xffff_ffff_ffff_f000)]);
}

#[test]
fn validated_flags_without_meaning_are_refused_first() {
    let both = MAP_SHARED | MAP_PRIVATE;
    let map = |flags, file| mmap(page(500), pages(1), RW, both | flags, file, 0);
    agrees(&[map(MAP_SYNC | MAP_FIXED, FILES[0])]);
    agrees(&[map(MAP_FIXED | MAP_FIXED_NOREPLACE, FILES[0])]);
    agrees(&[map(MAP_SYNC | MAP_FIXED, READ_ONLY)]);
    agrees(&[map(MAP_GROWSDOWN | MAP_FIXED_NOREPLACE, FILES[0])]);
    agrees(&[limit(RLIMIT_AS, NOTHING), map(MAP_FIXED | MAP_FIXED_NOREPLACE, FILES[0])]);
}

#[test]
fn calls_on_unmapped_ranges_report_that_first() {
    agrees(&[mprotect(page(500), pages(1), PROT_READ | PROT_GROWSUP)]);
    agrees(&[msync(page(500), 0xffff_ffff_ffff_f000, 0)]);
    agrees(&[limit(RLIMIT_MEMLOCK, 1), mlock(page(500), 0xffff_ffff_ffff_e000)]);
    agrees(&[limit(RLIMIT_MEMLOCK, 1), mlock2(page(500), 0xffff_ffff_ffff_e000, 0)]);
}

#[test]
fn fallocate_checks_descriptor_and_range_before_mode() {
    agrees(&[fallocate(READ_ONLY, FALLOC_FL_COLLAPSE_RANGE, 0, pages(1))]);
    agrees(&[fallocate(FILES[0], FALLOC_FL_ZERO_RANGE, 0x7fff_ffff_ffff_ffff, pages(1))]);
}

#[test]
fn a_child_joins_its_own_mappings_only() {
    agrees(&[
        private(489, 28),
        mlock2(page(500), pages(1), MLOCK_ONFAULT),
        store(page(500), 1),
        fork(),
        switch(),
        munlockall(),
    ]);
    agrees(&[private(2063, 511), mlock(page(2064), pages(511)), fork(), switch(), munlockall()]);
    agrees(&[
        private(480, 38),
        mlock2(page(500), pages(1), MLOCK_ONFAULT),
        fork(),
        switch(),
        mremap(page(500), pages(1), pages(1), DUPLICATE, page(501)),
    ]);
}

#[test]
fn a_shared_guard_keeps_no_child_from_merging() {
    agrees(&[
        shared(480, 40),
        mprotect(page(501), pages(8), PROT_READ),
        madvise(page(500), pages(2), MADV_GUARD_INSTALL),
        fork(),
        switch(),
        mprotect(page(505), pages(4), RW),
    ]);
    agrees(&[
        mmap(page(516), pages(7), RW, MAP_SHARED | MAP_FIXED, FILES[0], 0),
        madvise(page(516), pages(1), MADV_GUARD_INSTALL),
        mlock2(page(516), pages(1), 0),
        fork(),
        switch(),
        mlockall(MCL_CURRENT),
    ]);
}

#[test]
fn an_unlocked_mapping_merges_with_both_neighbors() {
    agrees(&[
        mmap(page(480), pages(29), RW, MAP_PRIVATE | MAP_FIXED, FILES[0], 0),
        mlock(page(500), pages(1)),
        madvise(page(501), pages(1), MADV_GUARD_INSTALL),
        munlockall(),
    ]);
}

#[test]
fn guards_over_a_table_are_cut_along() {
    agrees(&[
        private(2048, 512),
        madvise(page(2048), pages(512), MADV_GUARD_INSTALL),
        madvise(page(2048), pages(1), MADV_HUGEPAGE),
    ]);
}

#[test]
fn mincore_answers_mapping_by_mapping() {
    agrees(&[
        private(480, 28),
        mprotect(page(505), pages(2), PROT_READ),
        mincore(page(504), pages(4), page(507)),
    ]);
}

#[test]
fn a_write_only_stack_grows_page_by_page() {
    agrees(&[
        mmap(page(504), pages(1), PROT_WRITE, PRIVATE | MAP_GROWSDOWN, NO_FILE, 0),
        mlockall(MCL_CURRENT | MCL_FUTURE),
        store(page(464), 1),
    ]);
}

#[test]
fn preallocated_pages_are_seen_after_their_touch() {
    agrees(&[
        mmap(page(486), pages(20), RW, MAP_SHARED | MAP_FIXED, FILES[0], 0),
        fallocate(FILES[0], 0, pages(13), pages(5)),
        store(page(500), 1),
        mincore(page(500), pages(1), SCRATCH),
    ]);
}

#[test]
fn a_store_into_a_guard_makes_no_group() {
    agrees(&[
        mmap(page(480), pages(39), RW, MAP_PRIVATE | MAP_FIXED, FILES[0], 0),
        madvise(page(508), pages(2), MADV_GUARD_INSTALL),
        mlock(page(510), pages(1)),
        store(page(508), 1),
        munlockall(),
    ]);
}

#[test]
fn mprotect_populates_only_newly_writable_pages() {
    agrees(&[
        private(480, 26),
        mmap(page(503), pages(1), PROT_READ, PRIVATE, NO_FILE, 0),
        private(505, 3),
        mmap(page(505), pages(1), PROT_READ, MAP_PRIVATE | MAP_FIXED, FILES[0], 0),
        mlock(page(500), 0x4000000000000),
        mprotect(page(500), pages(6), RW),
    ]);
}

#[test]
fn shared_memory_with_guards_collapses_with_an_error() {
    let guarded = madvise(page(2051), pages(1), MADV_GUARD_INSTALL);
    let collapse = madvise(page(2048), pages(512), MADV_COLLAPSE);
    let begin = [shared(2048, 512), store(page(2048), 1), guarded];
    agrees(&[&begin[..], &[collapse.clone(), collapse.clone()]].concat());
    let lifted = madvise(page(2051), pages(1), MADV_GUARD_REMOVE);
    agrees(&[&begin[..], &[lifted, collapse]].concat());
}

#[test]
fn zeroes_opened_for_reading_cannot_be_made_writable() {
    let map =
        |kind, file, offset| mmap(page(500), pages(2), PROT_READ, kind | MAP_FIXED, file, offset);
    agrees(&[
        map(MAP_SHARED, ZEROES[1], 0),
        mprotect(page(500), pages(1), RW),
        mprotect(page(500), pages(2), PROT_READ | PROT_EXEC),
    ]);
    agrees(&[map(MAP_SHARED, ZEROES[0], 0), mprotect(page(500), pages(1), RW)]);
    agrees(&[map(MAP_SHARED, ZEROES[0], pages(1)), load(page(500)), load(page(501))]);
    agrees(&[mmap(page(500), pages(1), RW, MAP_SHARED | MAP_FIXED, ZEROES[1], 0)]);
    agrees(&[map(MAP_PRIVATE | MAP_GROWSDOWN, ZEROES[0], 0)]);
}

#[test]
fn shared_memory_without_a_page_is_not_collapsed() {
    agrees(&[shared(2048, 1024), madvise(page(2048), pages(512), MADV_COLLAPSE)]);
}

#[test]
fn droppable_memory_counts_against_the_future_lock_limit() {
    agrees(&[
        mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT),
        limit(RLIMIT_MEMLOCK, NOTHING),
        mmap(page(500), pages(1), RW, MAP_DROPPABLE | MAP_FIXED | MAP_ANONYMOUS, NO_FILE, 0),
    ]);
}

#[test]
fn modes_registered_twice_stay_with_their_userfaultfd() {
    let all = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP | UFFDIO_REGISTER_MODE_MINOR;
    agrees(&[
        agree(UFFD_FEATURE_SIGBUS),
        shared(480, 39),
        register(page(516), pages(3), all),
        register(page(501), pages(16), UFFDIO_REGISTER_MODE_MISSING),
    ]);
}

#[test]
fn what_a_userfaultfd_serves_moves_alone() {
    let fixed = MREMAP_MAYMOVE | MREMAP_FIXED;
    agrees(&[
        agree(UFFD_FEATURE_SIGBUS),
        private(480, 46),
        register(page(522), pages(2), UFFDIO_REGISTER_MODE_MISSING),
        mremap(page(521), pages(2), pages(2), fixed, page(502)),
        mremap(page(523), pages(2), pages(2), fixed, page(490)),
        mremap(page(522), pages(2), pages(2), fixed, page(485)),
    ]);
}

#[test]
fn a_child_moves_no_pages_of_its_parent() {
    agrees(&[
        agree(UFFD_FEATURE_SIGBUS),
        private(480, 8),
        register(page(480), pages(8), UFFDIO_REGISTER_MODE_MISSING),
        fork(),
        switch(),
        move_pages(page(480), page(500), pages(1), 0),
        supply_copy(page(480), SCRATCH, pages(1), 0),
        switch(),
        load(page(480)),
        load(page(481)),
    ]);
}

#[test]
fn nothing_is_supplied_beyond_a_files_end() {
    agrees(&[
        agree(UFFD_FEATURE_SIGBUS),
        ftruncate(FILES[0], pages(1)),
        mmap(page(505), pages(3), RW, MAP_PRIVATE | MAP_FIXED, FILES[0], 0),
        register(page(505), pages(3), UFFDIO_REGISTER_MODE_MISSING),
        supply_zeroes(page(505), pages(2), 0),
        supply_copy(page(506), SCRATCH, pages(2), 0),
    ]);
}

#[test]
fn partial_advice_does_not_cut_the_zero_page() {
    for advice in [MADV_PAGEOUT, MADV_COLD] {
        agrees(&[
            swap_to(COMPRESSED_MEMORY),
            private(2048, 512),
            madvise(page(2048), pages(512), MADV_HUGEPAGE),
            load(page(2048)),
            madvise(page(2048), pages(1), advice),
            store(page(2048), 1),
        ]);
    }
}
