//! The grammar of a line, and the messages for a line that violates it.

use pest::Parser as _;
use pest::error::{Error, ErrorVariant, InputLocation};
use pest::iterators::Pair;
use pest_derive::Parser;

use super::mistake::{Mistake, Place};
use super::usage::{self, Usage};
use super::words::nearest;

#[derive(Parser)]
#[grammar = "check/script.pest"]
struct Grammar;

/// Reads line number `line` and returns its statement, if any.
///
/// # Errors
/// If the line violates the grammar.
pub fn statement(text: &str, line: usize) -> Result<Option<Pair<'_, Rule>>, Mistake> {
    let lines = Grammar::parse(Rule::line, text).map_err(|error| explain(&error, text, line))?;
    Ok(lines.flat_map(Pair::into_inner).find(|pair| pair.as_rule() == Rule::statement))
}

/// The place of a part of the line.
pub fn place(pair: &Pair<'_, Rule>, line: usize) -> Place {
    Place { line, start: pair.as_span().start(), end: pair.as_span().end() }
}

fn explain(error: &Error<Rule>, text: &str, line: usize) -> Mistake {
    let at = match error.location {
        InputLocation::Pos(at) | InputLocation::Span((at, _)) => at,
    };
    let start = text.len() - text[at..].trim_start().len();
    let rest = text[start..].trim_end();
    let found = match rest.find([' ', '\t']) {
        _ if rest.starts_with('#') => "",
        Some(length) => &rest[..length],
        None => rest,
    };
    // If the end is missing, the place is right after the last word.
    let start = if found.is_empty() { text[..start].trim_end().len() } else { start };
    let place = Place { line, start, end: start + found.len() };
    let ErrorVariant::ParsingError { positives, .. } = &error.variant else {
        return Mistake::new(place, error.variant.message());
    };
    let words: Vec<&str> = usage::all().map(|usage| usage.word).collect();
    let is_word = found.starts_with(|c: char| c.is_ascii_alphabetic());
    if is_word && positives.iter().any(|rule| begins_a_statement(*rule)) {
        let mistake = Mistake::new(place, format!("`{found}` is no statement"));
        return match nearest(&words, found) {
            _ if found == "expect" => mistake.help("it stands behind one: read a expect 5"),
            Some(near) => mistake.help(format!("did you mean `{near}`?")),
            None => mistake.help("`bindery help check` lists the statements"),
        };
    }
    let expected = enumerate(positives);
    let message = match found {
        "" => format!("expected {expected}, but the line ends"),
        found => format!("expected {expected}, found `{found}`"),
    };
    let mistake = Mistake::new(place, message);
    match usage_in(&text[..start]) {
        Some(usage) => mistake.help(usage.line()),
        None => mistake,
    }
}

fn begins_a_statement(rule: Rule) -> bool {
    matches!(rule, Rule::line | Rule::statement | Rule::action)
}

/// The usage of the statement that the text contains or begins.
fn usage_in(text: &str) -> Option<&'static Usage> {
    let statement = text.rsplit(['=', ':']).next()?;
    let word = statement.split_whitespace().next()?;
    usage::all().find(|usage| usage.word == word && !usage.arguments.is_empty())
}

/// "an address, a length or a value"
fn enumerate(rules: &[Rule]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for rule in rules {
        let name = describe(*rule);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match &*names {
        [] => "something else".to_owned(),
        [one] => (*one).to_owned(),
        [some @ .., last] => format!("{} or {last}", some.join(", ")),
    }
}

/// A rule in words that a user understands.
#[expect(clippy::wildcard_enum_match_arm, reason = "the parser never expects the other rules")]
fn describe(rule: Rule) -> &'static str {
    match rule {
        Rule::line | Rule::statement | Rule::action => "a statement",
        Rule::binding => "`let`",
        Rule::in_process => "`in`",
        Rule::EOI => "the end of the line",
        Rule::colon => "`:`",
        Rule::equals => "`=`",
        Rule::comma => "`,`",
        Rule::expectation | Rule::seals_expectation | Rule::counts_expectation => "`expect`",
        Rule::outcome => "a value, ok, bytes, all, an errno or a signal",
        Rule::failure => "an errno or a signal",
        Rule::constant | Rule::number => "a number",
        Rule::name => "a new name (small letters, digits and _)",
        Rule::process => "a process",
        Rule::file => "a file",
        Rule::address | Rule::new_address => "an address",
        Rule::vector => "the address of a vector",
        Rule::length | Rule::new_length => "a length",
        Rule::offset => "an offset",
        Rule::count => "a count",
        Rule::value | Rule::amount => "a value",
        Rule::no_flags => "flags (a number)",
        Rule::bound => "a length or `unlimited`",
        Rule::protection => "a protection (letters of rwx, or none)",
        Rule::map_flags => "flags of mmap (such as private,fixed)",
        Rule::remap_flags => "flags of mremap (such as maymove)",
        Rule::advice => "an advice (such as dontneed)",
        Rule::lock_flags => "flags of mlock2 (onfault or 0)",
        Rule::lock_all_flags => "flags of mlockall (current, future, onfault)",
        Rule::sync_flags => "flags of msync (async, invalidate, sync)",
        Rule::memfd_flags => "flags of memfd (such as allow_sealing)",
        Rule::allocate_flags => "flags of allocate (such as keep_size)",
        Rule::seal_flags => "seals (such as write,grow)",
        Rule::file_access => "r, w or rw",
        Rule::resource => "a limit (memlock, as, data or stack)",
        Rule::folio_sizes => "folio sizes (such as 64K,2M)",
        Rule::folio_mode => "always, madvise or never",
        Rule::folio_kind => "anonymous, shared or file",
        Rule::overcommit_mode => "heuristic, always or never",
        Rule::work | Rule::work_count => "a count (such as entries_written)",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message, the column and the help.
    fn wrong(text: &str) -> (String, usize, Option<String>) {
        let mistake = statement(text, 1).unwrap_err();
        (mistake.message, mistake.place.start + 1, mistake.help)
    }

    #[test]
    fn every_usage_matches_the_grammar() {
        for Usage { word, arguments, .. } in usage::all() {
            match arguments.split_whitespace().next() {
                None | Some("[FLAGS]") => assert!(statement(word, 1).is_ok(), "{word}"),
                Some(_) => {
                    let (message, column, _) = wrong(word);
                    assert!(message.ends_with(", but the line ends"), "{message}");
                    assert_eq!(column, word.len() + 1, "{word}");
                }
            }
        }
    }

    #[test]
    fn comments_and_blanks_are_no_statements() {
        for text in ["", "   ", "# munmap", "\t# x", "\r"] {
            assert_eq!(statement(text, 1), Ok(None), "{text:?}");
        }
        for text in ["munmap a 4K", "  munmap\ta  4K  # gone", "munmap a 4K#gone\r"] {
            assert!(statement(text, 1).unwrap().is_some(), "{text:?}");
        }
    }

    #[test]
    fn a_missing_argument_is_named_with_the_usage() {
        let (message, column, help) = wrong("munmap a # all");
        assert_eq!(message, "expected a length, but the line ends");
        assert_eq!((column, help.as_deref()), (9, Some("munmap ADDRESS LENGTH")));
    }
}
