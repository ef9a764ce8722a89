//! Random numbers: ChaCha, seeded once from what differs between machines and moments.
//!
//! A machine under `-icount` with a fixed clock gives the same numbers each time, on purpose.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::sync::Mutex;
use crate::time;

static GENERATOR: Mutex<Option<ChaCha12Rng>> = Mutex::new(None);

/// Fills `into` with random bytes.
pub fn fill(into: &mut [u8]) {
    let mut generator = GENERATOR.lock();
    generator.get_or_insert_with(seeded).fill_bytes(into);
}

fn seeded() -> ChaCha12Rng {
    let mut seed = [0; 32];
    for (index, word) in [time::real_time(), time::now()].into_iter().enumerate() {
        seed[8 * index..8 * index + 8].copy_from_slice(&word.to_le_bytes());
    }
    ChaCha12Rng::from_seed(seed)
}
