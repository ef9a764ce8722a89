//! Random numbers: ChaCha, seeded once by the CPU's own generator and the clocks.
//!
//! A machine under `-icount` with a fixed clock and a seeded generator gives the same numbers each
//! time, on purpose.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::sync::Mutex;
use crate::{arch, time};

static GENERATOR: Mutex<Option<ChaCha12Rng>> = Mutex::new(None);

/// Fills `into` with random bytes.
pub fn fill(into: &mut [u8]) {
    let mut generator = GENERATOR.lock();
    generator.get_or_insert_with(seeded).fill_bytes(into);
}

fn seeded() -> ChaCha12Rng {
    let mut words = [time::real_time(), time::now(), 0, 0];
    for word in &mut words {
        *word ^= arch::random_word().unwrap_or(0);
    }
    let mut seed = [0; 32];
    for (place, word) in seed.chunks_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha12Rng::from_seed(seed)
}
