//! Random numbers: ChaCha, seeded once from the CPU's own generator and the clocks.
//!
//! Deliberately, a machine under `-icount` with a fixed clock and a seeded generator yields the
//! same numbers each time.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::errno::{Errno, Outcome};
use crate::sync::Mutex;
use crate::{arch, time, user};

use super::{scheduler, signal};

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

/// `getrandom(2)`.
pub(super) fn getrandom(at: u64, length: u64, flags: u64) -> Outcome {
    // GRND_NONBLOCK, GRND_RANDOM, GRND_INSECURE; the last two exclude each other.
    if flags > 7 || flags & 6 == 6 {
        return Err(Errno::EINVAL);
    }
    let length = length.min(i32::MAX as u64);
    let mut bytes = [0; 256];
    let mut done = 0;
    while done < length {
        let part = &mut bytes[..(length - done).min(256) as usize];
        fill(part);
        let written = at.checked_add(done).ok_or(Errno::EFAULT);
        match written.and_then(|at| user::write_bytes(at, part)) {
            Ok(()) => done += part.len() as u64,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        // A fatal signal must not wait for a large request.
        if done < length && signal::is_waiting(&scheduler::current()) {
            break;
        }
    }
    Ok(done)
}
