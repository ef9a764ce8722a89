//! The plugin's counts.
//!
//! The plugin's output is a line of column names, then a line for each occurrence of a phase, with
//! tabs between the fields (see `tools/count/phases.h`).

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeMap, Serializer};

use bindery_cli::guest::Problem;

/// Declares the counters in the order of the plugin's columns (`tools/count/counters.h`).
macro_rules! counters {
    ($($(#[$documentation:meta])* $counter:ident = $name:literal,)*) => {
        /// A counter.
        #[expect(dead_code, reason = "the tables show some of them, the JSON all")]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Counter {
            $($(#[$documentation])* $counter,)*
        }

        /// The names of all counters.
        pub const NAMES: &[&str] = &[$($name),*];
    };
}

counters! {
    /// Instructions of the kernel, without string instructions.
    Kernel = "kernel",
    /// Instructions of programs.
    User = "user",
    /// Iterations of the kernel's string instructions.
    KernelString = "kernel_string",
    /// Iterations of programs' string instructions.
    UserString = "user_string",
    /// The kernel's loads, without those of string instructions.
    Loads = "loads",
    /// The kernel's stores, without those of string instructions.
    Stores = "stores",
    /// Atomic read-modify-writes of the kernel.
    Atomics = "atomics",
    /// Barriers.
    Barriers = "barriers",
    /// TLB invalidations of a page.
    InvalidatePage = "invalidate_page",
    /// TLB invalidations of a range.
    InvalidateRange = "invalidate_range",
    /// TLB invalidations of an address space.
    InvalidateSpace = "invalidate_space",
    /// TLB invalidations of everything.
    InvalidateAll = "invalidate_all",
    /// Writes to the register of the root table.
    RootWrites = "root_writes",
    /// Writes to other system registers.
    RegisterWrites = "register_writes",
    /// System calls.
    SystemCalls = "system_calls",
    /// Returns from exceptions.
    ExceptionReturns = "exception_returns",
    /// Times that the CPU became idle.
    Halts = "halts",
    /// Bytes that the kernel's string instructions move or fill.
    StringBytes = "kernel_string_bytes",
}

const COUNTERS: usize = NAMES.len();

/// A number for each counter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Counts<T>([T; COUNTERS]);

impl<T: Copy> Counts<T> {
    pub fn of(&self, counter: Counter) -> T {
        self.0[counter as usize]
    }
}

impl<T: Serialize> Serialize for Counts<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(COUNTERS))?;
        for (name, count) in NAMES.iter().zip(&self.0) {
            map.serialize_entry(name, count)?;
        }
        map.end()
    }
}

/// All occurrences of a phase together.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct Summary {
    /// The number of occurrences of the phase.
    pub occurrences: u64,
    /// The mean of all occurrences.
    pub mean: Counts<f64>,
    /// The minimum of each counter.
    pub minimum: Counts<u64>,
}

impl Summary {
    fn new(occurrences: &[Counts<u64>]) -> Option<Self> {
        let (first, rest) = occurrences.split_first()?;
        let (mut sum, mut minimum) = (first.0, first.0);
        for counts in rest {
            for (place, &count) in counts.0.iter().enumerate() {
                sum[place] += count;
                minimum[place] = minimum[place].min(count);
            }
        }
        let mean = sum.map(|sum| sum as f64 / occurrences.len() as f64);
        let occurrences = occurrences.len() as u64;
        Some(Self { occurrences, mean: Counts(mean), minimum: Counts(minimum) })
    }
}

/// Reads the plugin's output: a summary for each phase, by its number.
///
/// # Errors
/// If the text is not in the plugin's format.
pub fn read(text: &str) -> Result<BTreeMap<u16, Summary>, Problem> {
    let summaries = occurrences(text)?.into_iter();
    Ok(summaries.filter_map(|(phase, all)| Some((phase, Summary::new(&all)?))).collect())
}

/// As [`read`], but with each occurrence of a phase separately, in order of completion.
///
/// # Errors
/// The errors of [`read`].
pub fn occurrences(text: &str) -> Result<BTreeMap<u16, Vec<Counts<u64>>>, Problem> {
    let mut lines = text.lines();
    let names = lines.next().unwrap_or_default();
    if !names.split('\t').eq(["phase"].iter().chain(NAMES).copied()) {
        return Err(Problem::Failed(format!(
            "the counting plugin is of another version than this program (it counts {names:?}); \
             remove target/guest/count to build it again"
        )));
    }
    let mut phases: BTreeMap<u16, Vec<Counts<u64>>> = BTreeMap::new();
    for line in lines {
        let (phase, counts) = read_line(line).ok_or_else(|| {
            Problem::Failed(format!(
                "cannot read the counting plugin's counts: {line:?} is not a phase and its counts; \
                 remove target/guest/count to build the plugin again"
            ))
        })?;
        phases.entry(phase).or_default().push(counts);
    }
    Ok(phases)
}

fn read_line(line: &str) -> Option<(u16, Counts<u64>)> {
    let (phase, counts) = line.split_once('\t')?;
    let counts: Result<Vec<u64>, _> = counts.split('\t').map(str::parse).collect();
    Some((phase.parse().ok()?, Counts(counts.ok()?.try_into().ok()?)))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Only instructions of the kernel.
    pub fn with_kernel(instructions: u64) -> Counts<u64> {
        let mut counts = [0; COUNTERS];
        counts[Counter::Kernel as usize] = instructions;
        Counts(counts)
    }

    fn line(phase: u16, kernel: u64) -> String {
        let mut counts = [7; COUNTERS];
        counts[Counter::Kernel as usize] = kernel;
        format!("{phase}\t{}\n", counts.map(|count| count.to_string()).join("\t"))
    }

    fn header() -> String {
        format!("phase\t{}\n", NAMES.join("\t"))
    }

    #[test]
    fn counters_have_the_order_of_the_plugins_columns() {
        let plugin = include_str!("../../../../tools/count/counters.h");
        let columns = plugin.lines().filter_map(|line| {
            let (_, column) = line.trim_start().strip_prefix("COUNTER(")?.split_once('"')?;
            column.split('"').next()
        });
        assert_eq!(columns.collect::<Vec<_>>(), NAMES);
    }

    #[test]
    fn occurrences_are_summed_up_by_phase() {
        let text = header() + &line(4, 100) + &line(5, 1) + &line(4, 300);
        let phases = read(&text).unwrap();
        assert_eq!(phases.keys().copied().collect::<Vec<_>>(), [4, 5]);
        let summary = &phases[&4];
        assert_eq!(summary.occurrences, 2);
        assert_eq!(summary.mean.of(Counter::Kernel), 200.0);
        assert_eq!(summary.minimum.of(Counter::Kernel), 100);
        assert_eq!(summary.mean.of(Counter::Halts), 7.0);
    }

    #[test]
    fn a_machine_that_marks_nothing_has_no_phases() {
        assert_eq!(read(&header()).unwrap().len(), 0);
    }

    #[test]
    fn other_text_than_the_plugins_is_refused() {
        let cut_off = header() + line(4, 1).trim_end().rsplit_once('\t').unwrap().0;
        for wrong in ["", "phase\tkernel\n", &cut_off, &(header() + "x\t1\n")] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }
}
