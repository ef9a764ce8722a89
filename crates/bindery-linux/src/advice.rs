//! `madvise`, `process_madvise` and `process_mrelease`.

use core::ops::Deref;

use linux_raw_sys::general as raw;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, KeyRights};
use bindery::{
    AddressSpace, Advice, CallReady, Errno, Error, Operation, PendingMadvise, Platform, Step,
};

use super::vector::{IoRange, MOST_BYTES, MOST_RANGES, PendingRange, RangeStep};
use super::{Outcome, Process, errno, raw as raw_result};

fn advice(number: i32) -> Option<Advice> {
    Some(match u32::try_from(number).ok()? {
        raw::MADV_NORMAL => Advice::Normal,
        raw::MADV_RANDOM => Advice::Random,
        raw::MADV_SEQUENTIAL => Advice::Sequential,
        raw::MADV_WILLNEED => Advice::WillNeed,
        raw::MADV_DONTNEED => Advice::DontNeed,
        raw::MADV_DONTNEED_LOCKED => Advice::DontNeedLocked,
        raw::MADV_FREE => Advice::Free,
        raw::MADV_COLD => Advice::Cold,
        raw::MADV_PAGEOUT => Advice::PageOut,
        raw::MADV_REMOVE => Advice::Remove,
        raw::MADV_DONTFORK => Advice::DontFork,
        raw::MADV_DOFORK => Advice::DoFork,
        raw::MADV_WIPEONFORK => Advice::WipeOnFork,
        raw::MADV_KEEPONFORK => Advice::KeepOnFork,
        raw::MADV_DONTDUMP => Advice::DontDump,
        raw::MADV_DODUMP => Advice::DoDump,
        raw::MADV_MERGEABLE => Advice::Mergeable,
        raw::MADV_UNMERGEABLE => Advice::Unmergeable,
        raw::MADV_HUGEPAGE => Advice::Huge,
        raw::MADV_NOHUGEPAGE => Advice::NoHuge,
        raw::MADV_COLLAPSE => Advice::Collapse,
        raw::MADV_POPULATE_READ => Advice::PopulateRead,
        raw::MADV_POPULATE_WRITE => Advice::PopulateWrite,
        raw::MADV_GUARD_INSTALL => Advice::GuardInstall,
        raw::MADV_GUARD_REMOVE => Advice::GuardRemove,
        _ => return None,
    })
}

pub(super) fn madvise<'m, P: Platform>(
    process: &impl Process<'m, P>,
    addr: u64,
    length: u64,
    number: i32,
) -> Outcome {
    let advice = advice(number).ok_or(Errno::EINVAL)?;
    let rights = process.key_rights();
    let advised = process.space().madvise_with_keys(VirtAddr(addr), length, advice, rights);
    advised.map(|()| 0).map_err(errno(Operation::Madvise))
}

/// `madvise(2)` up to its waits.
pub(super) fn begin_madvise<'m, P: Platform>(
    process: &impl Process<'m, P>,
    [addr, length, number]: [u64; 3],
) -> Result<PendingMadvise<'m, P>, Errno> {
    let advice = advice(number as i32).ok_or(Errno::EINVAL)?;
    let rights = process.key_rights();
    let begun = process.space().begin_madvise(VirtAddr(addr), length, advice, rights);
    begun.map_err(errno(Operation::Madvise))
}

/// `process_madvise(2)`: an array of `struct iovec` in the caller's memory lists the ranges.
pub(super) fn process_madvise<'m, P: Platform>(
    process: &impl Process<'m, P>,
    arguments: [u64; 6],
) -> Outcome {
    let mut call = PendingAdvice::new(arguments)?;
    // Looks up the target once, as on Linux, so closing the descriptor during a wait does not end
    // the call.
    let (mut ready, mut found) = (None, None);
    while let Step::Blocked(wait) = call.step(process, ready.take(), &mut found)? {
        ready = Some(wait.wait());
    }
    Ok(call.done)
}

/// A `process_madvise` in steps, with its progress.
#[derive(Debug)]
pub(super) struct PendingAdvice<'m, P: Platform> {
    arguments: [u64; 6],
    /// The validation of the whole array, which precedes all advice.
    validation: Option<Validation>,
    /// The index of the next range.
    next: u64,
    /// The range that is being read.
    reading: Option<PendingRange>,
    /// The length of the range that is being advised, and the rest of the advice.
    advising: Option<(u64, PendingMadvise<'m, P>)>,
    /// The address of the target's state, used only for comparison.
    target: Option<usize>,
    /// The length advised so far.
    pub(super) done: u64,
}

/// The ranges validated so far.
#[derive(Clone, Copy, Default, Debug)]
struct Validation {
    left: bool,
    skewed: bool,
    beyond: bool,
}

impl<'m, P: Platform> PendingAdvice<'m, P> {
    /// Creates the call. No range is read yet.
    pub(super) fn new(arguments: [u64; 6]) -> Result<Self, Errno> {
        let [_, _, count, _, flags, _] = arguments;
        if flags as u32 != 0 || count > MOST_RANGES {
            return Err(Errno::EINVAL);
        }
        Ok(Self {
            arguments,
            validation: Some(Validation::default()),
            next: 0,
            reading: None,
            advising: None,
            target: None,
            done: 0,
        })
    }

    /// Continues until all ranges are advised or the call has to wait for a page. `found` is the
    /// target, if it is known and cannot have changed.
    pub(super) fn step<'s>(
        &mut self,
        process: &'s impl Process<'m, P>,
        ready: Option<CallReady<'m, P>>,
        found: &mut Option<&'s AddressSpace<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Errno> {
        let count = self.arguments[2];
        let mut ready = ready;
        while let Some(mut validation) = self.validation {
            if self.next == count {
                self.end_validation(process, validation, found)?;
                break;
            }
            let index = self.next;
            match self.read_next(process.space(), ready.take())? {
                RangeStep::Blocked(wait) => return Ok(Step::Blocked(wait)),
                RangeStep::Read(range) => validation.note::<P>(index, range)?,
            }
            self.validation = Some(validation);
        }
        let (target, advice, rights) = match self.target(process, found) {
            Ok(target) => target,
            Err(_) if self.done > 0 => return Ok(Step::Done),
            Err(errno) => return Err(errno),
        };
        loop {
            if let Some((length, pending)) = &mut self.advising {
                match pending.step(target, ready.take()) {
                    Ok(Step::Blocked(wait)) => return Ok(Step::Blocked(wait)),
                    Ok(Step::Done) => self.done += *length,
                    Err(error) => return self.fail(error),
                }
                self.advising = None;
            }
            if self.next == count {
                return Ok(Step::Done);
            }
            if let Some(wait) = target.wait_for_mutex(&mut ready) {
                return Ok(Step::Blocked(wait));
            }
            let range = match self.read_next(process.space(), ready.take()) {
                Ok(RangeStep::Blocked(wait)) => return Ok(Step::Blocked(wait)),
                Ok(RangeStep::Read(range)) => range,
                // The array was unmapped after its validation.
                Err(_) if self.done > 0 => {
                    self.next = count;
                    return Ok(Step::Done);
                }
                Err(errno) => return Err(errno),
            };
            let length = range.length.min(MOST_BYTES - self.done);
            if length == 0 {
                continue;
            }
            match target.begin_madvise(VirtAddr(range.start), length, advice, rights) {
                Ok(pending) => self.advising = Some((length, pending)),
                Err(error) => return self.fail(error),
            }
        }
    }

    /// Reads the next range.
    fn read_next<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<RangeStep<'s, 'm, P>, Errno> {
        let mut range = match self.reading.take() {
            Some(range) => range,
            None => PendingRange::new(self.arguments[1], self.next)?,
        };
        let step = range.step(space, ready)?;
        match &step {
            RangeStep::Read(_) => self.next += 1,
            RangeStep::Blocked(_) => self.reading = Some(range),
        }
        Ok(step)
    }

    fn end_validation<'s>(
        &mut self,
        process: &'s impl Process<'m, P>,
        validation: Validation,
        found: &mut Option<&'s AddressSpace<'m, P>>,
    ) -> Result<(), Errno> {
        if validation.beyond {
            return Err(Errno::EFAULT);
        }
        self.target(process, found)?;
        if validation.left && validation.skewed {
            // Linux checks the alignment of the first range even if that range is empty.
            return Err(Errno::EINVAL);
        }
        (self.validation, self.next) = (None, 0);
        Ok(())
    }

    /// The advised memory, the advice, and the caller's rights. Since the last step, the descriptor
    /// may have been closed and reused for another process.
    fn target<'s>(
        &mut self,
        process: &'s impl Process<'m, P>,
        found: &mut Option<&'s AddressSpace<'m, P>>,
    ) -> Result<(&'s AddressSpace<'m, P>, Advice, KeyRights), Errno> {
        let [pidfd, _, _, number, ..] = self.arguments;
        let target = found.or_else(|| process.process(pidfd as i32)).ok_or(Errno::EBADF)?;
        *found = Some(target);
        let address = core::ptr::from_ref(target).addr();
        if *self.target.get_or_insert(address) != address {
            return Err(Errno::EBADF);
        }
        // Linux 7.2 rejects unknown advice even for an empty array.
        let advice = advice(number as i32).ok_or(Errno::EINVAL)?;
        let own = core::ptr::eq(target, process.space());
        if !own {
            if !advice.is_for_others() {
                return Err(Errno::EINVAL);
            }
            if !process.may_advise_others() {
                return Err(Errno::EPERM);
            }
        }
        Ok((target, advice, if own { process.key_rights() } else { KeyRights::ALL }))
    }

    /// Ends with the error, or with the length advised before it.
    fn fail<'s>(&mut self, error: Error) -> Result<Step<'s, 'm, P>, Errno> {
        if self.done == 0 {
            return Err(error.errno(Operation::Madvise));
        }
        (self.next, self.advising) = (self.arguments[2], None);
        Ok(Step::Done)
    }
}

impl Validation {
    fn note<P: Platform>(&mut self, index: u64, range: IoRange) -> Result<(), Errno> {
        let IoRange { start, length } = range;
        self.skewed |= index == 0 && length == 0 && !start.is_multiple_of(PAGE_SIZE);
        if length > i64::MAX as u64 {
            return Err(Errno::EINVAL);
        }
        self.left |= length > 0;
        self.beyond |= start.saturating_add(length) > P::Arch::USER_END;
        Ok(())
    }
}

/// `process_mrelease(2)`: frees the memory of a process that is about to exit. `find` returns the
/// memory of the process behind the pidfd. It fails with `EBADF` if the descriptor is not a pidfd,
/// with `ESRCH` if the process has released its memory, and with `EINVAL` if the process, or
/// another process with the same memory, is not about to exit. Returns 0 or `-errno`.
///
/// Context: may sleep. Complexity: as [`AddressSpace::reap`].
pub fn process_mrelease<'m, P: Platform, S: Deref<Target = AddressSpace<'m, P>>>(
    flags: u32,
    find: impl FnOnce() -> Result<S, Errno>,
) -> i64 {
    let release = || {
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        find()?.reap().map(|()| 0).map_err(|error| {
            let short = error == Error::OutOfMemory;
            if short { Errno::EAGAIN } else { error.errno(Operation::Madvise) }
        })
    };
    raw_result(release())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_and_numbers_correspond() {
        let named: std::vec::Vec<_> = (0..i32::from(u16::MAX)).filter_map(advice).collect();
        assert_eq!(named.len(), Advice::ALL.len());
        assert!(Advice::ALL.iter().all(|advice| named.contains(advice)));
    }
}
