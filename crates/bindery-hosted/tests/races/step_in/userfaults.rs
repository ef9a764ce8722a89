//! Userfaults concurrent with closes, exiting handlers, moves and changes with unread messages: no
//! thread waits for a handler that has ended, and no page is lost or visible twice.
//!
//! ```text
//! FROM   64 pages   registered with the first userfaultfd; pages 0 to 2 and 16 to 31 written
//! TO     64 pages   registered with the second one; nothing
//! ```
//!
//! Both userfaultfds get all messages about changes. One call is held at each of its steps while
//! another call runs. Then the first continues. At the end, both userfaultfds are closed, and both
//! calls have to return.

use std::sync::{Arc, Mutex};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, KeyRights, X86_64};
use bindery::platform::{Cpu, Platform};
use bindery::{
    Access, AddressSpace, Advice, CallPoll, Error, FaultError, FaultPoll, FillMode, Inspection,
    MoveMode, ParkedOn, PendingEvents, SizeMode, Step, TriedFault, Userfault, UserfaultFeatures,
    UserfaultMessage, UserfaultModes, UserfaultScope, check,
};
use bindery_hosted::{Machine, Walk};

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{self, HoldAt, Phase, Role, Stops};
use crate::support::{GIB, MIB, fixed, options};

const FROM: u64 = 4 * GIB;
const TO: u64 = 8 * GIB;
const PAGES: u64 = 64;
const LENGTH: u64 = PAGES * PAGE_SIZE;
const PLACES: [u64; 2] = [FROM, TO];
/// The time after which a call that need not wait counts as hung.
const HANGS: Duration = Duration::from_secs(60);

type Fd<'m, A> = Userfault<'m, Stepped<A>>;

fn written() -> impl Iterator<Item = u64> {
    (0..3).chain(16..32)
}

/// The index of one of the two userfaultfds, by its address range.
#[derive(Clone, Copy)]
enum Of {
    From = 0,
    To = 1,
}

struct World<'m, A: Walk> {
    machine: Machine<A>,
    space: AddressSpace<'m, Stepped<A>>,
    /// The userfaultfds as descriptors. A thread that uses a descriptor keeps it open.
    descriptors: [Mutex<Option<Arc<Fd<'m, A>>>>; 2],
    children: Mutex<Vec<AddressSpace<'m, Stepped<A>>>>,
    /// Descriptors of children, received in fork messages.
    inherited: Mutex<Vec<Fd<'m, A>>>,
}

impl<'m, A: Walk> World<'m, A> {
    /// Uses a userfaultfd, if it is open.
    fn with(&self, of: Of, work: impl FnOnce(&Fd<'m, A>) -> bool) -> bool {
        let open = self.descriptors[of as usize].lock().unwrap().clone();
        let Some(fd) = open else { return false };
        let result = work(&fd);
        self.close_if_last(fd);
        result
    }

    /// The last user of a userfaultfd closes it.
    fn close_if_last(&self, fd: Arc<Fd<'m, A>>) {
        if let Some(fd) = Arc::into_inner(fd) {
            self.space.close_userfault(fd);
        }
    }

    fn close(&self, of: Of) -> bool {
        let open = self.descriptors[of as usize].lock().unwrap().take();
        let was_open = open.is_some();
        open.into_iter().for_each(|fd| self.close_if_last(fd));
        was_open
    }

    /// A handler in another process exits. Its userfaultfds are closed with unread messages,
    /// without notice to the address space.
    fn die(&self) -> bool {
        let all = [Of::From, Of::To].map(|of| self.descriptors[of as usize].lock().unwrap().take());
        all.map(|fd| fd.map(drop).is_some()) != [false; 2]
    }

    fn fault(&self, at: u64) -> bool {
        self.space.fault(VirtAddr(at), Access::Write).is_ok()
    }

    /// As [`World::fault`], in a task that polls.
    fn polled_fault(&self, at: u64) -> bool {
        let at = VirtAddr(at);
        loop {
            let tried = stops::awake(|| self.space.try_fault(at, Access::Write, KeyRights::ALL));
            let Ok(TriedFault::Blocked(mut wait)) = tried else { return tried.is_ok() };
            loop {
                let polled = &mut wait;
                match stops::awake(move || polled.poll()) {
                    Ok(FaultPoll::Ready(_)) => break,
                    Ok(FaultPoll::Pending(on)) => self.park(at, on),
                    // Another thread holds a lock.
                    Ok(FaultPoll::NeedsThread) => match wait.wait() {
                        Ok(_) => break,
                        Err(_) => return false,
                    },
                    Err(_) => return false,
                }
            }
        }
    }

    /// Delivers the messages of a call, in a task that polls.
    fn tell(&self, mut events: PendingEvents<'m, Stepped<A>>) {
        let mut ready = None;
        while let Step::Blocked(mut wait) = events.step(ready.take()) {
            ready = loop {
                let polled = &mut wait;
                match stops::awake(move || polled.poll()) {
                    CallPoll::Ready(end) => break Some(end),
                    CallPoll::Pending(on) => {
                        self.space.memory().platform().park(on.word(), on.expected());
                    }
                    CallPoll::NeedsThread => panic!("the wait for a reader needs no thread"),
                }
            };
        }
    }

    fn polled_unmap(&self) -> bool {
        let (unmapped, events) = self.space.begin_munmap(VirtAddr(TO), LENGTH);
        self.tell(events);
        unmapped.is_ok()
    }

    fn polled_fork(&self) -> bool {
        let (child, events) = self.space.begin_fork();
        self.tell(events);
        child.map(|child| self.children.lock().unwrap().push(child)).is_ok()
    }

    /// Waits for the word of a fault. If the page is present, the word changes soon.
    fn park(&self, at: VirtAddr, on: ParkedOn<'_>) {
        let begin = Instant::now();
        while matches!(self.space.inspect(at), Inspection::Page { .. }) {
            if on.has_changed() {
                return;
            }
            assert!(begin.elapsed() < HANGS, "nothing wakes the fault, though its page is mapped");
            thread::yield_now();
        }
        self.space.memory().platform().park_for_handler(on.word(), on.expected());
    }

    /// Reads and handles one message.
    fn serve(&self, of: Of) -> bool {
        self.with(of, |fd| match fd.try_read() {
            Some(UserfaultMessage::Fault(fault)) => {
                let filled =
                    self.space.handler(fd).fill_zeroes(fault.address, PAGE_SIZE, FillMode::empty());
                filled.is_ok()
            }
            Some(UserfaultMessage::Fork(child)) => {
                self.inherited.lock().unwrap().push(child);
                true
            }
            message => message.is_some(),
        })
    }

    fn move_pages(&self, of: Of, to: u64, from: u64) -> bool {
        self.with(of, |fd| {
            let mode = MoveMode::ALLOW_SOURCE_HOLES;
            let moved =
                self.space.handler(fd).move_pages(VirtAddr(to), VirtAddr(from), LENGTH, mode);
            let Err(partial) = moved else { return true };
            // Another call is changing the mappings, has unmapped one, has closed this userfaultfd,
            // shares pages with a child, or has filled the destination.
            let is_known = matches!(
                partial.error,
                Error::TryAgain
                    | Error::NotMapped(_)
                    | Error::Invalid
                    | Error::Busy
                    | Error::Exists(_)
            );
            assert!(is_known, "{partial:?}");
            false
        })
    }
}

/// A call, and whether it may remove pages.
struct Call<A: Walk> {
    name: &'static str,
    call: fn(&World<'_, A>) -> bool,
    loses: bool,
}

fn calls<A: Walk>() -> Vec<Call<A>> {
    let call = |name, call: fn(&World<'_, A>) -> bool| Call { name, call, loses: false };
    let lost = |name, call: fn(&World<'_, A>) -> bool| Call { name, call, loses: true };
    vec![
        call(FAULT, |world| world.fault(TO + 40 * PAGE_SIZE)),
        call("fault of a page that moves", |world| world.fault(TO + PAGE_SIZE)),
        call(POLLED, |world| world.polled_fault(TO + 40 * PAGE_SIZE)),
        call("polled fault of a page that moves", |world| world.polled_fault(TO + PAGE_SIZE)),
        call("fault at the source", |world| world.fault(FROM + 40 * PAGE_SIZE)),
        call("move", |world| world.move_pages(Of::To, TO, FROM)),
        call("move back", |world| world.move_pages(Of::From, FROM, TO)),
        call(SERVE, |world| world.serve(Of::To)),
        call(CLOSE_FROM, |world| world.close(Of::From)),
        call(CLOSE_TO, |world| world.close(Of::To)),
        call(DIE, |world| world.die()),
        call("fork", |world| {
            let child = world.space.fork();
            child.map(|child| world.children.lock().unwrap().push(child)).is_ok()
        }),
        call("polled fork", |world| world.polled_fork()),
        lost("polled unmap", |world| world.polled_unmap()),
        lost("unmap", |world| world.space.munmap(VirtAddr(TO), LENGTH).is_ok()),
        lost(DISCARD, |world| world.space.madvise(VirtAddr(TO), LENGTH, Advice::DontNeed).is_ok()),
    ]
}

const FAULT: &str = "fault";
const POLLED: &str = "polled fault";
const SERVE: &str = "serve";
const CLOSE_FROM: &str = "close the source's";
const CLOSE_TO: &str = "close the destination's";
const DIE: &str = "the handler dies";
const DISCARD: &str = "discard";

fn world<'m, A: Walk>(
    machine: &Machine<A>,
    memory: &'m bindery::Memory<Stepped<A>>,
) -> World<'m, A> {
    let space = AddressSpace::new(memory, options()).unwrap();
    let descriptors = PLACES.map(|at| {
        let events = UserfaultFeatures::EVENT_FORK
            | UserfaultFeatures::EVENT_REMOVE
            | UserfaultFeatures::EVENT_UNMAP;
        space.mmap(&fixed(at, LENGTH)).unwrap();
        if at == FROM {
            for page in written() {
                let value = (page + 1).to_ne_bytes();
                space.write_user(VirtAddr(at + page * PAGE_SIZE), &value).unwrap();
            }
        }
        let fd = space.userfault(events, UserfaultScope::All).unwrap();
        space.register_userfault(&fd, VirtAddr(at), LENGTH, UserfaultModes::MISSING).unwrap();
        Mutex::new(Some(Arc::new(fd)))
    });
    World {
        machine: machine.clone(),
        space,
        descriptors,
        children: Mutex::default(),
        inherited: Mutex::default(),
    }
}

/// Waits for a call that need not wait for another.
fn join(thread: ScopedJoinHandle<'_, bool>, name: &str, why: &str) -> bool {
    let begin = Instant::now();
    while !thread.is_finished() {
        if begin.elapsed() > HANGS {
            // Aborts, because a panic would make the scope wait for the thread.
            eprintln!("{name} hangs: {why}");
            std::process::abort();
        }
        thread::yield_now();
    }
    thread.join().unwrap()
}

/// One run: `held` at a step, with `other` in between. `None` if `held` was never held.
fn run<A: Walk>(held: &Call<A>, other: &Call<A>, hold_at: HoldAt, order: u8) -> Option<Phase> {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    let free = memory.free_frame_count();
    let world = world(&machine, &memory);
    let stops = Arc::new(Stops::default());
    let act = |role, cpu, hold_at, call: &Call<A>| {
        let done = machine.on_cpu(Cpu(cpu), || stops.act(role, hold_at, || (call.call)(&world)));
        done.unwrap_or_else(|| panic!("{} panicked", call.name))
    };
    let phase = thread::scope(|scope| {
        // A fault already waits for a handler that is held.
        let waiter = (held.name == SERVE).then(|| {
            let fault = || machine.on_cpu(Cpu(2), || world.fault(TO + 41 * PAGE_SIZE));
            let waiter = scope.spawn(fault);
            while !world.with(Of::To, |fd| fd.is_readable()) {
                thread::yield_now();
            }
            waiter
        });
        let first = scope.spawn(|| act(Role::Held, 0, hold_at, held));
        let met = (stops.wait_for(Role::Held) == Phase::Held).then(|| {
            let second = scope.spawn(|| act(Role::Meanwhile, 1, HoldAt::Nowhere, other));
            (stops.wait_for(Role::Meanwhile), second)
        });
        stops.release(Role::Held);
        let Some((phase, second)) = met else {
            machine.on_cpu(Cpu(3), || [Of::From, Of::To].map(|of| world.close(of)));
            join(first, held.name, "all is closed");
            waiter.map(|waiter| join(waiter, FAULT, "all is closed"));
            return None;
        };
        let is_served = phase == Phase::Finished && other.name == SERVE;
        let (first, second) = if is_served && [FAULT, POLLED, DISCARD].contains(&held.name) {
            // The message of the waiting fault was the only one.
            if join(second, other.name, "it waits for nobody") {
                join(first, held.name, "it was served");
                (None, None)
            } else {
                (Some(first), None)
            }
        } else {
            (Some(first), Some(second))
        };
        machine.on_cpu(Cpu(3), || [Of::From, Of::To].map(|of| world.close(of)));
        first.map(|first| join(first, held.name, "all is closed"));
        second.map(|second| join(second, other.name, "all is closed"));
        waiter.map(|waiter| join(waiter, FAULT, "all is closed"));
        Some(phase)
    });
    println!("{}, and {} meanwhile, at {hold_at:?}", held.name, other.name);
    machine.on_cpu(Cpu(3), || verify(&world, held.loses || other.loses));
    drop(world);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    phase
}

fn verify<A: Walk>(world: &World<'_, A>, loses: bool) {
    let children = world.children.lock().unwrap();
    world.inherited.lock().unwrap().clear();
    world.machine.assert_clean();
    let memory = world.space.memory();
    let mut spaces = vec![&world.space];
    spaces.extend(children.iter());
    let mut scratch = vec![0; check::scratch_words(memory)];
    check::check(memory, &spaces, &mut scratch).unwrap_or_else(|broken| panic!("{broken}"));
    for space in &spaces {
        for page in written() {
            let found = places(space, page);
            assert!(found == 1 || loses && found == 0, "page {page} is at {found} places");
        }
        // The handlers have ended, so no fault waits.
        for at in
            PLACES.into_iter().flat_map(|at| (0..PAGES).map(move |page| at + page * PAGE_SIZE))
        {
            let served = space.fault(VirtAddr(at), Access::Write);
            assert!(served.is_ok() || loses && served == Err(FaultError::NotMapped), "{served:?}");
        }
    }
}

/// The number of addresses that hold a page.
fn places<A: Walk>(space: &AddressSpace<'_, Stepped<A>>, page: u64) -> usize {
    let at = PLACES.map(|base| VirtAddr(base + page * PAGE_SIZE));
    let stands = |at: &&VirtAddr| matches!(space.inspect(**at), Inspection::Page { .. });
    let is_it = |at: &&VirtAddr| {
        let mut bytes = [0; 8];
        space.read_user(**at, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes) == page + 1
    };
    at.iter().filter(stands).filter(is_it).count()
}

/// Each call is held at each of its steps while every other call runs.
fn meet<A: Walk>(order: u8) {
    let calls = calls::<A>();
    // The exit of a handler takes no step of the core.
    for first in calls.iter().filter(|call| call.name != DIE) {
        for second in &calls {
            let mut held = 0;
            let mut ended = 0;
            for step in 0.. {
                let Some(phase) = run(first, second, HoldAt::Number(step), order) else { break };
                held += 1;
                ended += u32::from(phase == Phase::Finished);
            }
            println!("{} and {}: {held} steps, {ended} ended", first.name, second.name);
            assert!(held > 0, "{} has no steps", first.name);
            // A handler that ends never waits, and the other calls wait only at some steps.
            let expected = match second.name {
                DIE => held,
                SERVE | CLOSE_FROM | CLOSE_TO => 1,
                _ => 0,
            };
            assert!(ended >= expected, "{} keeps {} waiting", first.name, second.name);
        }
    }
}

#[test]
fn on_x86_64() {
    meet::<X86_64<4>>(0);
}

#[test]
fn on_aarch64_with_folios_of_64_kib() {
    meet::<AArch64>(4);
}
