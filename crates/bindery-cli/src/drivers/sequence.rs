//! Runs a sequence of steps on one CPU and verifies everything after each step.

use std::fmt;

use bindery::{Counts, check};
use bindery_hosted::Walk;
use bindery_linux::Call;

use super::panics;
use super::step::Step;
use super::world::{Outside, Setup, World, lock, machine};

/// The errno of a call that ran out of memory.
const ENOMEM: i64 = -12;

/// The highest errno.
const MAX_ERRNO: i64 = 4095;

/// All errnos that are documented for calls about memory.
const ERRNOS: [i64; 22] =
    [1, 2, 3, 4, 5, 7, 9, 11, 12, 13, 14, 16, 17, 19, 22, 27, 28, 36, 38, 75, 95, 133];

/// A failed sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The number of the step that failed, from 0; `None` if the end of all processes failed.
    pub step: Option<usize>,
    /// The violation, or the message of the panic.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Some(step) => write!(f, "step {step}: {}", self.message),
            None => write!(f, "at the end: {}", self.message),
        }
    }
}

/// A run without a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Done {
    /// The number of steps taken.
    pub steps: usize,
    /// The maximum work of one step.
    pub most_work: u64,
}

/// Returns the next step, given the result of the last one; `None` at the end of the sequence.
pub type Next<'a> = dyn FnMut(i64) -> Option<Step> + 'a;

/// [`run`] on some architecture.
pub type Run = fn(&Setup, &mut Next<'_>) -> Result<Done, Failure>;

/// Builds the machine and takes steps until `next` has none, then ends all processes.
///
/// # Errors
/// The first failure. The state after the failure is leaked.
pub fn run<A: Walk>(setup: &Setup, next: &mut Next<'_>) -> Result<Done, Failure> {
    let machine = machine::<A>(setup);
    let outside = Outside::new(setup);
    let memory = machine.memory().expect("memory enough for its own metadata");
    let _on_cpu = machine.bind(bindery::platform::Cpu(0));
    let world = World::new(setup, &machine, &memory, &outside, 1);
    let mut scratch = vec![0; check::scratch_words(&memory)];
    let mut done = Done::default();
    let mut result = 0;
    while let Some(step) = next(result) {
        let taken = panics::caught(|| {
            let result = world.step(&step, &mut done);
            world.verify(&step, &mut scratch);
            result
        });
        match taken {
            Ok(taken) => result = taken,
            Err(message) => {
                world.forget();
                return Err(Failure { step: Some(done.steps), message });
            }
        }
        done.steps += 1;
    }
    panics::caught(|| world.finish()).map_err(|message| Failure { step: None, message })?;
    Ok(done)
}

/// Takes the steps of a list.
///
/// # Errors
/// The errors of [`run`].
pub fn replay(run: Run, setup: &Setup, steps: &[Step]) -> Result<Done, Failure> {
    let mut steps = steps.iter().copied();
    run(setup, &mut |_| steps.next())
}

impl<A: Walk> World<'_, A> {
    /// Performs a step, checks its work against the bound, and judges its result.
    fn step(&self, step: &Step, done: &mut Done) -> i64 {
        let asked = self.machine.ran_out_of_memory();
        let most = self.most_work(step);
        self.machine.take_work(most);
        let result = self.perform(step);
        let work = self.machine.take_work(0);
        done.most_work = done.most_work.max(work);
        assert!(work <= most, "a call looked at {work} entries");
        judge::<A>(step, result);
        if result == ENOMEM && self.machine.ran_out_of_memory() == asked {
            self.try_again(step);
        }
        result
    }

    /// The maximum work of a step that has not begun. A call that needs no memory examines the
    /// mapped pages: a few times each entry of each table, most of which may map the zero page. A
    /// call that needs memory may reclaim, and scans all frames many times before it fails. A call
    /// that splits a mapping or a table needs a few frames, which are free unless memory is short.
    fn most_work(&self, step: &Step) -> u64 {
        let frames = self.memory.total_frames();
        let reclaims = needs_memory(step) || cuts(step) && self.is_short();
        if reclaims {
            20_000 * frames
        } else {
            100_000 + 50 * frames + 4 * u64::from(A::ENTRIES) * self.tables()
        }
    }

    /// The number of page tables.
    fn tables(&self) -> u64 {
        self.with_spaces(|spaces| {
            let of = |counts: Counts| counts.tables_allocated.saturating_sub(counts.tables_freed);
            spaces.iter().map(|space| of(space.counts())).sum()
        })
    }

    fn is_short(&self) -> bool {
        self.memory.free_frame_count() < self.memory.total_frames() / 4
    }

    /// Verifies that a call that failed for lack of memory has reclaimed: the call must not succeed
    /// if it is repeated after some memory was freed.
    fn try_again(&self, step: &Step) {
        let is_call =
            matches!(step, Step::Call { .. } | Step::Control { .. } | Step::PagemapScan { .. });
        // A collapse requests a huge block but does not compact memory for it.
        let collapses =
            matches!(step, Step::Call { call: Call::Madvise, arguments, .. } if arguments[2] == 25);
        if is_call
            && !collapses
            && self.is_short()
            && self.swap_has_room()
            && self.memory.reclaim(64).freed > 0
        {
            let again = self.perform(step);
            assert_eq!(again, ENOMEM, "ENOMEM while swap has room: reclaim was not tried");
        }
    }

    /// Verifies all invariants.
    fn verify(&self, step: &Step, scratch: &mut [u32]) {
        self.look(step);
        lock(&self.bystander).run(self.machine);
        let _ = self.memory.wait_for_swap_writes();
        self.machine.assert_clean();
        self.with_spaces(|spaces| {
            if let Err(violation) = check::check(self.memory, spaces, scratch) {
                panic!("audit: {violation}");
            }
        });
    }
}

/// Whether a step may fill memory, and so reclaim. `mincore` writes a byte for each page into the
/// program's memory.
fn needs_memory(step: &Step) -> bool {
    /// `MADV_COLD`, `MADV_PAGEOUT`, `MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`.
    const GIVES_BACK: [u64; 5] = [20, 21, 4, 8, 9];
    let Step::Call { call, arguments, .. } = step else { return true };
    if *call == Call::Madvise {
        !GIVES_BACK.contains(&arguments[2])
    } else {
        !cuts(step) && *call != Call::Msync
    }
}

/// Whether a step that otherwise needs no memory may split a mapping or a table.
fn cuts(step: &Step) -> bool {
    matches!(step, Step::Call { call: Call::Munmap | Call::Mprotect, .. })
}

/// Verifies that the call may have this result.
fn judge<A: Walk>(step: &Step, result: i64) {
    if (-MAX_ERRNO..0).contains(&result) {
        assert!(
            ERRNOS.contains(&-result),
            "{step:?} returned {result}, which is no errno of this call"
        );
        return;
    }
    let Step::Call { call, .. } = step else { return };
    let is_address = result as u64 <= A::USER_END && result % 4096 == 0;
    let fits = match call {
        Call::Mmap | Call::Mremap => is_address,
        Call::Munmap
        | Call::Mprotect
        | Call::Madvise
        | Call::Mlock
        | Call::Mlock2
        | Call::Munlock
        | Call::Mlockall
        | Call::Munlockall
        | Call::Mincore
        | Call::Msync
        | Call::Mseal
        | Call::RemapFilePages => result == 0,
        Call::Brk
        | Call::PkeyMprotect
        | Call::PkeyAlloc
        | Call::PkeyFree
        | Call::ProcessMadvise => true,
    };
    assert!(fits, "{step:?} returned {result:#x}");
}
