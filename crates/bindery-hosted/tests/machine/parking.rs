//! Threads sleep until they are woken, and a thread that is never woken is reported.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use bindery::addr::VirtAddr;
use bindery::arch::{Tiny, X86_64};
use bindery::platform::{Cpu, Platform};
use bindery::sync::AlwaysOff;
use bindery::{Access, AddressSpace, FillMode, FrameRange, Memory};
use bindery::{UserfaultFeatures, UserfaultModes, UserfaultScope};
use bindery_hosted::{Config, Machine, Walk, pass_on};
use bindery_parts::{ParkedThread, ParkingBucket, ParkingTable, Scheduler};

use crate::support::alone::aborted_alone;
use crate::support::{GIB, MIB, fixed, options};

/// Sleeps last until the threads are woken.
const IS_PATIENT: bool = !cfg!(feature = "spurious_wakeups");

fn machine(cpus: u16, park_limit: Duration) -> Machine<Tiny> {
    Machine::new(Config { cpus, park_limit, memory: MIB, ..Config::default() })
}

fn patient(cpus: u16) -> Machine<Tiny> {
    machine(cpus, Config::default().park_limit)
}

fn await_sleepers<A: Walk>(machine: &Machine<A>, threads: u32) {
    while machine.parked_threads() < threads {
        thread::yield_now();
    }
}

#[test]
#[cfg_attr(feature = "spurious_wakeups", ignore = "a sleep ends by itself")]
fn a_lost_thread_ends_the_process_with_names() {
    let name = "a_lost_thread_ends_the_process_with_names";
    let Some(text) = aborted_alone(module_path!(), name) else {
        let machine = machine(4, Duration::from_millis(100));
        let word = AtomicU32::new(0x1234);
        eprintln!("the word is at {:#x}.", std::ptr::from_ref(&word).addr());
        thread::scope(|scope| {
            let sleep = || machine.on_cpu(Cpu(3), || machine.park(&word, 0x1234));
            thread::Builder::new().name("sleeper".into()).spawn_scoped(scope, sleep).unwrap();
        });
        return;
    };
    let word = text.split("the word is at ").nth(1).and_then(|rest| rest.split('.').next());
    let says = format!(
        "thread `sleeper` on CPU 3 sleeps on the word at {} while it holds 0x1234, which it does",
        word.unwrap()
    );
    assert!(text.contains(&says), "{text}");
}

/// The hosted machine with a table in place of its own way to park. Without one, every wake-up is
/// lost.
struct Other {
    machine: Machine<X86_64<4>>,
    table: Option<&'static ParkingTable<'static, Threads>>,
}

// SAFETY: every method forwards to the machine, which meets the obligations; `park` may block
// forever.
unsafe impl Platform for Other {
    type Arch = X86_64<4>;
    type Mutex = <Machine<X86_64<4>> as Platform>::Mutex;
    type SpinLock = <Machine<X86_64<4>> as Platform>::SpinLock;

    pass_on! { machine:
        direct_map zero copy invalidate invalidate_local invalidate_kernel publish_entries cpu relax
        enter_read leave_read synchronize grace_period is_over seed fatal_signal
        allocation_may_wait frames_released
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        match self.table {
            Some(table) => {
                let _ = table.park(word, expected);
            }
            None => self.machine.park(word, expected),
        }
    }

    fn unpark(&self, word: *const AtomicU32) {
        if let Some(table) = self.table {
            table.unpark(word);
        }
    }
}

/// The threads of two CPUs, which sleep by the means of the standard library.
struct Threads {
    machine: Machine<X86_64<4>>,
    asleep: [Mutex<Option<Thread>>; 2],
}

impl Scheduler for Threads {
    type Interrupts = AlwaysOff;

    fn current(&self) -> Option<usize> {
        Some(self.machine.cpu().0.into())
    }

    fn sleep(&self, is_woken: impl Fn() -> bool) -> ControlFlow<()> {
        *self.asleep[usize::from(self.machine.cpu().0)].lock().unwrap() = Some(thread::current());
        if !is_woken() {
            thread::park();
        }
        ControlFlow::Continue(())
    }

    fn wake(&self, thread: usize) {
        if let Some(thread) = self.asleep[thread].lock().unwrap().take() {
            thread.unpark();
        }
    }
}

/// A thread that faults waits for its handler, and the handler waits for the next fault.
#[test]
fn calls_wait_in_a_table_of_parts() {
    const PAGES: u64 = 100;
    static BUCKETS: [ParkingBucket; 2] = [const { ParkingBucket::new() }; 2];
    static RECORDS: [ParkedThread; 2] = [const { ParkedThread::new() }; 2];
    let machine = Machine::new(Config { cpus: 2, ..Config::default() });
    let threads = Threads { machine: machine.clone(), asleep: Default::default() };
    let table = &*Box::leak(Box::new(ParkingTable::new(threads, &BUCKETS, &RECORDS)));
    let (first, count) = machine.frames();
    let frames = [FrameRange { first, count }];
    let platform = Other { machine: machine.clone(), table: Some(table) };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(platform, &frames) }.unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
    space.mmap(&fixed(GIB, PAGES * 4096)).unwrap();
    let at = |page| VirtAddr(GIB + page * 4096);
    space.register_userfault(&fd, at(0), PAGES * 4096, UserfaultModes::MISSING).unwrap();
    let handle = || {
        for page in 0..PAGES {
            fd.read().unwrap();
            space.handler(&fd).fill_zeroes(at(page), 4096, FillMode::empty()).unwrap();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| machine.on_cpu(Cpu(1), handle));
        while table.parked() == 0 {
            thread::yield_now();
        }
        for page in 0..PAGES {
            space.fault(at(page), Access::Read).unwrap();
        }
    });
    assert_eq!(table.parked(), 0);
}

#[test]
#[cfg_attr(feature = "spurious_wakeups", ignore = "a sleep ends by itself")]
fn a_lost_wake_up_ends_the_process() {
    let name = "a_lost_wake_up_ends_the_process";
    let Some(text) = aborted_alone(module_path!(), name) else {
        let park_limit = Duration::from_secs(5);
        let machine = Machine::new(Config { cpus: 2, park_limit, ..Config::default() });
        let (first, count) = machine.frames();
        let frames = [FrameRange { first, count }];
        let platform = Other { machine: machine.clone(), table: None };
        // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
        let memory = unsafe { Memory::new(platform, &frames) }.unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        space.mmap(&fixed(GIB, 4096)).unwrap();
        let at = VirtAddr(GIB);
        space.register_userfault(&fd, at, 4096, UserfaultModes::MISSING).unwrap();
        thread::scope(|scope| {
            let handler = scope.spawn(|| machine.on_cpu(Cpu(1), || fd.read().map(drop)));
            await_sleepers(&machine, 1);
            // The handler does not process this message.
            let _ = space.fault(at, Access::Read);
            let _ = handler.join();
        });
        return;
    };
    let lost: Vec<_> = text.lines().filter(|line| line.ends_with("a lost wake-up")).collect();
    assert!(lost.len() == 1 && lost[0].contains("on CPU 1 sleeps on the word"), "{text}");
}

#[test]
fn a_sleep_lasts_until_the_word_is_unparked() {
    for _ in 0..100 {
        let (machine, word) = (patient(2), AtomicU32::new(0));
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                machine.park(&word, 0);
                word.load(Ordering::Acquire)
            });
            if IS_PATIENT {
                await_sleepers(&machine, 1);
                // Wakes the threads of another word.
                machine.unpark(&AtomicU32::new(0));
                machine.kill(Cpu(1));
                assert_eq!(machine.parked_threads(), 1);
            }
            word.store(1, Ordering::Release);
            machine.unpark(&word);
            assert!(sleeper.join().unwrap() == 1 || !IS_PATIENT);
        });
        // The word does not have the expected value.
        machine.park(&word, 0);
        assert_eq!(machine.parked_threads(), 0);
    }
}

#[test]
fn only_the_killed_thread_wakes_up() {
    for _ in 0..100 {
        let (machine, word) = (patient(3), AtomicU32::new(0));
        let (machine, word) = (&machine, &word);
        thread::scope(|scope| {
            let wait = |cpu| {
                machine.on_cpu(Cpu(cpu), || {
                    while word.load(Ordering::Acquire) == 0 && !machine.fatal_signal() {
                        machine.park(word, 0);
                    }
                    machine.fatal_signal()
                })
            };
            let killed = scope.spawn(move || wait(1));
            let other = scope.spawn(move || wait(2));
            if IS_PATIENT {
                await_sleepers(machine, 2);
            }
            machine.kill(Cpu(1));
            assert!(killed.join().unwrap());
            assert!(!other.is_finished());
            word.store(1, Ordering::Release);
            machine.unpark(word);
            assert!(!other.join().unwrap());
        });
    }
}

#[test]
fn a_counted_signal_reaches_a_thread_that_sleeps() {
    for fatal in [false, true] {
        let (machine, word) = (patient(2), AtomicU32::new(0));
        let send = |questions| match fatal {
            true => machine.fatal_signal_after(questions),
            false => machine.signal_after(questions),
        };
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                machine.on_cpu(Cpu(1), || {
                    let mut questions = 0;
                    while !machine.signal() {
                        questions += 1;
                        machine.park(&word, 0);
                    }
                    questions
                })
            });
            if IS_PATIENT {
                await_sleepers(&machine, 1);
            }
            send(Some(3));
            let questions = sleeper.join().unwrap();
            // One check precedes the signal, unless the thread was late.
            assert!((3..=4).contains(&questions) || !IS_PATIENT, "{questions} questions");
        });
        send(None);
    }
}

/// The callers have to check their words again.
#[test]
#[cfg(feature = "spurious_wakeups")]
fn with_spurious_wakeups_a_sleep_ends_by_itself() {
    let (machine, word) = (patient(1), AtomicU32::new(0));
    (0..100).for_each(|_| machine.park(&word, 0));
}
