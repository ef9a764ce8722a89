//! The output of the program.

/// The things that the CPUs of a measurement have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// One address space.
    Threads,
    /// One memory.
    Processes,
    /// No operation: the control.
    Memories,
}

/// The rate of one operation on one number of CPUs.
#[derive(Clone, PartialEq, Debug)]
pub struct Rate {
    pub operation: String,
    pub sharing: Sharing,
    pub cpus: u16,
    /// Operations a second, of all CPUs together: the median of the samples.
    pub per_second: f64,
    /// Samples in which no thread was preempted.
    pub used: u32,
    /// The other samples.
    pub left_out: u32,
}

/// A lock that two CPUs take in one operation.
#[derive(Clone, PartialEq, Debug)]
pub struct Hold {
    pub operation: String,
    pub sharing: Sharing,
    /// The record that has the lock.
    pub place: String,
    /// The time for which one operation holds it.
    pub nanoseconds: f64,
}

/// All figures of one run.
#[derive(Default, Debug)]
pub struct Figures {
    /// The extra nanoseconds of a write if another CPU also writes the line.
    pub line: Option<f64>,
    pub rates: Vec<Rate>,
    pub holds: Vec<Hold>,
}

impl Figures {
    /// Reads the standard output of the program.
    ///
    /// # Errors
    /// An error that names the first unreadable line.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut figures = Self::default();
        for line in text.lines() {
            figures
                .line(line)
                .ok_or_else(|| format!("cannot read the output of bindery-scaling: {line:?}"))?;
        }
        Ok(figures)
    }

    fn line(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split('\t').collect();
        match *words {
            ["line", nanoseconds] => self.line = Some(nanoseconds.parse().ok()?),
            ["hold", operation, sharing, place, nanoseconds] => self.holds.push(Hold {
                operation: operation.to_owned(),
                sharing: Sharing::named(sharing)?,
                place: place.to_owned(),
                nanoseconds: nanoseconds.parse().ok()?,
            }),
            ["rate", operation, sharing, cpus, per_second, used, left_out] => {
                self.rates.push(Rate {
                    operation: operation.to_owned(),
                    sharing: Sharing::named(sharing)?,
                    cpus: cpus.parse().ok()?,
                    per_second: per_second.parse().ok()?,
                    used: used.parse().ok()?,
                    left_out: left_out.parse().ok()?,
                });
            }
            _ => return None,
        }
        Some(())
    }

    /// The rate of an operation; `None` if it was not measured, or if a thread was preempted in
    /// each sample.
    pub fn rate(&self, operation: &str, sharing: Sharing, cpus: u16) -> Option<f64> {
        let rate = self.rates.iter().find(|rate| {
            (&*rate.operation, rate.sharing, rate.cpus) == (operation, sharing, cpus)
        })?;
        (rate.used > 0).then_some(rate.per_second)
    }

    /// The rate on `cpus` CPUs divided by that on one.
    pub fn ratio(&self, operation: &str, sharing: Sharing, cpus: u16) -> Option<f64> {
        Some(self.rate(operation, sharing, cpus)? / self.rate(operation, sharing, 1)?)
    }

    /// The lock that an operation holds longest.
    pub fn longest_hold(&self, operation: &str, sharing: Sharing) -> Option<&Hold> {
        let holds = self.holds.iter();
        holds
            .filter(|hold| hold.operation == operation && hold.sharing == sharing)
            .max_by(|one, other| one.nanoseconds.total_cmp(&other.nanoseconds))
    }
}

impl Sharing {
    fn named(name: &str) -> Option<Self> {
        match name {
            "threads" => Some(Self::Threads),
            "processes" => Some(Self::Processes),
            "memories" => Some(Self::Memories),
            _ => None,
        }
    }

    /// The setting's name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
            Self::Memories => "memories",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "line\t18.5\n\
        hold\tmmap, munmap\tthreads\tthe memory\t9.5\n\
        hold\tmmap, munmap\tthreads\tthe address space\t524.0\n\
        rate\tmmap, munmap\tthreads\t1\t2000\t80\t0\n\
        rate\tmmap, munmap\tthreads\t2\t1000\t70\t10\n\
        rate\tmmap, munmap\tprocesses\t2\t0\t0\t80\n";

    #[test]
    fn the_program_tells_what_it_measured() {
        let figures = Figures::read(TEXT).unwrap();
        assert_eq!(figures.line, Some(18.5));
        assert_eq!(figures.ratio("mmap, munmap", Sharing::Threads, 2), Some(0.5));
        assert_eq!(figures.rate("mmap, munmap", Sharing::Processes, 2), None, "no sample is left");
        assert_eq!(figures.rate("mmap, munmap", Sharing::Memories, 2), None, "never measured");
        let hold = figures.longest_hold("mmap, munmap", Sharing::Threads).unwrap();
        assert_eq!((&*hold.place, hold.nanoseconds), ("the address space", 524.0));
    }

    #[test]
    fn a_line_that_is_not_understood_is_reported() {
        for line in ["line", "line\tx", "rate\ta\tnobody\t1\t2\t3\t4", "hold\ta\tthreads\tb"] {
            let problem = Figures::read(line).unwrap_err();
            assert!(problem.contains("cannot read the output of bindery-scaling"), "{problem}");
        }
    }
}
