//! Absent entries: the same format on all architectures.

use super::*;

const MARKERS: [Marker; 3] = [Marker::UserfaultWriteProtect, Marker::Poison, Marker::Guard];

/// Absent entries of every kind, with the smallest and largest numbers.
pub(super) fn some_absent() -> impl Iterator<Item = Absent> {
    let flags =
        || (0..16).map(|n| (BOOLS[n & 1], BOOLS[n >> 1 & 1], BOOLS[n >> 2 & 1], BOOLS[n >> 3 & 1]));
    let numbers = [(0, 0), (31, (1 << 38) - 1), (5, 0x12_3456_789a), (7, 0x7fff_fffe)];
    let swap = flags().flat_map(move |(exclusive, soft_dirty, userfault, _)| {
        numbers.into_iter().map(move |(device, slot)| Absent::Swap {
            device,
            slot,
            exclusive,
            soft_dirty,
            userfault,
        })
    });
    let prot_none = flags().flat_map(|(accessed, dirty, soft_dirty, userfault)| {
        let frames = [0, 0x1234_5678, 0x7fff_ffff, 0x8000_0000, u32::MAX].into_iter();
        frames.flat_map(|frame| MemoryType::ALL.map(|memory| (frame, memory))).map(
            move |(frame, memory)| Absent::ProtNone {
                frame: Frame(frame),
                accessed,
                dirty,
                soft_dirty,
                userfault,
                memory,
            },
        )
    });
    swap.chain(prot_none).chain(MARKERS.map(Absent::Marker))
}

pub(super) fn absent_entries_are_read_back_and_never_empty_or_present<A: Arch>() {
    for absent in some_absent() {
        let entry = A::encode_absent(absent);
        assert_eq!(A::decode_absent(entry), Some(absent));
        assert!(!entry.is_empty() && entry.0 & A::PRESENT == 0);
        for level in Level::PTE.up_to(A::ROOT) {
            assert_eq!(level.kind(entry), Kind::Absent);
        }
        let prot_none = matches!(absent, Absent::ProtNone { .. });
        assert_eq!(A::is_prot_none(entry), prot_none);
    }
}

pub(super) fn absent_neighbors_are_one_step_apart<A: Arch>() {
    for absent in some_absent() {
        let next = match absent {
            Absent::Marker(_) => absent,
            Absent::Swap { slot, device, exclusive, soft_dirty, userfault } => {
                if slot + 1 == 1 << 38 {
                    continue;
                }
                Absent::Swap { slot: slot + 1, device, exclusive, soft_dirty, userfault }
            }
            mut hidden @ Absent::ProtNone { .. } => {
                let Absent::ProtNone { frame, .. } = &mut hidden else { continue };
                if matches!(frame.0, 0x7fff_ffff | u32::MAX) {
                    continue;
                }
                *frame = frame.plus(1);
                hidden
            }
        };
        let entry = A::encode_absent(absent);
        let stepped = Entry(entry.0.wrapping_add(A::absent_step(entry)));
        assert_eq!(A::decode_absent(stepped), Some(next));
        assert_eq!(A::nth_absent(entry, 1), stepped);
    }
}

/// The numbers on the two sides of a multiple of 2^31 are no neighbors in a run.
pub(super) fn any_number_is_reached_but_runs_end<A: Arch>() {
    let hidden = |frame| A::encode_prot_none(Frame(frame), Attributes::default());
    for (from, to) in [(0, u32::MAX), (0x7fff_ffff, 0x8000_0000), (7, 0x9000_0007)] {
        assert_eq!(A::nth_page(hidden(from), to - from), hidden(to));
    }
    let (below, above) = (hidden(0x7fff_ffff), hidden(0x8000_0000));
    let stepped = below.0.wrapping_add(A::absent_step(below));
    assert_ne!((stepped ^ above.0) & A::absent_compare_mask(below), 0);
}

pub(super) fn prot_none_leaves_gather_what_they_recorded<A: Arch>() {
    let prot_none = |bits: usize| Absent::ProtNone {
        frame: Frame(0x1234),
        accessed: BOOLS[bits & 1],
        dirty: BOOLS[bits >> 1 & 1],
        soft_dirty: BOOLS[bits >> 2 & 1],
        userfault: BOOLS[bits >> 3 & 1],
        memory: MemoryType::Device,
    };
    for (into, from) in (0..16).flat_map(|into| (0..16).map(move |from| (into, from))) {
        let gathered = A::encode_absent(prot_none(into | (from & 0b111)));
        let (into_entry, from_entry) =
            (A::encode_absent(prot_none(into)), A::encode_absent(prot_none(from)));
        assert_eq!(A::gather_absent(into_entry, from_entry), gathered);
        let mask = A::absent_compare_mask(into_entry);
        let agree = (into_entry.0 ^ from_entry.0) & mask == 0;
        assert_eq!(agree, into & 0b1000 == from & 0b1000, "only userfault must agree");
    }
    let swap = some_absent().next().map(A::encode_absent).unwrap();
    assert_eq!(A::gather_absent(swap, swap), swap);
    assert_eq!(A::absent_compare_mask(swap), !0);
}

pub(super) fn stripping_userfault_leaves_nothing_of_it<A: Arch>() {
    for absent in some_absent() {
        let stripped = A::strip_absent_userfault(A::encode_absent(absent));
        let expected = match absent {
            Absent::Marker(Marker::UserfaultWriteProtect) => None,
            Absent::Marker(_) => Some(absent),
            Absent::Swap { device, slot, exclusive, soft_dirty, .. } => {
                Some(Absent::Swap { device, slot, exclusive, soft_dirty, userfault: false })
            }
            Absent::ProtNone { frame, accessed, dirty, soft_dirty, memory, .. } => {
                let userfault = false;
                Some(Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory })
            }
        };
        assert_eq!(stripped, expected.map_or(Entry::EMPTY, A::encode_absent));
    }
}

pub(super) fn soft_dirty_marks_pages_but_not_markers<A: Arch>() {
    for absent in some_absent() {
        let expected = match absent {
            Absent::Marker(_) => absent,
            Absent::Swap { device, slot, exclusive, userfault, .. } => {
                Absent::Swap { device, slot, exclusive, soft_dirty: true, userfault }
            }
            Absent::ProtNone { frame, accessed, dirty, userfault, memory, .. } => {
                let soft_dirty = true;
                Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory }
            }
        };
        let marked = A::mark_absent_soft_dirty(A::encode_absent(absent));
        assert_eq!(marked, A::encode_absent(expected));
    }
}

pub(super) fn any_bits_that_decode_are_bits_that_were_encoded<A: Arch>() {
    // Random bits nearly always contain a stray bit, as do valid entries with one flipped bit.
    proptest!(|(bits: u64, which in 0usize..99, turned in 0u32..64)| {
        let valid = some_absent().nth(which).map_or(Entry::EMPTY, A::encode_absent);
        for entry in [Entry(bits), Entry(valid.0 ^ 1 << turned)] {
            if let Some(absent) = A::decode_absent(entry) {
                prop_assert_eq!(A::encode_absent(absent), entry);
            }
        }
    });
    assert_eq!(
        A::decode_absent(Entry(A::encode_absent(Absent::Marker(Marker::Guard)).0 | 1)),
        None
    );
    assert_eq!(A::decode_absent(Entry(A::ABSENT_FLIP)), None, "no kind at all");
}
