//! A model of any number of CPUs: it combines the time of an operation on one CPU, the cache lines
//! that the operation exchanges, and the wait for the lock that the operation holds longest.
//!
//! The CPUs form a closed queueing network. Each CPU works independently for a while, then queues
//! at one station, the lock, which serves it for the hold and the lines that the hold fetches.
//! Without a common lock each line is a station of its own. Mean value analysis computes the rate
//! of N CPUs from the rate of one CPU fewer (Reiser and Lavenberg, *Mean-Value Analysis of Closed
//! Multichain Queuing Networks*, JACM 27, 1980). The analysis is exact for holds of random length;
//! for constant holds it overestimates the wait by less than one hold.
//!
//! Two CPUs of a host are seldom twice as fast as one, because they share the host's clock, caches
//! and memory. The control, with a separate memory for each CPU, measures this effect. Its slowdown
//! lengthens the work of each CPU and the hold. No machine with more CPUs was measured, so the
//! model assumes a host with enough capacity for them.

/// An operation, in the form that the model needs. All times are nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// The operation's time on one CPU.
    pub alone: f64,
    /// The lines that the operation exchanges with another CPU.
    pub lines: f64,
    /// The cost of each.
    pub line: f64,
    /// The hold time of the common lock that the operation holds longest; 0 without a common lock.
    pub hold: f64,
}

/// The fraction of one CPU's speed that each of several CPUs reaches if they share nothing: 1 on a
/// host with enough capacity for all.
#[derive(Clone, Copy, Debug)]
pub struct HostSpeed(pub f64);

impl HostSpeed {
    /// The host slows no CPU down.
    pub const FULL: Self = Self(1.0);
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
    /// A lock held for less than the cost of a line counts as a line.
    fn has_lock(&self) -> bool {
        self.hold > self.line
    }

    /// The lines that the operation exchanges. The word of a common lock is one of them, even if
    /// the lines were counted for smaller mappings, which did not acquire the lock.
    fn exchanged(&self) -> f64 {
        if self.has_lock() { self.lines.max(1.0) } else { self.lines }
    }

    /// The hold time, measured on one CPU; at most the time of the operation.
    fn hold(&self) -> f64 {
        self.hold.min(self.alone)
    }

    /// The time that an operation spends at an empty station.
    fn demand(&self, host: HostSpeed) -> f64 {
        if self.has_lock() {
            self.hold() / host.0 + self.exchanged() * self.line
        } else {
            self.line
        }
    }

    /// The number of stations.
    fn stations(&self) -> f64 {
        if self.has_lock() { 1.0 } else { self.lines }
    }

    /// The time that an operation spends at no station.
    fn apart(&self, host: HostSpeed) -> f64 {
        let apart = if self.has_lock() { self.alone - self.hold() } else { self.alone };
        apart / host.0
    }

    /// The rate of `cpus` CPUs divided by that of one.
    pub fn speedup(&self, cpus: u32, host: HostSpeed) -> f64 {
        if cpus <= 1 {
            return 1.0;
        }
        if self.lines == 0.0 && !self.has_lock() {
            return f64::from(cpus) * host.0;
        }
        // The queue that an operation finds at each station is the queue with one CPU fewer. A
        // single CPU retains the lines and so pays for none, but its queue is the network's.
        let (mut queue, mut rate) = (0.0, 0.0);
        for cpus in 1..=cpus {
            let stay = self.demand(host) * (1.0 + queue);
            rate = f64::from(cpus) / (self.apart(host) + self.stations() * stay);
            queue = rate * stay;
        }
        rate * self.alone
    }

    /// The station that limits the rate, and the number of CPUs at which the station would be busy
    /// all the time.
    pub fn limit(&self) -> Limit {
        let demand = self.demand(HostSpeed::FULL);
        let cpus = (self.apart(HostSpeed::FULL) + self.stations() * demand) / demand;
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
        assert!(is_near(NOTHING_SHARED.speedup(384, HostSpeed::FULL), 384.0));
        assert_eq!(NOTHING_SHARED.limit(), Limit::None);
    }

    #[test]
    fn one_global_lock_serves_one_cpu() {
        let operation = Operation { hold: 100.0, lines: 5.0, ..NOTHING_SHARED };
        // Each of two CPUs waits for the other and fetches five lines of 20 ns.
        assert!(
            is_near(operation.speedup(2, HostSpeed::FULL), 0.5),
            "{}",
            operation.speedup(2, HostSpeed::FULL)
        );
        assert!(is_near(operation.speedup(384, HostSpeed::FULL), 0.5));
        assert_eq!(operation.limit(), Limit::Lock(1.0));
    }

    #[test]
    fn a_short_hold_limits_many_cpus_only() {
        let operation = Operation { hold: 40.0, lines: 0.0, alone: 4_000.0, line: 10.0 };
        assert!(operation.speedup(2, HostSpeed::FULL) > 1.95);
        // The hold, plus the line of the lock's word.
        let most = 4_000.0 / 50.0;
        assert!(
            operation.speedup(384, HostSpeed::FULL) <= most
                && operation.speedup(384, HostSpeed::FULL) > 0.99 * most
        );
        assert_eq!(operation.limit(), Limit::Lock(80.2));
    }

    #[test]
    fn a_line_limits_the_rate_to_its_own() {
        let operation = Operation { lines: 1.0, ..NOTHING_SHARED };
        // 100 ns of work at most every 20 ns.
        assert!(
            operation.speedup(384, HostSpeed::FULL) <= 5.0
                && operation.speedup(384, HostSpeed::FULL) > 4.95
        );
        assert_eq!(operation.limit(), Limit::Line(6.0));
        // Two CPUs: 120 ns per operation, plus an occasional wait for a line of the other CPU.
        let both = operation.speedup(2, HostSpeed::FULL);
        assert!(both < 2.0 * 100.0 / 120.0 && both > 1.6, "{both}");
    }

    #[test]
    fn a_slow_host_slows_work_and_holds() {
        let slow = HostSpeed(0.5);
        assert!(is_near(NOTHING_SHARED.speedup(2, slow), 1.0));
        let operation = Operation { hold: 100.0, lines: 5.0, ..NOTHING_SHARED };
        // 200 ns for the hold, 100 for the lines, and one CPU at a time.
        assert!(is_near(operation.speedup(2, slow), 1.0 / 3.0), "{}", operation.speedup(2, slow));
    }

    #[test]
    fn a_hold_is_no_longer_than_the_operation() {
        let operation = Operation { hold: 180.0, lines: 5.0, ..NOTHING_SHARED };
        assert!(is_near(operation.speedup(2, HostSpeed::FULL), 0.5));
    }

    #[test]
    fn one_cpu_is_the_measure() {
        assert!(is_near(
            Operation { lines: 3.0, ..NOTHING_SHARED }.speedup(1, HostSpeed::FULL),
            1.0
        ));
    }
}
