//! The result of one application's runs: a line, and its errors.

use bindery_cli::guest::Problem;

use super::run::Told;
use super::suite::Application;
use crate::output::thousands;

/// The minimum part of an application's memory that must have been in swap: one page in this
/// number.
const LEAST_IN_SWAP: u64 = 3;

/// The runs of one application.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Runs {
    /// The run in ample memory, on our kernel.
    pub ample: Told,
    /// The run in too little memory, on our kernel.
    pub short: Told,
    /// The run in too little memory on Linux, if Linux was run.
    pub linux: Option<Told>,
}

/// The heading of the lines.
pub const HEAD: &str = "\
                         memory, MiB       in swap        pages     pages     pages on Linux
application         machine      used  at most, MiB         out        in       out        in  \
answer
";

impl Runs {
    /// A line of the table.
    pub fn line(&self, application: &Application) -> String {
        let mib = |kibibytes: u64| format!("{:.1}", kibibytes as f64 / 1024.0);
        let Self { ample, short, linux } = self;
        let moved = |told: &Told| [told.out, told.into_memory].map(thousands);
        let [out, into_memory] = moved(short);
        let none = || ["-".to_owned(), "-".to_owned()];
        let [linux_out, linux_in] = linux.as_ref().map_or_else(none, moved);
        format!(
            "{:16} {:>10} {:>9} {:>13} {out:>11} {into_memory:>9} {linux_out:>9} {linux_in:>9}  \
             {}\n",
            application.name,
            application.memory,
            mib(ample.memory),
            mib(short.swap),
            short.answer,
        )
    }

    /// Checks the runs.
    ///
    /// # Errors
    /// If an answer differs from Linux's, or memory was not short.
    pub fn verdict(&self, application: &Application) -> Result<(), Problem> {
        let Self { ample, short, linux } = self;
        let fails = |what: String| Err(Problem::Failed(format!("{}: {what}", application.name)));
        let on_linux = linux.as_ref().map_or(application.answer, |told| told.answer.as_str());
        for (told, place) in [(ample, "in much memory"), (short, "in too little memory")] {
            if told.answer != on_linux {
                let answer = &told.answer;
                return fails(format!(
                    "the answer {place} is {answer}, and on Linux {on_linux}: memory was corrupted, \
                     or a call misbehaved"
                ));
            }
        }
        if on_linux != application.answer {
            let recorded = application.answer;
            return fails(format!(
                "Linux's answer is {on_linux}, and the recorded one {recorded}: the application or \
                 its library is of another version"
            ));
        }
        if ample.out > 0 {
            return fails(format!("{} pages went to swap in the run with ample memory", ample.out));
        }
        if short.out == 0 || short.swap * LEAST_IN_SWAP < ample.memory {
            return fails(format!(
                "memory was not short: at most {} of {} KiB were in swap; give the application less \
                 memory in suite.rs",
                short.swap, ample.memory
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(memory: u64, swap: u64, out: u64) -> Told {
        let answer = Application::from_name("sort").unwrap().answer.to_owned();
        Told { kernel: "Kernel 1".to_owned(), answer, memory, swap, out, into_memory: out }
    }

    fn good() -> Runs {
        let linux = Some(told(2_000, 900, 300));
        Runs { ample: told(3_000, 0, 0), short: told(2_000, 1_000, 1_250), linux }
    }

    #[test]
    fn equal_answers_with_enough_swap_are_good() {
        let sort = Application::from_name("sort").unwrap();
        assert!(good().verdict(sort).is_ok());
        assert!(Runs { linux: None, ..good() }.verdict(sort).is_ok());
        let line = good().line(sort);
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            words,
            ["sort", "32", "2.9", "1.0", "1,250", "1,250", "300", "300", sort.answer]
        );
    }

    #[test]
    fn a_wrong_answer_or_little_swap_fails() {
        let sort = Application::from_name("sort").unwrap();
        let other = |told: Told| Told { answer: "other".to_owned(), ..told };
        let Runs { ample, short, linux } = good();
        let bad = [
            Runs { ample: other(ample.clone()), ..good() },
            Runs { short: other(short.clone()), ..good() },
            Runs { linux: linux.map(other), ..good() },
            Runs { short: other(short.clone()), ample: other(ample.clone()), linux: None },
            Runs { short: Told { swap: 999, ..short.clone() }, ..good() },
            Runs { short: Told { out: 0, ..short }, ..good() },
            Runs { ample: Told { out: 1, ..ample }, ..good() },
        ];
        for runs in bad {
            assert!(runs.verdict(sort).is_err(), "{runs:?}");
        }
    }
}
