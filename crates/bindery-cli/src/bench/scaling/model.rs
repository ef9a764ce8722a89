//! A model of any number of CPUs: the time of an operation without others, the lines that it
//! exchanges, and the wait for the lock that it holds longest.
//!
//! The CPUs form a closed queueing network. Each works for itself for a while, then queues at one
//! station: the lock, where it stays for the hold and the lines that the hold fetches. Without a
//! common lock each line is a station of its own. Mean value analysis gives the rate of a number of
//! CPUs from that of one CPU less (Reiser and Lavenberg, *Mean-Value Analysis of Closed Multichain
//! Queuing Networks*, JACM 27, 1980). It is exact for holds of random length; for constant ones it
//! waits too long by less than a hold.

/// An operation, as the model sees it. All times are nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Its time on one CPU.
    pub alone: f64,
    /// The lines that it exchanges with another CPU.
    pub lines: f64,
    /// The cost of each.
    pub line: f64,
    /// The time for which it holds the common lock that it holds longest; 0 without one.
    pub hold: f64,
}

/// The station that limits the rate first.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Limit {
    /// None: the operation shares nothing that was counted.
    None,
    /// The lock, from this number of CPUs on.
    Lock(f64),
    /// A line, from this number of CPUs on.
    Line(f64),
}

impl Operation {
    /// A lock that is held for less than a line costs is a line.
    fn has_lock(&self) -> bool {
        self.hold > self.line
    }

    /// The time that an operation spends at an empty station.
    fn demand(&self) -> f64 {
        if self.has_lock() { self.hold + self.lines * self.line } else { self.line }
    }

    /// The number of stations.
    fn stations(&self) -> f64 {
        if self.has_lock() { 1.0 } else { self.lines }
    }

    /// The time that an operation spends at none.
    fn apart(&self) -> f64 {
        if self.has_lock() { (self.alone - self.hold).max(0.0) } else { self.alone }
    }

    /// The rate of `cpus` CPUs divided by that of one.
    pub fn speedup(&self, cpus: u32) -> f64 {
        if cpus <= 1 || self.lines == 0.0 && !self.has_lock() {
            return f64::from(cpus.max(1));
        }
        // The queue that an operation finds at each station: that of one CPU less. A single CPU
        // keeps the lines, so it pays for none, but its queue is that of the network.
        let (mut queue, mut rate) = (0.0, 0.0);
        for cpus in 1..=cpus {
            let stay = self.demand() * (1.0 + queue);
            rate = f64::from(cpus) / (self.apart() + self.stations() * stay);
            queue = rate * stay;
        }
        rate * self.alone
    }

    /// The station that limits the rate, and the CPUs at which it would be busy all the time.
    pub fn limit(&self) -> Limit {
        let cpus = (self.apart() + self.stations() * self.demand()) / self.demand();
        if self.has_lock() {
            Limit::Lock(cpus)
        } else if self.lines > 0.0 {
            Limit::Line(cpus)
        } else {
            Limit::None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING_SHARED: Operation = Operation { alone: 100.0, lines: 0.0, line: 20.0, hold: 0.0 };

    fn is_near(one: f64, other: f64) -> bool {
        (one - other).abs() < 0.01 * other
    }

    #[test]
    fn an_operation_that_shares_nothing_has_no_limit() {
        assert!(is_near(NOTHING_SHARED.speedup(384), 384.0));
        assert_eq!(NOTHING_SHARED.limit(), Limit::None);
    }

    #[test]
    fn a_lock_around_everything_serves_one_cpu_at_a_time() {
        let operation = Operation { hold: 100.0, lines: 5.0, ..NOTHING_SHARED };
        // Each of two CPUs waits for the other, and fetches five lines of 20 ns.
        assert!(is_near(operation.speedup(2), 0.5), "{}", operation.speedup(2));
        assert!(is_near(operation.speedup(384), 0.5));
        assert_eq!(operation.limit(), Limit::Lock(1.0));
    }

    #[test]
    fn a_short_hold_limits_many_cpus_only() {
        let operation = Operation { hold: 40.0, lines: 0.0, alone: 4_000.0, line: 20.0 };
        assert!(operation.speedup(2) > 1.95);
        let most = 4_000.0 / 40.0;
        assert!(operation.speedup(384) <= most && operation.speedup(384) > 0.99 * most);
        assert_eq!(operation.limit(), Limit::Lock(100.0));
    }

    #[test]
    fn a_line_limits_the_rate_to_its_own() {
        let operation = Operation { lines: 1.0, ..NOTHING_SHARED };
        // 100 ns of work at most every 20 ns.
        assert!(operation.speedup(384) <= 5.0 && operation.speedup(384) > 4.95);
        assert_eq!(operation.limit(), Limit::Line(6.0));
        // Two CPUs: 120 ns for each operation, and sometimes a wait for the other's line.
        let both = operation.speedup(2);
        assert!(both < 2.0 * 100.0 / 120.0 && both > 1.6, "{both}");
    }

    #[test]
    fn one_cpu_is_the_measure() {
        assert!(is_near(Operation { lines: 3.0, ..NOTHING_SHARED }.speedup(1), 1.0));
    }
}
