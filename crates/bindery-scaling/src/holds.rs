//! The locks that two CPUs share, and the time for which an operation holds each. The CPUs take
//! turns, because a hold without a waiter is the shortest.

use std::collections::HashMap;

use crate::Problem;
use crate::calls::{Calls, OnCore};
use crate::crew::Sharing;
use crate::machine::{self, Machine};
use crate::operations::{Operation, Worker};
use crate::timed_lock::{Hold, TimedLock, clock_cost, holds_during};
use bindery::Memory;

/// Samples. The shortest is used, because interrupts of the host lengthen holds in the others.
const SAMPLES: usize = 12;

/// A memory whose locks measure how long they are held.
pub struct Holds {
    memory: &'static Memory<Machine<TimedLock>>,
    /// The nanoseconds that reading the clock adds to each hold.
    clock: f64,
}

impl Holds {
    /// A memory of two CPUs.
    ///
    /// # Errors
    /// If the host has too little memory.
    pub fn new() -> Result<Self, Problem> {
        Ok(Self { memory: machine::memory(&[0, 1])?, clock: clock_cost() })
    }

    /// Prints the locks that both CPUs acquire in an operation.
    ///
    /// # Errors
    /// If memory is full.
    pub fn measure(&self, operation: &Operation, sharing: Sharing) -> Result<(), Problem> {
        let shares_space = sharing == Sharing::Threads;
        let spaces = if shares_space { 1 } else { 2 };
        let program = |_| OnCore::new(self.memory, 2);
        let programs = (0..spaces).map(program).collect::<Result<Vec<_>, _>>()?;
        let on = |number: u16, work: &mut dyn FnMut(&Worker<'_>)| {
            let calls = &programs[usize::from(number) % spaces];
            let worker = Worker { number, count: 2, shares_space, calls };
            machine::on_cpu(self.memory.platform(), number, || {
                calls.enter();
                work(&worker);
                calls.leave();
            });
        };
        (0..2).for_each(|number| on(number, &mut |worker| (operation.start)(worker)));
        let mut sides: [HashMap<usize, Hold>; 2] = Default::default();
        for _ in 0..SAMPLES {
            for (number, side) in sides.iter_mut().enumerate() {
                on(number as u16, &mut |worker| {
                    let holds = holds_during(|| (operation.run)(worker));
                    for (address, hold) in holds {
                        let shortest = side.entry(address).or_insert(hold);
                        if hold.nanoseconds < shortest.nanoseconds {
                            *shortest = hold;
                        }
                    }
                    (operation.reset)(worker);
                });
            }
        }
        (0..2).for_each(|number| on(number, &mut |worker| (operation.end)(worker)));
        let [first, second] = sides;
        for (address, hold) in first.iter().filter(|(address, _)| second.contains_key(address)) {
            let both = [*hold, second[address]];
            let held = both.map(|hold| hold.nanoseconds as f64 - hold.count as f64 * self.clock);
            let held = held[0].min(held[1]).max(0.0) / operation.count as f64;
            let place = self.place(&programs, *address);
            println!("hold\t{}\t{}\t{place}\t{held:.1}", operation.name, sharing.name());
        }
        Ok(())
    }

    /// The record that contains a lock.
    fn place(&self, programs: &[OnCore<TimedLock>], address: usize) -> &'static str {
        if is_within(self.memory, address) {
            "the memory"
        } else if programs.iter().any(|program| is_within(&program.space, address)) {
            "the address space"
        } else {
            "another record"
        }
    }
}

fn is_within<T>(value: &T, address: usize) -> bool {
    let start = std::ptr::from_ref(value).addr();
    (start..start + size_of::<T>()).contains(&address)
}
