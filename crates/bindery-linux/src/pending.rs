//! Calls that stop where they would wait for a pager, a swap device or a handler, and continue
//! later.

use bindery::{
    CallReady, CallWait, MappedWriteback, Operation, PendingMadvise, PendingProtect, Platform,
    Populate, Step,
};

use super::advice::{self, PendingAdvice};
use super::mincore::PendingMincore;
use super::{
    Call, Events, Outcome, Process, begin, errno, msync, populate_operation, protect, raw,
};

/// A call whose state is a value, for a kernel whose tasks are futures. It stops where [`call`]
/// would wait and continues from there. No work is repeated: no argument is read again, no change
/// is made again, and each pager request is sent once.
///
/// The first step performs the call up to its waits, which completes most calls. The following
/// calls stop at each page for which they have to wait: `mmap` with `MAP_POPULATE` or `MAP_LOCKED`,
/// `mlock`, `mlock2`, `mlockall`, `madvise` with `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE`.
/// With `MADV_PAGEOUT`, `madvise` stops at each folio for which a swap device has no free request,
/// with `MADV_REMOVE`, before each mapping of which the pager stores pages, and with
/// `MADV_COLLAPSE`, at each page in swap or in storage. Advice that drops contents first stops
/// until the userfaultfds that ask for it have heard of it. In locked memory, `brk`, `mremap`,
/// `remap_file_pages`, `mprotect` and `pkey_mprotect` stop too. A call that has unmapped or moved
/// memory stops until the userfaultfds that ask for it have heard of it, and keeps its result
/// during the wait ([`bindery::PendingEvents`]). `msync` stops until the pager has stored the pages
/// that a step has submitted. `mincore` and `process_madvise` stop for the pages of their arrays.
/// Between two steps other calls may change the range, as they may during the waits of a blocking
/// call.
///
/// `process_madvise` asks for the process behind the pidfd in each step. If the descriptor was
/// closed or names another process, the call ends with the length advised so far, or with `EBADF`.
/// (Linux keeps the process until the call ends.)
///
/// A step stops while another thread has the mutex of the address space, which it looks at first
/// ([`AddressSpace::wait_for_mutex`]). It sleeps for locks within its work, and a step that finds no
/// memory for the call's own records reclaims.
/// `MADV_WILLNEED` waits only for a synchronous swap device, `MADV_PAGEOUT` only for one that works
/// in `SwapDevice::submit`, and `MADV_REMOVE` only in `Pager::discard`.
///
/// Dropping the value ends the call; its effects so far stay, and its unread messages are
/// withdrawn. The pager still stores the pages already submitted to it, and a swap device those of
/// its requests.
///
/// ```
/// use bindery::{CallPoll, CallReady, CallWait, Platform};
/// use bindery_linux::{Call, CallStep, PendingCall, Process};
///
/// /// Makes a call like a task whose executor has nothing else to do.
/// fn run<'m, P: Platform>(process: &impl Process<'m, P>, call: Call, arguments: [u64; 6]) -> i64 {
///     let mut pending = PendingCall::new(call, arguments);
///     let mut ready = None;
///     loop {
///         match pending.step(process, ready.take()) {
///             CallStep::Done(result) => return result,
///             CallStep::Blocked(wait) => ready = Some(until_ready(process, wait)),
///         }
///     }
/// }
///
/// fn until_ready<'m, P: Platform>(
///     process: &impl Process<'m, P>, mut wait: CallWait<'_, 'm, P>,
/// ) -> CallReady<'m, P> {
///     loop {
///         match wait.poll() {
///             CallPoll::Ready(ready) => return ready,
///             // A future returns `Poll::Pending` here, and leaves its waker before.
///             CallPoll::Pending(on) => {
///                 process.space().memory().platform().park(on.word(), on.expected());
///             }
///             // On another thread, in a kernel that needs this call.
///             CallPoll::NeedsThread => break,
///         }
///     }
///     wait.wait()
/// }
/// ```
///
/// [`call`]: super::call
/// [`AddressSpace::wait_for_mutex`]: bindery::AddressSpace::wait_for_mutex
///
/// # Context
/// Context: may sleep.
#[derive(Debug)]
#[must_use = "its steps make the call"]
pub struct PendingCall<'m, P: Platform> {
    call: Call,
    /// The arguments, until the first step.
    arguments: Option<[u64; 6]>,
    /// The result of the call once `events` and `rest` are complete.
    outcome: Outcome,
    /// The messages about a change that the call has made; they come before `rest`.
    events: Events<'m, P>,
    rest: Rest<'m, P>,
}

/// The part of a call that waits.
#[derive(Debug)]
enum Rest<'m, P: Platform> {
    Maps(Populate),
    Protects(PendingProtect),
    Stores(MappedWriteback<'m, P>),
    Tells(PendingMincore),
    AdvisesHere(PendingMadvise<'m, P>),
    Advises(PendingAdvice<'m, P>),
}

/// The result of [`PendingCall::step`].
#[derive(Debug)]
pub enum CallStep<'s, 'm, P: Platform> {
    /// The raw result, as of [`super::call`].
    Done(i64),
    /// The call has to wait before its next step.
    Blocked(CallWait<'s, 'm, P>),
}

impl<'m, P: Platform> PendingCall<'m, P> {
    /// Creates the call with these raw arguments. Runs no part of it yet.
    pub fn new(call: Call, arguments: [u64; 6]) -> Self {
        let arguments = Some(arguments);
        let rest = Rest::Maps(Populate::default());
        Self { call, arguments, outcome: Ok(0), events: Events(None), rest }
    }

    /// Continues the call until it is done or has to wait. `ready` is the end of the wait that the
    /// last step returned. `process` is the same at each step. After the last step, returns the
    /// result again.
    ///
    /// Without `ready`, the call examines the page as if it had not waited: an error of the pager
    /// is lost, and the page is requested again.
    ///
    /// The step checks for a fatal signal in the thread that runs it ([`Platform::fatal_signal`]).
    ///
    /// Complexity: that of the completed part of the operation.
    pub fn step<'s>(
        &mut self,
        process: &'s impl Process<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> CallStep<'s, 'm, P> {
        let space = process.space();
        let mut ready = ready;
        if self.arguments.is_some()
            && locks_at_once(self.call)
            && let Some(wait) = space.wait_for_mutex(&mut ready)
        {
            return CallStep::Blocked(wait);
        }
        if let Some(arguments) = self.arguments.take() {
            self.outcome = self.begin(process, arguments);
        }
        if let Some(events) = &mut self.events.0 {
            if let Step::Blocked(wait) = events.step(ready.take()) {
                return CallStep::Blocked(wait);
            }
            self.events = Events(None);
        }
        let step = match &mut self.rest {
            Rest::Maps(populate) => {
                populate.step(space, ready).map_err(errno(populate_operation(self.call)))
            }
            Rest::Protects(protect) => {
                protect.step(space, ready).map_err(errno(Operation::Mprotect))
            }
            Rest::Stores(writeback) => {
                let report = |file: &_, at| process.check_errors(file, at);
                writeback.step_with(space, report).map_err(errno(Operation::Msync))
            }
            Rest::Tells(mincore) => mincore.step(space, ready),
            Rest::AdvisesHere(advice) => {
                advice.step(space, ready).map_err(errno(Operation::Madvise))
            }
            Rest::Advises(advice) => advice.step(process, ready, &mut None),
        };
        match step {
            Ok(Step::Blocked(wait)) => return CallStep::Blocked(wait),
            Ok(Step::Done) => {
                if let Rest::Advises(advice) = &self.rest {
                    self.outcome = Ok(advice.done);
                }
            }
            Err(errno) => self.outcome = Err(errno),
        }
        self.rest = Rest::Maps(Populate::default());
        CallStep::Done(raw(self.outcome))
    }

    /// Performs the call up to its waits.
    fn begin(&mut self, process: &impl Process<'m, P>, arguments: [u64; 6]) -> Outcome {
        let (space, [a, b, c, ..]) = (process.space(), arguments);
        let mut value = 0;
        self.rest = if self.call == Call::Msync {
            Rest::Stores(msync::begin_msync(space, a, b, c as i32)?)
        } else if self.call == Call::Mprotect {
            protects(protect::begin_mprotect(space, [a, b, c], protect::NO_KEY)?)
        } else if self.call == Call::PkeyMprotect {
            protects(protect::begin_mprotect(space, [a, b, c], arguments[3] as i32)?)
        } else if self.call == Call::Mincore {
            Rest::Tells(PendingMincore::new(space, [a, b, c])?)
        } else if self.call == Call::Madvise {
            Rest::AdvisesHere(advice::begin_madvise(process, [a, b, c])?)
        } else if self.call == Call::ProcessMadvise {
            Rest::Advises(PendingAdvice::new(arguments)?)
        } else {
            let (result, populate) = begin(process, self.call, arguments, &mut self.events)?;
            value = result;
            Rest::Maps(populate)
        };
        Ok(value)
    }
}

/// Whether the first part of the call takes the mutex of the address space. The parts of the other
/// calls look at the mutex themselves.
fn locks_at_once(call: Call) -> bool {
    !matches!(call, Call::Msync | Call::Mincore | Call::ProcessMadvise)
}

fn protects<'m, P: Platform>(pending: Option<PendingProtect>) -> Rest<'m, P> {
    pending.map_or_else(|| Rest::Maps(Populate::default()), Rest::Protects)
}
