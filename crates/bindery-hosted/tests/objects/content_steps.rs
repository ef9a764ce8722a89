//! A file whose pager answers late, for reads and writes in steps.

use std::thread;

use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    CallPoll, CallReady, CallWait, Error, Memory, Object, PagerError, PendingRead, PendingWrite,
    ReadPattern, Step,
};
use bindery_hosted::{Asked, Config, DelayedFiles, Machine};

use crate::support::objects::{PAGE, use_object_order};
use crate::support::{MIB, audit, memory_with};

pub type A = X86_64<4>;
pub type P = Machine<A>;
pub type File<'m> = Object<'m, P>;
pub type Result<T> = std::result::Result<T, Error>;

pub const PAGES: u64 = 24;
pub const SIZE: usize = (PAGES * PAGE) as usize - 100;

pub struct Fixture<'m> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<P>,
    pub pager: &'m DelayedFiles,
}

/// Runs `scenario` with a file of [`SIZE`] bytes, none in memory, whose pager keeps reads.
/// Afterwards nothing of the file is left.
#[track_caller]
pub fn with_file<R>(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>) -> R) -> R {
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_object_order(&memory, 0);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    pager.files.put(1, &bytes(SIZE));
    let result = {
        let mut file = memory.file(&pager, 1, SIZE as u64).unwrap();
        // Nothing is read ahead.
        file.set_read_pattern(ReadPattern::Random);
        let holder = file.clone();
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager };
        let result = scenario(&fixture, file);
        audit(&machine, &memory, &[]);
        // Requests without a waiting call are answered at the end.
        pager.keep_writes(false);
        pager.answer_all(&memory);
        pager.keep_reads(false);
        drop(holder);
        result
    };
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    result
}

/// As [`with_file`], with the odd pages in memory, so each even page is requested by itself.
#[track_caller]
pub fn with_half<R>(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>) -> R) -> R {
    with_file(|fixture, file| {
        fixture.pager.keep_reads(false);
        for page in (1..PAGES).step_by(2) {
            file.read(page * PAGE, &mut [0]).unwrap();
        }
        fixture.pager.keep_reads(true);
        scenario(fixture, file)
    })
}

pub fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / PAGE as usize * 7 + at % 251) as u8).collect()
}

impl<'m> Fixture<'m> {
    /// Polls a wait to its end, while the pager answers late.
    #[track_caller]
    pub fn until_ready(&self, wait: CallWait<'_, 'm, P>) -> CallReady<'m, P> {
        until_answered(self.memory, self.pager, wait)
    }

    /// Waits in another thread.
    pub fn in_thread(&self, wait: CallWait<'_, 'm, P>) -> CallReady<'m, P> {
        thread::scope(|scope| {
            let waits = scope.spawn(|| self.machine.on_cpu(Cpu(1), || wait.wait()));
            while !waits.is_finished() {
                self.pager.answer_all(self.memory);
                thread::yield_now();
            }
            waits.join().unwrap()
        })
    }

    /// Polls a wait and, if the wait needs a thread, blocks in this one.
    pub fn somehow(&self, mut wait: CallWait<'_, 'm, P>) -> CallReady<'m, P> {
        loop {
            match wait.poll() {
                CallPoll::Ready(ready) => return ready,
                CallPoll::Pending(_) => _ = self.pager.answer_all(self.memory),
                CallPoll::NeedsThread => break,
            }
        }
        self.pager.keep_reads(false);
        let ready = wait.wait();
        self.pager.keep_reads(true);
        ready
    }

    /// Runs `work` while the pager answers at once.
    pub fn at_once<R>(&self, work: impl FnOnce() -> R) -> R {
        self.pager.keep_reads(false);
        self.pager.answer_all(self.memory);
        let result = work();
        self.pager.keep_reads(true);
        result
    }

    /// Runs all steps. Returns the number of waits.
    #[track_caller]
    pub fn finish(
        &self,
        mut step: impl FnMut(Option<CallReady<'m, P>>) -> Result<Step<'m, 'm, P>>,
    ) -> Result<usize> {
        let mut ready = None;
        for waits in 0.. {
            match step(ready.take())? {
                Step::Done => return Ok(waits),
                Step::Blocked(wait) => ready = Some(self.until_ready(wait)),
            }
        }
        unreachable!()
    }

    pub fn read(&self, file: &File<'m>, offset: u64, into: &mut [u8]) -> Result<usize> {
        let mut read = PendingRead::new(file, offset, into.len())?;
        self.finish(|ready| read.step(ready, into))?;
        Ok(read.moved())
    }

    pub fn write(&self, file: &File<'m>, offset: u64, from: &[u8]) -> Result<usize> {
        let mut write = PendingWrite::new(file, offset, from.len())?;
        self.finish(|ready| write.step(ready, from))?;
        Ok(write.moved())
    }

    #[track_caller]
    pub fn answer(&self, page: u64, answer: std::result::Result<(), PagerError>) {
        let kept = self.pager.try_take(|asked| asked.first == page);
        self.pager.answer(self.memory, kept.expect("a read of the page"), answer);
    }

    /// The pages requested from the pager, in order.
    pub fn asked(&self) -> Vec<(u64, u64)> {
        self.pager.log().iter().map(|&Asked { first, pages, .. }| (first, pages)).collect()
    }

    /// The number of even pages requested from the pager.
    pub fn asked_even(&self) -> usize {
        self.asked().iter().filter(|(first, _)| first % 2 == 0).count()
    }
}

/// Polls a wait to its end, while the pager answers late.
#[track_caller]
pub fn until_answered<'m>(
    memory: &'m Memory<P>,
    pager: &DelayedFiles,
    mut wait: CallWait<'_, 'm, P>,
) -> CallReady<'m, P> {
    loop {
        match wait.poll() {
            CallPoll::Ready(ready) => return ready,
            CallPoll::Pending(on) => {
                assert!(!on.has_changed());
                assert!(pager.answer_all(memory) > 0, "what does it wait for?");
                assert!(on.has_changed());
            }
            // Waiting for the mutex, for example at a first write, needs no thread.
            CallPoll::NeedsThread => panic!("a thread is needed"),
        }
    }
}

#[track_caller]
pub fn blocked<'m>(step: Result<Step<'m, 'm, P>>) -> CallWait<'m, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

#[track_caller]
pub fn begin(wait: &mut CallWait<'_, '_, P>) {
    assert!(matches!(wait.poll(), CallPoll::Pending(_)));
}

#[track_caller]
pub fn ready<'m>(wait: &mut CallWait<'_, 'm, P>) -> CallReady<'m, P> {
    match wait.poll() {
        CallPoll::Ready(ready) => ready,
        other => panic!("it is not over: {other:?}"),
    }
}

/// Ranges that begin and end anywhere, including beyond the end of the file.
pub const RANGES: [(u64, usize); 8] = [
    (0, SIZE),
    (0, SIZE + 5000),
    (1, 1),
    (4000, 200),
    (PAGE, 4 * PAGE as usize),
    (PAGE + 7, 70_000),
    (SIZE as u64 - 10, 50),
    (SIZE as u64 + 10, 50),
];
