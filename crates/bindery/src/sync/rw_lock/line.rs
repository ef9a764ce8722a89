//! The line of threads that have slept in vain, in the lock's word: they enter in the order in
//! which they joined it, and no other thread enters before them.
//!
//! A thread that finds the lock held sleeps, and competes when it wakes up: the lock does not idle
//! until the sleeper runs. If another thread was faster, the sleeper joins the line, so neither a
//! stream of readers nor one of writers overtakes it again. The line has room for 15 threads;
//! if it is full, a thread sleeps until it has room.
//!
//! Two numbers modulo 16 are the line: the one that the next thread gets, and the one whose turn it
//! is. [`QUEUED`] is set as long as they differ, so one test of the word finds that a thread may
//! not enter. Both are 0 in an empty line, so the word of a lock that is free is 0.

use super::{PARKED, QUEUED, READER, READERS, WRITER};

/// Bits of each number.
const BITS: u32 = 4;
const MASK: u32 = (1 << BITS) - 1;
/// The first bit of the number whose turn it is.
const TURN_SHIFT: u32 = READERS.trailing_ones();
/// The first bit of the number for the next thread.
const NEXT_SHIFT: u32 = TURN_SHIFT + BITS;
const _: () = assert!(1 << (NEXT_SHIFT + BITS) == QUEUED, "the two numbers fill the gap");

/// The place of a thread in the line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlaceInLine(u32);

/// The mode in which a waiting thread wants the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    Read,
    Write,
}

fn turn(state: u32) -> u32 {
    state >> TURN_SHIFT & MASK
}

fn next(state: u32) -> u32 {
    state >> NEXT_SHIFT & MASK
}

/// The state in which the caller is the last of the line, and its place. `None` if the line is
/// full.
pub(super) fn join(state: u32) -> Option<(u32, PlaceInLine)> {
    let place = next(state);
    let after = (place + 1) & MASK;
    if after == turn(state) {
        return None;
    }
    let others = state & !(MASK << NEXT_SHIFT);
    Some((others | after << NEXT_SHIFT | QUEUED, PlaceInLine(place)))
}

/// Whether a thread that has the place, or none, must wait in this state.
pub(super) fn is_blocked(state: u32, place: Option<PlaceInLine>) -> bool {
    let before_others = place.is_none_or(|place| turn(state) != place.0);
    state & WRITER != 0 || (before_others && state & QUEUED != 0)
}

/// The state after the thread with the place, or without one, has entered a lock that does not
/// block it. A reader that leaves the line also clears [`PARKED`] and then wakes the sleepers,
/// because the next of the line may enter beside it; a writer keeps the bit until it unlocks.
pub(super) fn enter(state: u32, place: Option<PlaceInLine>, mode: Mode) -> u32 {
    let entered = match mode {
        Mode::Read => state + READER,
        Mode::Write => state | WRITER,
    };
    let Some(PlaceInLine(place)) = place else { return entered };
    let after = (place + 1) & MASK;
    let left = if after == next(state) {
        entered & !(QUEUED | MASK << NEXT_SHIFT | MASK << TURN_SHIFT)
    } else {
        entered & !(MASK << TURN_SHIFT) | after << TURN_SHIFT
    };
    match mode {
        Mode::Read => left & !PARKED,
        Mode::Write => left,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order in which threads enter that have joined in the order of their numbers.
    #[test]
    fn threads_enter_in_the_order_of_joining() {
        // Far enough that both numbers wrap around.
        let mut state = WRITER;
        let mut line = std::collections::VecDeque::new();
        for round in 0..40 {
            for _ in 0..3 {
                let Some((joined, place)) = join(state) else { break };
                state = joined;
                line.push_back(place);
            }
            assert!(
                line.iter().all(|place| is_blocked(state, Some(*place))),
                "the writer is inside"
            );
            state &= !WRITER;
            assert!(is_blocked(state, None), "a newcomer waits behind the line");
            let first = line.pop_front().expect("three have joined");
            assert!(!is_blocked(state, Some(first)));
            assert!(line.iter().all(|place| is_blocked(state, Some(*place))), "round {round}");
            state = enter(state, Some(first), Mode::Write);
            assert_eq!(state & QUEUED != 0, !line.is_empty());
        }
        while let Some(first) = line.pop_front() {
            state = enter(state & !WRITER, Some(first), Mode::Write);
        }
        assert_eq!(state, WRITER, "an empty line leaves no trace");
    }

    #[test]
    fn a_full_line_takes_no_more_threads() {
        let mut state = WRITER;
        for _ in 0..MASK {
            (state, _) = join(state).expect("the line has room");
        }
        assert_eq!(join(state), None);
        state = enter(state & !WRITER, Some(PlaceInLine(0)), Mode::Write);
        assert!(join(state).is_some(), "one has left");
    }

    #[test]
    fn a_reader_of_the_line_wakes_the_next() {
        let (state, first) = join(WRITER | PARKED).expect("the line is empty");
        let (state, second) = join(state).expect("the line has room");
        let entered = enter(state & !WRITER, Some(first), Mode::Read);
        assert_eq!(entered & PARKED, 0, "the sleepers are woken");
        assert!(!is_blocked(entered, Some(second)), "readers share the lock");
        assert!(is_blocked(entered, None));
        let both = enter(entered, Some(second), Mode::Read);
        assert_eq!(both, 2 * READER);
    }
}
