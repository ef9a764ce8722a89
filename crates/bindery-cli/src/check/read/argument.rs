//! Arguments: numbers, words, files and processes.

use pest::iterators::Pair;

use super::Reader;
use crate::check::mistake::Mistake;
use crate::check::number::{Value, number};
use crate::check::scope::Kind;
use crate::check::script::{Argument, File, Process};
use crate::check::syntax::Rule;
use crate::check::words::{self, Unknown, Vocabulary, choose};

/// An error in a part of an argument, before its place is known.
enum Wrong {
    Word(Unknown),
    Number(Mistake),
}

impl From<Unknown> for Wrong {
    fn from(unknown: Unknown) -> Self {
        Self::Word(unknown)
    }
}

impl Reader<'_> {
    /// A sum whose names are all numbers.
    pub fn value(&self, pair: &Pair<'_, Rule>) -> Result<Value, Mistake> {
        let value = Value::read(pair.as_str(), self.place(pair))?;
        self.scope.expect_numbers(&value)?;
        Ok(value)
    }

    /// The value of each part that has one.
    pub fn values<'p>(
        &self,
        pairs: impl Iterator<Item = Pair<'p, Rule>>,
    ) -> Result<Vec<Value>, Mistake> {
        pairs.map(|pair| self.value(&pair)).collect()
    }

    /// The value of the words for flags, a protection or an advice.
    pub fn words(&self, pair: &Pair<'_, Rule>, vocabulary: &Vocabulary) -> Result<u64, Mistake> {
        let place = self.place(pair);
        let read = |part: &str| number(part, place).map_err(Wrong::Number);
        vocabulary.read(pair.as_str(), read).map_err(|(part, wrong)| {
            let place = place.part(part.start, part.end);
            match wrong {
                Wrong::Word(unknown) => Mistake::new(place, unknown.message).help(unknown.help),
                Wrong::Number(mistake) => Mistake { place, ..mistake },
            }
        })
    }

    /// One of the words of a table.
    pub fn choice<T: Copy>(
        &self,
        pair: &Pair<'_, Rule>,
        one: &str,
        table: &[(&str, T)],
    ) -> Result<T, Mistake> {
        choose(one, table, pair.as_str())
            .map_err(|unknown| Mistake::new(self.place(pair), unknown.message).help(unknown.help))
    }

    pub fn file(&self, pair: &Pair<'_, Rule>) -> Result<File, Mistake> {
        let place = self.place(pair);
        let value = Value::read(pair.as_str(), place)?;
        match value.as_name() {
            Some(name) if !self.scope.is(name, Kind::Number) => {
                self.scope.expect(name, Kind::File, place)?;
                Ok(File::Named(name.to_owned(), place))
            }
            _ => {
                self.scope.expect_numbers(&value)?;
                Ok(File::Number(value))
            }
        }
    }

    fn process(&self, pair: &Pair<'_, Rule>) -> Result<Process, Mistake> {
        let place = self.place(pair);
        let value = Value::read(pair.as_str(), place)?;
        match value.as_name() {
            Some(name) => {
                self.scope.expect(name, Kind::Process, place)?;
                Ok(Process::Named(name.to_owned(), place))
            }
            None => Ok(Process::Number(value)),
        }
    }

    /// The argument of a call, by its kind in the grammar.
    pub fn argument(&self, pair: &Pair<'_, Rule>) -> Result<Argument, Mistake> {
        let flags =
            |vocabulary| self.words(pair, vocabulary).map(|bits| Argument::Words(vocabulary, bits));
        match pair.as_rule() {
            Rule::protection => flags(&words::PROTECTION),
            Rule::map_flags => flags(&words::MAP),
            Rule::remap_flags => flags(&words::REMAP),
            Rule::advice => flags(&words::ADVICE),
            Rule::lock_flags => flags(&words::LOCK),
            Rule::lock_all_flags => flags(&words::LOCK_ALL),
            Rule::sync_flags => flags(&words::SYNC),
            Rule::file => self.file(pair).map(Argument::File),
            Rule::process => self.process(pair).map(Argument::Process),
            Rule::length | Rule::new_length | Rule::offset => {
                self.value(pair).map(Argument::Length)
            }
            Rule::address | Rule::new_address | Rule::vector => {
                self.value(pair).map(Argument::Address)
            }
            _ => self.value(pair).map(Argument::Number),
        }
    }
}
