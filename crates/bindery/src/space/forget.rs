//! `MADV_COLD` and `MADV_FREE`: the pages of a range forget that they were used, or written.
//!
//! The call names pages, and both kinds of advice concern folios. As on Linux:
//!
//! | the range has of a folio | what happens |
//! |---|---|
//! | everything that is mapped of it | all of it forgets |
//! | a part, and nobody else maps or holds it | it is split, and the pages inside forget |
//! | a part of what others map or hold, too | nothing |

use crate::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Kind, Level};
use crate::folio::{Age, Folio};
use crate::platform::Platform;
use crate::table::NoMemory;
use crate::table::rewrite::use_bits::UseBits;
use crate::tlb::Gather;
use crate::vma::Vma;

use super::AddressSpace;
use super::fault::folio_range;

/// A large folio of private memory, and where entries map it.
struct Seen {
    folio: Folio,
    /// The number of the first page that is mapped there.
    number: u32,
    /// From that page to the last, with holes.
    range: VirtRange,
    /// How many are mapped there.
    pages: u32,
}

impl<P: Platform> AddressSpace<'_, P> {
    pub(super) fn forget_contents(
        &self,
        vma: &Vma,
        part: VirtRange,
        forget: UseBits,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        let part = self.without_shared_huge_edges(part);
        let locked = vma.lock_write(self.platform());
        let done = self.forget_folios(&locked, part, forget, gather);
        self.flush(gather);
        drop(locked);
        done
    }

    fn forget_folios(
        &self,
        vma: &Vma,
        part: VirtRange,
        forget: UseBits,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        let mut cut = false;
        self.page_table.clear_use(part, forget, gather, |folio, pages| {
            let Some(folio) = folio else { return true };
            let concerned = self.forget_folio(folio, pages, forget);
            cut |= !concerned && folio.order > Order::PAGE;
            concerned
        })?;
        if cut { self.forget_cut_folios(vma, part, forget, gather) } else { Ok(()) }
    }

    /// Lets a folio forget if these `pages` are all that is mapped of it. Says whether they are.
    fn forget_folio(&self, folio: Folio, pages: u32, forget: UseBits) -> bool {
        let frames = &self.page_table.memory.frames;
        let whole = frames.folio(folio).mappings() == pages;
        match forget {
            // A pin may write at any moment.
            UseBits::AccessedAndDirty if whole && frames.folio(folio).pins() == 0 => {
                frames.folio(folio).mark_lazy()
            }
            UseBits::Accessed if whole || !frames.folio(folio).is_anonymous() => {
                frames.folio(folio).reclaim_state().set_age(Age::Cold)
            }
            UseBits::Accessed | UseBits::AccessedAndDirty | UseBits::SoftDirty | UseBits::Dirty => {
                return false;
            }
        }
        true
    }

    /// As [`AddressSpace::forget_folios`], of large folios whose pages are not one run.
    #[cold]
    #[inline(never)]
    fn forget_cut_folios(
        &self,
        vma: &Vma,
        part: VirtRange,
        forget: UseBits,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        let mut at = part.start();
        while let Some(seen) = self.first_large_folio(VirtRange::raw(at.0, part.end().0)) {
            let Seen { folio, number, range, pages } = seen;
            at = range.end();
            let unbroken = range.pages() == u64::from(pages);
            let whole = unbroken && self.page_table.memory.frames.folio(folio).mappings() == pages;
            if !whole && !self.split_if_alone(range.start()) {
                continue;
            }
            // Some of the pages may lie behind those of another folio.
            let all = folio_range(vma, range.start(), number, folio).intersection(part);
            self.page_table.clear_use(all, forget, gather, |found, run| {
                found.is_some_and(|found| {
                    let pages = if whole && found == folio { pages } else { run };
                    self.forget_folio(found, pages, forget)
                })
            })?;
        }
        Ok(())
    }

    /// The first large folio of private memory that the range has, up to the first page of another
    /// folio.
    fn first_large_folio(&self, range: VirtRange) -> Option<Seen> {
        let frames = &self.page_table.memory.frames;
        let mut seen: Option<Seen> = None;
        self.page_table.look(range, |looked| {
            let frame = looked.frame();
            let folio = frame
                .and_then(|frame| frames.folio_of(frame))
                .filter(|folio| folio.order > Order::PAGE && frames.folio(*folio).is_anonymous());
            let pages = looked.range.pages() as u32;
            match (&mut seen, frame.zip(folio)) {
                (Some(seen), Some((_, folio))) if seen.folio == folio => {
                    seen.range = VirtRange::raw(seen.range.start().0, looked.range.end().0);
                    seen.pages += pages;
                    true
                }
                (Some(_), _) => looked.raw.is_empty(),
                (None, Some((frame, folio))) => {
                    let number = frame.0 - folio.head.0;
                    seen = Some(Seen { folio, number, range: looked.range, pages });
                    true
                }
                (None, None) => true,
            }
        });
        seen
    }

    /// The range without the huge leaves that it covers in part and that stay whole, since others
    /// map or hold their folio.
    pub(super) fn without_shared_huge_edges(&self, part: VirtRange) -> VirtRange {
        let (mut start, mut end) = (part.start(), part.end());
        let span = P::Arch::PMD.span();
        if !start.is_aligned(span)
            && let Some(leaf) = self.shared_huge_leaf(start)
        {
            start = leaf.end().min(end);
        }
        if start < end
            && !end.is_aligned(span)
            && let Some(leaf) = self.shared_huge_leaf(VirtAddr(end.0 - PAGE_SIZE))
        {
            end = leaf.start().max(start);
        }
        VirtRange::raw(start.0, end.0)
    }

    /// The huge leaf that maps `page`, unless an anonymous folio is mapped and held there alone.
    fn shared_huge_leaf(&self, page: VirtAddr) -> Option<VirtRange> {
        let frames = &self.page_table.memory.frames;
        let mut found = None;
        self.page_table.look(VirtRange::raw(page.0, page.0 + PAGE_SIZE), |looked| {
            let level = looked.node.level;
            if level > Level::PTE && level.kind(looked.raw) == Kind::Leaf {
                let folio = frames.folio_of(P::Arch::frame(looked.entry));
                let alone = |folio: Folio| {
                    frames.folio(folio).is_anonymous()
                        && frames.folio(folio).is_mapped_and_held(folio.pages(), 0)
                };
                let start = page.align_down(level.span());
                let leaf = VirtRange::from_len(start, level.span());
                found = leaf.filter(|_| !folio.is_some_and(alone));
            }
            false
        });
        found
    }
}
