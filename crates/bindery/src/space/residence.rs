//! `mincore(2)`.

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Absent, Kind, absent};
use crate::error::Error;
use crate::object::pages;
use crate::platform::Platform;

use super::AddressSpace;
use super::index::Indexed;
use super::vma::Vma;

/// Whether a stretch of pages can be touched without waiting for its content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residence {
    /// It is in memory: mapped, or known to the object that backs the mapping.
    Resident,
    /// It is not.
    Absent,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Says which pages of `length` bytes (rounded up) at `start` are in memory: calls `tell` with
    /// stretches of equal answers and their lengths in pages, in rising order. `tell` is called in a
    /// read section: it neither sleeps nor touches the program's memory.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::OutOfRange`]; [`Error::NotMapped`] at the first hole, after the
    /// stretches before it were told.
    ///
    /// Complexity: in the entries of the range; what has no table costs nothing.
    pub fn mincore(
        &self,
        start: VirtAddr,
        length: u64,
        mut tell: impl FnMut(Residence, u64),
    ) -> Result<(), Error> {
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        let limit = self.limit();
        let range = length
            .checked_next_multiple_of(PAGE_SIZE)
            .and_then(|length| VirtRange::from_len(start, length))
            .filter(|range| range.end() <= limit)
            .ok_or(Error::OutOfRange { limit })?;
        let _guard = self.mutex.lock();
        let mut at = range.start();
        while at < range.end() {
            let vma = self.vma_at(at).ok_or(Error::NotMapped(at))?;
            let part = VirtRange::raw(at.0, vma.end().min(range.end().0));
            self.table.look(part, |looked| {
                let stretch = looked.range;
                match arch::kind::<P::Arch>(looked.raw, looked.node.level) {
                    Kind::Leaf => tell(Residence::Resident, stretch.pages()),
                    Kind::Absent => match absent::decode::<P::Arch>(looked.raw) {
                        Some(Absent::Hidden { .. }) => tell(Residence::Resident, stretch.pages()),
                        Some(Absent::Marker(_)) => self.tell_object(vma, stretch, &mut tell),
                        _ => tell(Residence::Absent, stretch.pages()),
                    },
                    Kind::Empty | Kind::Table => self.tell_object(vma, stretch, &mut tell),
                }
                true
            });
            at = part.end();
        }
        Ok(())
    }

    /// Where the mapping around `addr` ends, if there is one.
    pub(crate) fn mapping_end(&self, addr: VirtAddr) -> Option<VirtAddr> {
        let _guard = self.mutex.lock();
        self.vma_at(addr).map(|vma| VirtAddr(vma.end()))
    }

    /// Nothing is mapped in `stretch`: the object may have it all the same.
    fn tell_object(&self, vma: &Vma, stretch: VirtRange, tell: &mut impl FnMut(Residence, u64)) {
        let Some(object) = vma.object() else {
            return tell(Residence::Absent, stretch.pages());
        };
        let mut at = stretch.start();
        while at < stretch.end() {
            let limit = (stretch.end().0 - at.0) >> PAGE_SHIFT;
            let page = vma.page_offset_of(at);
            let (found, count) = pages::resident_run(self.table.memory, object, page, limit);
            let count = count.clamp(1, limit);
            let residence = if found.is_some() { Residence::Resident } else { Residence::Absent };
            tell(residence, count);
            at = at.offset(count << PAGE_SHIFT);
        }
    }
}
