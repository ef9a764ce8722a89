//! The names of a script: their kinds, and the lines that define them. They are checked before
//! anything runs.

use std::collections::HashMap;

use super::mistake::{Mistake, Place};
use super::number::Value;
use super::script::MAIN;
use super::words::nearest;

/// The kind of thing that a name refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Number,
    File,
    Process,
    /// A process that has exited.
    Exited,
}

impl Kind {
    fn one(self) -> &'static str {
        match self {
            Self::Number => "a number",
            Self::File => "a file",
            Self::Process => "a process",
            Self::Exited => "a process that has exited",
        }
    }
}

/// Words that would be ambiguous as names.
const RESERVED: &[&str] = &["ok", "all", "bytes", "unlimited"];

/// All names up to some line.
#[derive(Debug)]
pub struct Scope {
    /// The kind of each name, and the line that set it last.
    names: HashMap<String, (Kind, usize)>,
}

impl Scope {
    pub fn new() -> Self {
        Self { names: HashMap::from([(MAIN.to_owned(), (Kind::Process, 0))]) }
    }

    /// Whether the name has this kind now.
    pub fn is(&self, name: &str, kind: Kind) -> bool {
        self.names.get(name).is_some_and(|(known, _)| *known == kind)
    }

    /// Defines a name. Names of numbers may be redefined, but names of files and processes may not.
    ///
    /// # Errors
    /// If the name is reserved, or refers to something that still exists.
    pub fn define(&mut self, name: &str, kind: Kind, place: Place) -> Result<(), Mistake> {
        if RESERVED.contains(&name) {
            let message = format!("`{name}` has a meaning of its own");
            return Err(Mistake::new(place, message).help("choose another name"));
        }
        match self.names.get(name) {
            None | Some((Kind::Exited, _)) => {}
            Some((Kind::Number, _)) if kind == Kind::Number => {}
            Some((known, line)) => {
                let message = format!("`{name}` is {} already{}", known.one(), on_line(*line));
                return Err(Mistake::new(place, message).help("choose another name"));
            }
        }
        self.names.insert(name.to_owned(), (kind, place.line));
        Ok(())
    }

    /// Records that the process has exited.
    pub fn exit(&mut self, process: &str, line: usize) {
        self.names.insert(process.to_owned(), (Kind::Exited, line));
    }

    /// Defines the names of a wrong line.
    pub fn assume(&mut self, text: &str, line: usize) {
        let words: Vec<&str> = text.split_whitespace().collect();
        for pair in words.windows(2) {
            let kind = match pair[0] {
                "let" => Kind::Number,
                "memfd" | "file" | "open" => Kind::File,
                "fork" => Kind::Process,
                _ => continue,
            };
            self.names.entry(pair[1].to_owned()).or_insert((kind, line));
        }
    }

    /// Refuses a name of another kind.
    ///
    /// # Errors
    /// The actual kind, or a similar name.
    pub fn expect(&self, name: &str, kind: Kind, place: Place) -> Result<(), Mistake> {
        match self.names.get(name) {
            Some((known, _)) if *known == kind => Ok(()),
            Some((known, line)) => {
                let message =
                    format!("`{name}` is {}{}, not {}", known.one(), on_line(*line), kind.one());
                Err(Mistake::new(place, message))
            }
            None => {
                let message = format!("nothing is called `{name}` here");
                Err(Mistake::new(place, message).help(self.suggest(name, kind)))
            }
        }
    }

    /// Refuses a sum with names that are not numbers.
    ///
    /// # Errors
    /// The errors of [`Scope::expect`].
    pub fn expect_numbers(&self, value: &Value) -> Result<(), Mistake> {
        value.names().try_for_each(|(name, place)| self.expect(name, Kind::Number, place))
    }

    fn suggest(&self, name: &str, kind: Kind) -> String {
        let known = self.names.iter().filter(|(_, (known, _))| *known == kind);
        let mut known: Vec<&str> = known.map(|(known, _)| &**known).collect();
        known.sort_unstable();
        let how = match kind {
            Kind::Number => "`let NAME = …` gives a name to a number or a result",
            Kind::File => "`memfd NAME` or `file NAME` makes a file",
            Kind::Process | Kind::Exited => "`fork NAME` makes a process",
        };
        match nearest(&known, name) {
            Some(near) => format!("did you mean `{near}`?"),
            None => how.to_owned(),
        }
    }
}

fn on_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(" (line {line})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(line: usize) -> Place {
        Place { line, start: 0, end: 1 }
    }

    #[test]
    fn a_name_is_one_thing_at_a_time() {
        let mut scope = Scope::new();
        assert_eq!(scope.define("m", Kind::File, on(1)), Ok(()));
        let again = scope.define("m", Kind::Number, on(2)).unwrap_err();
        assert_eq!(again.message, "`m` is a file already (line 1)");
        let main = scope.define("main", Kind::Process, on(3)).unwrap_err();
        assert_eq!(main.message, "`main` is a process already");
        assert_eq!(scope.define("a", Kind::Number, on(4)), Ok(()));
        assert_eq!(scope.define("a", Kind::Number, on(5)), Ok(()), "numbers may change");
    }

    #[test]
    fn an_exited_process_frees_its_name() {
        let mut scope = Scope::new();
        scope.define("child", Kind::Process, on(1)).unwrap();
        scope.exit("child", 2);
        let gone = scope.expect("child", Kind::Process, on(3)).unwrap_err();
        assert_eq!(gone.message, "`child` is a process that has exited (line 2), not a process");
        assert_eq!(scope.define("child", Kind::Process, on(4)), Ok(()));
    }

    #[test]
    fn an_unknown_name_gets_a_suggestion() {
        let mut scope = Scope::new();
        scope.define("heap", Kind::Number, on(1)).unwrap();
        let wrong = scope.expect("haep", Kind::Number, on(2)).unwrap_err();
        assert_eq!(wrong.help.as_deref(), Some("did you mean `heap`?"));
        let wrong = scope.expect("x", Kind::File, on(2)).unwrap_err();
        assert_eq!(wrong.help.as_deref(), Some("`memfd NAME` or `file NAME` makes a file"));
    }
}
