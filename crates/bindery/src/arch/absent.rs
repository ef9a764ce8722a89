//! Absent entries: entries that only software reads. All architectures share one format, because
//! every architecture leaves all bits but the valid bit to software.
//!
//! ```text
//! 63..51  50..44  43  42..12   11 ... 7          6         5                4          3           2..1  0
//! 0       number  0   number   device, marker    accessed  exclusive/dirty  userfault  soft-dirty  kind  0
//! ```
//!
//! The number is that of a slot or of a frame. The kind is never 0, so no absent entry equals the
//! empty one. A mask of the number's bits may be stored inverted ([`Arch::ABSENT_FLIP`]). Bit 43 is
//! then always 1. So a processor whose cache compares 44 bits of an address takes no inverted entry
//! for memory below 2^43, whatever the number.

use super::{Arch, Attributes, Entry, MemoryType};
use crate::addr::Frame;

const KIND_SHIFT: u32 = 1;
const KIND_MASK: u64 = 0b11 << KIND_SHIFT;
const SWAP: u64 = 1 << KIND_SHIFT;
const MARKER: u64 = 2 << KIND_SHIFT;
const HIDDEN: u64 = 3 << KIND_SHIFT;
pub(crate) const SOFT_DIRTY: u64 = 1 << 3;
pub(crate) const USERFAULT: u64 = 1 << 4;
/// In swap entries: exclusive. In ProtNone leaves: dirty.
const EXCLUSIVE: u64 = 1 << 5;
const DIRTY: u64 = 1 << 5;
pub(crate) const ACCESSED: u64 = 1 << 6;
const TYPE_SHIFT: u32 = 7;
const TYPE_MASK: u64 = 0x1f << TYPE_SHIFT;
const NUMBER_SHIFT: u32 = 12;
/// The number of bits below the bit that is always 0.
const LOW_BITS: u32 = 31;
const LOW: u64 = (1 << LOW_BITS) - 1;
/// The greatest slot.
const LAST_SLOT: u64 = (1 << 38) - 1;
const LAST_FRAME: u64 = u32::MAX as u64;

/// The meaning of an absent entry.
///
/// ```
/// use bindery::arch::{Absent, AbsentFormat, Marker, X86_64};
///
/// let guard = X86_64::<4>::encode_absent(Absent::Marker(Marker::Guard));
/// assert_eq!(X86_64::<4>::decode_absent(guard), Some(Absent::Marker(Marker::Guard)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Absent {
    /// The page is in swap.
    Swap {
        /// The device, 0 to 31.
        device: u8,
        /// The slot on the device, below 2^38; neighbors in a run have consecutive slots.
        slot: u64,
        /// No other process refers to the slot.
        exclusive: bool,
        /// The page was written since soft-dirty was last cleared.
        soft_dirty: bool,
        /// A userfaultfd write-protected the page.
        userfault: bool,
    },
    /// No page, but a recorded state.
    Marker(Marker),
    /// A page mapped without permissions (`PROT_NONE`): its folio counts the page as mapped, but
    /// the MMU does not see it.
    ProtNone {
        /// The page's frame.
        frame: Frame,
        /// The page was accessed before it became `PROT_NONE`.
        accessed: bool,
        /// The page was written before it became `PROT_NONE`.
        dirty: bool,
        /// The page was written since soft-dirty was last cleared.
        soft_dirty: bool,
        /// A userfaultfd write-protected the page.
        userfault: bool,
        /// The memory type of the page's leaf.
        memory: MemoryType,
    },
}

/// The markers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Marker {
    /// A userfaultfd write-protected an absent page.
    UserfaultWriteProtect,
    /// The page's content is lost; an access raises SIGBUS.
    Poison,
    /// A guard page (`MADV_GUARD_INSTALL`); an access raises SIGSEGV.
    Guard,
}

/// The bits of the number of a slot or a frame in an entry that is not inverted.
const fn number_bits(number: u64) -> u64 {
    (number & LOW | (number & !LOW) << 1) << NUMBER_SHIFT
}

/// The number with these bits, as from [`number_bits`].
const fn number_of(bits: u64) -> u64 {
    let bits = bits >> NUMBER_SHIFT;
    bits & LOW | (bits & !LOW) >> 1
}

const fn flag(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}

/// The absent entries of an architecture. The format is the same for all, so this trait has a
/// blanket implementation for every [`Arch`].
pub trait AbsentFormat: Arch {
    /// The entry for `absent`. Bits that do not fit (a slot of 2^38 or more, a device above 31) are
    /// truncated; callers allocate slots below those bounds.
    fn encode_absent(absent: Absent) -> Entry {
        let plain = match absent {
            Absent::Swap { device, slot, exclusive, soft_dirty, userfault } => {
                SWAP | flag(soft_dirty, SOFT_DIRTY)
                    | flag(userfault, USERFAULT)
                    | flag(exclusive, EXCLUSIVE)
                    | (u64::from(device) << TYPE_SHIFT) & TYPE_MASK
                    | number_bits(slot & LAST_SLOT)
            }
            Absent::Marker(marker) => {
                let number: u64 = match marker {
                    Marker::UserfaultWriteProtect => 0,
                    Marker::Poison => 1,
                    Marker::Guard => 2,
                };
                MARKER | number << TYPE_SHIFT
            }
            Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory } => {
                HIDDEN
                    | memory.number() << TYPE_SHIFT
                    | flag(soft_dirty, SOFT_DIRTY)
                    | flag(userfault, USERFAULT)
                    | flag(dirty, DIRTY)
                    | flag(accessed, ACCESSED)
                    | number_bits(u64::from(frame.0))
            }
        };
        Entry(plain ^ Self::ABSENT_FLIP)
    }

    /// The `PROT_NONE` entry of a page, which preserves all of `attributes` except permissions and
    /// key, because the mapping has those.
    fn encode_prot_none(frame: Frame, attributes: Attributes) -> Entry {
        let Attributes { accessed, dirty, soft_dirty, userfault, memory, .. } = attributes;
        Self::encode_absent(Absent::ProtNone {
            frame,
            accessed,
            dirty,
            soft_dirty,
            userfault,
            memory,
        })
    }

    /// Decodes the absent `entry`; `None` for a bit pattern that [`AbsentFormat::encode_absent`]
    /// never produces (the auditor reports such an entry).
    fn decode_absent(entry: Entry) -> Option<Absent> {
        let plain = entry.0 ^ Self::ABSENT_FLIP;
        let soft_dirty = plain & SOFT_DIRTY != 0;
        let userfault = plain & USERFAULT != 0;
        let number = (plain & TYPE_MASK) >> TYPE_SHIFT;
        let (slots, frames) = (number_bits(LAST_SLOT), number_bits(LAST_FRAME));
        let (absent, used) = match plain & KIND_MASK {
            // Without the feature, no such entry exists.
            SWAP if cfg!(feature = "swap") => {
                let swap = Absent::Swap {
                    device: number as u8,
                    slot: number_of(plain & slots),
                    exclusive: plain & EXCLUSIVE != 0,
                    soft_dirty,
                    userfault,
                };
                (swap, SOFT_DIRTY | USERFAULT | EXCLUSIVE | TYPE_MASK | slots)
            }
            MARKER => {
                let marker = match number {
                    0 => Marker::UserfaultWriteProtect,
                    1 => Marker::Poison,
                    2 => Marker::Guard,
                    _ => return None,
                };
                (Absent::Marker(marker), TYPE_MASK)
            }
            HIDDEN => {
                let hidden = Absent::ProtNone {
                    frame: Frame(number_of(plain & frames) as u32),
                    accessed: plain & ACCESSED != 0,
                    dirty: plain & DIRTY != 0,
                    soft_dirty,
                    userfault,
                    memory: MemoryType::of_number(number)?,
                };
                let used = SOFT_DIRTY | USERFAULT | DIRTY | ACCESSED | TYPE_MASK;
                (hidden, used | frames)
            }
            _ => return None,
        };
        // A stray bit anywhere else also means a corrupted entry.
        (plain & !(KIND_MASK | used) == 0).then_some(absent)
    }

    /// Whether the absent `entry` is a `PROT_NONE` leaf, which has a frame.
    #[inline]
    fn is_prot_none(entry: Entry) -> bool {
        (entry.0 ^ Self::ABSENT_FLIP) & KIND_MASK == HIDDEN
    }

    /// Whether the absent `entry` refers to a swap slot.
    #[inline]
    fn is_swap(entry: Entry) -> bool {
        cfg!(feature = "swap") && (entry.0 ^ Self::ABSENT_FLIP) & KIND_MASK == SWAP
    }

    /// The difference between the absent `entry` and its successor in a run: the next slot or
    /// frame; zero for markers, which are all equal. No run continues from a number below a multiple
    /// of 2^31 to that multiple, because the bit between the number's parts does not carry.
    #[inline]
    fn absent_step(entry: Entry) -> u64 {
        let plain = entry.0 ^ Self::ABSENT_FLIP;
        match plain & KIND_MASK {
            MARKER => 0,
            // An inverted field counts down.
            _ if Self::ABSENT_FLIP != 0 => 0u64.wrapping_sub(1 << NUMBER_SHIFT),
            _ => 1 << NUMBER_SHIFT,
        }
    }

    /// The absent entry whose slot or frame is `count` after that of `first`; markers are all
    /// equal.
    fn nth_absent(first: Entry, count: u32) -> Entry {
        let plain = first.0 ^ Self::ABSENT_FLIP;
        if plain & KIND_MASK == MARKER {
            return first;
        }
        let all = number_bits(LAST_SLOT);
        let number = number_of(plain & all).wrapping_add(u64::from(count)) & LAST_SLOT;
        Entry((plain & !all | number_bits(number)) ^ Self::ABSENT_FLIP)
    }

    /// The bits in which absent neighbors of one run must agree (after
    /// [`AbsentFormat::absent_step`] per entry): all except accessed, dirty and soft-dirty of
    /// `PROT_NONE` leaves, which [`AbsentFormat::gather_absent`] merges.
    #[inline]
    fn absent_compare_mask(entry: Entry) -> u64 {
        if Self::is_prot_none(entry) { !(ACCESSED | DIRTY | SOFT_DIRTY) } else { !0 }
    }

    /// `into` with accessed, dirty and soft-dirty of the `PROT_NONE` leaf `from` merged in; other
    /// absent entries have nothing to merge.
    #[inline]
    fn gather_absent(into: Entry, from: Entry) -> Entry {
        if Self::is_prot_none(from) {
            Entry(into.0 | from.0 & (ACCESSED | DIRTY | SOFT_DIRTY))
        } else {
            into
        }
    }

    /// The absent entry marked soft-dirty, as after a move; markers have no such bit.
    #[inline]
    fn mark_absent_soft_dirty(entry: Entry) -> Entry {
        if (entry.0 ^ Self::ABSENT_FLIP) & KIND_MASK == MARKER {
            entry
        } else {
            Entry(entry.0 | SOFT_DIRTY)
        }
    }

    /// The entry for both sides of a `fork`: a swap entry is no longer exclusive.
    #[inline]
    fn share_absent(entry: Entry) -> Entry {
        if Self::is_swap(entry) { Entry(entry.0 & !EXCLUSIVE) } else { entry }
    }

    /// The entry with the userfault write-protect bit; markers have no such bit.
    #[inline]
    fn set_absent_userfault(entry: Entry) -> Entry {
        if (entry.0 ^ Self::ABSENT_FLIP) & KIND_MASK == MARKER {
            entry
        } else {
            Entry(entry.0 | USERFAULT)
        }
    }

    /// The entry for an area without userfault: without the write-protect bit; a write-protect
    /// marker becomes the empty entry.
    #[inline]
    fn strip_absent_userfault(entry: Entry) -> Entry {
        if entry == Self::encode_absent(Absent::Marker(Marker::UserfaultWriteProtect)) {
            Entry::EMPTY
        } else {
            Entry(entry.0 & !USERFAULT)
        }
    }
}

impl<A: Arch> AbsentFormat for A {}
