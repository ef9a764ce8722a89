//! Statements, from the parts that the grammar has found.

use bindery::addr::PAGE_SHIFT;
use bindery_linux::Call;
use pest::iterators::{Pair, Pairs};

use super::Reader;
use crate::check::mistake::{Mistake, Place};
use crate::check::number::{Value, number};
use crate::check::scope::Kind;
use crate::check::script::{
    Access, Action, Argument, Expectation, FILE_ACCESSES, FOLIO_KINDS, FOLIO_MODES, FileAction,
    FolioKind, OVERCOMMITS, OnFile, RESOURCES, Setting, SystemCall,
};
use crate::check::syntax::Rule;
use crate::check::words;
use crate::size::MAX_ORDER;

/// `MAP_ANONYMOUS`.
const ANONYMOUS: u64 = linux_raw_sys::general::MAP_ANONYMOUS as u64;

/// The parts of a statement, in order.
struct Parts<'p> {
    place: Place,
    pairs: Pairs<'p, Rule>,
}

impl<'p> Parts<'p> {
    /// The next part, which the grammar requires.
    fn next(&mut self) -> Result<Pair<'p, Rule>, Mistake> {
        self.pairs.next().ok_or_else(|| Mistake::new(self.place, "something is missing here"))
    }

    /// The next part, if it is of that kind.
    fn next_if(&mut self, rule: Rule) -> Option<Pair<'p, Rule>> {
        self.pairs.peek().filter(|pair| pair.as_rule() == rule)?;
        self.pairs.next()
    }
}

impl Reader<'_> {
    /// The action, and its expectation.
    pub fn action(
        &mut self,
        pair: Pair<'_, Rule>,
    ) -> Result<(Option<Action>, Option<Expectation>), Mistake> {
        let (mut action, mut expectation) = (None, None);
        for part in pair.into_inner() {
            if part.as_rule() == Rule::expectation {
                expectation = Some(self.expectation(part)?);
                continue;
            }
            // Actions with expectations of their own.
            let own = part.clone().into_inner().find(|inner| {
                matches!(inner.as_rule(), Rule::seals_expectation | Rule::counts_expectation)
            });
            expectation = own.map(|own| self.expectation(own)).transpose()?;
            action = Some(self.statement_of(part)?);
        }
        Ok((action, expectation))
    }

    fn statement_of(&mut self, pair: Pair<'_, Rule>) -> Result<Action, Mistake> {
        let (rule, place) = (pair.as_rule(), self.place(&pair));
        let word = pair.as_str().split_whitespace().next().unwrap_or_default();
        if let Some(call) = Call::ALL.iter().find(|call| call.name() == word) {
            return self.call(*call, pair);
        }
        let mut parts = Parts { place, pairs: pair.into_inner() };
        match rule {
            Rule::fork => {
                let child = parts.next()?;
                Ok(Action::Fork(child.as_str().to_owned(), self.place(&child)))
            }
            Rule::exit => Ok(Action::Exit),
            Rule::layout => Ok(Action::Layout),
            Rule::counts => Ok(Action::Counts),
            Rule::audit => Ok(Action::Audit),
            Rule::read | Rule::write | Rule::fetch | Rule::fill => {
                self.access(rule, parts).map(Action::Access)
            }
            Rule::heap | Rule::limit | Rule::policy | Rule::overcommit => {
                self.setting(rule, parts).map(Action::Setting)
            }
            Rule::memfd | Rule::new_file | Rule::open => {
                self.new_file(rule, parts).map(Action::File)
            }
            _ => self.on_file(rule, parts).map(Action::File),
        }
    }

    fn call(&self, call: Call, pair: Pair<'_, Rule>) -> Result<Action, Mistake> {
        let numeric = |pair: &Pair<'_, Rule>| {
            pair.as_rule() == Rule::map_flags
                && pair.as_str().contains(|c: char| c.is_ascii_digit())
        };
        let raw = pair.clone().into_inner().any(|part| numeric(&part));
        let arguments: Result<Vec<Argument>, Mistake> =
            pair.into_inner().map(|part| self.argument(&part)).collect();
        let mut arguments = arguments?;
        if call == Call::Mmap
            && !raw
            && let [_, _, _, Argument::Words(_, flags)] = &mut *arguments
        {
            // Without a file, the mapping is anonymous.
            *flags |= ANONYMOUS;
        }
        Ok(Action::Call(SystemCall { call, arguments }))
    }

    fn access(&self, rule: Rule, mut parts: Parts<'_>) -> Result<Access, Mistake> {
        let at = self.value(&parts.next()?)?;
        Ok(match rule {
            Rule::read => {
                let length = parts.next_if(Rule::length);
                Access::Read { at, length: self.optional(length)? }
            }
            Rule::write => Access::Write { at, values: self.values(parts.pairs)? },
            Rule::fetch => Access::Fetch { at },
            _ => Access::Fill {
                at,
                length: self.value(&parts.next()?)?,
                byte: self.value(&parts.next()?)?,
            },
        })
    }

    fn optional(&self, pair: Option<Pair<'_, Rule>>) -> Result<Option<Value>, Mistake> {
        pair.map(|pair| self.value(&pair)).transpose()
    }

    /// A statement that gives a name to a file.
    fn new_file(&mut self, rule: Rule, mut parts: Parts<'_>) -> Result<FileAction, Mistake> {
        let pair = parts.next()?;
        let (name, place) = (pair.as_str().to_owned(), self.place(&pair));
        let action = match rule {
            Rule::memfd => {
                let flags = parts.next_if(Rule::memfd_flags);
                let flags = flags.map(|flags| self.words(&flags, &words::MEMFD)).transpose()?;
                let sealing = u64::from(linux_raw_sys::general::MFD_ALLOW_SEALING);
                FileAction::Memfd { name: name.clone(), flags: flags.unwrap_or(sealing) }
            }
            Rule::new_file => {
                let size = parts.next_if(Rule::length);
                FileAction::New { name: name.clone(), size: self.optional(size)? }
            }
            _ => FileAction::Open {
                name: name.clone(),
                file: self.file(&parts.next()?)?,
                access: self.choice(&parts.next()?, "way to open a file", FILE_ACCESSES)?,
            },
        };
        self.scope.define(&name, Kind::File, place)?;
        Ok(action)
    }

    fn on_file(&self, rule: Rule, mut parts: Parts<'_>) -> Result<FileAction, Mistake> {
        let file = self.file(&parts.next()?)?;
        if rule == Rule::close {
            return Ok(FileAction::Close { file });
        }
        let value = |parts: &mut Parts<'_>| self.value(&parts.next()?);
        let what = match rule {
            Rule::truncate => OnFile::Truncate { length: value(&mut parts)? },
            Rule::allocate | Rule::punch => {
                let (offset, length) = (value(&mut parts)?, value(&mut parts)?);
                let flags = parts.next_if(Rule::allocate_flags);
                let mode = match flags {
                    Some(flags) => self.words(&flags, &words::ALLOCATE)?,
                    None if rule == Rule::punch => PUNCH,
                    None => 0,
                };
                OnFile::Allocate { offset, length, mode }
            }
            Rule::seal => OnFile::Seal { seals: self.words(&parts.next()?, &words::SEALS)? },
            Rule::seals => OnFile::Seals,
            Rule::pread => {
                let offset = value(&mut parts)?;
                let length = parts.next_if(Rule::length);
                OnFile::Read { offset, length: self.optional(length)? }
            }
            _ => {
                let offset = value(&mut parts)?;
                OnFile::Write { offset, values: self.values(parts.pairs)? }
            }
        };
        Ok(FileAction::On { file, what })
    }

    fn setting(&self, rule: Rule, mut parts: Parts<'_>) -> Result<Setting, Mistake> {
        let first = parts.next()?;
        Ok(match rule {
            Rule::heap => Setting::Heap(self.value(&first)?),
            Rule::limit => {
                let resource = self.choice(&first, "limit", RESOURCES)?;
                let bound = parts.next()?;
                let unlimited = bound.as_str() == "unlimited";
                let bound = if unlimited { None } else { Some(self.value(&bound)?) };
                Setting::Limit(resource, bound)
            }
            Rule::policy => {
                let orders = self.orders(&first)?;
                let mode = self.choice(&parts.next()?, "mode", FOLIO_MODES)?;
                let kind = parts.next_if(Rule::folio_kind);
                let kind = kind.map(|kind| self.choice(&kind, "kind of memory", FOLIO_KINDS));
                let kind = kind.transpose()?.unwrap_or(FolioKind::Anonymous);
                Setting::Policy { orders, mode, kind }
            }
            _ => {
                let mode = self.choice(&first, "mode", OVERCOMMITS)?;
                let limit = parts.next_if(Rule::length);
                Setting::Overcommit(mode, self.optional(limit)?)
            }
        })
    }

    /// The orders of folios of these sizes.
    fn orders(&self, pair: &Pair<'_, Rule>) -> Result<Vec<u8>, Mistake> {
        let whole = self.place(pair);
        let mut start = 0;
        let mut orders = Vec::new();
        for text in pair.as_str().split(',') {
            let place = whole.part(start, start + text.len());
            start += text.len() + 1;
            let size = number(text, place)?;
            let order = size.trailing_zeros().wrapping_sub(PAGE_SHIFT);
            if !size.is_power_of_two() || !(1..=u32::from(MAX_ORDER)).contains(&order) {
                let message = format!("no folios of `{text}` can be chosen");
                let help = "their sizes are powers of two from 8K to 2M; pages of 4K are always \
                            used where nothing else fits";
                return Err(Mistake::new(place, message).help(help));
            }
            orders.push(order as u8);
        }
        Ok(orders)
    }
}

/// `fallocate` of a hole.
const PUNCH: u64 = {
    use linux_raw_sys::general as raw;
    (raw::FALLOC_FL_PUNCH_HOLE | raw::FALLOC_FL_KEEP_SIZE) as u64
};
