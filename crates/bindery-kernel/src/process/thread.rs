//! A thread: a kernel stack, the registers of its program, and its signals.

use alloc::sync::Arc;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use bindery::{Pauses, VmallocOptions};

use crate::arch::{self, Registers};
use crate::errno::Errno;
use crate::heap;
use crate::memory::Pages;
use crate::sync::Mutex;

use super::credentials::{self, Credentials};
use super::limits::Faults;
use super::name::ShortName;
use super::scheduler;
use super::signal::ThreadSignals;
use super::state::Process;

/// Work of a thread before it returns to its program: bits of [`Thread::work`].
pub mod work {
    /// A signal may be waiting.
    pub const SIGNAL: u32 = 1 << 0;
    /// The thread's time slice is over.
    pub const RESCHEDULE: u32 = 1 << 1;
    /// The thread has to end.
    pub const END: u32 = 1 << 2;
}

/// The number of no CPU, for a thread that does not run.
pub(super) const NO_CPU: u32 = u32::MAX;

/// The size of a kernel stack, in bytes.
const STACK_SIZE: usize = 32 << 10;

/// The number of stacks kept for reuse, since a new thread often follows the end of another.
const SPARES: usize = 4;

static SPARE_STACKS: Mutex<[Option<Pages>; SPARES]> = Mutex::new([const { None }; SPARES]);

/// Frees the stacks that are kept for reuse.
pub(super) fn free_spare_stacks() {
    let stacks = core::mem::take(&mut *SPARE_STACKS.lock());
    drop(stacks);
}

/// A kernel stack. `None` only during the drop.
struct KernelStack(Option<Pages>);

impl KernelStack {
    fn new() -> Result<Self, Errno> {
        if let Some(stack) = SPARE_STACKS.lock().iter_mut().find_map(Option::take) {
            return Ok(Self(Some(stack)));
        }
        // A fault on the stack would be handled on that same stack.
        let options = VmallocOptions { pauses: Pauses::Never, ..VmallocOptions::default() };
        Pages::new(STACK_SIZE, &options).map(|stack| Self(Some(stack)))
    }

    fn top(&self) -> *mut u8 {
        self.0.as_ref().map_or(core::ptr::null_mut(), Pages::end)
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        let mut spares = SPARE_STACKS.lock();
        if let Some(place) = spares.iter_mut().find(|place| place.is_none()) {
            *place = self.0.take();
        }
    }
}

/// The saved state of a thread that does not run.
pub(super) struct Saved {
    pub(super) context: arch::Context,
    pub(super) floating_point: arch::FloatingPoint,
    pub(super) thread_pointer: u64,
}

/// The files of a thread. The file layer defines their type and casts to it without a check.
///
/// # Safety
/// 1. Exactly one type implements the trait.
pub unsafe trait ThreadFiles: Send + Sync {}

/// A thread of a program.
pub struct Thread {
    id: AtomicU32,
    /// The process that the thread belongs to.
    pub process: Arc<Process>,
    /// Bits of [`work`].
    pub work: AtomicU32,
    /// The thread's signals.
    pub signals: Mutex<ThreadSignals>,
    /// The thread's descriptors and current directory, until it ends; usually shared with all
    /// threads of its process.
    files: Mutex<Option<Arc<dyn ThreadFiles>>>,
    credentials: Mutex<Credentials>,
    /// The thread's short name, unless it is the first thread, whose name the process holds.
    pub(super) own_name: Mutex<ShortName>,
    /// The address of the word that is zeroed, and whose futex is woken, when the thread ends; 0
    /// for none.
    pub clear_child_id: AtomicU64,
    /// The head of its list of robust futexes; 0 for none.
    pub robust_list: AtomicU64,
    /// The deadline of a call that is restarted after a signal without a handler; 0 for none.
    pub(super) deadline_of_restart: AtomicU64,
    /// CPU time up to the thread's last yield of the CPU, in nanoseconds.
    pub(super) run_time: AtomicU64,
    /// Faults up to the thread's last yield of the CPU.
    pub(super) faults_before: AtomicU64,
    /// Faults with a read of content.
    pub major_faults: AtomicU64,
    /// The number of freed victims when the thread last ran out of memory.
    pub(super) victims_seen: AtomicU64,
    /// Whether the thread sleeps; owned by the scheduler.
    pub(super) asleep: AtomicBool,
    /// The CPU that runs the thread, or [`NO_CPU`]; owned by the scheduler, which keeps it only if
    /// several CPUs run threads.
    pub(super) runs_on: AtomicU32,
    /// One bit for each CPU that may run the thread.
    pub(super) allowed: AtomicU64,
    stack: KernelStack,
    saved: UnsafeCell<Saved>,
}

// SAFETY: `saved` is touched only by the scheduler, while the thread does not run, or by the
// running thread for itself; all accesses are by the holder of the kernel's lock, without
// preemption.
unsafe impl Send for Thread {}
// SAFETY: as above.
unsafe impl Sync for Thread {}

impl Thread {
    /// A thread that starts in its program with `registers`. It sleeps until it is woken
    /// (`scheduler::wake`).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(
        id: u32,
        process: Arc<Process>,
        files: Arc<dyn ThreadFiles>,
        registers: &Registers,
        floating_point: arch::FloatingPoint,
        thread_pointer: u64,
        signals: ThreadSignals,
    ) -> Result<Arc<Self>, Errno> {
        let stack = KernelStack::new()?;
        heap::room(size_of::<Self>())?;
        // SAFETY: the stack is large enough, and no thread runs on it.
        let context = unsafe { arch::prepare(stack.top(), registers) };
        let thread =
            Self::make(id, process, stack, Saved { context, floating_point, thread_pointer });
        *thread.signals.lock() = signals;
        *thread.files.lock() = Some(files);
        *thread.credentials.lock() = credentials::credentials();
        if scheduler::is_in_thread() {
            let allowed = scheduler::current().allowed.load(Ordering::Relaxed);
            thread.allowed.store(allowed, Ordering::Relaxed);
        }
        Ok(thread)
    }

    /// A thread without a program that runs `entry` in the kernel. It sleeps until it is woken.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn of_kernel(
        process: Arc<Process>,
        entry: extern "C" fn() -> !,
    ) -> Result<Arc<Self>, Errno> {
        let stack = KernelStack::new()?;
        heap::room(size_of::<Self>())?;
        // SAFETY: no thread runs on the stack.
        let context = unsafe { arch::prepare_kernel(stack.top(), entry) };
        let floating_point = arch::FloatingPoint::new();
        Ok(Self::make(0, process, stack, Saved { context, floating_point, thread_pointer: 0 }))
    }

    fn make(id: u32, process: Arc<Process>, stack: KernelStack, saved: Saved) -> Arc<Self> {
        Arc::new(Self {
            id: AtomicU32::new(id),
            process,
            work: AtomicU32::new(0),
            signals: Mutex::default(),
            files: Mutex::default(),
            credentials: Mutex::new(Credentials::root()),
            own_name: Mutex::default(),
            clear_child_id: AtomicU64::new(0),
            robust_list: AtomicU64::new(0),
            deadline_of_restart: AtomicU64::new(0),
            run_time: AtomicU64::new(0),
            faults_before: AtomicU64::new(0),
            major_faults: AtomicU64::new(0),
            victims_seen: AtomicU64::new(0),
            asleep: AtomicBool::new(true),
            runs_on: AtomicU32::new(NO_CPU),
            allowed: AtomicU64::new(u64::MAX),
            stack,
            saved: UnsafeCell::new(saved),
        })
    }

    /// The thread's number (`gettid`).
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// The thread's files; `None` once the thread has ended.
    pub fn files(&self) -> Option<Arc<dyn ThreadFiles>> {
        self.files.lock().clone()
    }

    /// Calls an action with the thread's files, or with `None` once the thread has ended. The files
    /// are locked, so the action must neither sleep nor drop a description.
    #[inline]
    pub fn with_files<R>(&self, act: impl FnOnce(Option<&dyn ThreadFiles>) -> R) -> R {
        act(self.files.lock().as_deref())
    }

    /// Replaces or removes the thread's files. The old files are closed unless another thread
    /// shares them.
    pub fn set_files(&self, files: Option<Arc<dyn ThreadFiles>>) {
        let old = core::mem::replace(&mut *self.files.lock(), files);
        drop(old);
    }

    /// The thread's credentials.
    pub fn credentials(&self) -> Credentials {
        self.credentials.lock().clone()
    }

    /// Replaces the thread's credentials and returns the old ones.
    pub(super) fn replace_credentials(&self, new: Credentials) -> Credentials {
        core::mem::replace(&mut *self.credentials.lock(), new)
    }

    /// Sets the thread's number to its process's number, because it is the only remaining thread
    /// and runs a new program.
    pub(super) fn become_first(&self) {
        self.id.store(self.process.id, Ordering::Relaxed);
    }

    /// CPU time in nanoseconds.
    pub fn processor_time(&self) -> u64 {
        self.run_time.load(Ordering::Relaxed) + scheduler::time_of_this_run(self)
    }

    /// The number of the thread's faults.
    pub fn faults(&self) -> Faults {
        let all = self.faults_before.load(Ordering::Relaxed) + scheduler::faults_of_this_run(self);
        let major = self.major_faults.load(Ordering::Relaxed);
        // Copies of the kernel may read content, too.
        Faults { minor: all.saturating_sub(major), major }
    }

    pub(super) fn saved(&self) -> *mut Saved {
        self.saved.get()
    }

    pub(super) fn stack_top(&self) -> *mut u8 {
        self.stack.top()
    }

    /// # Panics
    /// If an access at `address` faulted because the kernel stack has overflowed, which is a defect
    /// of the kernel. Takes no lock, because the running thread may hold any.
    pub fn check_stack(&self, address: u64) {
        let runs_over = self.stack.0.as_ref().is_some_and(|stack| stack.is_right_in_front(address));
        assert!(!runs_over, "the kernel stack of thread {} has run over", self.id());
    }
}
