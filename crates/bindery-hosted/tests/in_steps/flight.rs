//! Calls in steps.

use bindery::arch::KeyRights;
use bindery::{
    Access, CallPoll, CallReady, CallWait, FaultPoll, FaultReady, FaultWait, ParkedOn, PendingCopy,
    PendingObjectSwapIn, PendingRead, PendingSwapIn, PendingUserCopy, PendingWrite, Platform, Step,
    TriedFault, Writeback,
};
use bindery_linux::{CallStep, PendingCall};

use super::action::{Cells, Way, What};
use super::answers::Answers;
use super::calls::{EINVAL, Expected, Made, raw};
use super::model::{CELL, CELLS, filled};
use super::world::{AT, P, World, address};
use bindery::addr::VirtAddr;

/// More polls than any wait needs. Each but the last sees another answer.
const MOST_POLLS: u32 = 10_000;

/// The rest of a call.
enum Body<'m> {
    Call(Box<PendingCall<'m, P>>, Expected, Made, Option<Answers>),
    Load(PendingUserCopy, Vec<u8>),
    Fill(PendingUserCopy, Vec<u8>),
    Copy(Box<PendingCopy>),
    SwapIn(PendingSwapIn),
    SwapInObjects(PendingObjectSwapIn<'m, P>),
    Touch,
    Read(PendingRead<'m, P>, Vec<u8>),
    Write(PendingWrite<'m, P>, Vec<u8>),
    Sync(Writeback<'m, P>),
}

enum Wait<'w, 'm> {
    None,
    Call(CallWait<'w, 'm, P>),
    Fault(FaultWait<'w, 'm, P>),
}

/// The end of a step.
#[derive(Debug)]
enum End {
    Blocked,
    Done,
    /// The result of a system call.
    Result(i64),
    Failed(String),
}

/// A call in steps.
pub struct Flight<'w, 'm> {
    pub by: usize,
    what: What,
    body: Body<'m>,
    wait: Wait<'w, 'm>,
    ready: Option<CallReady<'m, P>>,
    /// The page that the last wait of a fault has brought.
    brought: Option<FaultReady<'m, P>>,
    /// The error of the last wait of a fault.
    error: Option<String>,
    /// The time of the call.
    born: u64,
    /// The failed answers at that time.
    failed: u64,
    /// Whether no step has been taken yet.
    is_first: bool,
    /// Whether mappings or objects have changed in between.
    pub is_disturbed: bool,
    /// Whether a signal came during a step or a wait.
    is_killed: bool,
}

/// The bytes of a call that fills cells.
pub fn bytes(cells: Cells, value: u8) -> Vec<u8> {
    let cell = |index| [filled(value, index); CELL as usize];
    (0..cells.count).flat_map(cell).collect()
}

impl Flight<'_, '_> {
    /// The number of cells done.
    fn progress(&self) -> u64 {
        let bytes = match &self.body {
            Body::Load(copy, _) | Body::Fill(copy, _) => copy.copied(),
            Body::Read(read, _) => read.moved(),
            Body::Write(write, _) => write.moved(),
            Body::Copy(copy) => copy.copied() as usize,
            Body::Call(..)
            | Body::SwapIn(_)
            | Body::SwapInObjects(_)
            | Body::Touch
            | Body::Sync(_) => 0,
        };
        assert_eq!(bytes as u64 % CELL, 0, "a piece ends within a cell");
        bytes as u64 / CELL
    }
}

impl<'w, 'm> World<'w, 'm> {
    pub fn failed(&self) -> u64 {
        let server = self.server;
        server.failed_reads.get() + server.failed_writes.get() + server.failed_swaps()
    }

    /// Begins a call, and takes its first step.
    pub fn begin(&mut self, by: usize, what: What) {
        let at = |cells: Cells| VirtAddr(AT + cells.first * CELL);
        let length = |cells: Cells| (cells.count * CELL) as usize;
        let body = match what {
            What::Load(cells) => {
                Body::Load(PendingUserCopy::new(at(cells)), vec![0; length(cells)])
            }
            What::Fill(cells, value) => {
                Body::Fill(PendingUserCopy::new(at(cells)), bytes(cells, value))
            }
            What::Copy(copied) => {
                let (here, there) = (at(copied.here), VirtAddr(AT + copied.there * CELL));
                let length = copied.here.count * CELL;
                Body::Copy(Box::new(if copied.is_from_other {
                    PendingCopy::from_other(here, there, length)
                } else {
                    PendingCopy::to_other(here, there, length)
                }))
            }
            What::SwapIn => Body::SwapIn(self.space(by).begin_swap_in_area(&self.area)),
            What::SwapInObjects => {
                Body::SwapInObjects(self.memory.begin_swap_in_objects(&self.area))
            }
            What::Touch(..) => Body::Touch,
            What::Read(object, cells) => {
                let object = &self.objects[object];
                let read = PendingRead::new(object, cells.first * CELL, length(cells)).unwrap();
                Body::Read(read, vec![0; length(cells)])
            }
            What::Write(object, cells, value, _) => {
                let object = &self.objects[object];
                let write = PendingWrite::new(object, cells.first * CELL, length(cells)).unwrap();
                Body::Write(write, bytes(cells, value))
            }
            What::Sync(object, cells) => {
                let object = &self.objects[object];
                Body::Sync(object.begin_sync(cells.first * CELL, cells.count * CELL))
            }
            _ => {
                let (call, arguments) = raw(what);
                let call = Box::new(PendingCall::new(call, arguments));
                let answers = match what {
                    What::Tell(span, at) => Some(self.answers(by, span, at)),
                    _ => None,
                };
                Body::Call(call, self.expected(by, what), self.made(by, what), answers)
            }
        };
        let flight = Flight {
            by,
            what,
            body,
            wait: Wait::None,
            ready: None,
            brought: None,
            error: None,
            born: self.model.now,
            failed: self.failed(),
            is_first: true,
            is_disturbed: false,
            is_killed: false,
        };
        self.send_signals();
        self.run(flight);
    }

    /// Takes a step of the call, which stays among the calls in steps unless it is done.
    fn run(&mut self, mut flight: Flight<'w, 'm>) {
        let before = flight.progress();
        let end = self.server.without_sleep(|| self.one_step(&mut flight));
        flight.is_killed |= self.take_back_signals(flight.what);
        self.apply_fillings();
        if flight.is_first && matches!(flight.body, Body::Call(..)) {
            self.apply(flight.by, flight.what);
        }
        self.check(&flight, before, &end);
        self.check_step_of_answers(&mut flight, &end);
        flight.is_first = false;
        self.observe();
        if matches!(end, End::Blocked) {
            self.flights.push(flight);
        } else {
            self.with(|| drop(flight));
        }
    }

    /// Checks the answers of `mincore` after a step.
    fn check_step_of_answers(&mut self, flight: &mut Flight<'w, 'm>, end: &End) {
        let Body::Call(.., Some(answers)) = &mut flight.body else { return };
        if let End::Result(EINVAL) = end {
            return;
        }
        if flight.is_first {
            self.allow_answers(flight.by, answers);
        }
        self.forget_answers(flight.by, answers);
        if let End::Result(0) = end {
            self.check_answers(flight.by, answers, flight.is_first);
        }
    }

    fn one_step(&self, flight: &mut Flight<'w, 'm>) -> End {
        let (caller, ready) = (self.caller(flight.by), flight.ready.take());
        let space = &caller.space;
        let of_fault = |error: bindery::FaultError| error.to_string();
        let of_error = |error: bindery::Error| error.to_string();
        let step = match &mut flight.body {
            Body::Call(call, ..) => match call.step(caller, ready) {
                CallStep::Done(result) => return End::Result(result),
                CallStep::Blocked(wait) => Ok(Step::Blocked(wait)),
            },
            Body::Load(copy, into) => copy.read(space, ready, into).map_err(of_fault),
            Body::Fill(copy, from) => copy.write(space, ready, from).map_err(of_fault),
            Body::Copy(copy) => {
                let What::Copy(copied) = flight.what else { unreachable!() };
                let other = self.space(self.other(copied));
                copy.step(space, other, ready).map_err(|error| of_fault(error.fault))
            }
            Body::SwapIn(call) => call.step(space, ready).map_err(of_error),
            Body::SwapInObjects(call) => call.step(ready).map_err(of_error),
            Body::Read(read, into) => read.step(ready, into).map_err(of_error),
            Body::Write(write, from) => {
                let What::Write(.., stop) = flight.what else { unreachable!() };
                let (stop, mut has_stopped) = ((stop * CELL) as usize, false);
                let step = write.step_with(ready, |done, to, length| {
                    let left = if done < stop { stop - done } else { length };
                    has_stopped |= left < length;
                    let piece = &from[done..done + length.min(left)];
                    // SAFETY: the bytes at `to` belong to the object, without a reference to them.
                    unsafe { self.machine.write_bytes(to, piece) };
                    piece.len()
                });
                // The rest follows in the next step.
                if has_stopped && matches!(step, Ok(Step::Done)) {
                    return End::Blocked;
                }
                step.map_err(of_error)
            }
            Body::Sync(sync) => sync.step().map_err(of_error),
            Body::Touch => {
                let What::Touch(page, writes) = flight.what else { unreachable!() };
                let access = if writes { Access::Write } else { Access::Read };
                if let Some(error) = flight.error.take() {
                    return End::Failed(error);
                }
                let tried = space.try_fault(address(page), access, KeyRights::ALL);
                flight.brought = None;
                return match tried {
                    Ok(TriedFault::Resolved(_)) => End::Done,
                    Ok(TriedFault::Blocked(wait)) => {
                        flight.wait = Wait::Fault(wait);
                        End::Blocked
                    }
                    Err(error) => End::Failed(error.to_string()),
                };
            }
        };
        match step {
            Ok(Step::Done) => End::Done,
            Ok(Step::Blocked(wait)) => {
                flight.wait = Wait::Call(wait);
                End::Blocked
            }
            Err(error) => End::Failed(error),
        }
    }

    /// Continues a call.
    pub fn advance(&mut self, which: usize, way: Way) {
        let mut flight = self.flights.swap_remove(which);
        let mut wait = std::mem::replace(&mut flight.wait, Wait::None);
        self.send_signals();
        if let Way::Poll | Way::Mixed | Way::Without = way
            && !self.poll(&mut flight, &mut wait, |_| ())
        {
            flight.wait = wait;
            flight.is_killed |= self.take_back_signals(flight.what);
            self.flights.push(flight);
            return;
        }
        match way {
            Way::Poll | Way::Early => {}
            Way::Thread => {
                let wait = std::mem::replace(&mut wait, Wait::None);
                self.with(|| in_thread(&mut flight, wait));
            }
            Way::Mixed => std::mem::swap(&mut self.spare, &mut flight.ready),
            Way::Without => flight.ready = None,
        }
        self.with(|| drop(wait));
        self.run(flight);
    }

    /// Polls a wait. Returns whether it is over. If not, calls `pending` with the word.
    fn poll(
        &self,
        flight: &mut Flight<'w, 'm>,
        wait: &mut Wait<'w, 'm>,
        pending: impl Fn(ParkedOn<'_>),
    ) -> bool {
        let is_over = self.server.without_sleep(|| match &mut *wait {
            Wait::None => Some(true),
            Wait::Call(wait) => match wait.poll() {
                CallPoll::Ready(ready) => {
                    flight.ready = Some(ready);
                    Some(true)
                }
                CallPoll::Pending(on) => {
                    pending(on);
                    Some(false)
                }
                CallPoll::NeedsThread => None,
            },
            Wait::Fault(wait) => match wait.poll() {
                Ok(FaultPoll::Ready(ready)) => {
                    flight.brought = Some(ready);
                    Some(true)
                }
                Ok(FaultPoll::Pending(on)) => {
                    pending(on);
                    Some(false)
                }
                Ok(FaultPoll::NeedsThread) => None,
                Err(error) => {
                    flight.error = Some(error.to_string());
                    Some(true)
                }
            },
        });
        is_over.unwrap_or_else(|| {
            let wait = std::mem::replace(wait, Wait::None);
            self.with(|| in_thread(flight, wait));
            true
        })
    }

    /// Ends all calls: drops them, or takes them to their ends. The server answers while a wait is
    /// not over.
    pub fn end_calls(&mut self, are_dropped: bool) {
        let mut steps = 0;
        if are_dropped {
            let flights = std::mem::take(&mut self.flights);
            self.with(|| drop(flights));
        }
        while let Some(mut flight) = self.flights.pop() {
            let mut wait = std::mem::replace(&mut flight.wait, Wait::None);
            let (by, what) = (flight.by, flight.what);
            let serve = |on: ParkedOn<'_>| {
                while !on.has_changed() {
                    assert!(self.serve(), "nothing can wake {what:?} of {by}");
                }
            };
            let mut polls = 0;
            while !self.poll(&mut flight, &mut wait, serve) {
                polls += 1;
                assert!(polls < MOST_POLLS, "{what:?} of {by} never ends");
            }
            self.with(|| drop(wait));
            steps += 1;
            assert!(steps < MOST_POLLS, "{what:?} of {by} takes steps without end");
            self.run(flight);
            self.peek();
        }
        let spare = self.spare.take();
        self.with(|| drop(spare));
    }

    /// Whether nothing but the call has changed the mappings or objects since its beginning, and no
    /// answer has failed.
    fn is_alone(&self, flight: &Flight<'_, '_>) -> bool {
        !flight.is_disturbed && !flight.is_killed && self.failed() == flight.failed
    }

    /// Checks the progress of a step and its end, and applies both to the model.
    fn check(&mut self, flight: &Flight<'w, 'm>, before: u64, end: &End) {
        let (by, after) = (flight.by, flight.progress());
        assert!(before <= after, "{:?} begins again", flight.what);
        let has_failed = flight.is_killed || self.failed() > flight.failed;
        let is_wanted = |object: &Cells| after == object.count;
        match (flight.what, &flight.body) {
            (What::Load(cells), Body::Load(_, into)) => {
                self.check_load(by, cells, into, before..after);
                self.check_fault(by, cells.first + after, false, end, has_failed);
                assert!(!matches!(end, End::Done) || is_wanted(&cells));
            }
            (What::Fill(cells, value), Body::Fill(..)) => {
                for index in before..after {
                    self.model.store(by, cells.first + index, Some(filled(value, index)));
                }
                self.check_fault(by, cells.first + after, true, end, has_failed);
                assert!(!matches!(end, End::Done) || is_wanted(&cells));
            }
            (What::Copy(copied), Body::Copy(_)) => {
                self.copied(by, copied, before..after, flight.is_first);
                let is_reached = self.is_copied(by, copied, after);
                let is_failure = matches!(end, End::Failed(_));
                assert!(!is_failure || !is_reached || has_failed, "{copied:?} fails: {end:?}");
                assert!(!matches!(end, End::Done) || is_wanted(&copied.here));
            }
            (What::SwapIn | What::SwapInObjects, Body::SwapIn(_) | Body::SwapInObjects(_)) => {
                let is_failure = matches!(end, End::Failed(_));
                assert!(!is_failure || has_failed, "a swap-in fails: {end:?}");
            }
            (What::Touch(page, writes), Body::Touch) => {
                // The error may be that of the mapping during the wait.
                let has_failed = has_failed || flight.is_disturbed;
                self.check_fault(by, page * CELLS, writes, end, has_failed);
            }
            (What::Read(object, cells), Body::Read(_, into)) => {
                self.check_read(object, cells, into, before..after);
                let is_end = cells.first + after >= self.model.objects[object].size;
                match end {
                    End::Failed(error) => {
                        assert!(has_failed && after == 0, "a read fails: {error}")
                    }
                    End::Done => assert!(
                        is_wanted(&cells) || is_end || has_failed,
                        "a read is short: {after} of {}",
                        cells.count
                    ),
                    End::Blocked | End::Result(_) => {}
                }
            }
            (What::Write(object, cells, value, _), Body::Write(..)) => {
                self.write(object, cells.first, value, before..after);
                match end {
                    End::Failed(error) => {
                        assert!(has_failed && after == 0, "a write fails: {error}")
                    }
                    End::Done => assert!(is_wanted(&cells) || has_failed, "a write is short"),
                    End::Blocked | End::Result(_) => {}
                }
            }
            (What::Sync(_, cells), Body::Sync(_)) => match end {
                End::Failed(error) => assert!(has_failed, "a sync fails: {error}"),
                End::Done if !has_failed => {
                    self.assert_stored(cells.first..cells.first + cells.count, flight.born);
                }
                End::Blocked | End::Done | End::Result(_) => {}
            },
            (what, Body::Call(_, expected, made, _)) => {
                let End::Result(result) = *end else { return };
                let is_alone = self.is_alone(flight);
                assert!(
                    expected.allows(result, is_alone),
                    "{what:?} returns {result} (alone: {is_alone}): {expected:?}"
                );
                self.returned(made, result, is_alone);
            }
            (what, _) => unreachable!("{what:?}"),
        }
    }

    /// A step that fails is one whose next cell no access finds.
    fn check_fault(&self, by: usize, cell: u64, writes: bool, end: &End, has_failed: bool) {
        if let End::Failed(error) = end {
            let is_right = self.model.find(by, cell / CELLS, writes).is_none();
            assert!(is_right || has_failed, "page {} of {by}: {error}", cell / CELLS);
        }
    }
}

/// Waits like a thread.
fn in_thread<'m>(flight: &mut Flight<'_, 'm>, wait: Wait<'_, 'm>) {
    match wait {
        Wait::None => {}
        Wait::Call(wait) => flight.ready = Some(wait.wait()),
        Wait::Fault(wait) => match wait.wait() {
            Ok(ready) => flight.brought = Some(ready),
            Err(error) => flight.error = Some(error.to_string()),
        },
    }
}
