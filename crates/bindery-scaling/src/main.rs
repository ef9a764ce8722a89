//! Operations that many CPUs make at once, for `bindery bench scaling`.
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
        eprintln!("bindery-scaling library|linux ROUNDS CPUS,CPUS,...");
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

/// A worker whose call fails ends the process: the other workers would wait for it.
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

/// The reason why a measurement cannot be made.
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
        for (operation, sharing) in pairs(&[Sharing::Threads, Sharing::Processes]) {
            holds.measure(operation, sharing)?;
        }
        let machines = self.cpus.iter().map(|cpus| Machines::new(*cpus));
        let machines = machines.collect::<Result<Vec<_>, _>>()?;
        for (operation, sharing) in pairs(&[Sharing::Threads, Sharing::Processes, Sharing::Nothing])
        {
            self.rates(operation, sharing, |number| CoreCrew::new(&machines[number], sharing))?;
        }
        Ok(())
    }

    fn linux(&self) -> Result<(), Problem> {
        calls::only_base_pages()?;
        for (operation, sharing) in pairs(&[Sharing::Threads, Sharing::Processes]) {
            self.rates(operation, sharing, |number| LinuxCrew::new(self.cpus[number], sharing))?;
        }
        Ok(())
    }

    /// Measures an operation on each number of CPUs; `crew` makes the workers of one of them. The
    /// numbers alternate, so that other load on the host meets all of them.
    fn rates<C: Crew>(
        &self,
        operation: &Operation,
        sharing: Sharing,
        crew: impl Fn(usize) -> Result<C, Problem>,
    ) -> Result<(), Problem> {
        let mut all: Vec<Samples> = self.cpus.iter().map(|_| Samples::default()).collect();
        for _ in 0..PARTS {
            for (number, samples) in all.iter_mut().enumerate() {
                samples.add(&crew(number)?, operation, self.rounds.div_ceil(PARTS))?;
            }
        }
        for (cpus, samples) in self.cpus.iter().zip(&mut all) {
            let (name, sharing, median) = (operation.name, sharing.name(), samples.median());
            let (used, left_out) = (samples.rates.len(), samples.left_out);
            println!("rate\t{name}\t{sharing}\t{cpus}\t{median:.0}\t{used}\t{left_out}");
        }
        Ok(())
    }
}

/// The parts in which the samples of an operation are taken.
const PARTS: u32 = 8;

/// Each operation in each of the settings in which it has a meaning.
fn pairs(settings: &[Sharing]) -> impl Iterator<Item = (&'static Operation, Sharing)> {
    let all = OPERATIONS
        .iter()
        .flat_map(move |operation| settings.iter().map(move |sharing| (operation, *sharing)));
    all.filter(|(operation, sharing)| operation.works(*sharing))
}

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
