//! Verifies `memcpy`, `memmove`, `memset` and `memcmp` against loops over bytes
//! (`workload=memory-functions`). The compiler calls these functions, and some architectures
//! implement them. The test covers every length up to [`LONGEST`], every alignment in a word, and
//! the surrounding bytes.

use core::cmp::Ordering;
use core::hint::black_box;
use core::ptr;

use crate::log;

/// Longer than every length that the functions treat specially.
const LONGEST: usize = 300;

/// Bytes on either side that must stay as they are.
const EDGE: usize = 64;

/// The number of different alignments.
const PLACES: usize = 8;

type Bytes = [u8; LONGEST + 2 * EDGE];

/// Verifies each function over many lengths and alignments.
///
/// # Panics
/// If a byte is wrong.
pub fn verify() {
    for length in 0..=LONGEST {
        copies(length);
        moves(length);
        fills(length);
        comparisons(length);
    }
    log!("memcpy, memmove, memset and memcmp do what loops over bytes do");
}

/// A byte that differs from all its neighbors within the reach of one call.
fn byte(at: usize) -> u8 {
    (at % 251) as u8
}

#[inline(never)]
fn fill(bytes: &mut Bytes) {
    for (at, place) in bytes.iter_mut().enumerate() {
        *place = black_box(byte(at));
    }
}

/// Panics unless each byte equals the result of `expected`.
#[inline(always)]
fn expect(function: &str, call: [usize; 3], bytes: &Bytes, expected: impl Fn(usize) -> u8) {
    for (at, found) in bytes.iter().enumerate() {
        if black_box(*found) != expected(at) {
            wrong(function, call, at);
        }
    }
}

#[cold]
fn wrong(function: &str, [length, to, from]: [usize; 3], at: usize) -> ! {
    panic!("{function} of {length} bytes from {from} to {to} is wrong at {at}")
}

fn copies(length: usize) {
    let (mut source, mut target) = ([0; _], [0; _]);
    fill(&mut source);
    for (to, from) in (0..PLACES * PLACES).map(|pair| (EDGE + pair / PLACES, EDGE + pair % PLACES))
    {
        target.fill(black_box(0xff));
        // SAFETY: both are arrays of their own, and `length` bytes from there lie in them.
        unsafe {
            let from = black_box(source.as_ptr().add(from));
            ptr::copy_nonoverlapping(from, target.as_mut_ptr().add(to), black_box(length));
        }
        expect("memcpy", [length, to, from], &target, |at| {
            if (to..to + length).contains(&at) { byte(at - to + from) } else { 0xff }
        });
    }
}

fn moves(length: usize) {
    let mut bytes = [0; _];
    for (to, from) in (0..2 * EDGE).map(|from| (EDGE, from)) {
        fill(&mut bytes);
        // SAFETY: `length` bytes from either place lie in the array.
        unsafe {
            let start = black_box(bytes.as_mut_ptr());
            ptr::copy(start.add(from), start.add(to), black_box(length));
        }
        expect("memmove", [length, to, from], &bytes, |at| {
            byte(if (to..to + length).contains(&at) { at - to + from } else { at })
        });
    }
}

fn fills(length: usize) {
    let mut bytes = [0; _];
    for to in EDGE..EDGE + PLACES {
        fill(&mut bytes);
        // SAFETY: `length` bytes from there lie in the array.
        unsafe { bytes.as_mut_ptr().add(to).write_bytes(black_box(0xa5), black_box(length)) };
        expect("memset", [length, to, to], &bytes, |at| {
            if (to..to + length).contains(&at) { 0xa5 } else { byte(at) }
        });
    }
}

fn comparisons(length: usize) {
    let (mut one, mut other) = ([0; _], [0; _]);
    // Over all lengths, each position occurs at each distance from the end.
    let differences = (length % 7..=length).step_by(7);
    for (differs, place) in differences.flat_map(|at| (0..4).map(move |place| (at, place))) {
        fill(&mut one);
        fill(&mut other);
        // The first difference decides. A difference behind the end does not count.
        for at in differs..one.len() {
            one[at] = 1;
            other[at] = if at == differs { 0x82 } else { 0 };
        }
        // Moved by `place`, so that their alignments differ.
        other.copy_within(0..length, place);
        let (front, back) = (&black_box(&one)[..length], &black_box(&other)[place..place + length]);
        let expected = if differs < length { Ordering::Less } else { Ordering::Equal };
        if front.cmp(back) != expected
            || back.cmp(front) != expected.reverse()
            || (front == back) != expected.is_eq()
        {
            wrong("memcmp", [length, place, 0], differs);
        }
    }
}
