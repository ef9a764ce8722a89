//! Performs a statement on the fixture.

use bindery_hosted::Walk;
use bindery_linux::{self as linux, Call};

use super::fixture::{Fixture, Stop};
use super::outcome::{Expected, Outcome, Style};
use super::script::{Action, Argument, Awaitable, Statement, SystemCall};
use super::show;

mod access;
mod file;
mod setting;

/// The maximum number of bytes read at once.
const MOST_BYTES: u64 = 16 << 20;

/// A performed action, and its outcome.
#[derive(Clone, Debug)]
pub struct Performed {
    /// The call with its arguments, as `strace` shows it.
    pub call: String,
    pub outcome: Outcome,
    pub expected: Option<Expected>,
}

impl<A: Walk> Fixture<'_, A> {
    /// Performs the statement.
    ///
    /// # Errors
    /// If the statement cannot be performed at all; then nothing changes.
    pub fn perform(&mut self, statement: &Statement) -> Result<Performed, Stop> {
        let Statement { place, process, name, action, expectation } = statement;
        let index = self.index(process, *place)?;
        let expected = expectation.as_ref().map(|expectation| self.expected(&expectation.outcome));
        let expected = expected.transpose()?;
        let (call, outcome) = match action {
            Action::Call(call) => self.call(index, call)?,
            Action::File(action) => self.on_file(index, action, place.line)?,
            Action::Access(access) => self.access(index, access)?,
            Action::Setting(setting) => self.setting(index, setting)?,
            Action::Fork(child, _) => self.fork(index, child, place.line),
            Action::Exit => {
                self.remove_process(index);
                ("exit()".to_owned(), Outcome::Done)
            }
            Action::Constant(value) => {
                let value = self.number(value)?;
                let name = name.as_deref().unwrap_or("_");
                (format!("let {name}"), Outcome::hexadecimal(value))
            }
            Action::Layout => {
                ("layout()".to_owned(), Outcome::Layout { mappings: self.layout(index) })
            }
            Action::Counts => {
                let counts = self.process_mut(index).count();
                ("counts()".to_owned(), Outcome::Counts { counts })
            }
            Action::Audit => ("audit()".to_owned(), Outcome::Audit(self.audit())),
        };
        if let Some(name) = name {
            let value = outcome.value();
            self.name_number(name, value.ok_or_else(|| ended(place.line, &outcome)));
        }
        Ok(Performed { call, outcome, expected })
    }

    /// The expectation with numbers for all names.
    fn expected(&self, outcome: &Awaitable) -> Result<Expected, Stop> {
        Ok(match outcome {
            Awaitable::Success => Expected::Success,
            Awaitable::Failure(awaited) => Expected::Failure(*awaited),
            Awaitable::Value(value) => Expected::Value(self.number(value)?),
            Awaitable::Bytes(bytes) => {
                Expected::Bytes(bytes.iter().map(|byte| self.byte(byte)).collect::<Result<_, _>>()?)
            }
            Awaitable::All(byte) => Expected::All(self.byte(byte)?),
            Awaitable::Seals(bits) => Expected::Seals(*bits),
            Awaitable::Counts(counts) => {
                let counts = counts.iter().map(|(name, value)| Ok((*name, self.number(value)?)));
                Expected::Counts(counts.collect::<Result<_, Stop>>()?)
            }
        })
    }

    fn call(&self, index: usize, call: &SystemCall) -> Result<(String, Outcome), Stop> {
        let SystemCall { call, arguments } = call;
        let mut raw = [0; 6];
        if *call == Call::Mmap {
            // No file.
            raw[4] = u64::MAX;
        }
        let mut shown = Vec::new();
        for (slot, argument) in raw.iter_mut().zip(arguments) {
            let text;
            (*slot, text) = self.argument(argument)?;
            shown.push(text);
        }
        let result = linux::call(&self.caller(index), *call, raw);
        let is_address = matches!(call, Call::Mmap | Call::Mremap | Call::Brk);
        let style = if is_address { Style::Hexadecimal } else { Style::Decimal };
        let mut outcome = Outcome::of_call(result, style);
        if *call == Call::Mincore && result == 0 {
            outcome = self.residence(index, raw);
        }
        Ok((format!("{}({})", call.name(), shown.join(", ")), outcome))
    }

    /// The raw argument, and its text.
    fn argument(&self, argument: &Argument) -> Result<(u64, String), Stop> {
        let numbered = |(descriptor, text): (i32, String)| (i64::from(descriptor) as u64, text);
        Ok(match argument {
            Argument::Address(value) => {
                let value = self.number(value)?;
                (value, show::hexadecimal(value))
            }
            Argument::Length(value) => {
                let value = self.number(value)?;
                (value, show::size(value))
            }
            Argument::Number(value) => {
                let value = self.number(value)?;
                (value, value.to_string())
            }
            Argument::Words(vocabulary, bits) => (*bits, vocabulary.show(*bits)),
            Argument::File(file) => numbered(self.descriptor(file)?),
            Argument::Process(process) => numbered(self.process_descriptor(process)?),
        })
    }
}

/// The reason why the result of the statement is missing.
fn ended(line: usize, outcome: &Outcome) -> String {
    format!("line {line} ended with {}", outcome.show())
}
