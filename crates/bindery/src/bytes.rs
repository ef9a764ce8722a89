//! Bytes between a caller's buffer and the frames of an object.
//!
//! Programs may read and write the same pages at the same time, through their own tables. So
//! everything here goes by aligned 64-bit atomics, and a store of fewer bytes changes no byte
//! beside them. (Linux copies without that care; a language that calls such a race undefined does
//! not let us.)
//!
//! ```text
//! words   |. . . . . b b b|b b b b b b b b|b b b b b b b b|b b . . . . . .|
//!          exchanged       stored          stored          exchanged
//! ```

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::addr::{Frame, PAGE_SIZE};
use crate::platform::Platform;

const WORD: usize = size_of::<u64>();
const PAGE: usize = PAGE_SIZE as usize;
const WORDS: usize = PAGE / WORD;

/// Reads from `offset` on, counted from the beginning of `first`; consecutive frames follow.
pub(crate) fn read<P: Platform>(platform: &P, first: Frame, offset: usize, into: &mut [u8]) {
    for_each_page(first, offset, into.len(), |frame, inside, outside| {
        let words = words(platform, frame);
        let into = &mut into[outside];
        for_each_word(inside, |word, part, from| {
            let bytes = words[word].load(Relaxed).to_ne_bytes();
            into[from..from + part.len()].copy_from_slice(&bytes[part]);
        });
    });
}

/// Writes from `offset` on, counted from the beginning of `first`; consecutive frames follow.
pub(crate) fn write<P: Platform>(platform: &P, first: Frame, offset: usize, from: &[u8]) {
    for_each_page(first, offset, from.len(), |frame, inside, outside| {
        let words = words(platform, frame);
        let source = &from[outside];
        for_each_word(inside, |word, part, at| {
            let source = &source[at..at + part.len()];
            change(&words[word], part, |bytes| bytes.copy_from_slice(source));
        });
    });
}

/// Fills the bytes `inside` of `frame` with zeroes.
pub(crate) fn zero<P: Platform>(platform: &P, frame: Frame, inside: Range<usize>) {
    let words = words(platform, frame);
    for_each_word(inside, |word, part, _| change(&words[word], part, |bytes| bytes.fill(0)));
}

/// Changes `part` of a word and nothing else of it.
#[inline]
fn change(word: &AtomicU64, part: Range<usize>, change: impl Fn(&mut [u8])) {
    if part.len() == WORD {
        let mut bytes = [0; WORD];
        change(&mut bytes);
        word.store(u64::from_ne_bytes(bytes), Relaxed);
        return;
    }
    let changed = |old: u64| {
        let mut bytes = old.to_ne_bytes();
        change(&mut bytes[part.clone()]);
        Some(u64::from_ne_bytes(bytes))
    };
    // It never says no.
    let _ = word.fetch_update(Relaxed, Relaxed, changed);
}

/// Cuts `len` bytes at `offset` behind the beginning of `first` where pages meet: the frame, the
/// bytes in it, and where these stand in the whole.
#[inline]
fn for_each_page(
    first: Frame,
    offset: usize,
    len: usize,
    mut f: impl FnMut(Frame, Range<usize>, Range<usize>),
) {
    let mut done = 0;
    while done < len {
        let at = offset + done;
        let inside = at % PAGE;
        let count = (PAGE - inside).min(len - done);
        f(first.plus((at / PAGE) as u32), inside..inside + count, done..done + count);
        done += count;
    }
}

/// Cuts a range of bytes of a page where words meet: the word, the bytes of it, and where they
/// stand in the range.
#[inline]
fn for_each_word(range: Range<usize>, mut f: impl FnMut(usize, Range<usize>, usize)) {
    let mut at = range.start;
    while at < range.end {
        let inside = at % WORD;
        let count = (WORD - inside).min(range.end - at);
        f(at / WORD, inside..inside + count, at - range.start);
        at += count;
    }
}

/// The words of a frame.
#[inline]
fn words<P: Platform>(platform: &P, frame: Frame) -> &[AtomicU64; WORDS] {
    let window = platform.window(frame).cast::<[AtomicU64; WORDS]>();
    // SAFETY: the window shows all 4,096 bytes of the frame for as long as the platform lives,
    // aligned to 4,096 (obligation 1 of `Platform`, and `Frames::new` looked). Callers pass frames
    // that an object has, whose bytes the core accesses as aligned atomics alone while programs
    // may write them; those that a pager has borrowed meanwhile nobody writes (`save`).
    unsafe { window.as_ref() }
}
