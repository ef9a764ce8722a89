//! The guarantees of every architecture: each sentence below is tested on all of them. Most tests
//! compare a changed entry with the entry that [`Arch::page_entry`] builds from changed attributes,
//! which also proves that no other bit changed.

mod absent_entries;

use proptest::prelude::*;

use super::*;
use absent_entries::*;

/// Runs the named functions as tests for one architecture.
macro_rules! architecture {
    ($module:ident, $arch:ty) => {
        architecture! { $module, $arch:
            what_is_written_into_a_leaf_is_read_back
            permissions_never_imply_more_than_reading
            pages_are_guarded_where_they_can_be_and_are_run
            a_leaf_names_its_frame_at_every_level
            the_step_leads_to_the_leaf_of_the_next_frame
            a_page_that_nothing_is_allowed_with_is_prot_none_at_every_level
            every_change_of_a_leaf_keeps_its_memory_type
            tables_leaves_and_empty_entries_are_told_apart
            software_bits_stand_where_the_constants_say
            gathering_adds_accessed_and_dirty_and_nothing_else
            a_leaf_is_saturated_when_the_mmu_has_nothing_to_record
            a_change_of_one_attribute_leaves_the_others_alone
            neighbors_agree_exactly_in_what_a_run_shares
            setting_and_clearing_contig_undo_each_other_at_every_index
            a_contig_run_folds_only_where_both_alignments_agree
            permissions_and_records_change_in_place
            another_frame_size_or_scope_needs_a_break
            a_contig_run_is_entered_and_left_by_a_break
            what_was_not_there_needs_no_break
            absent_entries_are_read_back_and_never_empty_or_present
            absent_neighbors_are_one_step_apart
            any_number_is_reached_but_runs_end
            prot_none_leaves_gather_what_they_recorded
            stripping_userfault_leaves_nothing_of_it
            soft_dirty_marks_pages_but_not_markers
            any_bits_that_decode_are_bits_that_were_encoded
        }
    };
    ($module:ident, $arch:ty: $($test:ident)*) => {
        mod $module {
            use super::*;
            $(#[test]
            fn $test() {
                super::$test::<$arch>();
            })*
        }
    };
}

architecture!(x86_64_with_four_levels, X86_64<4>);
architecture!(x86_64_with_five_levels, X86_64<5>);
architecture!(aarch64, AArch64);
architecture!(riscv64_sv39, Riscv64<3>);
architecture!(riscv64_sv48, Riscv64<4>);
architecture!(tiny, Tiny);

const BOOLS: [bool; 2] = [false, true];

/// All attributes that a leaf may have on every architecture.
fn all_attributes() -> impl Iterator<Item = Attributes> {
    (0..=u8::MAX)
        .map(|bits| Attributes {
            permissions: Permissions::from_bits_truncate(bits & 0xf),
            accessed: bits & 1 << 4 != 0,
            dirty: bits & 1 << 5 != 0,
            soft_dirty: bits & 1 << 6 != 0,
            userfault: bits & 1 << 7 != 0,
            ..Attributes::default()
        })
        .filter(|attributes| attributes.permissions.intersects(Permissions::ACCESS))
}

/// The attributes that all architectures can express.
fn readable() -> impl Iterator<Item = Attributes> {
    all_attributes().filter(|attributes| attributes.permissions.contains(Permissions::READ))
}

fn pairs() -> impl Iterator<Item = (Attributes, Attributes)> {
    readable().flat_map(|a| readable().map(move |b| (a, b)))
}

/// A few frames aligned for a leaf at `level`, among them the first and the last.
fn frames<A: Arch>(level: Level<A>) -> [Frame; 4] {
    let mask = !0 << level.order().0;
    [0, 0x1234_5678, 0x8000_0000, u32::MAX].map(|frame| Frame(frame & mask))
}

fn page<A: Arch>(attributes: Attributes) -> Entry {
    A::page_entry(Frame(0x1_2340), Level::PTE, attributes)
}

fn with(attributes: Attributes, permissions: Permissions) -> Attributes {
    Attributes { permissions: attributes.permissions | permissions, ..attributes }
}

fn without(attributes: Attributes, permissions: Permissions) -> Attributes {
    Attributes { permissions: attributes.permissions - permissions, ..attributes }
}

fn what_is_written_into_a_leaf_is_read_back<A: Arch>() {
    for level in Level::PTE.up_to(A::LARGEST_LEAF) {
        for attributes in readable() {
            let leaf = A::page_entry(frames::<A>(level)[1], level, attributes);
            assert_eq!(A::attributes(leaf), attributes, "{leaf:?} at level {level}");
        }
    }
}

fn permissions_never_imply_more_than_reading<A: Arch>() {
    for attributes in all_attributes() {
        let read = A::attributes(page::<A>(attributes));
        assert_eq!(without(read, Permissions::READ), without(attributes, Permissions::READ));
    }
}

fn pages_are_guarded_where_they_can_be_and_are_run<A: Arch>() {
    for level in Level::PTE.up_to(A::LARGEST_LEAF) {
        let frame = frames::<A>(level)[1];
        for plain in readable() {
            let run = plain.permissions.contains(Permissions::EXECUTE);
            let (old, new) = (
                A::page_entry(frame, level, plain),
                A::page_entry(frame, level, with(plain, Permissions::BTI)),
            );
            let guarded = A::attributes(new).permissions.contains(Permissions::BTI);
            assert_eq!(guarded, A::BTI && run, "{plain:?}");
            assert_eq!(without(A::attributes(new), Permissions::BTI), plain);
            // The bit changes in place, splits runs, and survives writes and protection changes.
            assert!(!A::needs_break(old, new, level) && !A::needs_break(new, old, level));
            let difference = old.0 ^ new.0;
            assert_eq!(difference & A::compare_mask(Equal::empty()), difference);
            let written = A::make_writable(A::write_protect(new), Write::Now);
            assert_eq!(A::attributes(written).permissions.contains(Permissions::BTI), guarded);
        }
    }
    for nothing in [Permissions::empty(), Permissions::USER] {
        assert_eq!(A::implied(nothing | Permissions::BTI), nothing);
    }
}

fn every_change_of_a_leaf_keeps_its_memory_type<A: Arch>() {
    let supported = MemoryType::ALL.into_iter().filter(|one| A::memory_type(*one).is_some());
    for (memory, level) in
        supported.flat_map(|one| Level::PTE.up_to(A::LARGEST_LEAF).map(move |level| (one, level)))
    {
        let normal = |plain: Attributes| A::page_entry(frames::<A>(level)[1], level, plain);
        // If types share an encoding, decoding returns the strictest of them.
        let of_leaf = A::attributes(normal(Attributes { memory, ..readable().next().unwrap() }));
        let strictest = of_leaf.memory;
        assert_eq!(A::memory_type(strictest), A::memory_type(memory));
        for plain in readable() {
            let leaf = normal(Attributes { memory, ..plain });
            assert_eq!(A::attributes(leaf), Attributes { memory: strictest, ..plain });
            // The type splits runs, regardless of other differences between their entries.
            let difference = leaf.0 ^ normal(plain).0;
            let mask = A::compare_mask(Equal::ANY_FRAMES);
            assert_eq!(difference & mask, difference);
            assert_eq!(difference == 0, strictest == MemoryType::Normal);
            let hidden = A::encode_prot_none(A::frame(leaf), A::attributes(leaf));
            let Some(Absent::ProtNone { memory: kept, .. }) = A::decode_absent(hidden) else {
                panic!("{hidden:?} is no `PROT_NONE` entry");
            };
            assert_eq!(kept, strictest);
            let changed = [
                A::write_protect(leaf),
                A::make_writable(A::write_protect(leaf), Write::Now),
                A::mark_accessed(leaf),
                A::mark_unused(leaf),
                A::mark_clean(leaf),
                A::gather(leaf, normal(plain)),
            ];
            for entry in changed {
                assert_eq!(A::attributes(entry).memory, strictest, "{plain:?}");
            }
        }
    }
}

#[test]
fn a_kernel_leaf_is_complete_for_the_mmu() {
    macro_rules! holds {
        ($arch:ty) => {
            for (level, memory) in Level::PTE
                .up_to(Level::PUD)
                .flat_map(|level| MemoryType::ALL.map(|one| (level, one)))
            {
                let Some(bits) = <$arch>::memory_type(memory) else { continue };
                for permissions in [Permissions::READ, Permissions::READ | Permissions::WRITE] {
                    for permissions in [permissions, permissions | Permissions::EXECUTE] {
                        let leaf = <$arch>::kernel_leaf(Frame(1 << 18), level, permissions, memory);
                        let dirty = permissions.contains(Permissions::WRITE);
                        let attributes =
                            Attributes { permissions, accessed: true, dirty, ..Default::default() };
                        let expected = <$arch>::page_entry(Frame(1 << 18), level, attributes);
                        assert_eq!(leaf, Entry(expected.0 | bits));
                        assert!(<$arch>::is_saturated(leaf));
                    }
                }
            }
        };
    }
    holds!(X86_64<4>);
    holds!(AArch64);
    holds!(Riscv64<3>);
}

fn a_leaf_names_its_frame_at_every_level<A: Arch>() {
    for level in Level::PTE.up_to(A::LARGEST_LEAF) {
        for (frame, attributes) in
            frames::<A>(level).into_iter().flat_map(|f| all_attributes().map(move |a| (f, a)))
        {
            assert_eq!(A::frame(A::page_entry(frame, level, attributes)), frame);
        }
    }
}

fn the_step_leads_to_the_leaf_of_the_next_frame<A: Arch>() {
    for level in Level::PTE.up_to(A::LARGEST_LEAF) {
        let count = level.order().pages();
        for attributes in all_attributes() {
            let frame = frames::<A>(level)[1];
            let next = A::page_entry(frame, level, attributes).0 + A::STEP * u64::from(count);
            assert_eq!(Entry(next), A::page_entry(frame.plus(count), level, attributes));
        }
    }
}

fn a_page_that_nothing_is_allowed_with_is_prot_none_at_every_level<A: Arch>() {
    let nothing = [Permissions::empty(), Permissions::USER, Permissions::USER | Permissions::BTI];
    let key = ProtectionKey::truncated(5);
    for level in Level::PTE.up_to(A::LARGEST_LEAF) {
        let frame = frames::<A>(level)[1];
        for (permissions, records) in
            nothing.into_iter().flat_map(|none| all_attributes().map(move |other| (none, other)))
        {
            let Attributes { accessed, dirty, soft_dirty, userfault, memory, .. } = records;
            let entry = A::page_entry(frame, level, Attributes { permissions, key, ..records });
            let hidden =
                |frame| Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory };
            assert_eq!(level.kind(entry), Kind::Absent);
            assert_eq!(A::decode_absent(entry), Some(hidden(frame)));
            let next = A::nth_page(entry, 3);
            assert_eq!(A::decode_absent(next), Some(hidden(frame.plus(3))));
            let leaf = A::page_entry(frame, Level::PTE, records);
            assert_eq!(A::nth_page(leaf, 3), A::page_entry(frame.plus(3), Level::PTE, records));
        }
    }
}

#[test]
fn a_kernel_leaf_without_permissions_is_empty() {
    let (frame, nothing, memory) = (Frame(7), Permissions::empty(), MemoryType::Device);
    assert_eq!(X86_64::<4>::kernel_leaf(frame, Level::PTE, nothing, memory), Entry::EMPTY);
    assert_eq!(AArch64::kernel_leaf(frame, Level::PTE, nothing, memory), Entry::EMPTY);
    assert_eq!(Riscv64::<3>::kernel_leaf(frame, Level::PMD, nothing, memory), Entry::EMPTY);
}

fn tables_leaves_and_empty_entries_are_told_apart<A: Arch>() {
    for level in Level::PTE.up_to(A::ROOT) {
        assert_eq!(level.kind(Entry::EMPTY), Kind::Empty);
    }
    for level in Level::PMD.up_to(A::ROOT) {
        for frame in frames::<A>(Level::PTE) {
            assert_eq!(level.kind(A::table(frame)), Kind::Table);
            assert_eq!(A::frame(A::table(frame)), frame);
        }
    }
    for level in Level::PTE.up_to(A::LARGEST_LEAF) {
        for (frame, attributes) in
            frames::<A>(level).into_iter().flat_map(|f| all_attributes().map(move |a| (f, a)))
        {
            assert_eq!(level.kind(A::page_entry(frame, level, attributes)), Kind::Leaf);
        }
    }
}

fn software_bits_stand_where_the_constants_say<A: Arch>() {
    assert!(A::SOFT_DIRTY.is_power_of_two() && A::USERFAULT.is_power_of_two());
    assert_eq!(A::PRESENT, 1, "absent entries rely on it");
    for attributes in all_attributes() {
        let plain = Attributes { soft_dirty: false, userfault: false, ..attributes };
        let mut bits = page::<A>(plain).0;
        bits |= if attributes.soft_dirty { A::SOFT_DIRTY } else { 0 };
        bits |= if attributes.userfault { A::USERFAULT } else { 0 };
        assert_eq!(page::<A>(attributes).0, bits);
    }
}

fn gathering_adds_accessed_and_dirty_and_nothing_else<A: Arch>() {
    for (into, from) in pairs() {
        let sum = Attributes {
            accessed: into.accessed | from.accessed,
            dirty: into.dirty | from.dirty,
            ..into
        };
        let other = A::page_entry(Frame(0xffff_ffff), Level::PTE, from);
        assert_eq!(A::gather(page::<A>(into), other), page::<A>(sum), "{into:?} {from:?}");
    }
}

fn a_leaf_is_saturated_when_the_mmu_has_nothing_to_record<A: Arch>() {
    for attributes in all_attributes() {
        let writable = attributes.permissions.contains(Permissions::WRITE);
        let saturated = attributes.accessed && (attributes.dirty || !writable);
        assert_eq!(A::is_saturated(page::<A>(attributes)), saturated, "{attributes:?}");
    }
}

fn a_change_of_one_attribute_leaves_the_others_alone<A: Arch>() {
    for old in readable() {
        let entry = page::<A>(old);
        let protected = page::<A>(without(old, Permissions::WRITE));
        let writable = with(old, Permissions::WRITE);
        let written = Attributes { accessed: true, dirty: true, soft_dirty: true, ..writable };
        let accessed = Attributes { accessed: true, ..old };
        assert_eq!(A::write_protect(entry), protected);
        assert_eq!(A::make_writable(entry, Write::Later), page::<A>(writable));
        assert_eq!(A::make_writable(entry, Write::Now), page::<A>(written));
        assert_eq!(A::mark_accessed(entry), page::<A>(accessed));
        let (unused, clean) =
            (Attributes { accessed: false, ..old }, Attributes { dirty: false, ..old });
        assert_eq!(A::mark_unused(entry), page::<A>(unused));
        assert_eq!(A::mark_clean(entry), page::<A>(clean));
        // The round trip of a fork and the subsequent fault.
        assert_eq!(A::make_writable(protected, Write::Later), page::<A>(writable));
    }
}

fn neighbors_agree_exactly_in_what_a_run_shares<A: Arch>() {
    for equal in (0..4).map(Equal::from_bits_truncate) {
        for (a, b) in pairs() {
            let mut shared = a.userfault == b.userfault
                && without(a, Permissions::WRITE).permissions
                    == without(b, Permissions::WRITE).permissions;
            if equal.contains(Equal::WRITABLE) {
                shared &= a.permissions == b.permissions;
            }
            if equal.contains(Equal::SOFT_DIRTY) {
                shared &= a.soft_dirty == b.soft_dirty;
            }
            let next = A::page_entry(Frame(0x1_2341), Level::PTE, b).0 - A::STEP;
            let agree = (page::<A>(a).0 ^ next) & A::compare_mask(equal) == 0;
            assert_eq!(agree, shared, "{equal:?} {a:?} {b:?}");
        }
    }
    let first = page::<A>(Attributes { permissions: Permissions::READ, ..Default::default() });
    let far = first.0 + 2 * A::STEP;
    assert_ne!((first.0 ^ (far - A::STEP)) & A::compare_mask(Equal::empty()), 0);
    let attributes = A::attributes(first);
    for frame in frames::<A>(Level::PTE) {
        let other = A::page_entry(frame, Level::PTE, attributes);
        assert_eq!((first.0 ^ other.0) & A::compare_mask(Equal::ANY_FRAMES), 0, "{frame:?}");
    }
}

fn setting_and_clearing_contig_undo_each_other_at_every_index<A: Arch>() {
    for index in EntryIndex::all::<A>() {
        for attributes in all_attributes() {
            // A contiguous run is aligned in both address spaces; the next frame is arbitrary.
            let frame = Frame(0x1_2340 + index.number());
            let single = A::page_entry(frame, Level::PTE, attributes);
            let contig = A::set_contig(single, index);
            assert_eq!(A::clear_contig(contig, index), single);
            assert_eq!(A::clear_contig(single, index), single, "one in no contig stays as it is");
            assert!(!A::is_contig(single));
            assert_eq!(A::is_contig(contig), A::CONTIG_ENTRIES > 1);
            assert_eq!(Level::<A>::PTE.kind(contig), Kind::Leaf);
            assert_eq!((contig.0 ^ single.0) & (A::SOFT_DIRTY | A::USERFAULT), 0);
        }
    }
}

fn a_contig_run_folds_only_where_both_alignments_agree<A: Arch>() {
    let attributes = Attributes { permissions: Permissions::READ, ..Default::default() };
    for index in EntryIndex::all::<A>() {
        for offset in 0..2 * A::CONTIG_ENTRIES {
            let first = A::page_entry(Frame(0x1_2340 + offset), Level::PTE, attributes);
            let aligned =
                index.offset_in(A::CONTIG_ENTRIES) == 0 && offset % A::CONTIG_ENTRIES == 0;
            assert_eq!(A::may_fold(first, index), A::CONTIG_ENTRIES > 1 && aligned);
        }
    }
    assert!(A::CONTIG_ENTRIES.is_power_of_two() && A::CONTIG_ENTRIES < A::ENTRIES);
}

fn permissions_and_records_change_in_place<A: Arch>() {
    for (old, new) in pairs() {
        // User and kernel leaves differ in the user permission and in the global bit.
        if (old.permissions ^ new.permissions).contains(Permissions::USER) {
            continue;
        }
        for level in Level::PTE.up_to(A::LARGEST_LEAF) {
            let frame = frames::<A>(level)[1];
            let (old, new) = (A::page_entry(frame, level, old), A::page_entry(frame, level, new));
            assert!(!A::needs_break(old, new, level), "{old:?} to {new:?}");
            // The same holds inside a contiguous run.
            let index = EntryIndex::new(frame.0 % A::ENTRIES);
            assert!(
                level > Level::PTE
                    || !A::needs_break(
                        A::set_contig(old, index),
                        A::set_contig(new, index),
                        Level::PTE
                    )
            );
        }
    }
}

fn another_frame_size_or_scope_needs_a_break<A: Arch>() {
    for (old, new) in pairs() {
        for level in Level::PTE.up_to(A::LARGEST_LEAF) {
            let [first, second, ..] = frames::<A>(level);
            let old = A::page_entry(first, level, old);
            assert!(A::needs_break(old, A::page_entry(second, level, new), level), "frame");
            if level > Level::PTE {
                let table = A::table(first);
                assert!(A::needs_break(old, table, level) && A::needs_break(table, old, level));
            }
        }
    }
    for level in Level::PMD.up_to(A::ROOT) {
        assert!(A::needs_break(A::table(Frame(1)), A::table(Frame(2)), level));
        assert!(!A::needs_break(A::table(Frame(1)), A::table(Frame(1)), level));
    }
    for user in readable().map(|attributes| with(attributes, Permissions::USER)) {
        let kernel = without(user, Permissions::USER);
        assert!(A::needs_break(page::<A>(user), page::<A>(kernel), Level::PTE), "becomes global");
    }
}

fn a_contig_run_is_entered_and_left_by_a_break<A: Arch>() {
    for (old, new) in pairs() {
        for index in EntryIndex::FIRST.stretch(A::CONTIG_ENTRIES) {
            let frame = Frame(0x1_2340 + index.number());
            let single = A::page_entry(frame, Level::PTE, old);
            let contig = A::set_contig(A::page_entry(frame, Level::PTE, new), index);
            if A::CONTIG_ENTRIES > 1 {
                assert!(A::needs_break(single, contig, Level::PTE));
                assert!(A::needs_break(contig, single, Level::PTE));
            }
        }
    }
}

fn what_was_not_there_needs_no_break<A: Arch>() {
    for attributes in all_attributes() {
        for level in Level::PTE.up_to(A::LARGEST_LEAF) {
            let leaf = A::page_entry(frames::<A>(level)[1], level, attributes);
            assert!(!A::needs_break(Entry::EMPTY, leaf, level));
            assert!(!A::needs_break(leaf, Entry::EMPTY, level));
            for absent in some_absent().map(A::encode_absent) {
                assert!(!A::needs_break(absent, leaf, level));
                assert!(!A::needs_break(leaf, absent, level));
            }
        }
    }
}
