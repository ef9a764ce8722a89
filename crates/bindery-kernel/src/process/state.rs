//! A process and its changing state.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::ops::Add;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::memory::Space;
use crate::sync::Mutex;
use crate::time;

use super::credentials::{Capability, Credentials};
use super::facts::ProgramFacts;
use super::limits::{self, Faults, Limit};
use super::name::{self, ShortName};
use super::thread::Thread;
use super::wait_queue::WaitQueue;
use super::{barriers, memory_shortage, parking, signal, timer};

/// A process (Linux: a thread group).
pub struct Process {
    /// The process's number (`getpid`).
    pub id: u32,
    /// The start time, in nanoseconds since power-on.
    pub start_time: u64,
    pub(super) space: Mutex<Option<Arc<Space>>>,
    pub(super) actions: Mutex<Arc<signal::Actions>>,
    /// Signals that any thread of the process may handle.
    pub(super) pending: Mutex<signal::Pending>,
    pub(super) state: Mutex<State>,
    pub(super) facts: Mutex<ProgramFacts>,
    pub(super) limits: Mutex<limits::Limits>,
    pub(super) standing: memory_shortage::Standing,
    pub(super) timers: Mutex<BTreeMap<i32, timer::Timer>>,
    pub(super) processor_timers: Mutex<timer::ProcessorTimers>,
    /// The registrations for `membarrier`; processes that share the memory share them.
    pub(super) barriers: Mutex<barriers::Barriers>,
    /// The credentials of the process's first thread.
    pub(super) credentials: Mutex<Credentials>,
    /// Whether other processes of the same user may inspect this one (`PR_SET_DUMPABLE`).
    pub(super) dumpable: AtomicBool,
    /// Threads that wait for a child.
    pub(super) children_changed: WaitQueue,
    /// Set when the process no longer uses the memory that `vfork` lent it.
    pub(super) has_own_memory: AtomicBool,
    /// Threads that wait for the process to continue, to release the memory of `vfork`, or to
    /// become single-threaded.
    pub(super) life_changed: WaitQueue,
}

/// The state of a process that its lock protects.
pub(super) struct State {
    pub(super) parent: Weak<Process>,
    pub(super) children: Vec<Arc<Process>>,
    pub(super) threads: Vec<Arc<Thread>>,
    pub(super) group: u32,
    pub(super) session: u32,
    /// The short name of its first thread, which remains after that thread ends.
    pub(super) name: ShortName,
    /// The signal to its parent at its end; 0 for none.
    pub(super) exit_signal: u32,
    /// The signal sent to the process when its parent ends; 0 for none.
    pub(super) parent_end_signal: u32,
    /// The exit status in the format of `wait4`; set when the process begins to end.
    pub(super) status: Option<u32>,
    /// The status with which the first thread ended. It becomes the process's status, unless all
    /// threads end at once.
    pub(super) first_thread_status: u32,
    /// Whether only the process's status is left.
    pub(super) is_ended: bool,
    /// The signal that has stopped the process.
    pub(super) stopped: Option<u32>,
    /// A state change that `wait4` has not reported yet.
    pub(super) report: Option<Report>,
    /// CPU time of the children that were waited for, in nanoseconds.
    pub(super) children_time: u64,
    /// Faults of the same children.
    pub(super) children_faults: Faults,
    /// Faults of its ended threads.
    pub(super) ended_threads_faults: Faults,
    /// CPU time of its ended threads, in nanoseconds.
    pub(super) ended_threads_time: u64,
    /// The peak of resident pages in memory that the process has left, by `execve` or at its end.
    pub(super) left_memory_peak: u64,
    /// The largest peak of resident pages among the descendants that were waited for.
    pub(super) children_peak: u64,
    pub(super) has_executed: bool,
    /// Whether the process's parent has ended, so that the first process became its parent.
    pub(super) is_orphan: bool,
}

/// A state change of a process that has not ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Report {
    Stopped(u32),
    Continued,
}

impl Process {
    /// The process's memory.
    ///
    /// # Panics
    /// If the process has ended. For another process use [`Process::try_space`].
    pub fn space(&self) -> Arc<Space> {
        self.try_space().expect("a running process has memory")
    }

    /// The process's memory; `None` once the process has ended.
    pub fn try_space(&self) -> Option<Arc<Space>> {
        self.space.lock().clone()
    }

    /// The facts about the process's program.
    pub fn facts(&self) -> ProgramFacts {
        self.facts.lock().clone()
    }

    /// Reads the facts about the process's program without copying them.
    pub fn with_facts<R>(&self, look: impl FnOnce(&ProgramFacts) -> R) -> R {
        look(&self.facts.lock())
    }

    /// The short name (`comm`) of the process's first thread, without the zero.
    pub fn name(&self) -> Vec<u8> {
        name::text(self.state.lock().name)
    }

    /// Changes the short name of the process's first thread; the name is cut to 15 bytes.
    pub fn set_name(&self, name: &[u8]) {
        self.state.lock().name = name::cut(name);
    }

    /// The parent's number; 0 for the first process.
    pub fn parent_id(&self) -> u32 {
        self.parent().map_or(0, |parent| parent.id)
    }

    /// The number of the process's group.
    pub fn group(&self) -> u32 {
        self.state.lock().group
    }

    /// The number of the process's session.
    pub fn session(&self) -> u32 {
        self.state.lock().session
    }

    /// The process's state as `/proc/PID/stat` shows it: `R`, `S`, `T` or `Z`.
    pub fn letter(&self) -> char {
        let state = self.state.lock();
        let sleeps = |thread: &Arc<Thread>| thread.asleep.load(Ordering::Relaxed);
        match &*state {
            State { is_ended: true, .. } => 'Z',
            State { stopped: Some(_), .. } => 'T',
            State { threads, .. } if threads.iter().all(sleeps) => 'S',
            _ => 'R',
        }
    }

    /// The state of one of the process's threads: `R`, `S`, or `D` during a wait in the core that a
    /// signal may not end.
    pub fn letter_of(&self, id: u32) -> char {
        let letter = self.letter();
        let thread = {
            let state = self.state.lock();
            state.threads.iter().find(|thread| thread.id() == id).cloned()
        };
        match thread {
            Some(thread) if matches!(letter, 'R' | 'S') => {
                match (thread.asleep.load(Ordering::Relaxed), parking::is_parked(&thread)) {
                    (false, _) => 'R',
                    (true, true) => 'D',
                    (true, false) => 'S',
                }
            }
            _ => letter,
        }
    }

    /// The numbers of the process's threads.
    pub fn thread_ids(&self) -> Vec<u32> {
        self.state.lock().threads.iter().map(|thread| thread.id()).collect()
    }

    /// The number of its threads that belong to this real user. An ended process counts as one.
    pub(super) fn threads_of(&self, user: u32) -> usize {
        let state = self.state.lock();
        if state.threads.is_empty() {
            return usize::from(self.credentials.lock().user.real == user);
        }
        state.threads.iter().filter(|thread| thread.credentials().user.real == user).count()
    }

    /// CPU time of all its threads, ended ones included, in nanoseconds.
    pub fn processor_time(&self) -> u64 {
        let state = self.state.lock();
        let running: u64 = state.threads.iter().map(|thread| thread.processor_time()).sum();
        state.ended_threads_time + running
    }

    /// As [`Process::processor_time`], for the children that were waited for.
    pub fn children_time(&self) -> u64 {
        self.state.lock().children_time
    }

    /// Faults of all its threads, ended ones included.
    pub fn faults(&self) -> Faults {
        let state = self.state.lock();
        state
            .threads
            .iter()
            .map(|thread| thread.faults())
            .fold(state.ended_threads_faults, Faults::add)
    }

    /// As [`Process::faults`], for the children that were waited for.
    pub fn children_faults(&self) -> Faults {
        self.state.lock().children_faults
    }

    /// The peak of resident pages in the process's memory, or in memory that the process has left.
    pub fn peak(&self) -> u64 {
        let now = self.try_space().map_or(0, |space| space.resident_peak());
        self.state.lock().left_memory_peak.max(now)
    }

    /// As [`Process::peak`], the largest among the descendants that were waited for.
    pub fn children_peak(&self) -> u64 {
        self.state.lock().children_peak
    }

    /// Records the peak of memory that the process leaves.
    pub(super) fn note_left_memory(&self, space: &Space) {
        let peak = space.resident_peak();
        let mut state = self.state.lock();
        state.left_memory_peak = state.left_memory_peak.max(peak);
    }

    /// A limit (`RLIMIT_*`).
    pub fn limit(&self, resource: u32) -> Limit {
        self.limits.lock().get(resource)
    }

    /// The credentials of the process's first thread, which remain valid after that thread ends.
    pub fn credentials(&self) -> Credentials {
        self.credentials.lock().clone()
    }

    pub(super) fn set_credentials(&self, new: Credentials) {
        *self.credentials.lock() = new;
    }

    /// Whether other processes of the same user may inspect this one.
    pub fn is_dumpable(&self) -> bool {
        self.dumpable.load(Ordering::Relaxed)
    }

    pub(super) fn set_dumpable(&self, dumpable: bool) {
        self.dumpable.store(dumpable, Ordering::Relaxed);
    }

    /// Passes its limits on memory to its address space.
    pub(super) fn apply_limits(&self) {
        if let Some(space) = self.try_space() {
            let unlimited = self.credentials().can(Capability::LockMemory);
            let limits = self.limits.lock().clone();
            limits.apply(&space, unlimited);
        }
    }

    /// The signals pending for the whole process, and those that its first thread blocks, ignores
    /// and catches.
    pub fn signal_sets(&self) -> [u64; 4] {
        let blocked = self.threads().first().map_or(0, |thread| thread.signals.lock().blocked);
        let (ignored, caught) = self.actions.lock().sets();
        [self.pending.lock().set(), blocked, ignored, caught]
    }

    /// The first of the process's threads that has not ended.
    pub fn first_thread(&self) -> Option<Arc<Thread>> {
        self.state.lock().threads.first().cloned()
    }

    pub(super) fn threads(&self) -> Vec<Arc<Thread>> {
        self.state.lock().threads.clone()
    }

    pub(super) fn parent(&self) -> Option<Arc<Process>> {
        self.state.lock().parent.upgrade()
    }

    pub(super) fn actions(&self) -> Arc<signal::Actions> {
        self.actions.lock().clone()
    }

    /// A process without threads, which is in no table yet.
    pub(super) fn new(id: u32, of: ProcessParts) -> Arc<Self> {
        Arc::new(Self {
            id,
            start_time: time::now(),
            space: Mutex::new(of.space),
            actions: Mutex::new(of.actions),
            pending: Mutex::default(),
            state: Mutex::new(of.state),
            facts: Mutex::new(of.facts),
            limits: Mutex::new(of.limits),
            standing: of.standing,
            barriers: Mutex::new(of.barriers),
            credentials: Mutex::new(of.credentials),
            dumpable: AtomicBool::new(of.dumpable),
            timers: Mutex::default(),
            processor_timers: Mutex::default(),
            children_changed: WaitQueue::new(),
            has_own_memory: AtomicBool::new(false),
            life_changed: WaitQueue::new(),
        })
    }
}

/// The parts of a new process.
pub(super) struct ProcessParts {
    /// `None` for the kernel's own processes.
    pub(super) space: Option<Arc<Space>>,
    pub(super) actions: Arc<signal::Actions>,
    pub(super) state: State,
    pub(super) facts: ProgramFacts,
    pub(super) limits: limits::Limits,
    pub(super) standing: memory_shortage::Standing,
    pub(super) barriers: barriers::Barriers,
    pub(super) credentials: Credentials,
    pub(super) dumpable: bool,
}

impl State {
    /// The state of a child of `parent`, or of the first process.
    pub(super) fn new(parent: Option<&Arc<Process>>, exit_signal: u32) -> Self {
        let (group, session, name) = match parent {
            Some(parent) => {
                let state = parent.state.lock();
                (state.group, state.session, state.name)
            }
            None => (1, 1, [0; 16]),
        };
        Self {
            parent: parent.map(Arc::downgrade).unwrap_or_default(),
            children: Vec::new(),
            threads: Vec::new(),
            group,
            session,
            name,
            exit_signal,
            parent_end_signal: 0,
            status: None,
            first_thread_status: 0,
            is_ended: false,
            stopped: None,
            report: None,
            children_time: 0,
            children_faults: Faults::default(),
            left_memory_peak: 0,
            children_peak: 0,
            ended_threads_faults: Faults::default(),
            ended_threads_time: 0,
            has_executed: false,
            is_orphan: false,
        }
    }
}
