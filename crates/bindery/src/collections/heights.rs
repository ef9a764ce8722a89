//! Unpredictable heights of towers.
//!
//! A program can measure its faults and learn which of its mappings have tall towers. With a common
//! random number generator, the program could compute the next heights. So the numbers are
//! SipHash-2-4 of a counter, with a key that programs do not know ([`crate::Platform::seed`]). One
//! number provides about fifteen heights.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::range_skip_list::HEIGHT;

/// The maximum number of bits for one height.
const BITS: u32 = 2 * HEIGHT as u32;

/// Draws heights. The caller holds the writer lock of the index.
pub(crate) struct Heights {
    key: [u64; 2],
    /// The counter for the next number.
    counter: AtomicU64,
    /// The unused bits of the last number, below a sentinel bit.
    left: AtomicU64,
}

impl Heights {
    /// Heights determined by `key`.
    pub(crate) const fn new(key: [u64; 2]) -> Self {
        Self { key, counter: AtomicU64::new(0), left: AtomicU64::new(1) }
    }

    /// A height from 1 to [`HEIGHT`]; each height is a quarter as likely as the previous one.
    pub(crate) fn draw(&self) -> usize {
        let mut left = self.left.load(Relaxed);
        if left >> BITS == 0 {
            left = self.refill();
        }
        let more = (left.trailing_zeros() / 2).min(HEIGHT as u32 - 1);
        self.left.store(left >> (2 * (more + 1)), Relaxed);
        1 + more as usize
    }

    #[cold]
    fn refill(&self) -> u64 {
        let counter = self.counter.load(Relaxed);
        self.counter.store(counter.wrapping_add(1), Relaxed);
        siphash(self.key, counter) | 1 << (u64::BITS - 1)
    }
}

/// SipHash-2-4 of the eight bytes of `word`, the least significant first (Aumasson and Bernstein,
/// "SipHash: a fast short-input PRF", 2012).
fn siphash(key: [u64; 2], word: u64) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    // The second word contains only the length of the message.
    for word in [word, 8 << 56] {
        v[3] ^= word;
        rounds(&mut v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    rounds(&mut v, 4);
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn rounds(v: &mut [u64; 4], count: u32) {
    for _ in 0..count {
        v[0] = v[0].wrapping_add(v[1]);
        v[2] = v[2].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].rotate_left(32).wrapping_add(v[3]);
        v[2] = v[2].wrapping_add(v[1]);
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[2] = v[2].rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_standard() {
        // The key 00 01 ... 0f and the message 00 01 ... 07 of the paper's list.
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(key, 0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn each_height_is_a_quarter_as_likely() {
        let heights = Heights::new([3, 4]);
        let drawn: Vec<_> = (0..1 << 20).map(|_| heights.draw()).collect();
        assert!(drawn.iter().all(|height| (1..=HEIGHT).contains(height)));
        let mut expected = f64::from(1 << 20);
        for height in 1..=6 {
            let reach = drawn.iter().filter(|drawn| **drawn >= height).count() as f64;
            assert!((reach / expected - 1.0).abs() < 0.1, "{reach} reach {height}");
            expected /= 4.0;
        }
    }

    #[test]
    fn another_key_gives_other_heights() {
        let heights = |key| {
            let heights = Heights::new(key);
            (0..64).map(|_| heights.draw()).collect::<Vec<_>>()
        };
        assert_eq!(heights([1, 2]), heights([1, 2]));
        assert_ne!(heights([1, 2]), heights([2, 2]));
        assert_ne!(heights([1, 2]), heights([1, 3]));
    }
}
