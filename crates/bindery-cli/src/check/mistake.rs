//! Errors in a script with their places, which are shown as the line with a caret below it.

use std::fmt::Write as _;

/// A part of a line of the script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The number of the line, from 1.
    pub line: usize,
    /// The first byte of the part in its line, from 0.
    pub start: usize,
    /// The byte after the last one.
    pub end: usize,
}

impl Place {
    /// The part of this place from `start` to `end`, relative to its beginning.
    pub fn part(self, start: usize, end: usize) -> Self {
        Self { line: self.line, start: self.start + start, end: self.start + end }
    }
}

/// An invalid or meaningless part of a script.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mistake {
    pub place: Place,
    /// The error, in a sentence without a full stop.
    pub message: String,
    /// The correction, if one is known.
    pub help: Option<String>,
}

impl Mistake {
    pub fn new(place: Place, message: impl Into<String>) -> Self {
        Self { place, message: message.into(), help: None }
    }

    pub fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }
}

/// The text of a script, and its name.
#[derive(Clone, Debug)]
pub struct Source {
    pub name: String,
    pub lines: Vec<String>,
}

impl Source {
    pub fn new(name: impl Into<String>, text: &str) -> Self {
        // Some editors write it at the start.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        Self { name: name.into(), lines: text.lines().map(str::to_owned).collect() }
    }

    /// The mistake in the form of compilers:
    ///
    /// ```text
    /// expected a length, but the line ends
    ///  --> moves.bindery:3:18
    ///   |
    /// 3 | munmap 0x40000000
    ///   |                  ^
    ///   = munmap ADDRESS LENGTH
    /// ```
    pub fn show(&self, mistake: &Mistake) -> String {
        let Mistake { place, message, help } = mistake;
        let Place { line, start, end } = *place;
        let text = self.lines.get(line - 1).map_or("", |text| text.trim_end());
        let before = text.get(..start).unwrap_or(text);
        let marked = text.get(start..end).map_or(0, |marked| marked.chars().count());
        let column = before.chars().count() + 1;
        // Tabs stay tabs, so that the caret is in the column that the reader sees.
        let indent: String = before.chars().map(|c| if c == '\t' { c } else { ' ' }).collect();
        let margin = " ".repeat(line.to_string().len());
        let carets = "^".repeat(marked.max(1));
        let mut shown = format!(
            "{message}\n{margin}--> {}:{line}:{column}\n{margin} |\n{line} | {text}\n\
             {margin} | {indent}{carets}",
            self.name
        );
        if let Some(help) = help {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\n{margin} = {help}");
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caret_is_below_the_mistake() {
        let source = Source::new("s", "layout\n\tread ä x\n");
        let start = "\tread ä ".len();
        let mistake = Mistake::new(Place { line: 2, start, end: start + 1 }, "no").help("yes");
        let wanted = "no\n --> s:2:9\n  |\n2 | \tread ä x\n  | \t       ^\n  = yes";
        assert_eq!(source.show(&mistake), wanted);
    }

    #[test]
    fn a_mistake_at_the_end_has_a_caret() {
        let source = Source::new("s", "read");
        let shown = source.show(&Mistake::new(Place { line: 1, start: 4, end: 4 }, "more"));
        assert_eq!(shown, "more\n --> s:1:5\n  |\n1 | read\n  |     ^");
    }
}
