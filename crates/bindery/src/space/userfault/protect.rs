//! Write-protection (`UFFDIO_WRITEPROTECT`): protects pages and lifts their protection.

use bitflags::bitflags;

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Level, Marker};
use crate::error::{Error, Failure};
use crate::platform::Platform;
use crate::space::entry_policy::entry_policy;
use crate::space::fault::{Fault, Next, Resolved, Stepped, stopped};
use crate::space::op::Op;
use crate::space::userfault::userfault_range;
use crate::table::NoMemory;
use crate::table::edit::Edit;
use crate::table::publish::publish;
use crate::userfault::{UserfaultFeatures, UserfaultState};
use crate::vma::{MappingFlags, Vma};

use super::handler::UserfaultHandler;
use super::is_served;
use super::shared::frame_of_object;

bitflags! {
    /// Modes of [`UserfaultHandler::write_protect`] (`UFFDIO_WRITEPROTECT_MODE_*`, the same bits).
    ///
    /// # Context
    /// Context: any.
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, Error, Platform, Userfault, WriteProtectMode};
    ///
    /// /// The start of a snapshot: from here on, writes are reported first.
    /// fn begin<P: Platform>(
    ///     space: &AddressSpace<'_, P>,
    ///     userfault: &Userfault<'_, P>,
    ///     (start, length): (VirtAddr, u64),
    /// ) -> Result<(), Error> {
    ///     space.handler(userfault).write_protect(start, length, WriteProtectMode::PROTECT)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct WriteProtectMode: u8 {
        /// Protects the pages. Without this mode, the call lifts their protection and wakes waiting
        /// faults.
        const PROTECT = 1 << 0;
        /// Does not wake waiting faults.
        const DONT_WAKE = 1 << 1;
    }
}

/// Whether a marker records the protection of a missing page of the VMA.
fn marks_vacant(vma: &Vma, state: &UserfaultState) -> bool {
    !vma.is_anonymous() || state.has(UserfaultFeatures::WP_UNPOPULATED)
}

impl<P: Platform> UserfaultHandler<'_, '_, P> {
    /// Write-protects the pages of `length` bytes at `start`, or lifts their protection
    /// (`UFFDIO_WRITEPROTECT`). A write to a protected page sends a message and waits.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs. One invalidation per 64
    /// tables.
    ///
    /// # Errors
    /// [`Error::TryAgain`] while the address space changes; [`Error::Unaligned`],
    /// [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Invalid`] if both flags are set or
    /// the userfaultfd belongs to another address space; [`Error::NotMapped`] if the range has no
    /// mapping, or a mapping is not registered for write-protection; [`Error::OutOfMemory`]. The
    /// part before an error is complete.
    pub fn write_protect(
        self,
        start: VirtAddr,
        length: u64,
        mode: WriteProtectMode,
    ) -> Result<(), Error> {
        let Self { space, userfault } = self;
        if userfault.state().is_changing() {
            return Err(Error::TryAgain);
        }
        let range = userfault_range(space, start, length)?;
        if mode == WriteProtectMode::all() || !space.owns_userfault(userfault) {
            return Err(Error::Invalid);
        }
        let protects = mode.contains(WriteProtectMode::PROTECT);
        space.operate_with_reclaim(|op| {
            if userfault.state().is_changing() {
                return Err(Error::TryAgain.into());
            }
            write_protect(op, range, protects)
        })?;
        if mode.is_empty() {
            userfault.state().wake(space.platform(), range);
        }
        Ok(())
    }
}

fn write_protect<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    protects: bool,
) -> Result<(), Failure> {
    let mut found = false;
    for vma in op.vmas.overlapping(range) {
        found = true;
        let part = vma.range().intersection(range);
        if !is_served(vma) || !vma.has(MappingFlags::USERFAULT_WRITE_PROTECT) {
            return Err(Error::NotMapped(part.start()).into());
        }
        let locked = vma.lock_write(op.platform());
        let done = if protects {
            let marks = locked.userfault().is_some_and(|state| marks_vacant(&locked, state));
            protect_part(&mut op.edit, part, marks)
        } else {
            lift_part(&mut op.edit, &locked, part)
        };
        // Flush before the VMA is unlocked, because faults rely on the entries.
        op.edit.flush();
        drop(locked);
        done?;
    }
    if found { Ok(()) } else { Err(Error::NotMapped(range.start()).into()) }
}

fn protect_part<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    part: VirtRange,
    marks: bool,
) -> Result<(), NoMemory> {
    edit.userfault_protect(part)?;
    let mut reached = part.start();
    if marks { edit.userfault_mark(part, &mut reached) } else { Ok(()) }
}

/// Protects the front of `part` for which memory suffices, and no page beyond it. Returns the end
/// of the front. Writes the markers first, because only they need memory.
pub(in crate::space) fn protect_front<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    part: VirtRange,
) -> VirtAddr {
    let mut reached = part.start();
    let marked = edit.userfault_mark(part, &mut reached);
    let front = VirtRange::raw(part.start().0, reached.0);
    let protected = edit.userfault_protect(front);
    debug_assert!(protected.is_ok(), "a huge leaf has lost its deposit");
    if marked.is_ok() { part.end() } else { reached }
}

/// Whether a write lifts the protection of the VMA's pages without a message.
pub(in crate::space) fn lifts_unseen(vma: &Vma) -> bool {
    let lifts = |state: &UserfaultState| {
        state.has(UserfaultFeatures::WP_ASYNC) && !state.is_closed() && marks_vacant(vma, state)
    };
    vma.has(MappingFlags::USERFAULT_WRITE_PROTECT) && vma.userfault().is_some_and(lifts)
}

/// Lifts the protection, and makes pages writable immediately if the VMA and the page allow it.
fn lift_part<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
) -> Result<(), NoMemory> {
    edit.userfault_lift_to(part, &entry_policy(vma))?;
    edit.memory.platform().publish_entries();
    Ok(())
}

/// Lifts the protection of the page for a write, without notifying a userfaultfd.
#[cold]
pub(in crate::space) fn lift_protection<P: Platform>(fault: &Fault<'_, '_, P>) -> Stepped {
    let range = VirtRange::raw(fault.page.0, fault.page.0 + PAGE_SIZE);
    fault.space.page_table.edit(|edit| edit.userfault_lift(range))?;
    Ok(Next::Again)
}

/// Resolves a read fault at a marker of a registered VMA: maps the page write-protected.
#[cold]
pub(in crate::space) fn map_protected_page<P: Platform>(fault: &Fault<'_, '_, P>) -> Stepped {
    let Some(object) = fault.vma.object() else { return map_protected(fault, None) };
    // The invalidate lock is held, so the page stays until it is mapped.
    match frame_of_object(fault, object) {
        Ok(frame) => map_protected(fault, Some(frame)),
        Err(stop) => stopped(stop),
    }
}

/// As [`map_protected_page`], for the object's page in `frame`, or for a zero page.
fn map_protected<P: Platform>(fault: &Fault<'_, '_, P>, frame: Option<Frame>) -> Stepped {
    let (space, page) = (fault.space, fault.page);
    let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
    let memory = space.page_table.memory;
    let attributes = fault.vma.flags().attributes().accessed().write_protected();
    let leaf = attributes.entry(frame.unwrap_or(memory.zero_frame), Level::<P::Arch>::PTE);
    let marker = P::Arch::encode_absent(Absent::Marker(Marker::UserfaultWriteProtect));
    let mapped = space.page_table.with_tables(range, |mut span| {
        if span.entry_at(page).entry != marker {
            return Ok(Ok(Next::Again));
        }
        // Splits a level-2 marker.
        let table = span.table_at(page, Level::PTE)?;
        let index = P::Arch::PTE.index_of(page);
        if let Some(folio) = frame.and_then(|frame| memory.frames.folio_of(frame)) {
            if memory.frames.folio(folio).map(1).is_err() {
                return Ok(Err(Failure::NoMemory));
            }
            span.counts.mapped(memory.frames.folio(folio).owner_kind(), 1);
        }
        let word = &space.page_table.entries(table)[index.position()];
        word.store(leaf.0, core::sync::atomic::Ordering::Release);
        span.counts.entries_written += 1;
        let resolved = frame.map_or(Resolved::ZeroPage, |_| Resolved::Mapped(range));
        Ok(Ok(Next::Done(resolved)))
    });
    publish(&space.page_table, range);
    mapped?
}
