//! The expectation of a statement.

use pest::iterators::Pair;

use super::Reader;
use crate::check::failure::Awaited;
use crate::check::mistake::Mistake;
use crate::check::number::Value;
use crate::check::outcome::COUNTS;
use crate::check::script::{Awaitable, Expectation};
use crate::check::syntax::Rule;
use crate::check::words;

impl Reader<'_> {
    pub fn expectation(&self, pair: Pair<'_, Rule>) -> Result<Expectation, Mistake> {
        let mut place = self.place(&pair);
        let outcome = if pair.as_rule() == Rule::counts_expectation {
            let counts = pair.into_inner().filter(|part| part.as_rule() == Rule::work_count);
            Awaitable::Counts(counts.map(|count| self.work_count(count)).collect::<Result<_, _>>()?)
        } else {
            let Some(outcome) = innermost(pair) else {
                return Err(Mistake::new(place, "an outcome was expected"));
            };
            place = self.place(&outcome);
            self.outcome(outcome)?
        };
        Ok(Expectation { place, outcome })
    }

    fn outcome(&self, pair: Pair<'_, Rule>) -> Result<Awaitable, Mistake> {
        match pair.as_rule() {
            Rule::ok => Ok(Awaitable::Success),
            Rule::failure => {
                let awaited = Awaited::read(pair.as_str()).map_err(|unknown| {
                    Mistake::new(self.place(&pair), unknown.message).help(unknown.help)
                })?;
                Ok(Awaitable::Failure(awaited))
            }
            Rule::seal_flags => self.words(&pair, &words::SEALS).map(Awaitable::Seals),
            Rule::bytes => self.values(pair.into_inner()).map(Awaitable::Bytes),
            Rule::all_bytes => match pair.clone().into_inner().next() {
                Some(byte) => self.value(&byte).map(Awaitable::All),
                None => self.value(&pair).map(Awaitable::All),
            },
            _ => self.value(&pair).map(Awaitable::Value),
        }
    }

    fn work_count(&self, pair: Pair<'_, Rule>) -> Result<(&'static str, Value), Mistake> {
        let place = self.place(&pair);
        let mut parts = pair.into_inner();
        let (Some(work), Some(amount)) = (parts.next(), parts.next()) else {
            return Err(Mistake::new(place, "a count and a value were expected"));
        };
        let names: Vec<(&str, &'static str)> =
            COUNTS.iter().map(|(name, _)| (*name, *name)).collect();
        Ok((self.choice(&work, "count", &names)?, self.value(&amount)?))
    }
}

/// The argument of `expect …`, without its wrappers.
fn innermost(pair: Pair<'_, Rule>) -> Option<Pair<'_, Rule>> {
    let inner = pair.into_inner().next()?;
    if inner.as_rule() == Rule::outcome { inner.into_inner().next() } else { Some(inner) }
}
