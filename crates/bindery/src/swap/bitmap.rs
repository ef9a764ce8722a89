//! The bitmap of a cluster's taken slots.

use crate::addr::Order;

/// The number of slots of a cluster: the number of entries of a table, so that a huge page fits
/// into one cluster.
pub(crate) const CLUSTER_SLOTS: u32 = 512;

const WORDS: usize = CLUSTER_SLOTS as usize / 64;

/// One bit for each slot, set while it is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bitmap([u64; WORDS]);

impl Bitmap {
    pub(super) const EMPTY: Self = Self([0; WORDS]);

    /// Whether the slot is taken.
    #[cfg(test)]
    pub(super) fn is_taken(&self, slot: u32) -> bool {
        self.0[slot as usize / 64] >> (slot % 64) & 1 != 0
    }

    /// Takes a free block of 2^`order` slots, aligned to its size, and returns its first slot.
    /// Reads eight words.
    pub(super) fn take_block(&mut self, order: Order) -> Option<u32> {
        let size = order.pages();
        if size >= 64 {
            let words = size as usize / 64;
            let at = (0..WORDS)
                .step_by(words)
                .find(|at| self.0[*at..at + words].iter().all(|word| *word == 0))?;
            self.0[at..at + words].fill(u64::MAX);
            return Some(at as u32 * 64);
        }
        let mut starts = u64::MAX / ((1 << size) - 1);
        if size == 1 {
            starts = u64::MAX;
        }
        for (at, word) in self.0.iter_mut().enumerate() {
            let mut free = !*word;
            let mut width = 1;
            while width < size {
                free &= free >> width;
                width *= 2;
            }
            free &= starts;
            if free != 0 {
                let first = free.trailing_zeros();
                *word |= ((1 << size) - 1) << first;
                return Some(at as u32 * 64 + first);
            }
        }
        None
    }

    /// Takes the first free slot and the free slots after it, up to `most`. Returns the first slot
    /// and the number of slots.
    pub(super) fn take_stretch(&mut self, most: u32) -> Option<(u32, u32)> {
        let (at, word) = self.0.iter().enumerate().find(|(_, word)| **word != u64::MAX)?;
        let first = at as u32 * 64 + word.trailing_ones();
        let mut count = 0;
        while count < most && first + count < CLUSTER_SLOTS {
            let slot = first + count;
            let (index, shift) = (slot as usize / 64, slot % 64);
            let free = (self.0[index] >> shift).trailing_zeros().min(64 - shift);
            let taken = free.min(most - count);
            if taken == 0 {
                break;
            }
            self.0[index] |= (u64::MAX >> (64 - taken)) << shift;
            count += taken;
            if taken < 64 - shift {
                break;
            }
        }
        Some((first, count))
    }

    /// Takes these slots.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn take(&mut self, first: u32, count: u32) {
        for slot in first..first + count {
            self.0[slot as usize / 64] |= 1 << (slot % 64);
        }
    }

    /// Frees `count` slots from `first` on.
    pub(super) fn free_run(&mut self, first: u32, count: u32) {
        let (mut slot, end) = (first, first + count);
        while slot < end {
            let (index, shift) = (slot as usize / 64, slot % 64);
            let part = (end - slot).min(64 - shift);
            self.0[index] &= !((u64::MAX >> (64 - part)) << shift);
            slot += part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_disjoint_until_exhaustion() {
        for order in Order::PAGE.up_to(Order(9)) {
            let mut bitmap = Bitmap::EMPTY;
            for block in 0..CLUSTER_SLOTS >> order.0 {
                assert_eq!(bitmap.take_block(order), Some(block << order.0), "order {order}");
            }
            assert_eq!(bitmap.take_block(order), None);
            bitmap.free_run(0, order.pages());
            assert_eq!(bitmap.take_block(order), Some(0));
        }
    }

    #[test]
    fn a_stretch_ends_at_the_first_taken_slot() {
        let mut bitmap = Bitmap::EMPTY;
        assert_eq!(bitmap.take_stretch(130), Some((0, 130)));
        assert_eq!(bitmap.take_block(Order(3)), Some(136));
        assert_eq!(bitmap.take_stretch(100), Some((130, 6)));
        assert_eq!(bitmap.take_stretch(1000), Some((144, 368)));
        assert_eq!(bitmap.take_stretch(1), None);
        bitmap.free_run(100, 200);
        assert!(bitmap.is_taken(99) && !bitmap.is_taken(100) && bitmap.is_taken(300));
        assert_eq!(bitmap.take_stretch(300), Some((100, 200)));
    }
}
