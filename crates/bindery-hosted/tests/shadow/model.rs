//! The reference model: a sorted list of areas, and for each page that was written what stands in
//! its first and last word. No tables, no folios, no TLB.

use std::collections::BTreeMap;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::Arch;
use bindery::{Error, FaultError, Place, Protection, Remap};

use super::{Op, Outcome, done, signal};

/// A stretch of addresses with one protection; its start is its key.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Area {
    pub end: u64,
    pub protection: Protection,
    /// Where its first page was born, in pages.
    pub birth: u64,
}

/// The first and the last word of a page.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Words {
    pub first: u64,
    pub last: u64,
}

/// What the architecture and the options say.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub minimum: u64,
    pub limit: u64,
    pub top: u64,
    levels: u8,
    index_bits: u32,
    block: u64,
}

impl Rules {
    pub fn of<A: Arch>(minimum: u64) -> Self {
        // With five levels, a program has to ask for what lies above 2^47.
        let top = if A::LEVELS > 4 { (1 << 47) - PAGE_SIZE } else { A::USER_END };
        Self {
            minimum,
            limit: A::USER_END,
            top,
            levels: A::LEVELS,
            index_bits: A::INDEX_BITS,
            block: u64::from(A::BLOCK) * PAGE_SIZE,
        }
    }

    fn span(&self, level: u8) -> u64 {
        PAGE_SIZE << (self.index_bits * u32::from(level - 1))
    }
}

fn round(length: u64) -> Option<u64> {
    length.checked_next_multiple_of(PAGE_SIZE)
}

fn aligned(at: u64) -> Result<(), Error> {
    if at.is_multiple_of(PAGE_SIZE) { Ok(()) } else { Err(Error::Unaligned(VirtAddr(at))) }
}

/// One address space as its program sees it.
#[derive(Clone, Debug)]
pub struct Shadow {
    rules: Rules,
    pub areas: BTreeMap<u64, Area>,
    /// What was written, by page; all else is zero.
    pub pages: BTreeMap<u64, Words>,
}

impl Shadow {
    pub fn new(rules: Rules) -> Self {
        Self { rules, areas: BTreeMap::new(), pages: BTreeMap::new() }
    }

    /// What `op` must give; the model has done it afterwards.
    pub fn expect(&mut self, op: Op) -> Outcome {
        match op {
            Op::Map(place, length, protection) => self.map(place, length, protection).into(),
            Op::Unmap(at, length) => done(self.unmap(at, length)),
            Op::Protect(at, length, to) => done(self.protect(at, length, to)),
            Op::Remap(old, old_length, length, remap) => {
                self.remap(old, old_length, length, remap).into()
            }
            Op::Discard(at, length) => done(self.discard(at, length)),
            Op::Read(at) => {
                let readable = Protection::READ | Protection::WRITE;
                let allowed = self.allowed(at, |protection| protection.intersects(readable));
                let word = self.words(at & !(PAGE_SIZE - 1)).first;
                signal(allowed.map(|()| word))
            }
            Op::Write(at, value) => {
                let allowed = self.writable(at);
                if allowed.is_ok() {
                    self.pages.entry(at).or_default().first = value;
                }
                signal(allowed.map(|()| 0))
            }
            Op::Fill(at, length, byte) => signal(self.fill(at, length, byte).map(|()| 0)),
            Op::Execute(at) => {
                let executable = |protection: Protection| protection.contains(Protection::EXECUTE);
                signal(self.allowed(at, executable).map(|()| 0))
            }
            Op::SplitFolio(..) | Op::Collapse(_) => Outcome::Done(0),
        }
    }

    pub fn words(&self, page: u64) -> Words {
        self.pages.get(&page).copied().unwrap_or_default()
    }

    /// The area that holds `at`.
    pub fn area(&self, at: u64) -> Option<(u64, Area)> {
        let (start, area) = self.areas.range(..=at).next_back()?;
        (at < area.end).then_some((*start, *area))
    }

    fn allowed(&self, at: u64, test: impl Fn(Protection) -> bool) -> Result<(), FaultError> {
        let (_, area) = self.area(at).ok_or(FaultError::NotMapped)?;
        if test(area.protection) { Ok(()) } else { Err(FaultError::Protection) }
    }

    fn writable(&self, at: u64) -> Result<(), FaultError> {
        self.allowed(at, |protection| protection.contains(Protection::WRITE))
    }

    fn fill(&mut self, at: u64, length: u64, byte: u8) -> Result<(), FaultError> {
        let word = u64::from_ne_bytes([byte; 8]);
        for page in (at..at + length).step_by(PAGE_SIZE as usize) {
            self.writable(page)?;
            self.pages.insert(page, Words { first: word, last: word });
        }
        Ok(())
    }

    /// Lets no area reach over `at`.
    fn cut(&mut self, at: u64) {
        if let Some((start, area)) = self.area(at).filter(|(start, _)| *start < at) {
            self.areas.insert(start, Area { end: at, ..area });
            let birth = area.birth.wrapping_add((at - start) / PAGE_SIZE);
            self.areas.insert(at, Area { birth, ..area });
        }
    }

    /// Joins areas that continue each other.
    fn join(&mut self) {
        let mut joined: Vec<(u64, Area)> = Vec::with_capacity(self.areas.len());
        for (start, area) in &self.areas {
            match joined.last_mut() {
                Some((low, last))
                    if last.end == *start
                        && last.protection == area.protection
                        && last.birth.wrapping_add((last.end - *low) / PAGE_SIZE) == area.birth =>
                {
                    last.end = area.end;
                }
                _ => joined.push((*start, *area)),
            }
        }
        self.areas = joined.into_iter().collect();
    }

    fn forget(&mut self, start: u64, end: u64) {
        let gone: Vec<_> = self.pages.range(start..end).map(|(page, _)| *page).collect();
        for page in gone {
            self.pages.remove(&page);
        }
    }

    fn clear(&mut self, start: u64, end: u64) {
        self.cut(start);
        self.cut(end);
        self.areas.retain(|at, _| !(start..end).contains(at));
        self.forget(start, end);
    }

    fn is_free(&self, start: u64, end: u64) -> bool {
        self.area(start).is_none() && self.areas.range(start..end).next().is_none()
    }

    /// The highest free place that begins `congruent` bytes behind a multiple of `align`.
    fn highest(&self, length: u64, align: u64, congruent: u64) -> Option<u64> {
        let mut end = self.rules.top;
        for (start, area) in self
            .areas
            .iter()
            .rev()
            .map(|(start, area)| (*start, area.end))
            .chain([(0, self.rules.minimum)])
        {
            if let Some(at) = end.checked_sub(length).and_then(|at| at.checked_sub(congruent)) {
                let at = at / align * align + congruent;
                if at >= area {
                    return Some(at);
                }
            }
            end = end.min(start);
        }
        None
    }

    fn map(
        &mut self,
        place: Place,
        length: u64,
        protection: Protection,
    ) -> Result<VirtAddr, Error> {
        if length == 0 {
            return Err(Error::ZeroLength);
        }
        let length = round(length).filter(|l| *l <= self.rules.limit).ok_or(Error::TooLong)?;
        let start = match place {
            Place::Fixed(at) => self.fixed(at.0, length)?,
            Place::FixedNoReplace(at) => {
                let start = self.fixed(at.0, length)?;
                if !self.is_free(start, start + length) {
                    let inside = || self.areas.range(start..).next().map_or(start, |(at, _)| *at);
                    let first = if self.area(start).is_some() { start } else { inside() };
                    return Err(Error::Exists(VirtAddr(first)));
                }
                start
            }
            Place::Near(at) => {
                let at = at.0 & !(PAGE_SIZE - 1);
                match self.fixed(at, length) {
                    Ok(start) if self.is_free(start, start + length) => start,
                    _ => self.anywhere(length)?,
                }
            }
            Place::Anywhere => self.anywhere(length)?,
        };
        self.clear(start, start + length);
        let birth = start / PAGE_SIZE;
        self.areas.insert(start, Area { end: start + length, protection, birth });
        self.join();
        Ok(VirtAddr(start))
    }

    fn fixed(&self, at: u64, length: u64) -> Result<u64, Error> {
        let Rules { limit, minimum, .. } = self.rules;
        if at.checked_add(length).is_none_or(|end| end > limit) {
            return Err(Error::OutOfRange { limit: VirtAddr(limit) });
        }
        aligned(at)?;
        if at < minimum {
            return Err(Error::BelowMinimum { minimum: VirtAddr(minimum) });
        }
        Ok(at)
    }

    fn anywhere(&self, length: u64) -> Result<u64, Error> {
        let table = self.rules.span(2);
        let whole = (length >= table).then(|| self.highest(length, table, 0)).flatten();
        whole.or_else(|| self.highest(length, PAGE_SIZE, 0)).ok_or(Error::NoRoom)
    }

    fn unmap(&mut self, at: u64, length: u64) -> Result<(), Error> {
        let (start, end) = self.bounds(at, length)?;
        self.clear(start, end);
        Ok(())
    }

    fn bounds(&self, at: u64, length: u64) -> Result<(u64, u64), Error> {
        aligned(at)?;
        let limit = self.rules.limit;
        if at > limit || length > limit - at {
            return Err(Error::OutOfRange { limit: VirtAddr(limit) });
        }
        match length {
            0 => Err(Error::ZeroLength),
            _ => Ok((at, at + length.next_multiple_of(PAGE_SIZE))),
        }
    }

    fn protect(&mut self, at: u64, length: u64, protection: Protection) -> Result<(), Error> {
        aligned(at)?;
        let limit = VirtAddr(self.rules.limit);
        let end = round(length).and_then(|length| at.checked_add(length));
        let end = end.ok_or(Error::OutOfRange { limit })?;
        self.cut(at);
        self.cut(end);
        let mut next = at;
        while next < end
            && let Some(area) = self.areas.get_mut(&next)
        {
            area.protection = protection;
            next = area.end;
        }
        self.join();
        if next < end { Err(Error::NotMapped(VirtAddr(next))) } else { Ok(()) }
    }

    fn discard(&mut self, at: u64, length: u64) -> Result<(), Error> {
        if length == 0 && aligned(at).is_ok() {
            return Ok(());
        }
        let (start, end) = self.bounds(at, length)?;
        self.forget(start, end);
        let mut next = start;
        while next < end
            && let Some((_, area)) = self.area(next)
        {
            next = area.end;
        }
        if next < end { Err(Error::NotMapped(VirtAddr(0))) } else { Ok(()) }
    }

    fn remap(
        &mut self,
        old: u64,
        old_length: u64,
        length: u64,
        remap: Remap,
    ) -> Result<VirtAddr, Error> {
        aligned(old)?;
        let limit = self.rules.limit;
        let out_of_range = Error::OutOfRange { limit: VirtAddr(limit) };
        let (old_length, length) = (round(old_length).unwrap_or(0), round(length).unwrap_or(0));
        match length {
            0 => return Err(Error::ZeroLength),
            _ if length > limit => return Err(out_of_range),
            _ => {}
        }
        if let Remap::To(VirtAddr(target)) = remap {
            aligned(target)?;
            if target > limit - length {
                return Err(out_of_range);
            }
            let ends = |start: u64, length: u64| u128::from(start) + u128::from(length);
            if u128::from(target) < ends(old, old_length) && u128::from(old) < ends(target, length)
            {
                return Err(Error::Overlap);
            }
        }
        let (_, area) = self.area(old).ok_or(Error::NotMapped(VirtAddr(old)))?;
        if old_length == 0 {
            return Err(Error::NotShared);
        }
        let kept = old_length.min(length);
        let moves = matches!(remap, Remap::To(_));
        if (moves || length > old_length) && kept > area.end - old {
            return Err(Error::CrossesMapping { end: VirtAddr(area.end) });
        }
        let minimum = VirtAddr(self.rules.minimum);
        if matches!(remap, Remap::To(target) if target < minimum) {
            return Err(Error::BelowMinimum { minimum });
        }
        if length < old_length {
            self.unmap(old + length, old_length - length)?;
        }
        let target = match remap {
            Remap::To(target) => {
                self.clear(target.0, target.0 + length);
                target.0
            }
            _ if length <= old_length => return Ok(VirtAddr(old)),
            _ => {
                let end = old.saturating_add(length);
                let free = area.end == old + old_length && self.is_free(area.end, end);
                if free && end <= limit {
                    self.grow(old, end);
                    return Ok(VirtAddr(old));
                }
                if remap == Remap::InPlace {
                    return Err(Error::NoRoom);
                }
                self.congruent(old, old_length, length).ok_or(Error::NoRoom)?
            }
        };
        self.transfer(old, kept, target, length);
        Ok(VirtAddr(target))
    }

    fn grow(&mut self, at: u64, end: u64) {
        let (start, area) = self.area(at).expect("just looked at");
        self.areas.insert(start, Area { end, ..area });
        self.join();
    }

    /// The place for a mapping that moves: congruent modulo the largest table of which it covers a
    /// whole slot, so that tables can move with it.
    fn congruent(&self, old: u64, old_length: u64, length: u64) -> Option<u64> {
        let spans = (2..=self.rules.levels).rev().map(|level| self.rules.span(level));
        let covered = spans.filter(|span| old.next_multiple_of(*span) + span <= old + old_length);
        let smaller = [self.rules.span(2), self.rules.block, PAGE_SIZE];
        covered.chain(smaller).find_map(|align| self.highest(length, align, old % align))
    }

    fn transfer(&mut self, old: u64, kept: u64, target: u64, length: u64) {
        self.cut(old);
        let area = self.areas[&old];
        let moved: Vec<_> = self.pages.range(old..old + kept).map(|(p, w)| (*p, *w)).collect();
        self.clear(old, old + kept);
        self.areas.insert(target, Area { end: target + length, ..area });
        self.pages.extend(moved.iter().map(|(page, words)| (page - old + target, *words)));
        self.join();
    }

    /// Where `op` may have come when it ran out of memory: to nothing, or to a part of what its
    /// verb says it may have done.
    pub fn half_way(&self, op: Op) -> Vec<Self> {
        let mut states = vec![self.clone()];
        match op {
            Op::Protect(at, length, to) => {
                for part in (0..length).step_by(PAGE_SIZE as usize) {
                    let mut half = self.clone();
                    let _ = half.protect(at, part, to);
                    states.push(half);
                }
            }
            Op::Remap(old, old_length, length, Remap::To(target)) => {
                if length < old_length {
                    let mut half = self.clone();
                    half.clear(old + length, old + old_length);
                    states.push(half);
                }
                for mut half in states.clone() {
                    half.clear(target.0, target.0 + length);
                    states.push(half);
                }
            }
            _ => {}
        }
        states
    }
}
