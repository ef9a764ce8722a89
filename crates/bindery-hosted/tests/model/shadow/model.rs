//! The reference model: a sorted list of areas, and the first and the last word of each written
//! page. No tables, no folios, no TLB.

use std::collections::BTreeMap;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::Arch;
use bindery::{Error, FaultError, Place, Protection, Remap};

use super::{Op, Outcome, done, signal};

/// A mapping; its start is its key.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Area {
    pub end: u64,
    pub protection: Protection,
}

/// The areas. Adjacent ones with equal permissions are merged.
pub fn joined(areas: &BTreeMap<u64, Area>) -> Vec<(u64, Area)> {
    let mut joined: Vec<(u64, Area)> = Vec::with_capacity(areas.len());
    for (start, area) in areas {
        match joined.last_mut() {
            Some((_, last)) if last.end == *start && last.protection == area.protection => {
                last.end = area.end;
            }
            _ => joined.push((*start, *area)),
        }
    }
    joined
}

/// The first and the last word of a page.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Words {
    pub first: u64,
    pub last: u64,
}

/// The rules of the architecture and the options.
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
        // With five levels, a program has to request addresses above 2^47.
        let top = if A::LEVELS > 4 { (1 << 47) - PAGE_SIZE } else { A::USER_END };
        Self {
            minimum,
            limit: A::USER_END,
            top,
            levels: A::LEVELS,
            index_bits: A::INDEX_BITS,
            block: u64::from(A::CONTIG_ENTRIES) * PAGE_SIZE,
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
    /// The model does not know whether neighbors with equal permissions are one mapping. Operations
    /// that depend on it need [`Shadow::adopt`] first.
    pub areas: BTreeMap<u64, Area>,
    /// Written words, by page; all others are zero.
    pub pages: BTreeMap<u64, Words>,
}

impl Shadow {
    pub fn new(rules: Rules) -> Self {
        Self { rules, areas: BTreeMap::new(), pages: BTreeMap::new() }
    }

    /// Applies `op` to the model and returns the expected result.
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

    /// Splits the area that extends over `at`.
    fn cut(&mut self, at: u64) {
        if let Some((start, area)) = self.area(at).filter(|(start, _)| *start < at) {
            self.areas.insert(start, Area { end: at, ..area });
            self.areas.insert(at, area);
        }
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

    /// The highest free address that lies `congruent` bytes after a multiple of `align`.
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
            Place::Near(at) => self.near(at.0, length)?,
            Place::Anywhere => self.anywhere(length)?,
        };
        self.clear(start, start + length);
        self.areas.insert(start, Area { end: start + length, protection });
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

    fn near(&self, hint: u64, length: u64) -> Result<u64, Error> {
        let at = (hint & !(PAGE_SIZE - 1)).max(self.rules.minimum);
        match self.fixed(at, length) {
            Ok(start) if hint >= PAGE_SIZE && self.is_free(start, start + length) => Ok(start),
            _ => self.anywhere(length),
        }
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

    /// For calls that reject a range only if it wraps.
    fn unwrapped(&self, at: u64, length: u64) -> Result<u64, Error> {
        aligned(at)?;
        let limit = VirtAddr(self.rules.limit);
        let end = round(length).and_then(|length| at.checked_add(length));
        end.ok_or(Error::OutOfRange { limit })
    }

    /// The first unmapped address from `at` to `end`.
    fn hole(&self, at: u64, end: u64) -> Result<(), Error> {
        let mut next = at;
        while next < end
            && let Some((_, area)) = self.area(next)
        {
            next = area.end;
        }
        if next < end { Err(Error::NotMapped(VirtAddr(next))) } else { Ok(()) }
    }

    fn protect(&mut self, at: u64, length: u64, protection: Protection) -> Result<(), Error> {
        let end = self.unwrapped(at, length)?;
        self.cut(at);
        self.cut(end);
        let whole = self.hole(at, end);
        let stop = if let Err(Error::NotMapped(hole)) = whole { hole.0 } else { end };
        self.areas.range_mut(at..stop).for_each(|(_, area)| area.protection = protection);
        whole
    }

    fn discard(&mut self, at: u64, length: u64) -> Result<(), Error> {
        let end = self.unwrapped(at, length)?;
        self.forget(at, end);
        self.hole(at, end)
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
        let stays = matches!(remap, Remap::Leave(_) | Remap::LeaveTo(_));
        if let Remap::To(target) | Remap::Leave(target) | Remap::LeaveTo(target) = remap {
            let target = target.0;
            aligned(target)?;
            if target > limit - length {
                return Err(out_of_range);
            }
            if stays && old_length != length {
                return Err(Error::Invalid);
            }
            let ends = |start: u64, length: u64| u128::from(start) + u128::from(length);
            if u128::from(target) < ends(old, old_length) && u128::from(old) < ends(target, length)
            {
                return Err(Error::Overlap);
            }
        }
        match remap {
            Remap::To(target) | Remap::LeaveTo(target) if old_length == length => {
                self.move_all(old, length, target.0, stays)
            }
            _ => self.remap_one(old, old_length, length, remap),
        }
    }

    /// The parts of `start..end`, each in one mapping.
    fn parts(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let overlaps = |(at, area): (&u64, &Area)| (start.max(*at), end.min(area.end));
        let first = self.area(start).map_or(start, |(at, _)| at);
        self.areas.range(first..end.max(first)).map(overlaps).collect()
    }

    /// Moves each mapping in the range by the same distance.
    fn move_all(
        &mut self,
        old: u64,
        length: u64,
        target: u64,
        stays: bool,
    ) -> Result<VirtAddr, Error> {
        let parts = self.parts(old, old.saturating_add(length));
        if parts.first().is_none_or(|(start, _)| *start > old) {
            return Err(Error::NotMapped(VirtAddr(old)));
        }
        self.not_too_low(target)?;
        for (start, end) in parts {
            let to = start - old + target;
            self.clear(to, to + (end - start));
            self.transfer(start, end - start, to, end - start, stays);
        }
        Ok(VirtAddr(target))
    }

    fn not_too_low(&self, target: u64) -> Result<(), Error> {
        let minimum = VirtAddr(self.rules.minimum);
        if target < minimum.0 { Err(Error::BelowMinimum { minimum }) } else { Ok(()) }
    }

    fn remap_one(
        &mut self,
        old: u64,
        old_length: u64,
        length: u64,
        remap: Remap,
    ) -> Result<VirtAddr, Error> {
        let (_, area) = self.area(old).ok_or(Error::NotMapped(VirtAddr(old)))?;
        if old_length == 0 {
            return Err(Error::NotShared);
        }
        let kept = old_length.min(length);
        let moves = !matches!(remap, Remap::InPlace | Remap::MayMove);
        if (moves || length > old_length) && kept > area.end - old {
            return Err(Error::CrossesMapping { end: VirtAddr(area.end) });
        }
        if let Remap::To(target) = remap {
            self.not_too_low(target.0)?;
            // Unmapped, even if the tail cannot be.
            self.clear(target.0, target.0 + length);
        }
        if length < old_length {
            self.unmap(old + length, old_length - length)?;
        }
        let target = match remap {
            Remap::To(target) | Remap::LeaveTo(target) => target.0,
            Remap::Leave(VirtAddr(0)) => self.congruent(old, kept, length).ok_or(Error::NoRoom)?,
            Remap::Leave(hint) => self.near(hint.0, length)?,
            Remap::InPlace | Remap::MayMove if length <= old_length => return Ok(VirtAddr(old)),
            Remap::InPlace | Remap::MayMove => {
                let end = old.saturating_add(length);
                let free = area.end == old + old_length && self.is_free(area.end, end);
                if free && end <= self.rules.limit {
                    self.grow(old, end);
                    return Ok(VirtAddr(old));
                }
                if remap == Remap::InPlace {
                    return Err(Error::NoRoom);
                }
                self.congruent(old, old_length, length).ok_or(Error::NoRoom)?
            }
        };
        self.transfer(old, kept, target, length, matches!(remap, Remap::Leave(_)));
        Ok(VirtAddr(target))
    }

    fn grow(&mut self, at: u64, end: u64) {
        let (start, area) = self.area(at).expect("just looked at");
        self.areas.insert(start, Area { end, ..area });
    }

    /// The destination of a moving mapping, congruent with the source modulo the span of the
    /// largest table that the mapping covers completely, so that whole tables can move.
    fn congruent(&self, old: u64, old_length: u64, length: u64) -> Option<u64> {
        let spans = (2..=self.rules.levels).rev().map(|level| self.rules.span(level));
        let covered = spans.filter(|span| old.next_multiple_of(*span) + span <= old + old_length);
        let smaller = [self.rules.span(2), self.rules.block, PAGE_SIZE];
        covered.chain(smaller).find_map(|align| self.highest(length, align, old % align))
    }

    /// Moves contents to a new mapping. The source is removed or stays as an empty mapping.
    fn transfer(&mut self, old: u64, kept: u64, target: u64, length: u64, stays: bool) {
        let (_, area) = self.area(old).expect("it is mapped");
        let moved: Vec<_> = self.pages.range(old..old + kept).map(|(p, w)| (*p, *w)).collect();
        if stays {
            self.forget(old, old + kept);
        } else {
            self.clear(old, old + kept);
        }
        self.areas.insert(target, Area { end: target + length, ..area });
        self.pages.extend(moved.iter().map(|(page, words)| (page - old + target, *words)));
    }

    /// The possible states after `op` ran out of memory: unchanged, or with a part of the changes
    /// that the operation allows.
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
            Op::Remap(old, old_length, length, Remap::To(target) | Remap::LeaveTo(target))
                if old_length == length =>
            {
                let stays = matches!(op, Op::Remap(.., Remap::LeaveTo(_)));
                let mut half = self.clone();
                for (start, end) in self.parts(old, old + length) {
                    let to = start - old + target.0;
                    half.clear(to, to + (end - start));
                    states.push(half.clone());
                    half.transfer(start, end - start, to, end - start, stays);
                    states.push(half.clone());
                }
            }
            Op::Remap(old, old_length, length, Remap::To(target)) => {
                let mut half = self.clone();
                half.clear(target.0, target.0 + length);
                states.push(half.clone());
                half.clear(old + length, old + old_length.max(length));
                states.push(half);
            }
            _ => {}
        }
        states
    }
}
