//! A thread: a kernel stack, the registers of its program, and what it waits for.

use alloc::sync::Arc;
use core::alloc::Layout;
use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::arch::{self, Registers};
use crate::errno::Errno;
use crate::heap;
use crate::sync::Mutex;

use super::signal::ThreadSignals;
use super::{Process, scheduler};

/// What a thread has to do before it goes back to its program: bits of [`Thread::work`].
pub mod work {
    /// A signal may be waiting.
    pub const SIGNAL: u32 = 1 << 0;
    /// Its turn is over.
    pub const RESCHEDULE: u32 = 1 << 1;
    /// It has to end.
    pub const END: u32 = 1 << 2;
}

/// The size of a kernel stack, in bytes.
const STACK_SIZE: usize = 32 << 10;

/// Stands at the lower end of each kernel stack; gone where the stack was too short.
const CANARY: u64 = 0x6b63_6174_735f_6f6e;

/// A kernel stack.
struct KernelStack(NonNull<u8>);

// SAFETY: the memory belongs to the stack alone.
unsafe impl Send for KernelStack {}
// SAFETY: nothing can be done with a shared reference but learn the address.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    const LAYOUT: Layout = match Layout::from_size_align(STACK_SIZE, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("a constant"),
    };

    fn new() -> Result<Self, Errno> {
        let stack = heap::try_allocate(Self::LAYOUT).ok_or(Errno::ENOMEM)?;
        // SAFETY: the lowest word of what was just allocated.
        unsafe { stack.cast::<u64>().write(CANARY) };
        Ok(Self(stack))
    }

    fn top(&self) -> *mut u8 {
        // SAFETY: one past the end of the allocation.
        unsafe { self.0.as_ptr().add(STACK_SIZE) }
    }

    fn is_whole(&self) -> bool {
        // SAFETY: the lowest word of the allocation; nobody writes there as long as all is well.
        unsafe { self.0.cast::<u64>().read_volatile() == CANARY }
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; the thread that ran on it is gone.
        unsafe { alloc::alloc::dealloc(self.0.as_ptr(), Self::LAYOUT) };
    }
}

/// What is saved of a thread while it does not run.
pub(super) struct Saved {
    pub(super) context: arch::Context,
    pub(super) floating_point: arch::FloatingPoint,
    pub(super) thread_pointer: u64,
}

/// A thread of a program.
pub struct Thread {
    id: AtomicU32,
    /// The process that it belongs to.
    pub process: Arc<Process>,
    /// Bits of [`work`].
    pub work: AtomicU32,
    /// Its signals.
    pub signals: Mutex<ThreadSignals>,
    /// Where a zero is written, and a futex woken, when it ends; 0 for nowhere.
    pub clear_child_id: AtomicU64,
    /// The head of its list of robust futexes; 0 for none.
    pub robust_list: AtomicU64,
    /// The deadline of the call that is made again after a signal without a handler; 0 for none.
    pub(super) deadline_of_restart: AtomicU64,
    /// Nanoseconds that it had run when it last gave the CPU away.
    pub(super) run_time: AtomicU64,
    /// Whether it sleeps; owned by the scheduler.
    pub(super) asleep: AtomicBool,
    stack: KernelStack,
    saved: UnsafeCell<Saved>,
}

// SAFETY: `saved` is touched by the scheduler alone, while the thread does not run, or by the
// thread itself about itself; all on one CPU, without preemption.
unsafe impl Send for Thread {}
// SAFETY: as above.
unsafe impl Sync for Thread {}

impl Thread {
    /// A thread that will begin in its program with `registers`, and sleeps until it is woken
    /// (`scheduler::wake`).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(
        id: u32,
        process: Arc<Process>,
        registers: &Registers,
        floating_point: arch::FloatingPoint,
        thread_pointer: u64,
        signals: ThreadSignals,
    ) -> Result<Arc<Self>, Errno> {
        let stack = KernelStack::new()?;
        // SAFETY: the stack is new, large enough, and nobody runs on it.
        let context = unsafe { arch::prepare(stack.top(), registers) };
        Ok(Arc::new(Self {
            id: AtomicU32::new(id),
            process,
            work: AtomicU32::new(0),
            signals: Mutex::new(signals),
            clear_child_id: AtomicU64::new(0),
            robust_list: AtomicU64::new(0),
            deadline_of_restart: AtomicU64::new(0),
            run_time: AtomicU64::new(0),
            asleep: AtomicBool::new(true),
            stack,
            saved: UnsafeCell::new(Saved { context, floating_point, thread_pointer }),
        }))
    }

    /// Its number (`gettid`).
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// Gives it the number of its process: it is the only thread left, and runs a new program.
    pub(super) fn become_first(&self) {
        self.id.store(self.process.id, Ordering::Relaxed);
    }

    /// Nanoseconds that it has run.
    pub fn processor_time(&self) -> u64 {
        self.run_time.load(Ordering::Relaxed) + scheduler::time_of_this_run(self)
    }

    pub(super) fn saved(&self) -> *mut Saved {
        self.saved.get()
    }

    pub(super) fn stack_top(&self) -> *mut u8 {
        self.stack.top()
    }

    /// # Panics
    /// Where the kernel stack has run over: a defect of the kernel.
    pub(super) fn check_stack(&self) {
        assert!(self.stack.is_whole(), "the kernel stack of thread {} has run over", self.id());
    }
}
