//! The outcome of an action, and its comparison with the expectation.

use bindery::Counts;
use serde::{Serialize, Serializer};

use super::audit::Findings;
use super::failure::{Awaited, Failure};
use super::layout::Row;
use super::show;
use super::words::SEALS;

/// The outcome of an action.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Outcome {
    Done,
    Value {
        value: u64,
        #[serde(skip)]
        style: Style,
    },
    Failure(Failure),
    Bytes {
        /// The return value, if the action is a call.
        #[serde(skip_serializing_if = "Option::is_none")]
        value: Option<u64>,
        #[serde(serialize_with = "in_digits")]
        bytes: Vec<u8>,
    },
    Seals {
        bits: u64,
    },
    Counts {
        #[serde(serialize_with = "by_name")]
        counts: Counts,
    },
    Layout {
        mappings: Vec<Row>,
    },
    Audit(Findings),
}

/// The style in which a value is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Style {
    #[default]
    Hexadecimal,
    Decimal,
}

impl Style {
    fn show(self, value: u64) -> String {
        match self {
            Self::Hexadecimal => show::hexadecimal(value),
            Self::Decimal => value.to_string(),
        }
    }
}

/// One of the counts, selected from all.
type Count = fn(&Counts) -> u64;

/// The counts by name.
pub const COUNTS: &[(&str, Count)] = &[
    ("entries_read", |counts| counts.entries_read),
    ("entries_written", |counts| counts.entries_written),
    ("entries_descended", |counts| counts.entries_descended),
    ("tables_allocated", |counts| counts.tables_allocated),
    ("tables_freed", |counts| counts.tables_freed),
    ("tables_moved", |counts| counts.tables_moved),
    ("tables_locked", |counts| counts.tables_locked),
    ("invalidations", |counts| counts.invalidations),
    ("pages_invalidated", |counts| counts.pages_invalidated),
    ("invalidations_saved", |counts| counts.invalidations_saved),
    ("folios_touched", |counts| counts.folios_touched),
    ("bytes_zeroed", |counts| counts.bytes_zeroed),
    ("bytes_copied", |counts| counts.bytes_copied),
];

fn in_digits<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    serializer.serialize_str(&digits)
}

fn by_name<S: Serializer>(counts: &Counts, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(COUNTS.iter().map(|(name, count)| (name, count(counts))))
}

impl Outcome {
    pub fn decimal(value: u64) -> Self {
        Self::Value { value, style: Style::Decimal }
    }

    pub fn hexadecimal(value: u64) -> Self {
        Self::Value { value, style: Style::Hexadecimal }
    }

    /// The raw result of a call.
    pub fn of_call(result: i64, style: Style) -> Self {
        match Failure::of_call(result) {
            Some(failure) => Self::Failure(failure),
            None => Self::Value { value: result as u64, style },
        }
    }

    /// The number to name, or to compare with.
    pub fn value(&self) -> Option<u64> {
        match self {
            Self::Value { value, .. } => Some(*value),
            Self::Bytes { value, .. } => *value,
            Self::Layout { mappings } => Some(mappings.len() as u64),
            Self::Done
            | Self::Failure(_)
            | Self::Seals { .. }
            | Self::Counts { .. }
            | Self::Audit(_) => None,
        }
    }

    /// The text after the `=`; several lines if necessary.
    pub fn show(&self) -> String {
        match self {
            Self::Done => "ok".to_owned(),
            Self::Value { value, style } => style.show(*value),
            Self::Failure(failure) => failure.show(),
            Self::Bytes { value: None, bytes } => show::bytes(bytes),
            Self::Bytes { value: Some(value), bytes } => format!("{value} {}", show::bytes(bytes)),
            Self::Seals { bits } => SEALS.show(*bits),
            Self::Counts { counts } => show_counts(counts),
            Self::Layout { mappings } => {
                let mut shown = show::plural(mappings.len() as u64, "mapping");
                for row in mappings {
                    shown.push('\n');
                    shown.push_str(&row.show());
                }
                shown
            }
            Self::Audit(findings) => findings.show(),
        }
    }
}

fn show_counts(counts: &Counts) -> String {
    let all = COUNTS.iter().map(|(name, count)| (name, count(counts)));
    let some: Vec<_> = all
        .filter(|(_, count)| *count != 0)
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    if some.is_empty() { "nothing".to_owned() } else { some.join(", ") }
}

/// The expected outcome, with numbers for all names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Expected {
    Success,
    Failure(Awaited),
    Value(u64),
    Bytes(Vec<u8>),
    All(u8),
    Seals(u64),
    Counts(Vec<(&'static str, u64)>),
}

impl Expected {
    /// The difference between the expected and the actual outcome in words; `None` if they agree.
    pub fn unmet(&self, outcome: &Outcome) -> Option<String> {
        let instead = |expected: &str| Some(format!("expected {expected}, got {}", first(outcome)));
        match (self, outcome) {
            (Self::Failure(awaited), Outcome::Failure(failure)) if awaited.matches(*failure) => {
                None
            }
            (Self::Failure(awaited), _) => instead(awaited.name()),
            (Self::Success, Outcome::Failure(_)) => instead("ok"),
            (Self::Success, _) => None,
            (Self::Value(value), _) if outcome.value() == Some(*value) => None,
            (Self::Value(value), Outcome::Value { style, .. }) => instead(&style.show(*value)),
            (Self::Value(value), _) => instead(&show::hexadecimal(*value)),
            (Self::Bytes(expected), Outcome::Bytes { bytes, .. }) => {
                if expected.len() == bytes.len() {
                    difference(expected.iter().copied(), bytes)
                } else {
                    let wanted = show::plural(expected.len() as u64, "byte");
                    Some(format!("expected {wanted}, got {}", bytes.len()))
                }
            }
            (Self::All(byte), Outcome::Bytes { bytes, .. }) => {
                difference(std::iter::repeat(*byte), bytes)
            }
            (Self::Bytes(_) | Self::All(_), _) => instead("bytes"),
            (Self::Seals(expected), Outcome::Seals { bits }) if expected == bits => None,
            (Self::Seals(expected), _) => instead(&SEALS.show(*expected)),
            (Self::Counts(expected), Outcome::Counts { counts }) => unmet_counts(expected, counts),
            (Self::Counts(_), _) => instead("counts"),
        }
    }
}

/// The outcome in one line.
fn first(outcome: &Outcome) -> String {
    outcome.show().lines().next().unwrap_or_default().to_owned()
}

fn difference(expected: impl Iterator<Item = u8>, bytes: &[u8]) -> Option<String> {
    let (at, (expected, found)) =
        expected.zip(bytes).enumerate().find(|(_, (expected, found))| expected != *found)?;
    Some(format!("expected byte {at} to be {expected:#04x}, got {found:#04x}"))
}

fn unmet_counts(expected: &[(&'static str, u64)], counts: &Counts) -> Option<String> {
    let found = |name: &str| {
        let known = COUNTS.iter().find(|(known, _)| *known == name);
        known.map_or(0, |(_, count)| count(counts))
    };
    let wrong = expected.iter().filter(|(name, count)| found(name) != *count);
    let wrong: Vec<_> = wrong
        .map(|(name, count)| format!("expected {name} {count}, got {}", found(name)))
        .collect();
    (!wrong.is_empty()).then(|| wrong.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_expectation_shows_both_outcomes() {
        let invalid = Expected::Failure(Awaited::read("EINVAL").unwrap());
        let unmet = invalid.unmet(&Outcome::of_call(-12, Style::Decimal)).unwrap();
        assert_eq!(unmet, "expected EINVAL, got -1 ENOMEM (Cannot allocate memory)");
        assert_eq!(invalid.unmet(&Outcome::of_call(-22, Style::Decimal)), None);
        let unmet = Expected::Value(5).unmet(&Outcome::hexadecimal(0x40)).unwrap();
        assert_eq!(unmet, "expected 5, got 0x40");
    }

    #[test]
    fn bytes_are_compared_one_by_one() {
        let read = |bytes: &[u8]| Outcome::Bytes { value: None, bytes: bytes.to_vec() };
        let expected = Expected::Bytes(vec![1, 2]);
        assert_eq!(expected.unmet(&read(&[1, 2])), None);
        let unmet = expected.unmet(&read(&[1, 3])).unwrap();
        assert_eq!(unmet, "expected byte 1 to be 0x02, got 0x03");
        assert_eq!(expected.unmet(&read(&[1])).unwrap(), "expected 2 bytes, got 1");
        assert_eq!(Expected::All(7).unmet(&read(&[7; 9])), None);
    }

    #[test]
    fn only_the_counts_that_are_named_are_compared() {
        let counts = Counts { entries_written: 2, invalidations: 1, ..Counts::default() };
        let counts = Outcome::Counts { counts };
        assert_eq!(Expected::Counts(vec![("entries_written", 2)]).unmet(&counts), None);
        let unmet = Expected::Counts(vec![("invalidations", 0)]).unmet(&counts).unwrap();
        assert_eq!(unmet, "expected invalidations 0, got 1");
        assert_eq!(counts.show(), "entries_written 2, invalidations 1");
    }
}
