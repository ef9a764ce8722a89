//! Several CPUs on the same resources, whose results can be predicted although the order of the
//! calls cannot.
//!
//! | file | contents |
//! |---|---|
//! | `limits` | a limit that several CPUs reach: never exceeded, and each refusal is true |
//! | `commitment` | committed memory at its limit, while processes change mappings |
//! | `fronts` | the last free frames, which other CPUs keep for themselves |
//! | `contents` | calls on overlapping ranges: no page has content that was never stored there |

extern crate bindery_scenarios as support;

mod commitment;
mod contents;
mod fronts;
mod limits;

use std::sync::Barrier;
use std::thread;

use bindery::platform::Cpu;
use bindery_hosted::{Machine, Walk};

/// Runs `work` on the CPUs 0 to `count` at once. Returns the results in the order of the CPUs.
fn on_cpus<A: Walk, R: Send>(
    machine: &Machine<A>,
    count: u16,
    work: impl Fn(u16) -> R + Sync,
) -> Vec<R> {
    let all_are_there = Barrier::new(count.into());
    thread::scope(|scope| {
        let (work, all_are_there) = (&work, &all_are_there);
        let threads: Vec<_> = (0..count)
            .map(|cpu| {
                scope.spawn(move || {
                    all_are_there.wait();
                    machine.on_cpu(Cpu(cpu), || work(cpu))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
