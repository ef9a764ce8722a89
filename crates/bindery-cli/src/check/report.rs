//! The results, in readable form line by line, and in machine-readable form as one document.

use std::io::{self, ErrorKind, Write};

use serde::Serialize;

use super::outcome::Outcome;
use super::perform::Performed;
use super::script::MAIN;
use super::show;

/// One run of `bindery check`. Fields are only ever added.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The version of the program.
    bindery: &'static str,
    script: String,
    architecture: String,
    memory_bytes: u64,
    events: Vec<Event>,
    expectations_met: usize,
    /// The lines whose expectations were not met.
    expectations_unmet: Vec<usize>,
    /// The number of violations that all audits found.
    violations: usize,
    /// The reason why the script ended early, if it did.
    pub stopped: Option<String>,
}

/// One statement, or an action after the last.
#[derive(Debug, Serialize)]
struct Event {
    /// `null` for actions after the last statement.
    line: Option<usize>,
    process: String,
    call: String,
    result: Outcome,
    /// Whether the expectation was met; `null` without one.
    met: Option<bool>,
    /// The expected and the actual outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    unmet: Option<String>,
}

impl Report {
    pub fn new(script: &str, architecture: String, memory_bytes: u64) -> Self {
        Self {
            bindery: env!("CARGO_PKG_VERSION"),
            script: script.to_owned(),
            architecture,
            memory_bytes,
            events: Vec::new(),
            expectations_met: 0,
            expectations_unmet: Vec::new(),
            violations: 0,
            stopped: None,
        }
    }

    /// Records a statement's result and shows it.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub fn statement(
        &mut self,
        line: usize,
        process: &str,
        performed: Performed,
    ) -> Result<(), String> {
        let Performed { call, outcome, expected } = performed;
        let unmet = expected.as_ref().and_then(|expected| expected.unmet(&outcome));
        match (&expected, &unmet) {
            (None, _) => {}
            (Some(_), None) => self.expectations_met += 1,
            (Some(_), Some(_)) => self.expectations_unmet.push(line),
        }
        let met = expected.map(|_| unmet.is_none());
        let process = process.to_owned();
        self.event(Event { line: Some(line), process, call, result: outcome, met, unmet })
    }

    /// Records a finding after the last statement and shows it.
    ///
    /// # Errors
    /// The errors of [`Report::statement`].
    pub fn epilogue(&mut self, process: &str, call: &str, result: Outcome) -> Result<(), String> {
        let (process, call) = (process.to_owned(), call.to_owned());
        self.event(Event { line: None, process, call, result, met: None, unmet: None })
    }

    fn event(&mut self, event: Event) -> Result<(), String> {
        if let Outcome::Audit(findings) = &event.result {
            self.violations += findings.violations.len();
        }
        let shown = print(&event.show());
        self.events.push(event);
        shown
    }

    /// The problem of the run, if it has one.
    pub fn problem(&self) -> Option<String> {
        let mut problems = Vec::new();
        problems.extend(self.stopped.clone());
        if !self.expectations_unmet.is_empty() {
            let lines: Vec<_> = self.expectations_unmet.iter().map(usize::to_string).collect();
            problems.push(format!(
                "{} of {} expectations were not met: line {}",
                lines.len(),
                lines.len() + self.expectations_met,
                lines.join(", ")
            ));
        }
        if self.violations > 0 {
            let violations = show::plural(self.violations as u64, "violation");
            problems.push(format!("the audit found {violations}"));
        }
        (!problems.is_empty()).then(|| problems.join("\nerror: "))
    }
}

impl Event {
    fn show(&self) -> String {
        let Self { line, process, call, result, unmet, .. } = self;
        let who = if process == MAIN { String::new() } else { format!("{process}: ") };
        let mut shown = format!("{who}{call} = {}\n", result.show());
        if let (Some(line), Some(unmet)) = (line, unmet) {
            shown.push_str(&format!("  line {line}: {unmet}\n"));
        }
        shown
    }
}

/// Prints to standard output. A reader that closes the pipe (`| head`) does not cause an error.
fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::audit::Findings;

    #[test]
    fn what_an_audit_finds_is_a_problem() {
        let mut report = Report::new("s", "x86-64".to_owned(), 1 << 20);
        assert_eq!(report.problem(), None);
        let leak = Outcome::Audit(Findings::leak(2));
        assert!(leak.show().starts_with("1 violation\n  2 frames are in use"), "{}", leak.show());
        report.violations = 1;
        assert_eq!(report.problem().as_deref(), Some("the audit found 1 violation"));
        report.stopped = Some("it stopped".to_owned());
        let both = "it stopped\nerror: the audit found 1 violation";
        assert_eq!(report.problem().as_deref(), Some(both));
    }
}
