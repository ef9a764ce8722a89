//! The process that runs a sequence on Linux, and its child. Between the operations, the process's
//! own memory does not change: observations go to memory shared with the waiting process.

use std::io;

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::super::names::{NOTHING, RLIMIT_AS, RLIMIT_DATA, RLIMIT_MEMLOCK, UNLIMITED};
use super::super::observation::{
    FILE_PAGES_LOOKED_AT, LONGEST, Outcome, digest_of_bytes, header, put_bytes, significant,
    stamped,
};
use super::super::operation::{Operation, OperationKind};
use super::super::place::{ALL_FILES, PAGE, SCRATCH, USERFAULTFD, in_region};
use super::super::swapped::free_wiped;
use super::super::words::{Shared, Sink};
use super::access;
use super::fixture::hard_limit;
use super::look::Eyes;

/// Message to the child: observe your memory and exit.
const END: u64 = u64::MAX;

/// Message to the parent, combined with a step number: the child exited at that step.
const EXITED: u64 = 1 << 32;

/// One of the two processes.
pub struct Runner<'a> {
    pub operations: &'a [Operation],
    pub shared: Shared<'a>,
    pub eyes: Eyes,
    /// The buffer for reads and writes of files.
    pub buffer: &'a mut [u8],
    /// The argument structure of the last request on the userfaultfd.
    pub words: [u64; 5],
    /// 0 for the first process, 1 for its child.
    pub number: u64,
    pub other: Option<Other>,
}

/// The channel to the other process. The processes alternate: each wakes the other, then waits
/// until it is woken.
pub struct Other {
    hear: i32,
    tell: i32,
    /// The child's process id, in the parent.
    child: i32,
}

/// The next state of the acting process.
enum Next {
    /// The process continues here.
    Step(usize),
    /// The process has ended.
    Over,
}

/// Makes a system call. Returns its result; errors are negative.
pub fn call(number: libc::c_long, a: [u64; 6]) -> i64 {
    // SAFETY: calls of a sequence change memory only in the region, which holds no data of this
    // process, or in `SCRATCH`; the generator ensures this. Other calls affect only files and
    // limits.
    let returned = unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]) };
    if returned == -1 {
        return -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or_default());
    }
    returned
}

fn number_of(operation: OperationKind) -> libc::c_long {
    match operation {
        OperationKind::Mmap => libc::SYS_mmap,
        OperationKind::Munmap => libc::SYS_munmap,
        OperationKind::Mremap => libc::SYS_mremap,
        OperationKind::Mprotect => libc::SYS_mprotect,
        OperationKind::Madvise => libc::SYS_madvise,
        OperationKind::Brk => libc::SYS_brk,
        OperationKind::Mlock => libc::SYS_mlock,
        OperationKind::Mlock2 => libc::SYS_mlock2,
        OperationKind::Munlock => libc::SYS_munlock,
        OperationKind::Mlockall => libc::SYS_mlockall,
        OperationKind::Munlockall => libc::SYS_munlockall,
        OperationKind::Mincore => libc::SYS_mincore,
        OperationKind::Msync => libc::SYS_msync,
        OperationKind::Mseal => libc::SYS_mseal,
        OperationKind::Ftruncate => libc::SYS_ftruncate,
        OperationKind::Fallocate => libc::SYS_fallocate,
        other => unreachable!("{other:?} is no system call of that name"),
    }
}

/// Drops or regains the capability that lets the process lock memory without limit.
fn be_limited(limited: bool) {
    let mut sets = capabilities(None).expect("capabilities");
    sets.effective.set(CapabilitySet::IPC_LOCK, !limited);
    set_capabilities(None, sets).expect("a capability that is permitted");
}

fn returned(value: i64) -> Outcome {
    Outcome::Returned(value)
}

/// Zeroes a page. Returns whether all of it could be read and written.
fn wipe(page: u64) -> bool {
    (page..page + PAGE).step_by(8).all(|at| match access::load(at) {
        Ok(0) => true,
        Ok(_) => access::store(at, 0).is_ok(),
        Err(_) => false,
    })
}

fn pipe() -> (i32, i32) {
    let mut ends = [0; 2];
    // SAFETY: there is room for the two descriptors.
    let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(made, 0, "pipe");
    (ends[0], ends[1])
}

fn tell(to: i32, message: u64) {
    // SAFETY: the message has eight bytes.
    let written = unsafe { libc::write(to, (&raw const message).cast(), 8) };
    assert_eq!(written, 8, "the other process has gone");
}

fn hear(from: i32) -> u64 {
    let mut message = 0_u64;
    // SAFETY: there is room for eight bytes.
    let read = unsafe { libc::read(from, (&raw mut message).cast(), 8) };
    assert_eq!(read, 8, "the other process has gone");
    message
}

impl Runner<'_> {
    /// Runs from the first operation to the end of the scenario.
    pub fn run(mut self) {
        let operations = self.operations;
        let mut step = 0;
        loop {
            let next = match operations.get(step) {
                Some(operation) => self.act(step, operation),
                None => self.finish(),
            };
            match next {
                Next::Step(next) => step = next,
                Next::Over => return,
            }
        }
    }

    fn act(&mut self, step: usize, operation: &Operation) -> Next {
        match operation.operation {
            OperationKind::Fork => self.fork(step),
            OperationKind::Switch => {
                self.observe(step, Outcome::Returned(0));
                let Some(other) = &self.other else { return Next::Step(step + 1) };
                tell(other.tell, step as u64 + 1);
                self.wait()
            }
            OperationKind::Exit => self.exit(step),
            _ => {
                let outcome = self.perform(operation);
                self.begin(step, outcome);
                self.put_what_it_read(operation, outcome);
                self.eyes.look(&mut self.shared);
                Next::Step(step + 1)
            }
        }
    }

    /// Waits for this process's turn.
    fn wait(&mut self) -> Next {
        let Some(other) = &self.other else { return Next::Over };
        let message = hear(other.hear);
        if message == END {
            self.look_at_contents(self.operations.len());
            return Next::Over;
        }
        let step = (message & !EXITED) as usize;
        if message & EXITED == 0 {
            return Next::Step(step);
        }
        self.bury_the_child();
        if step == self.operations.len() {
            return self.finish();
        }
        self.observe(step, Outcome::Returned(0));
        Next::Step(step + 1)
    }

    fn fork(&mut self, step: usize) -> Next {
        if self.other.is_none() {
            let (to_child, to_parent) = (pipe(), pipe());
            // SAFETY: the child is a copy that continues below. It allocates nothing, so it needs
            // no lock that another thread of this process may hold.
            let child = unsafe { libc::fork() };
            assert!(child >= 0, "fork");
            if child == 0 {
                self.number = 1;
                self.other = Some(Other { hear: to_child.0, tell: to_parent.1, child: 0 });
                self.eyes.open();
                return self.wait();
            }
            self.other = Some(Other { hear: to_parent.0, tell: to_child.1, child });
        }
        self.observe(step, Outcome::Returned(0));
        Next::Step(step + 1)
    }

    /// The child, if one exists, exits; the parent continues.
    fn exit(&mut self, step: usize) -> Next {
        if self.number == 1 {
            return self.exit_as_child(step);
        }
        self.end_the_child();
        self.observe(step, Outcome::Returned(0));
        Next::Step(step + 1)
    }

    /// Ends the scenario: the child observes its memory and exits, then the parent observes its
    /// own.
    fn finish(&mut self) -> Next {
        let step = self.operations.len();
        if self.number == 1 {
            return self.exit_as_child(step);
        }
        self.end_the_child();
        self.look_at_contents(step);
        Next::Over
    }

    fn exit_as_child(&mut self, step: usize) -> Next {
        self.look_at_contents(self.operations.len());
        if let Some(other) = &self.other {
            tell(other.tell, step as u64 | EXITED);
        }
        Next::Over
    }

    fn end_the_child(&mut self) {
        if let Some(other) = &self.other {
            tell(other.tell, END);
            self.bury_the_child();
        }
    }

    /// Waits until the child has exited and is reaped.
    fn bury_the_child(&mut self) {
        let Some(other) = self.other.take() else { return };
        let mut status = 0;
        // SAFETY: there is room for the status.
        let waited = unsafe { libc::waitpid(other.child, &mut status, 0) };
        assert_eq!((waited, status), (other.child, 0), "the child has failed");
        for end in [other.hear, other.tell] {
            // SAFETY: these ends are no longer used.
            unsafe { libc::close(end) };
        }
    }

    fn begin(&mut self, step: usize, outcome: Outcome) {
        for word in header(step, self.number, outcome) {
            self.shared.put(word);
        }
    }

    fn observe(&mut self, step: usize, outcome: Outcome) {
        self.begin(step, outcome);
        self.shared.put(0);
        self.eyes.look(&mut self.shared);
    }

    fn look_at_contents(&mut self, step: usize) {
        self.begin(step, Outcome::Looked);
        let count_at = self.shared.len();
        self.shared.put(0);
        self.eyes.put_contents(&mut self.shared);
        self.put_files();
        self.shared.amend(count_at, (self.shared.len() - count_at - 1) as u64);
        self.eyes.look(&mut self.shared);
    }

    /// Writes the contents of the first pages of all files.
    fn put_files(&mut self) {
        for (number, file) in (0..).zip(ALL_FILES) {
            for page in 0..FILE_PAGES_LOOKED_AT {
                let at = page * PAGE;
                self.buffer[..PAGE as usize].fill(0);
                let read =
                    call(libc::SYS_pread64, [file, self.buffer.as_ptr() as u64, PAGE, at, 0, 0]);
                if read > 0 {
                    self.shared.put(number << 32 | at);
                    self.shared.put(digest_of_bytes(&self.buffer[..PAGE as usize]));
                }
            }
        }
    }

    fn perform(&mut self, operation: &Operation) -> Outcome {
        let a = operation.arguments;
        if let Some((request, _)) = operation.operation.userfault_request() {
            self.words = operation.userfault_words();
            let words = self.words.as_mut_ptr() as u64;
            return returned(call(libc::SYS_ioctl, [USERFAULTFD, request.into(), words, 0, 0, 0]));
        }
        match operation.operation {
            OperationKind::Load => access::load(a[0]).into(),
            OperationKind::Store => access::store(a[0], a[1]).map(|()| 0).into(),
            OperationKind::Mmap => self.map(libc::SYS_mmap, a, a[1]),
            OperationKind::Mremap => self.map(libc::SYS_mremap, a, a[2]),
            OperationKind::ProcessMadvise => {
                let count = operation.ranges.len() as u64;
                for (at, (start, length)) in (SCRATCH..).step_by(16).zip(&operation.ranges) {
                    for (at, word) in [(at, *start), (at + 8, *length)] {
                        assert_eq!(access::store(at, word), Ok(()), "the vector is written");
                    }
                }
                returned(call(libc::SYS_process_madvise, [a[0], SCRATCH, count, a[1], a[2], 0]))
            }
            OperationKind::AddSeals => {
                returned(call(libc::SYS_fcntl, [a[0], libc::F_ADD_SEALS as u64, a[1], 0, 0, 0]))
            }
            OperationKind::GetSeals => {
                returned(call(libc::SYS_fcntl, [a[0], libc::F_GET_SEALS as u64, 0, 0, 0, 0]))
            }
            OperationKind::ReadAt => {
                let length = a[2].min(LONGEST);
                let into = self.buffer.as_mut_ptr() as u64;
                returned(call(libc::SYS_pread64, [a[0], into, length, a[1], 0, 0]))
            }
            OperationKind::WriteAt => {
                let length = a[2].min(LONGEST);
                for (index, byte) in self.buffer[..length as usize].iter_mut().enumerate() {
                    *byte = stamped(a[3], index);
                }
                let from = self.buffer.as_ptr() as u64;
                returned(call(libc::SYS_pwrite64, [a[0], from, length, a[1], 0, 0]))
            }
            OperationKind::Limit => self.limit(a[0], a[1]),
            OperationKind::SwapTo | OperationKind::Reclaim => returned(0),
            OperationKind::FreeWiped => {
                let advise =
                    |at, length, advice| call(libc::SYS_madvise, [at, length, advice, 0, 0, 0]);
                returned(free_wiped([a[0], a[1], a[2]], wipe, advise))
            }
            operation => returned(call(number_of(operation), a)),
        }
    }

    /// A call that may choose the address of a mapping: unmaps it if it lies outside the region.
    fn map(&self, number: libc::c_long, arguments: [u64; 6], length: u64) -> Outcome {
        let at = call(number, arguments);
        if at < 0 || in_region(at as u64) {
            return Outcome::Returned(at);
        }
        let length = length.next_multiple_of(PAGE);
        call(libc::SYS_munmap, [at as u64, length, 0, 0, 0, 0]);
        Outcome::Elsewhere
    }

    fn limit(&mut self, resource: u64, pages: u64) -> Outcome {
        if resource == RLIMIT_MEMLOCK {
            be_limited(pages != UNLIMITED);
        }
        let used = match resource {
            RLIMIT_AS => self.eyes.usage().mapped,
            RLIMIT_DATA => self.eyes.usage().data,
            _ => self.eyes.usage().locked,
        };
        let wanted = match pages {
            UNLIMITED => u64::MAX,
            NOTHING => 0,
            more => (used + more) * PAGE,
        };
        let highest = hard_limit(resource as libc::__rlimit_resource_t);
        let limit = libc::rlimit { rlim_cur: wanted.min(highest), rlim_max: highest };
        let limit = (&raw const limit) as u64;
        returned(call(libc::SYS_setrlimit, [resource, limit, 0, 0, 0, 0]))
    }

    /// Writes the words that an operation has read, after their number.
    fn put_what_it_read(&mut self, operation: &Operation, outcome: Outcome) {
        let count_at = self.shared.len();
        self.shared.put(0);
        if let Some((_, words @ 4..)) = operation.operation.userfault_request() {
            self.shared.put(self.words[words - 1]);
            self.shared.amend(count_at, 1);
        }
        let Outcome::Returned(value @ 0..) = outcome else { return };
        let a = operation.arguments;
        match operation.operation {
            OperationKind::Mincore if a[2] == SCRATCH => {
                let bytes = a[1].div_ceil(PAGE);
                for at in (SCRATCH..SCRATCH + bytes).step_by(8) {
                    let word = access::load(at).unwrap_or_default();
                    self.shared.put(significant(word, SCRATCH + bytes - at));
                }
            }
            OperationKind::ReadAt => {
                put_bytes(&self.buffer[..value as usize], |word| self.shared.put(word));
            }
            _ => return,
        }
        self.shared.amend(count_at, (self.shared.len() - count_at - 1) as u64);
    }
}
