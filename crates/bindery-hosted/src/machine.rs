//! [`Machine`]: memory, CPUs and MMUs, combined into an implementation of the core's [`Platform`].

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use bindery::addr::{Frame, PAGE_SHIFT};
use bindery::arch::Level;
#[cfg(feature = "measure")]
use bindery::platform::Work;
use bindery::platform::{Cpu, CpuSet, GracePeriod, Invalidation, MAX_CPUS, Platform};
use bindery::sync::LockApi05;
use bindery::{FrameRange, FramesError, Memory};
use parking_lot::Mutex;

use crate::collections::Collections;
use crate::config::Config;
use crate::control::BrokenControl;
use crate::cpu::{self, OnCpu, Seats};
use crate::instructions::Instructions;
use crate::memory::{DirectMap, PhysicalMemory};
use crate::mmu::walk::World;
use crate::mmu::{Translation, Walk};
use crate::pager_thread;
use crate::parking::Parking;
use crate::signals::Signals;
use crate::stats::{Requests, Statistics};
use crate::tlb::Tlb;
use crate::violation::{Log, Violation};

/// A machine inside this process. Clones refer to the same machine, so one can be passed to
/// `bindery::Memory` while others observe it.
pub struct Machine<A: Walk> {
    /// A copy of the direct map in `shared`, which saves an indirection.
    pub(crate) direct_map: DirectMap,
    pub(crate) shared: Arc<Shared<A>>,
}

impl<A: Walk> Clone for Machine<A> {
    fn clone(&self) -> Self {
        Self { direct_map: self.direct_map, shared: Arc::clone(&self.shared) }
    }
}

impl<A: Walk> fmt::Debug for Machine<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("architecture", &A::NAME)
            .field("first", &self.direct_map.first())
            .field("frames", &self.direct_map.frames())
            .field("cpus", &self.cpus())
            .finish_non_exhaustive()
    }
}

/// The state that all clones of a machine share.
pub(crate) struct Shared<A: Walk> {
    pub(crate) seats: Seats,
    /// The MMU and TLB of each CPU.
    pub(crate) tlbs: Box<[Padded<Mutex<Tlb<A>>>]>,
    /// Whether CPUs record the roots that they load ([`Machine::load_root`]).
    pub(crate) records_roots: AtomicBool,
    pub(crate) log: Log,
    requests: Requests,
    pub(crate) signals: Signals,
    pub(crate) parking: Parking,
    collections: Collections,
    seed: u64,
    protection_keys: u8,
    branch_target_identification: bool,
    page_based_memory_types: bool,
    gibibyte_leaves: bool,
    broken: Option<BrokenControl>,
    /// Calls of [`Platform::out_of_memory`].
    ran_out: AtomicU64,
    pub(crate) instructions: Instructions,
    /// Whether [`Machine::memory`] has passed on the frames.
    handed_over: AtomicBool,
    /// Lives as long as any clone, so pointers into it stay valid as long.
    memory: PhysicalMemory,
}

/// A value in its own cache lines.
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

impl<A: Walk> Machine<A> {
    /// Builds a machine.
    pub fn new(config: Config) -> Self {
        let Config { memory, contents, cpus, tlb, first_frame, seed, .. } = config;
        assert!((1..=MAX_CPUS).contains(&usize::from(cpus)), "a machine with {cpus} CPUs");
        let frames = u32::try_from(memory >> PAGE_SHIFT).ok().filter(|frames| *frames > 0);
        let frames = frames.unwrap_or_else(|| panic!("a machine with {memory} bytes of memory"));
        assert!(first_frame.0.checked_add(frames).is_some(), "frame numbers beyond 32 bits");
        let memory = PhysicalMemory::reserve(first_frame, frames, contents);
        let tlbs = (0..cpus).map(|cpu| Padded(Mutex::new(Tlb::new(tlb, Cpu(cpu))))).collect();
        let shared = Shared {
            seats: Seats::new(cpus),
            tlbs,
            records_roots: AtomicBool::new(false),
            log: Log::default(),
            requests: Requests::default(),
            signals: Signals::new(cpus),
            parking: Parking::new((config.park_limit, config.brief_park), seed),
            collections: Collections::default(),
            seed,
            protection_keys: config.protection_keys,
            branch_target_identification: config.branch_target_identification,
            page_based_memory_types: config.page_based_memory_types,
            gibibyte_leaves: config.gibibyte_leaves,
            broken: config.broken,
            ran_out: AtomicU64::new(0),
            instructions: Instructions::new(config.instructions),
            handed_over: AtomicBool::new(false),
            memory,
        };
        Self { direct_map: shared.memory.direct_map(), shared: Arc::new(shared) }
    }

    /// All frames of the machine, managed by the core; if the machine has several CPUs, all are
    /// online ([`Memory::cpu_online`]). For a platform around the machine, the caller makes a
    /// [`Memory`] of [`Machine::frames`] itself.
    ///
    /// # Errors
    /// [`FramesError::TooSmall`] if the frames cannot hold their own metadata.
    ///
    /// Panics if the frames were passed on before: they belong to one memory.
    ///
    /// ```should_panic
    /// # use bindery_hosted::{Config, Machine};
    /// let machine = Machine::<bindery::arch::X86_64>::new(Config::default());
    /// let (first, second) = (machine.memory(), machine.memory());
    /// ```
    pub fn memory(&self) -> Result<Memory<Self>, FramesError> {
        let first_time = !self.shared.handed_over.swap(true, Ordering::Relaxed);
        assert!(first_time, "the machine's frames belong to another memory");
        let (first, count) = self.frames();
        // SAFETY: 1. only the core, on behalf of programs and the MMU, uses the machine's frames,
        // and no other memory is made here; 2. no CPU has a table yet.
        let memory = unsafe { Memory::new(self.clone(), &[FrameRange { first, count }]) }?;
        if self.cpus() > 1 {
            let online = (0..self.cpus()).take_while(|cpu| memory.cpu_online(Cpu(*cpu)).is_ok());
            let online = online.count() as u16;
            if online < self.cpus() {
                // With little memory either all CPUs are online or none.
                for cpu in 0..online {
                    let _was_online = memory.cpu_offline(Cpu(cpu));
                }
            }
        }
        Ok(memory)
    }

    /// The machine's memory, which is one range: its first frame and the number of frames.
    pub fn frames(&self) -> (Frame, u32) {
        (self.direct_map.first(), self.direct_map.frames())
    }

    /// The number of CPUs.
    pub fn cpus(&self) -> u16 {
        self.shared.seats.count()
    }

    /// Binds the calling thread to `cpu` until the guard is dropped. An unbound thread is CPU 0
    /// whenever it uses the machine. Panics if another thread is on the CPU.
    pub fn bind(&self, cpu: Cpu) -> OnCpu<'_> {
        self.shared.seats.bind(cpu)
    }

    /// Runs `work` on `cpu`; see [`Machine::bind`].
    pub fn on_cpu<R>(&self, cpu: Cpu, work: impl FnOnce() -> R) -> R {
        let _on_cpu = self.bind(cpu);
        work()
    }

    /// The statistics so far.
    pub fn statistics(&self) -> Statistics {
        let tlbs = self.shared.tlbs.iter().map(|tlb| Statistics::from(tlb.0.lock().counts));
        tlbs.fold(self.shared.requests.read(), |sum, counts| sum + counts)
    }

    /// Compares all entries of strict TLBs with the current tables and reports stale entries. Call
    /// it while no call into the core runs: during a call, TLBs may be out of date.
    pub fn audit(&self) {
        for tlb in &self.shared.tlbs {
            tlb.0.lock().audit(self.world());
        }
    }

    /// The violations found so far (the first thousand).
    pub fn violations(&self) -> Vec<Violation> {
        self.shared.log.all()
    }

    /// Like [`Machine::violations`], but also clears the list.
    pub fn take_violations(&self) -> Vec<Violation> {
        self.shared.log.take()
    }

    /// Audits, and panics with all violations if there are any.
    #[track_caller]
    pub fn assert_clean(&self) {
        self.audit();
        let total = self.shared.log.total();
        if total > 0 {
            let lines: Vec<_> =
                self.violations().iter().take(20).map(|v| format!("  {v}")).collect();
            panic!("{total} violation(s):\n{}", lines.join("\n"));
        }
    }

    /// The number of synchronizations of instruction caches:
    /// [`Platform::synchronize_instructions`], and [`Machine::synchronize_program`].
    pub fn instruction_synchronizations(&self) -> u64 {
        self.shared.instructions.calls()
    }

    /// Synchronizes a frame, as a program does after it has written code.
    pub fn synchronize_program(&self, frame: Frame) {
        self.shared.instructions.synchronize(&self.direct_map, frame, 1);
    }

    /// The translations of an address space in the strict TLB of `cpu`, in ascending order.
    pub fn cached(&self, cpu: Cpu, root: Frame) -> Vec<Translation> {
        self.tlb(cpu).lock().cached(root)
    }

    /// The number of threads that sleep in [`Platform::park`]. The next wake-up of a word finds
    /// every thread counted on it.
    pub fn parked_threads(&self) -> u32 {
        self.shared.parking.asleep()
    }

    /// The number of calls of [`Platform::unpark`]. The core makes none for a word on which no thread
    /// or task is counted as waiting.
    pub fn unparks(&self) -> u64 {
        self.shared.parking.unparks()
    }

    /// Makes [`Platform::collect_memory`] call `collect`, like an embedder that frees its caches.
    pub fn on_collect(&self, collect: impl Fn() + Send + Sync + 'static) {
        self.shared.collections.set(Box::new(collect));
    }

    /// The number of calls of [`Platform::collect_memory_later`].
    pub fn collections_put_off(&self) -> u64 {
        self.shared.collections.put_off()
    }

    /// The number of calls of [`Platform::out_of_memory`]: reclaim had found nothing to free, and a
    /// call or a fault failed.
    pub fn ran_out_of_memory(&self) -> u64 {
        self.shared.ran_out.load(Ordering::Relaxed)
    }

    /// Returns the work of the calls on the calling thread's CPU since the last `take_work` there:
    /// the entries that they examined ([`Platform::worked`]) and the read sections that they
    /// entered. From here on, a thread on that CPU that exceeds `most` panics at its next read
    /// section; 0 means no limit.
    #[cfg(feature = "measure")]
    pub fn take_work(&self, most: u64) -> u64 {
        self.shared.seats.take_work(most)
    }

    pub(crate) fn world(&self) -> World<'_> {
        World { memory: &self.direct_map, log: &self.shared.log, broken: self.shared.broken }
    }

    #[inline]
    pub(crate) fn broken(&self) -> Option<BrokenControl> {
        self.shared.broken
    }

    #[inline]
    pub(crate) fn tlb(&self, cpu: Cpu) -> &Mutex<Tlb<A>> {
        &self.shared.tlbs[usize::from(cpu.0)].0
    }
}

// SAFETY: the obligations of `Platform`, by number.
// 1. `DirectMap::at` gives each frame its own page of the region, in order, and checks that the
//    frame is in it. The region lives as long as any clone of the machine, and this crate accesses
//    it only on behalf of programs, of a kernel that uses its mappings, and as the MMU.
// 2. `invalidate` and `invalidate_kernel` take the lock of each CPU's TLB, under which every access
//    is made from translation to last byte, and remove the entries that the contract requires. A
//    CPU's later walk synchronizes with the invalidation through the lock, so it sees the entries
//    as written.
// 3. `Seats::synchronize` and `Seats::is_over` know every section that was announced before them;
//    see `cpu.rs`.
// 4. `Seats` gives a thread a seat only when no other has it, and there are at most `MAX_CPUS`.
// 5. The machine has no kernel root.
unsafe impl<A: Walk> Platform for Machine<A> {
    type Arch = A;
    type Mutex = LockApi05<parking_lot::RawMutex>;
    // This lock spins for a while before it sleeps. Pure spinning would waste a time slice of the
    // host whenever the holder's thread is preempted. No interrupts exist that would need to be
    // disabled.
    type SpinLock = LockApi05<parking_lot::RawMutex>;

    #[inline]
    fn direct_map(&self, frame: Frame) -> NonNull<u8> {
        self.direct_map.at(frame)
    }

    fn zero(&self, first: Frame, count: u32) {
        self.direct_map.zero(first, count);
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        self.direct_map.copy(from, to, count);
    }

    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        if self.broken() == Some(BrokenControl::Invalidation) {
            return;
        }
        self.speculate();
        let here = self.cpu();
        let mut messages = 0;
        debug_assert!(cpus.iter().all(|cpu| cpu.0 < self.cpus()), "CPUs that do not exist");
        for cpu in (0..self.cpus()).map(Cpu).filter(|cpu| cpus.contains(*cpu)) {
            messages += u64::from(cpu != here);
            // The sender handles the message itself. Holding the TLB lock corresponds to having
            // interrupted the CPU between two instructions.
            self.tlb(cpu).lock().invalidate(self.world(), root, what);
        }
        self.shared.requests.invalidation(messages, what.range.pages());
    }

    fn invalidate_local(&self, root: Frame, what: &Invalidation) {
        if self.broken() == Some(BrokenControl::Invalidation) {
            return;
        }
        self.tlb(self.cpu()).lock().invalidate(self.world(), root, what);
        self.shared.requests.local(what.range.pages());
    }

    fn invalidate_kernel(&self, root: Frame, what: &Invalidation) {
        if self.broken() == Some(BrokenControl::Invalidation) {
            return;
        }
        // No address space shares the kernel's tables here (`Platform::kernel_root` returns none),
        // so their entries are cached only under their own root.
        for cpu in (0..self.cpus()).map(Cpu) {
            self.tlb(cpu).lock().invalidate(self.world(), root, what);
        }
        // The caller's own CPU needs no message.
        let messages = u64::from(self.cpus()) - 1;
        self.shared.requests.invalidation(messages, what.range.pages());
    }

    fn synchronize_instructions(&self, first: Frame, count: u32) {
        self.shared.instructions.synchronize(&self.direct_map, first, count);
    }

    #[inline]
    fn publish_entries(&self) {
        // Walkers load entries with acquire ordering, and memory is coherent.
        fence(Ordering::Release);
    }

    #[inline]
    fn cpu(&self) -> Cpu {
        self.shared.seats.cpu()
    }

    #[inline]
    fn relax(&self) {
        cpu::relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        assert!(
            !self.shared.seats.inside(),
            "a thread sleeps inside a read section on CPU {}",
            self.cpu().0
        );
        self.shared.parking.park(self.cpu(), word, expected, &self.shared.signals);
    }

    fn park_briefly(&self, word: &AtomicU32, expected: u32) {
        assert!(!self.shared.seats.inside(), "a thread sleeps briefly inside a read section");
        self.shared.parking.park_briefly((self.cpu(), word, expected), &self.shared.signals);
    }

    fn works_for_pager(&self) -> bool {
        pager_thread::is_one()
    }

    fn unpark(&self, word: *const AtomicU32) {
        self.shared.parking.unpark(word);
    }

    #[inline]
    fn enter_read(&self) {
        self.shared.seats.enter();
    }

    #[inline]
    fn leave_read(&self) {
        self.shared.seats.leave();
    }

    fn synchronize(&self) {
        self.shared.seats.synchronize();
    }

    fn fatal_signal(&self) -> bool {
        assert!(!self.shared.seats.inside(), "a call that would stop inside a read section");
        self.shared.signals.waits() || self.shared.signals.has_killed(self.cpu())
    }

    fn signal(&self) -> bool {
        self.shared.signals.other_waits() || self.fatal_signal()
    }

    fn thread(&self) -> u32 {
        u32::from(self.cpu().0) + 1
    }

    fn seed(&self) -> u64 {
        self.shared.seed
    }

    fn protection_keys(&self) -> u8 {
        self.shared.protection_keys
    }

    fn branch_target_identification(&self) -> bool {
        self.shared.branch_target_identification
    }

    fn page_based_memory_types(&self) -> bool {
        self.shared.page_based_memory_types
    }

    fn largest_shown_leaf(&self) -> Level<A> {
        if self.shared.gibibyte_leaves { Level::PUD } else { Level::PMD }
    }

    #[inline]
    fn grace_period(&self) -> GracePeriod {
        self.shared.seats.grace_period()
    }

    #[inline]
    fn is_over(&self, period: GracePeriod) -> bool {
        self.shared.seats.is_over(period)
    }

    fn allocation_may_wait(&self) {
        assert!(
            !self.shared.seats.inside(),
            "an allocation that may wait for memory inside a read section"
        );
    }

    fn might_sleep(&self) {
        assert!(!self.shared.seats.inside(), "a thread that might sleep inside a read section");
    }

    fn yield_if_due(&self) {
        self.allocation_may_wait();
    }

    fn collect_memory(&self) {
        assert!(!self.shared.seats.inside(), "memory is collected inside a read section");
        self.shared.collections.collect();
    }

    fn collect_memory_later(&self) {
        self.shared.collections.note_put_off();
    }

    fn out_of_memory(&self) -> bool {
        self.shared.ran_out.fetch_add(1, Ordering::Relaxed);
        false
    }

    #[cfg(feature = "measure")]
    #[inline]
    fn worked(&self, work: Work) {
        self.shared.seats.worked(work.entries);
    }

    fn frames_released(&self, first: Frame, count: u32) {
        self.shared.instructions.released(first, count);
        for tlb in &self.shared.tlbs {
            tlb.0.lock().released(self.world(), first, count);
        }
    }
}
