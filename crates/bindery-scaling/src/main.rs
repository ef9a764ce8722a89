//! Operations that many CPUs perform concurrently, for `bindery bench scaling`.
//!
//! `bindery-scaling library|linux ROUNDS CPUS,CPUS,...` measures the core or the host's Linux. Each
//! line of standard output is a fact, its words separated by tabs:
//!
//! ```text
//! line NANOSECONDS                                        one cache line that two CPUs exchange
//! rate OPERATION SHARING CPUS PER_SECOND USED LEFT_OUT    the median of the samples used
//! hold OPERATION SHARING PLACE NANOSECONDS                a lock that two CPUs share, and its hold
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `machine` | the machine of the core: as many CPUs as threads |
//! | `timed_lock` | a lock that knows how long it is held |
//! | `grace` | grace periods of the machine |
//! | `calls` | the calls of a program, on the core and on Linux |
//! | `operations` | the operations |
//! | `board` | words that all workers of a measurement share |
//! | `crew` | workers, their address spaces and memory |
//! | `team` | workers at once, and the samples without preemption |
//! | `holds` | which locks two CPUs share, and for how long each is held |
//! | `line` | the cost of a cache line |

#![deny(clippy::wildcard_enum_match_arm, clippy::match_wildcard_for_single_variants)]

mod board;
mod calls;
mod crew;
mod grace;
mod holds;
mod line;
mod machine;
mod operations;
mod team;
mod timed_lock;

use std::fmt;
use std::process::ExitCode;

use crew::{CoreCrew, Crew, LinuxCrew, Machines, Sharing};
use operations::{OPERATIONS, Operation};
use team::Samples;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match &*arguments {
        [subject, rounds, cpus] => Request::parse(subject, rounds, cpus),
        _ => None,
    };
    let Some(request) = parsed else {
        eprintln!(
            "usage: bindery-scaling library|linux ROUNDS CPUS[,CPUS]... (`bindery bench scaling` runs it)"
        );
        return ExitCode::from(2);
    };
    end_on_panic();
    match request.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("bindery-scaling: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// A worker whose call fails ends the process, because the other workers would wait for it.
fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(101);
    }));
}

/// The subject of a measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    Library,
    Linux,
}

/// A command line.
struct Request {
    subject: Subject,
    rounds: u32,
    cpus: Vec<u16>,
}

/// The reason why a measurement is impossible.
#[derive(Debug)]
struct Problem(String);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<nix::Error> for Problem {
    fn from(error: nix::Error) -> Self {
        Self(error.to_string())
    }
}

impl Request {
    fn parse(subject: &str, rounds: &str, cpus: &str) -> Option<Self> {
        let subject = match subject {
            "library" => Subject::Library,
            "linux" => Subject::Linux,
            _ => return None,
        };
        let rounds = rounds.parse().ok().filter(|rounds| *rounds > 0)?;
        let cpus: Option<Vec<u16>> = cpus
            .split(',')
            .map(|count| count.parse().ok().filter(|count| (1..=machine::MAX_CPUS).contains(count)))
            .collect();
        Some(Self { subject, rounds, cpus: cpus.filter(|cpus| !cpus.is_empty())? })
    }

    fn run(&self) -> Result<(), Problem> {
        team::check(&self.cpus)?;
        match self.subject {
            Subject::Library => self.library(),
            Subject::Linux => self.linux(),
        }
    }

    /// Holds come before rates, which take most of the time.
    fn library(&self) -> Result<(), Problem> {
        if self.cpus.iter().any(|count| *count > 1) {
            println!("line\t{:.2}", line::cost(self.rounds)?);
        }
        let holds = holds::Holds::new()?;
        for operation in OPERATIONS {
            let settings = [Sharing::Threads, Sharing::Processes];
            let mut settings = settings.into_iter().filter(|sharing| operation.works(*sharing));
            settings.try_for_each(|sharing| holds.measure(operation, sharing))?;
        }
        let machines = self.cpus.iter().map(|cpus| Machines::new(*cpus));
        let machines = machines.collect::<Result<Vec<_>, _>>()?;
        let settings = [Sharing::Threads, Sharing::Processes, Sharing::Nothing];
        OPERATIONS.iter().try_for_each(|operation| {
            let crew = |sharing, number: usize| CoreCrew::new(&machines[number], sharing);
            self.rates(operation, &settings, crew)
        })
    }

    fn linux(&self) -> Result<(), Problem> {
        calls::only_base_pages()?;
        OPERATIONS.iter().try_for_each(|operation| {
            let crew = |sharing, number: usize| LinuxCrew::new(self.cpus[number], sharing);
            self.rates(operation, &[Sharing::Threads, Sharing::Processes], crew)
        })
    }

    /// Measures an operation in each setting on each number of CPUs; `crew` creates the workers of
    /// one combination. The combinations alternate, so that other load and clock changes of the
    /// host affect all of them.
    fn rates<C: Crew>(
        &self,
        operation: &Operation,
        settings: &[Sharing],
        crew: impl Fn(Sharing, usize) -> Result<C, Problem>,
    ) -> Result<(), Problem> {
        let settings = settings.iter().filter(|sharing| operation.works(**sharing));
        let numbers = 0..self.cpus.len();
        let cases = settings.flat_map(|sharing| numbers.clone().map(move |it| (*sharing, it)));
        let mut all: Vec<_> = cases.map(|case| (case, Samples::default())).collect();
        for _ in 0..PARTS {
            for ((sharing, number), samples) in &mut all {
                let crew = crew(*sharing, *number)?;
                samples.add(&crew, operation, self.rounds.div_ceil(PARTS))?;
            }
        }
        for ((sharing, number), samples) in &mut all {
            let (name, sharing, cpus) = (operation.name, sharing.name(), self.cpus[*number]);
            let median = samples.median();
            let (used, left_out) = (samples.rates.len(), samples.left_out);
            println!("rate\t{name}\t{sharing}\t{cpus}\t{median:.0}\t{used}\t{left_out}");
        }
        Ok(())
    }
}

/// The number of parts into which the samples of an operation are divided.
const PARTS: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_understood_or_refused() {
        let request = Request::parse("library", "9", "1,2").unwrap();
        assert!(request.subject == Subject::Library && request.rounds == 9);
        assert_eq!(request.cpus, [1, 2]);
        for (subject, rounds, cpus) in [
            ("windows", "9", "1"),
            ("linux", "0", "1"),
            ("linux", "x", "1"),
            ("linux", "9", "0"),
            ("linux", "9", "1,"),
            ("linux", "9", "257"),
        ] {
            assert!(Request::parse(subject, rounds, cpus).is_none(), "{subject} {rounds} {cpus}");
        }
    }
}
