//! Sequences in which the core swaps but Linux does not, or swaps differently. Contents must agree
//! nevertheless; the residence of pages must agree except for:
//!
//! | Linux | the core | |
//! |---|---|---|
//! | a page of anonymous memory | in swap | as it should be |
//! | a mapped page of an object | not mapped, or vice versa | either side may drop such pages |
//! | a page of anonymous memory, the zero page, or none | another one | lazily freed pages |
//! | `mincore` finds a page | it does not | the page is in swap |
//! | the zero page | a page of anonymous memory | a zero subpage of a split huge page |
//! | the zero page | none | Linux copies the huge zero page to a child; the core lets it fault |
//! | a file has fewer pages | it has them | Linux frees never-written hole pages; the core swaps |

use super::differences::advice;
use super::names::{MADV_COLLAPSE, MADV_FREE, MADV_HUGEPAGE};
use super::observation::{Observation, Outcome, Presence, Snapshot, Stretch};
use super::operation::{Operation, OperationKind};
use super::place::PAGE;

/// The category of `PAGEMAP_SCAN`.
const IS_SWAPPED: Presence = Presence::Other(1 << 4);

/// The maximum number of pages in a call about lazily freed memory.
const MOST_FREED: u64 = 64;

/// Performs [`OperationKind::FreeWiped`]: `wipe` zeroes a page if possible, `advise` is
/// `madvise(2)`. Returns the first error, or 0.
pub fn free_wiped(
    [at, length, before]: [u64; 3],
    mut wipe: impl FnMut(u64) -> bool,
    mut advise: impl FnMut(u64, u64, u64) -> i64,
) -> i64 {
    let first = at / PAGE * PAGE;
    let end = first + (length / PAGE).min(MOST_FREED) * PAGE;
    let mut result = 0;
    let mut from = first;
    for to in (first..=end).step_by(PAGE as usize) {
        if to < end && wipe(to) {
            continue;
        }
        for advice in [before, MADV_FREE] {
            if from < to && advice != 0 && result == 0 {
                result = advise(from, to - from, advice);
            }
        }
        from = to + PAGE;
    }
    result
}

/// The events that may have happened so far.
#[derive(Clone, Copy)]
struct May {
    /// Pages were freed lazily.
    freed: bool,
    /// Huge pages existed.
    huge: bool,
}

/// Replaces the core's observations by Linux's where they differ only because of swap.
pub fn level(operations: &[Operation], linux: &[Observation], ours: &mut [Observation]) {
    let swaps = |operation: &Operation| operation.operation == OperationKind::SwapTo;
    if !operations.iter().any(swaps) {
        return;
    }
    for (theirs, now) in linux.iter().zip(ours) {
        let mut so_far = operations.iter().take(theirs.step + 1);
        let freed = so_far.clone().any(|one| one.operation == OperationKind::FreeWiped);
        let huge =
            so_far.any(|one| [MADV_HUGEPAGE, MADV_COLLAPSE].map(Some).contains(&advice(one)));
        let may = May { freed, huge };
        now.snapshot.stretches = leveled(&theirs.snapshot, &now.snapshot, may);
        let fewer = level_files(&theirs.snapshot, &mut now.snapshot);
        let asks = operations.get(theirs.step).map(|operation| operation.operation);
        let answered = asks == Some(OperationKind::Mincore)
            && matches!(theirs.outcome, Outcome::Returned(0..));
        let mut words = theirs.data.iter().zip(&now.data);
        let in_swap = words.all(|(theirs, ours)| freed || fewer || ours & !theirs == 0);
        if answered && theirs.data.len() == now.data.len() && in_swap {
            now.data.clone_from(&theirs.data);
        }
    }
}

/// Whether Linux has fewer pages of a file.
fn level_files(theirs: &Snapshot, now: &mut Snapshot) -> bool {
    let mut fewer = false;
    for (theirs, ours) in theirs.files.iter().zip(&mut now.files) {
        if theirs.pages < ours.pages {
            ours.pages = theirs.pages;
            fewer = true;
        }
    }
    fewer
}

/// The state of the core's pages, replaced by Linux's where they differ only because of swap.
fn leveled(theirs: &Snapshot, now: &Snapshot, may: May) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let (mut linux, mut ours) = (pages(&theirs.stretches), pages(&now.stretches));
    while let Some(at) = linux.peek().into_iter().chain(ours.peek()).map(|(at, _)| *at).min() {
        let here = |(page, _): &(u64, Presence)| *page == at;
        let one = linux.next_if(here).map(|(_, presence)| presence);
        let other = ours.next_if(here).map(|(_, presence)| presence);
        let Some(presence) = (if alike(one, other, may) { one } else { other }) else { continue };
        match stretches.last_mut() {
            Some(last) if last.end == at && last.presence == presence => last.end += PAGE,
            _ => stretches.push(Stretch { start: at, end: at + PAGE, presence }),
        }
    }
    stretches
}

fn pages(
    stretches: &[Stretch],
) -> std::iter::Peekable<impl Iterator<Item = (u64, Presence)> + use<'_>> {
    let all = stretches.iter().flat_map(|stretch| {
        let addresses = (stretch.start..stretch.end).step_by(PAGE as usize);
        addresses.map(|at| (at, stretch.presence))
    });
    all.peekable()
}

/// Whether a page on Linux and the same page in the core differ only because of swap.
fn alike(theirs: Option<Presence>, ours: Option<Presence>, may: May) -> bool {
    let object = |page: Option<Presence>| page.is_none_or(|page| page == Presence::Object);
    let lazy = |page: Option<Presence>| {
        let any = [Presence::Anonymous, Presence::Zero, IS_SWAPPED];
        page.is_none_or(|page| any.contains(&page))
    };
    (theirs, ours) == (Some(Presence::Anonymous), Some(IS_SWAPPED))
        || object(theirs) && object(ours)
        || may.freed && lazy(theirs) && lazy(ours)
        || may.huge && theirs == Some(Presence::Zero) && lazy(ours)
}
