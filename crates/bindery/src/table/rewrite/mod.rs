//! Entries that change in place: permissions, accessed and dirty bits, userfault bits, markers.
//!
//! Each operation is a function from a [`Run`] to a [`Change`], decided once for all entries of the
//! run. One loop carries out the changes. The loop knows which stores narrow ([`super::narrowing`])
//! and which contiguous runs must first be unfolded or broken, and it uses a plain store only to
//! replace an entry that the MMU can no longer change.
//!
//! | file | operations |
//! |---|---|
//! | `protect` | `mprotect`, and leaves becoming writable again |
//! | `use_bits` | `MADV_COLD`, `MADV_FREE`, `clear_refs`, aging, write-protection before a save |
//! | `write_protect` | write-protection by a userfaultfd |
//! | `marker` | entries without a page: setting and removing them |
//! | `leaves` | carries out the changes of leaves |

mod leaves;
pub(crate) mod marker;
pub(crate) mod protect;
pub(crate) mod use_bits;
pub(crate) mod write_protect;

use crate::addr::{Frame, VirtRange};
use crate::arch::{Arch, Attributes, EntryIndex, Equal, Level};
use crate::folio::Folio;
use crate::platform::Platform;

use super::cursor::Chunks;
use super::edit::Edit;
use super::locking::Depth;
use super::run::{self, Run, What};
use super::span::Span;
use super::zap::clear_absent;
use super::{NoMemory, PageTable};

use use_bits::UseBits;

pub(super) use leaves::clear_accessed;

/// The change to the entries of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    /// The entries stay.
    Keep,
    /// The leaves lose these bits.
    ClearUse(UseBits),
    /// The leaves get the permissions and the key of these attributes.
    Permit(Attributes),
    /// The leaves become `PROT_NONE` entries.
    Hide,
    /// The `PROT_NONE` entries become leaves with these attributes, and retain their own use bits.
    Reveal(Attributes),
    /// The leaves lose the write permission and get the userfault bit.
    WriteProtect,
    /// The leaves lose the userfault bit.
    LiftWriteProtect,
    /// These bits of absent entries are cleared and set.
    AbsentBits { cleared: u64, set: u64 },
    /// The absent entries become empty. The slots and pages to which they refer are released.
    Release,
}

/// Rewrites the runs of `range`, whose leaves agree in the attributes of `equal`. `decide` returns
/// the change for each non-empty run. It may shorten the run, in which case the loop calls it again
/// for the rest. Stale ranges enter the gather. Returns the number of leaves in which
/// [`Change::ClearUse`] has cleared a bit.
///
/// Fails only if a huge leaf that must be split has no deposit; the preceding runs have then been
/// rewritten.
// Always inlined: the caller knows `decide` and the changes that it can return.
#[inline(always)]
fn rewrite<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    equal: Equal,
    mut decide: impl FnMut(&mut Run<P::Arch>) -> Change,
) -> Result<u64, NoMemory> {
    rewrite_twice(edit, range, equal, |_, run| decide(run))
}

/// As [`rewrite`], but `decide` may itself carry out a change before the one that it returns.
#[inline(always)]
fn rewrite_twice<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    equal: Equal,
    mut decide: impl FnMut(&mut Span<'_, '_, P>, &mut Run<P::Arch>) -> Change,
) -> Result<u64, NoMemory> {
    let mut cleared = 0;
    let mut chunks = Chunks::of(range);
    while let Some(part) = edit.next_part(&mut chunks) {
        let section = edit.table().read_section();
        let mut span = edit.chunk_span(&section, &mut chunks, part, Depth::Floor(Level::PTE));
        while let Some(mut run) = span.next_run(equal)? {
            if matches!(run.what, What::Empty | What::Table(_)) {
                continue;
            }
            loop {
                let count = run.count;
                let change = decide(&mut span, &mut run);
                cleared += carry_out(&mut span, &run, change);
                if run.count == count {
                    break;
                }
                run = Run { count, ..run }.rest(run.count);
            }
        }
    }
    Ok(cleared)
}

/// Neighboring level-1 leaves that map consecutive pages of one folio.
struct FolioPart {
    /// `None` if the frame belongs to no folio, like that of the zero page.
    folio: Option<Folio>,
    /// The frame of the first page.
    first: Frame,
    /// The number of leaves.
    count: u32,
}

/// The result of `ask` for the folios of a run of level-1 leaves, which may map any frames
/// ([`Equal::ANY_FRAMES`]). Shortens the run to the leaves with the same result. `ask` also returns
/// for how many leaves of the part its result holds.
#[inline(always)]
fn ask_each_folio<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &mut Run<P::Arch>,
    mut ask: impl FnMut(&FolioPart) -> (bool, u32),
) -> bool {
    let mut answer = None;
    let mut number = 0;
    while number < run.count {
        let (found, count) = ask(&folio_part(page_table, run, number));
        if *answer.get_or_insert(found) != found {
            break;
        }
        number += count;
    }
    run.count = number;
    answer.unwrap_or(false)
}

/// The part of a run of level-1 leaves that starts with leaf `number` of the run and maps one
/// folio.
#[inline(always)]
fn folio_part<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &Run<P::Arch>,
    number: u32,
) -> FolioPart {
    let frames = &page_table.memory.frames;
    let entries = page_table.entries_of(run);
    let frame_at = |number: u32| {
        let entry = run::load(entries, EntryIndex::new(number));
        P::Arch::frame(P::Arch::clear_contig(entry, run.index + number))
    };
    let first = frame_at(number);
    let Some(folio) = frames.folio_of(first) else {
        return FolioPart { folio: None, first, count: 1 };
    };
    let within = first.0 - folio.head.0;
    let most = (run.count - number).min(folio.pages() - within);
    let next = |ahead: &u32| frame_at(number + ahead) == first.plus(*ahead);
    let count = 1 + (1..most).take_while(next).count() as u32;
    FolioPart { folio: Some(folio), first, count }
}

/// Carries out a change. Returns the number of leaves in which [`Change::ClearUse`] has cleared a
/// bit.
// Always inlined: a caller knows most of the match at compile time.
#[inline(always)]
fn carry_out<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>, change: Change) -> u64 {
    match run.what {
        What::Leaf(first) => match change {
            Change::ClearUse(bits) => return leaves::clear_use(span, run, bits),
            Change::Permit(new) => leaves::permit(span, run, first, new),
            Change::Hide => leaves::hide(span, run),
            Change::WriteProtect => leaves::write_protect(span, run),
            Change::LiftWriteProtect => leaves::lift_write_protect(span, run),
            Change::Keep | Change::Reveal(_) | Change::AbsentBits { .. } | Change::Release => {}
        },
        What::Absent(first) => match change {
            Change::Reveal(new) => leaves::reveal(span, run, first, new),
            Change::AbsentBits { cleared, set } => {
                leaves::change_absent_bits(span, run, cleared, set);
            }
            Change::Release => clear_absent(span, run, first),
            Change::Keep
            | Change::ClearUse(_)
            | Change::Permit(_)
            | Change::Hide
            | Change::WriteProtect
            | Change::LiftWriteProtect => {}
        },
        What::Empty | What::Table(_) => {}
    }
    0
}
