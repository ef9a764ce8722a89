//! Compares the frames' metadata with the contents of the trees.

use core::sync::atomic::Ordering;

use crate::addr::Frame;
use crate::folio::{Folio, Owner, OwnerKind};
use crate::frame::FrameRange;
use crate::frame::meta::MetaKind;
use crate::frame::slab::Slab;
use crate::platform::Platform;
use crate::vma::Vma;

use super::{Audit, Violation};

impl<P: Platform> Audit<'_, '_, P> {
    pub(super) fn frames(&mut self) -> Result<(), Violation> {
        let frames = &self.memory.frames;
        frames.check_free_lists().map_err(Violation::FreeLists)?;
        if frames.refused() != 0 {
            return Err(Violation::Refused(frames.refused()));
        }
        let mut slabs = self.memory.slabs();
        slabs.try_for_each(|slab| slab.check_magazines(frames)).map_err(Violation::FreeLists)?;
        let vmas = &self.memory.slab::<Vma>();
        let used = self.report.mappings + self.waiting.vmas;
        let allocated = vmas.objects(frames);
        if allocated != used {
            return Err(Violation::LeakedMappings { allocated, used });
        }
        let (mut result, mut slabs) = (Ok(()), 0);
        frames.for_each_block(|frame, order, kind| {
            if result.is_ok() {
                result = match kind {
                    MetaKind::Folio => {
                        let folio = frames.folio_of(frame);
                        folio.map_or(Err(Violation::Leaked(frame)), |folio| self.folio(folio))
                    }
                    MetaKind::Table | MetaKind::Kernel if self.count(frame).copied() != Some(1) => {
                        Err(Violation::Leaked(frame))
                    }
                    MetaKind::Raw | MetaKind::Tail => Err(Violation::Leaked(frame)),
                    MetaKind::Embedder => {
                        self.shown(FrameRange { first: frame, count: order.pages() })
                    }
                    MetaKind::Table | MetaKind::Kernel => Ok(()),
                    // Counted elsewhere, or kept forever.
                    MetaKind::Reserved
                    | MetaKind::Free
                    | MetaKind::Slab
                    | MetaKind::Zero
                    | MetaKind::Compressed
                    | MetaKind::Swap
                    | MetaKind::Cpu
                    | MetaKind::Front => Ok(()),
                };
            }
            match kind {
                MetaKind::Slab => slabs += 1,
                MetaKind::Free => self.report.free_frames += u64::from(order.pages()),
                MetaKind::Reserved
                | MetaKind::Raw
                | MetaKind::Table
                | MetaKind::Folio
                | MetaKind::Tail
                | MetaKind::Zero
                | MetaKind::Kernel
                | MetaKind::Embedder
                | MetaKind::Compressed
                | MetaKind::Swap
                | MetaKind::Cpu
                | MetaKind::Front => {}
            }
        });
        result?;
        let memory = self.memory;
        let used = memory.slabs().map(Slab::frames).sum();
        if slabs != used {
            return Err(Violation::LeakedMappings { allocated: slabs, used });
        }
        Ok(())
    }

    fn folio(&mut self, folio: Folio) -> Result<(), Violation> {
        let frames = &self.memory.frames;
        let says = frames.folio(folio).mappings();
        let (mut holds, mut names) = (0, 0);
        for page in 0..folio.pages() {
            let frame = folio.head.plus(page);
            let (mappings, named) = self.uses(frame);
            if mappings > 0 && !self.may_be_mapped(folio, page, named) {
                return Err(Violation::DroppedButMapped(frame));
            }
            holds += mappings;
            names += u32::from(named);
            if frames.folio(folio).exclusive().contains(page) {
                if mappings > 1 {
                    return Err(Violation::ExclusiveButShared { frame, mappings });
                }
                if frames.folio(folio).owner_kind() != OwnerKind::Anonymous {
                    return Err(Violation::ExclusiveButOfObject(frame));
                }
            }
        }
        let references =
            frames.folio(folio).references() - u32::from(frames.folio(folio).is_swap_cached());
        if says != holds {
            return Err(Violation::Mappings { folio: folio.head, says, holds });
        }
        if references != names || !self.may_be_named(folio, names) {
            return Err(Violation::References { folio: folio.head, says: references });
        }
        if says == 0
            && names == 0
            && frames.folio(folio).pins() == 0
            && !frames.folio(folio).is_swap_cached()
        {
            return Err(Violation::Leaked(folio.head));
        }
        if says == 0 && names == 0 && frames.folio(folio).owner().owner != Owner::None {
            return Err(Violation::StaleOwner(folio.head));
        }
        self.report.folios += 1;
        Ok(())
    }

    /// Compares the count of an embedder's block with the number of program leaves that map its
    /// frames.
    fn shown(&mut self, block: FrameRange) -> Result<(), Violation> {
        let says = self.memory.frames.meta(block.first).word.load(Ordering::Relaxed);
        let holds = block.frames().map(|frame| self.uses(frame).0).sum();
        if says != u64::from(holds) {
            return Err(Violation::Mappings { folio: block.first, says: says as u32, holds });
        }
        Ok(())
    }

    /// Counts a table as found; finding it again is a violation.
    pub(super) fn meet_table(
        &mut self,
        table: Frame,
        at: crate::addr::VirtAddr,
    ) -> Result<(), Violation> {
        let Some(count) = self.count(table) else { return Err(Violation::NotATable { table, at }) };
        *count += 1;
        if *count > 1 {
            return Err(Violation::TableTwice { table, at });
        }
        self.report.tables += 1;
        Ok(())
    }
}
