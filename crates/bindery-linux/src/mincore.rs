//! `mincore`.

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use bindery::{
    AddressSpace, CallReady, Errno, Error, Operation, PendingUserCopy, Platform, Residence, Step,
};

use super::Outcome;

/// The number of pages whose answers are buffered on the stack.
const PAGES_AT_ONCE: u64 = 512;

pub(super) fn mincore<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    vector: u64,
) -> Outcome {
    let mut rest = Unanswered::new(space, addr, length, vector)?;
    while rest.pages > 0 {
        let mut answers = [0_u8; PAGES_AT_ONCE as usize];
        let told = rest.ask(space, &mut answers);
        // The answers before a hole are written even if the call fails at the hole.
        let known = &answers[..told.known];
        space.write_user(VirtAddr(rest.vector), known).map_err(|_| Errno::EFAULT)?;
        rest.pass(told)?;
    }
    Ok(0)
}

/// The pages that a call has yet to report.
#[derive(Debug)]
struct Unanswered {
    start: u64,
    pages: u64,
    /// The place of the first answer.
    vector: u64,
}

/// The result for some pages.
#[derive(Debug)]
struct Told {
    /// The number of answers.
    known: usize,
    /// The number of pages that were asked about.
    pages: u64,
    result: Result<(), Errno>,
}

impl Unanswered {
    fn new<P: Platform>(
        space: &AddressSpace<'_, P>,
        start: u64,
        length: u64,
        vector: u64,
    ) -> Result<Self, Errno> {
        if !start.is_multiple_of(PAGE_SIZE) {
            return Err(Errno::EINVAL);
        }
        let limit = space.limit().0;
        let fits = |start: u64, length: u64| length <= limit && start <= limit - length;
        if !fits(start, length) {
            return Err(Errno::ENOMEM);
        }
        let pages = length.div_ceil(PAGE_SIZE);
        if !fits(vector, pages) {
            return Err(Errno::EFAULT);
        }
        Ok(Self { start, pages, vector })
    }

    /// Queries the next pages.
    fn ask<P: Platform>(
        &self,
        space: &AddressSpace<'_, P>,
        answers: &mut [u8; PAGES_AT_ONCE as usize],
    ) -> Told {
        let mut known = 0;
        let start = VirtAddr(self.start);
        // One mapping at a time, as on Linux: the vector itself may lie in the next mapping, and
        // writing to it makes pages there resident.
        let end = space.mapping_end(start).unwrap_or(start);
        let left = ((end.0 - start.0) >> PAGE_SHIFT).max(1);
        let pages = self.pages.min(PAGES_AT_ONCE).min(left);
        let told = space.mincore(start, pages << PAGE_SHIFT, |residence, pages| {
            let stretch = &mut answers[known..known + pages as usize];
            stretch.fill(u8::from(residence == Residence::Resident));
            known += pages as usize;
        });
        let result = told.map_err(|error| {
            let beyond = matches!(error, Error::OutOfRange { .. });
            if beyond { Errno::ENOMEM } else { error.errno(Operation::Mincore) }
        });
        Told { known, pages, result }
    }

    /// Advances past pages whose answers are written.
    fn pass(&mut self, told: Told) -> Result<(), Errno> {
        told.result?;
        self.start += told.pages << PAGE_SHIFT;
        self.vector += told.pages;
        self.pages -= told.pages;
        Ok(())
    }
}

/// A `mincore` in steps. It keeps the answers for up to 512 pages, one bit each, until they are in
/// the vector, so the call does not examine these pages again.
#[derive(Debug)]
pub(super) struct PendingMincore {
    rest: Unanswered,
    /// The answers that have yet to be written.
    told: Option<(Told, PendingUserCopy)>,
    bits: [u64; PAGES_AT_ONCE as usize / 64],
}

impl PendingMincore {
    /// Creates the call. No page is reported yet.
    pub(super) fn new<P: Platform>(
        space: &AddressSpace<'_, P>,
        [addr, length, vector]: [u64; 3],
    ) -> Result<Self, Errno> {
        let rest = Unanswered::new(space, addr, length, vector)?;
        Ok(Self { rest, told: None, bits: Default::default() })
    }

    /// Continues until all pages are reported or the call would have to wait for the vector.
    pub(super) fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Errno> {
        let mut ready = ready;
        loop {
            let mut answers = [0_u8; PAGES_AT_ONCE as usize];
            let (told, mut copy) = match self.told.take() {
                Some(told) => {
                    for (at, answer) in answers.iter_mut().enumerate() {
                        *answer = (self.bits[at / 64] >> (at % 64)) as u8 & 1;
                    }
                    told
                }
                None if self.rest.pages == 0 => return Ok(Step::Done),
                None => {
                    if let Some(wait) = space.wait_for_mutex(&mut ready) {
                        return Ok(Step::Blocked(wait));
                    }
                    let told = self.rest.ask(space, &mut answers);
                    (told, PendingUserCopy::new(VirtAddr(self.rest.vector)))
                }
            };
            let written = copy.write(space, ready.take(), &answers[..told.known]);
            if let Step::Blocked(wait) = written.map_err(|_| Errno::EFAULT)? {
                self.bits = Default::default();
                for (at, answer) in answers.iter().enumerate() {
                    self.bits[at / 64] |= u64::from(*answer) << (at % 64);
                }
                self.told = Some((told, copy));
                return Ok(Step::Blocked(wait));
            }
            self.rest.pass(told)?;
        }
    }
}
