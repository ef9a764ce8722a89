//! Parses the text of a script line by line, with the names defined so far. Collects all errors, so
//! that they can be fixed at once.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "`Rule` has every rule of the grammar; a place in a statement allows a few"
)]

use pest::iterators::Pair;

use super::mistake::{Mistake, Place, Source};
use super::scope::{Kind, Scope};
use super::script::{Action, Awaitable, Endings, Expectation, MAIN, Script, Statement};
use super::syntax::{self, Rule};

mod action;
mod argument;
mod expectation;

/// Reads a whole script.
///
/// # Errors
/// All errors, by line.
pub fn script(source: Source) -> Result<Script, (Source, Vec<Mistake>)> {
    let mut scope = Scope::new();
    let (mut statements, mut mistakes) = (Vec::new(), Vec::new());
    for (index, text) in source.lines.iter().enumerate() {
        match line(&mut scope, index + 1, text) {
            Ok(statement) => statements.extend(statement),
            Err(mistake) => {
                // One error is enough, so later lines do not report the missing name.
                scope.assume(text, index + 1);
                mistakes.push(mistake);
            }
        }
    }
    if mistakes.is_empty() { Ok(Script { source, statements }) } else { Err((source, mistakes)) }
}

fn line(scope: &mut Scope, line: usize, text: &str) -> Result<Option<Statement>, Mistake> {
    let Some(pair) = syntax::statement(text, line)? else { return Ok(None) };
    let mut reader = Reader { scope, line };
    reader.statement(pair).map(Some)
}

/// The state while one line is read.
struct Reader<'s> {
    scope: &'s mut Scope,
    line: usize,
}

impl Reader<'_> {
    fn place(&self, pair: &Pair<'_, Rule>) -> Place {
        syntax::place(pair, self.line)
    }

    fn statement(&mut self, pair: Pair<'_, Rule>) -> Result<Statement, Mistake> {
        let place = self.place(&pair);
        let mut process = MAIN.to_owned();
        let mut named = None;
        let (mut action, mut expectation) = (None, None);
        for part in flatten(pair) {
            match part.as_rule() {
                Rule::in_process => process = self.acting(&part)?,
                Rule::name => named = Some((part.as_str().to_owned(), self.place(&part))),
                Rule::constant => action = Some(Action::Constant(self.value(&part)?)),
                Rule::action => (action, expectation) = self.action(part)?,
                _ => {}
            }
        }
        if process == MAIN {
            self.scope.expect(MAIN, Kind::Process, place)?;
        }
        let action = action.ok_or_else(|| Mistake::new(place, "a statement was expected"))?;
        if let Some(expectation) = &expectation {
            check_ending(expectation, action.endings())?;
        }
        if let Some((name, place)) = &named {
            self.name_result(name, *place, &action)?;
        }
        match &action {
            Action::Exit => self.scope.exit(&process, self.line),
            Action::Fork(child, place) => self.scope.define(child, Kind::Process, *place)?,
            Action::Call(_)
            | Action::File(_)
            | Action::Access(_)
            | Action::Setting(_)
            | Action::Constant(_)
            | Action::Layout
            | Action::Counts
            | Action::Audit => {}
        }
        let name = named.map(|(name, _)| name);
        Ok(Statement { place, process, name, action, expectation })
    }

    /// The acting process: `in child:`.
    fn acting(&mut self, pair: &Pair<'_, Rule>) -> Result<String, Mistake> {
        let inner = pair.clone().into_inner();
        let process = inner.into_iter().find(|part| part.as_rule() == Rule::process);
        let process = process.unwrap_or_else(|| pair.clone());
        self.scope.expect(process.as_str(), Kind::Process, self.place(&process))?;
        Ok(process.as_str().to_owned())
    }

    fn name_result(&mut self, name: &str, place: Place, action: &Action) -> Result<(), Mistake> {
        if !action.endings().value {
            let message = "this statement returns nothing that `let` could name";
            return Err(Mistake::new(place, message).help("leave `let` out"));
        }
        self.scope.define(name, Kind::Number, place)
    }
}

/// The parts of a statement, whatever their nesting in `let`.
fn flatten(pair: Pair<'_, Rule>) -> impl Iterator<Item = Pair<'_, Rule>> {
    pair.into_inner().flat_map(|part| match part.as_rule() {
        Rule::binding => part.into_inner().collect(),
        _ => vec![part],
    })
}

/// Refuses an impossible expectation.
fn check_ending(expectation: &Expectation, endings: Endings) -> Result<(), Mistake> {
    let possible = match &expectation.outcome {
        Awaitable::Success | Awaitable::Seals(_) | Awaitable::Counts(_) => true,
        Awaitable::Failure(awaited) if awaited.signal => endings.signal,
        Awaitable::Failure(_) => endings.errno,
        Awaitable::Value(_) => endings.value,
        Awaitable::Bytes(_) | Awaitable::All(_) => endings.bytes,
    };
    if possible {
        return Ok(());
    }
    let mut kinds = vec!["ok"];
    let all = [
        (endings.value, "a value"),
        (endings.bytes, "bytes"),
        (endings.errno, "an errno"),
        (endings.signal, "a signal"),
    ];
    kinds.extend(all.into_iter().filter_map(|(possible, kind)| possible.then_some(kind)));
    let message = "this statement never ends so";
    Err(Mistake::new(expectation.place, message).help(format!("it ends with {}", kinds.join(", "))))
}
