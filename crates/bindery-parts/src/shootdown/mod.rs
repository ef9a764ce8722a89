//! [`Shootdowns`]: invalidations of TLBs on other CPUs, by interrupts, and only on CPUs that need
//! them.
//!
//! | file | contents |
//! |---|---|
//! | `counts` | what CPUs have counted |
//! | `queue` | the requests to one CPU |
//! | `root_word` | the root that a CPU has loaded |
//!
//! # Which CPUs are interrupted
//! A word for each CPU says which program's root the CPU has loaded (`root_word`). A CPU that runs
//! the root is interrupted. A CPU that keeps the translations of the root under a tag, with the
//! *kernel's* root loaded, is not: the thread marks the tag as stale, and the CPU flushes it before
//! it loads the root again. (It must not keep the program's root loaded. Its walker would read
//! tables speculatively that are about to be freed.) A CPU that has loaded another root is not
//! interrupted either, since it flushes the tag when it comes back.
//!
//! # Orders
//! A CPU announces that it switches, executes a fence, and loads the root; then it announces the
//! root. A thread writes entries, executes a fence, and reads the words. So if the thread does not
//! see that the CPU switches, the CPU's walker sees the new entries. While a CPU switches, it is
//! interrupted for every root:
//! 1. CPU A announces root Q, while its walker still reads the tables of root P.
//! 2. CPU B unmaps pages of P, finds Q, interrupts no CPU, and frees a table.
//! 3. CPU A's walker reads the freed table, and may even set an accessed bit in it.
//!
//! # Waiting
//! Requests are sent to all CPUs before the thread waits for the first of them. A thread that waits
//! serves its own CPU's queue, so two CPUs that wait for each other with interrupts off both
//! finish. For the same reason, a CPU that waits for a spin lock with interrupts off calls
//! [`OnCpu::serve`] ([`Platform::relax`](bindery::Platform::relax)).

mod counts;
#[cfg(all(test, loom))]
mod loom_model;
mod queue;
mod root_word;
#[cfg(all(test, not(loom)))]
mod tests;

use core::fmt;

use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, Invalidation, MAX_CPUS};

use crate::atomic::{Ordering, constructor};
use crate::cpu_mask::CpuMask;
use crate::rule::{self, Rule};

pub use counts::ShootdownCounts;
use counts::{Counts, add};
use queue::{Queue, Request, Taken, Ticket};
use root_word::{Claim, RootWord, State};

/// The TLB of the caller's CPU, and interrupts to others: the hooks of [`Shootdowns`].
///
/// All functions are called on the CPU of the [`OnCpu`] that they were passed with.
///
/// # Context
/// Context: any. The functions never sleep, and are called with interrupts on or off and in
/// interrupt handlers.
pub trait LocalTlb {
    /// Interrupts another CPU. Its handler calls [`OnCpu::serve`]. The hook orders the caller's
    /// earlier stores before the interrupt (x86-64 with x2APIC: `mfence; lfence`; AArch64:
    /// `dsb ishst`; RISC-V: `fence w, o`).
    fn send(&self, cpu: Cpu);

    /// Invalidates translations of `root`, which this CPU has loaded, under its current tag.
    fn invalidate(&self, root: Frame, what: &Invalidation);

    /// Invalidates translations of the kernel's addresses, global ones too, under every tag.
    fn invalidate_kernel(&self, what: &Invalidation);

    /// Invalidates all translations and all intermediate entries, global ones too, under every tag.
    fn flush_all(&self);

    /// Orders all accesses before the call before all accesses and instruction fetches after it
    /// (x86-64: a write of a control register; AArch64: `dsb sy; isb`; RISC-V: `fence; fence.i`).
    fn order(&self);

    /// One round of waiting for another CPU.
    fn relax(&self) {
        core::hint::spin_loop();
    }
}

/// The translations that a CPU has of the root that it is about to load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Translations {
    /// Valid: the load may keep those of the root's tag (x86-64: bit 63 of `CR3` set).
    Kept,
    /// Possibly invalid: the load flushes those of the root's tag, with intermediate entries.
    Stale,
}

/// The memory of one CPU in [`Shootdowns`], some cache lines.
///
/// ```
/// use bindery_parts::ShootdownCpu;
///
/// static CPUS: [ShootdownCpu; 4] = [const { ShootdownCpu::new() }; 4];
/// assert!(size_of_val(&CPUS) <= 4 * 768);
/// ```
#[repr(align(128))]
#[derive(Debug)]
pub struct ShootdownCpu {
    root: RootWord,
    queue: Queue,
    counts: Counts,
}

impl ShootdownCpu {
    constructor! {
        /// A CPU that is offline, with no root loaded.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self { root: RootWord::new(), queue: Queue::new(), counts: Counts::new() }
        }
    }
}

impl Default for ShootdownCpu {
    fn default() -> Self {
        Self::new()
    }
}

/// Invalidations on many CPUs, for [`Platform::invalidate`](bindery::Platform::invalidate) and
/// [`Platform::invalidate_kernel`](bindery::Platform::invalidate_kernel).
///
/// The embedder supplies a [`ShootdownCpu`] for each CPU. At first, all CPUs are offline, and no
/// CPU has a root loaded.
///
/// ```
/// use bindery::addr::{Frame, VirtAddr, VirtRange};
/// use bindery::platform::{Cpu, CpuSet, Invalidation, Tables};
/// use bindery_parts::{LocalTlb, OnCpu, ShootdownCpu, Shootdowns, Translations};
///
/// static CPUS: [ShootdownCpu; 2] = [const { ShootdownCpu::new() }; 2];
/// static SHOOTDOWNS: Shootdowns<'static> = Shootdowns::new(&CPUS);
///
/// struct Tlb;
///
/// impl LocalTlb for Tlb {
///     fn send(&self, _cpu: Cpu) {} // the interrupt controller
///     fn invalidate(&self, _root: Frame, _what: &Invalidation) {} // `invlpg`
///     fn invalidate_kernel(&self, _what: &Invalidation) {}
///     fn flush_all(&self) {} // a change of `CR4.PGE`
///     fn order(&self) {} // a write of `CR3`
/// }
///
/// /// The caller's CPU, which it does not leave during a call.
/// fn here() -> OnCpu<'static, 'static, Tlb> {
///     # let cpu = || Cpu(0);
///     SHOOTDOWNS.on(cpu(), &Tlb)
/// }
///
/// /// `Platform::invalidate`.
/// fn invalidate(root: Frame, cpus: &CpuSet, what: &Invalidation) {
///     here().invalidate(root, cpus, what);
/// }
///
/// /// `Platform::relax`, and the handler of the interrupt.
/// fn relax() {
///     here().serve();
///     core::hint::spin_loop();
/// }
///
/// here().online();
/// // A switch to a program, after `AddressSpace::enter`.
/// here().run(Frame(7), |translations| assert_eq!(translations, Translations::Stale));
/// // To the idle thread and back: the tag stays valid.
/// here().keep(|| { /* load the kernel's root */ });
/// here().run(Frame(7), |translations| assert_eq!(translations, Translations::Kept));
///
/// let mut cpus = CpuSet::EMPTY;
/// cpus.insert(Cpu(0));
/// let range = VirtRange::from_len(VirtAddr(0x1000), 0x1000).expect("a range");
/// let what = Invalidation { range, stride: 0x1000, tables: Tables::Unchanged };
/// invalidate(Frame(7), &cpus, &what);
/// relax();
/// assert_eq!(SHOOTDOWNS.counts().invalidations, 1);
/// ```
///
/// # Context
/// Context: any. A thread that invalidates waits for other CPUs' handlers, or for their calls of
/// [`OnCpu::serve`].
#[derive(Debug)]
pub struct Shootdowns<'m> {
    online: CpuMask,
    cpus: &'m [ShootdownCpu],
}

impl<'m> Shootdowns<'m> {
    constructor! {
        /// Shootdowns among the CPUs with the numbers of the slice; elements from [`MAX_CPUS`] on
        /// are not used.
        pub const fn new(cpus: &'m [ShootdownCpu]) -> Self {
            let cpus = if cpus.len() > MAX_CPUS { cpus.split_at(MAX_CPUS).0 } else { cpus };
            Self { online: CpuMask::new(), cpus }
        }
    }

    /// The view of the caller's CPU. The caller stays on the CPU while it uses the view.
    ///
    /// # Panics
    /// If `cpu` is not below the number of CPUs.
    #[inline]
    pub fn on<'s, T: LocalTlb>(&'s self, cpu: Cpu, tlb: &'s T) -> OnCpu<'s, 'm, T> {
        OnCpu { all: self, me: &self.cpus[usize::from(cpu.0)], cpu, tlb }
    }

    /// Sums of all CPUs. Not exact while CPUs invalidate. Linear in the number of CPUs.
    pub fn counts(&self) -> ShootdownCounts {
        ShootdownCounts::sum_of(self.cpus.iter().map(|cpu| &cpu.counts))
    }
}

/// [`Shootdowns`] as the caller's CPU uses them ([`Shootdowns::on`]).
///
/// # Context
/// Context: any. Interrupts may be on or off.
pub struct OnCpu<'s, 'm, T> {
    all: &'s Shootdowns<'m>,
    me: &'s ShootdownCpu,
    cpu: Cpu,
    tlb: &'s T,
}

impl<T: LocalTlb> OnCpu<'_, '_, T> {
    /// Loads the root of a program by `load`, which is told whether it must flush. Call it after
    /// `AddressSpace::enter`. Call the unsafe `AddressSpace::leave` for the old address space only
    /// if the load has flushed its tag.
    ///
    /// The translations are kept only if this root was the last one, left by [`OnCpu::keep`]. A CPU
    /// without tags flushes by each load, whatever it is told.
    ///
    /// The CPU is online; a debug build panics if not.
    pub fn run(&self, root: Frame, load: impl FnOnce(Translations)) {
        debug_assert!(self.is_online(self.cpu), "CPU {} is not online", self.cpu.0);
        let was = self.me.root.begin_switch();
        let is_kept = was == State::Runs(root)
            || was == State::Keeps(root)
            || was == State::Stale(root) && !rule::holds(Rule::FlushStale);
        load(if is_kept { Translations::Kept } else { Translations::Stale });
        self.me.root.end_switch(State::Runs(root));
    }

    /// Loads the kernel's root by `load`, and keeps the translations of the program's root under
    /// their tag. From here on, no invalidation of the program's root interrupts this CPU. `load`
    /// must load the kernel's root, under a tag of its own.
    pub fn keep(&self, load: impl FnOnce()) {
        let was = self.me.root.begin_switch();
        load();
        self.me.root.end_switch(match was {
            State::Runs(root) => State::Keeps(root),
            State::Keeps(_) | State::Stale(_) | State::Nothing | State::Switches => was,
        });
    }

    /// Loads the kernel's root by `load`, which flushes the translations of the program's root or
    /// gives its tag up. The caller then calls `AddressSpace::leave`.
    pub fn leave(&self, load: impl FnOnce()) {
        self.me.root.begin_switch();
        load();
        self.me.root.end_switch(State::Nothing);
    }

    /// Invalidates translations of `root` on the CPUs of the set, and waits until none of them uses
    /// one. For [`Platform::invalidate`](bindery::Platform::invalidate).
    ///
    /// Linear in the number of CPUs in the set.
    pub fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        rule::fence(Rule::FenceBeforeRoots);
        let mut to_ask = CpuSet::EMPTY;
        for cpu in cpus.iter().filter(|cpu| *cpu != self.cpu) {
            let Some(other) = self.all.cpus.get(usize::from(cpu.0)) else { continue };
            match other.root.claim_flush(root) {
                Claim::Ask => to_ask.insert(cpu),
                Claim::Spared => add(&self.me.counts.spared),
                Claim::Left => {}
            }
        }
        let request = Request::Program(root, *what);
        let here = || {
            if cpus.contains(self.cpu) {
                self.perform(&request);
            }
        };
        if to_ask.is_empty() { here() } else { self.ask(&to_ask, &request, here) }
    }

    /// Invalidates translations of the kernel's addresses on all CPUs that are online, and waits
    /// for them. For [`Platform::invalidate_kernel`](bindery::Platform::invalidate_kernel).
    ///
    /// Linear in the number of CPUs.
    #[inline]
    pub fn invalidate_kernel(&self, what: &Invalidation) {
        rule::fence(Rule::FenceBeforeOnline);
        if self.is_alone() {
            self.perform_kernel(what);
        } else {
            self.copy().ask_others(Request::Kernel(*what));
        }
    }

    /// Makes the accesses of all other CPUs that are online ordered: each executes
    /// [`LocalTlb::order`] between the begin of the call and its end (Linux: `membarrier(2)`). The
    /// caller orders its own.
    ///
    /// Linear in the number of CPUs.
    pub fn order_others(&self) {
        rule::fence(Rule::FenceBeforeOnline);
        if !self.is_alone() {
            self.copy().ask_others(Request::Order);
        }
    }

    /// Whether no other CPU is online.
    #[inline]
    fn is_alone(&self) -> bool {
        let order = rule::order(Rule::AcquireGone, Ordering::Acquire);
        !self.all.online.has_others(self.cpu, order)
    }

    fn copy(&self) -> Self {
        Self { all: self.all, me: self.me, cpu: self.cpu, tlb: self.tlb }
    }

    /// Sends a request to all other CPUs that are online, performs an invalidation here, and waits
    /// for them. Takes both by value, so that a CPU that is alone stores neither.
    #[cold]
    #[inline(never)]
    fn ask_others(self, request: Request) {
        let order = rule::order(Rule::AcquireGone, Ordering::Acquire);
        let to_ask = self.all.online.others(self.cpu, order);
        self.ask(&to_ask, &request, || {
            if let Request::Kernel(what) = &request {
                self.perform_kernel(what);
            }
        });
    }

    /// Performs the requests to this CPU: in the handler of the interrupt, and in
    /// [`Platform::relax`](bindery::Platform::relax). Without requests, reads one word.
    #[inline]
    pub fn serve(&self) {
        if self.me.queue.is_asked() {
            self.serve_taken(self.me.queue.take());
        }
    }

    /// Announces that the CPU is online, and flushes its TLB, which performs the requests that it
    /// has missed. Called on the CPU with interrupts off, before it loads the kernel's root or, if
    /// the kernel has started with it, before the first access to a
    /// [`KernelMap`](bindery::KernelMap)'s addresses. An interrupt that another CPU sends from here
    /// on reaches the CPU when it turns interrupts on.
    pub fn online(&self) {
        // Relaxed: a thread that sees the CPU online asks it, and concludes nothing.
        self.all.online.insert(self.cpu, Ordering::Relaxed);
        rule::fence(Rule::FenceAtOnline);
        // Requests of threads that found the CPU online earlier. Their interrupts may be lost.
        let queue = &self.me.queue;
        let taken = if rule::holds(Rule::ServeAtOnline) { queue.take() } else { Taken::NONE };
        let number = queue.full_flushes_asked();
        if rule::holds(Rule::FlushAtOnline) {
            self.tlb.flush_all();
        }
        queue.full_flush_done(number);
        queue.finish(taken);
    }

    /// Announces that the CPU goes offline: from here on, no other CPU waits for it. The CPU has
    /// left its last program's root ([`OnCpu::leave`]), and until it stops, it uses no address of a
    /// [`KernelMap`](bindery::KernelMap) that another CPU may free.
    pub fn offline(&self) {
        // Threads take back the requests that are left in the queue.
        self.all.online.remove(self.cpu, rule::order(Rule::ReleaseGone, Ordering::Release));
    }

    /// Whether the CPU is online.
    pub fn is_online(&self, cpu: Cpu) -> bool {
        self.all.online.contains(cpu, rule::order(Rule::AcquireGone, Ordering::Acquire))
    }

    #[cold]
    fn serve_taken(&self, taken: Taken) {
        if taken.is_for_everything() {
            let number = self.me.queue.full_flushes_asked();
            self.flush_all();
            // It may stand for any request.
            self.tlb.order();
            self.me.queue.full_flush_done(number);
        } else {
            taken.slots().for_each(|slot| self.perform(&self.me.queue.request(slot)));
        }
        self.me.queue.finish(taken);
    }

    fn perform(&self, request: &Request) {
        let (root, what) = match request {
            Request::Program(root, what) => (*root, what),
            Request::Kernel(what) => return self.perform_kernel(what),
            Request::Order => return self.tlb.order(),
        };
        match self.me.root.state() {
            State::Switches => self.flush_all(),
            State::Keeps(kept) if kept == root && rule::holds(Rule::StaleWhenServed) => {
                let _ = self.me.root.claim_flush(root);
            }
            State::Runs(loaded) | State::Keeps(loaded) if loaded == root => {
                add(&self.me.counts.invalidations);
                self.tlb.invalidate(root, what);
            }
            // The CPU flushes the root's tag before it loads the root again.
            State::Runs(_) | State::Keeps(_) | State::Stale(_) | State::Nothing => {}
        }
    }

    #[inline]
    fn perform_kernel(&self, what: &Invalidation) {
        add(&self.me.counts.invalidations);
        self.tlb.invalidate_kernel(what);
    }

    fn flush_all(&self) {
        add(&self.me.counts.full_flushes);
        self.tlb.flush_all();
    }

    /// Sends a request to CPUs, performs it `here` while they work, and waits for them.
    #[cold]
    #[inline(never)]
    fn ask(&self, cpus: &CpuSet, request: &Request, here: impl FnOnce()) {
        let mut tickets = [Ticket::NONE; MAX_CPUS];
        for cpu in cpus.iter() {
            tickets[usize::from(cpu.0)] = self.queue(cpu).post(request);
        }
        for cpu in cpus.iter() {
            self.interrupt(cpu, tickets[usize::from(cpu.0)]);
        }
        here();
        for cpu in cpus.iter() {
            self.wait(cpu, tickets[usize::from(cpu.0)]);
        }
    }

    /// Interrupts a CPU for a request, unless the CPU has taken it or is interrupted anyway.
    fn interrupt(&self, cpu: Cpu, ticket: Ticket) {
        let queue = self.queue(cpu);
        if !queue.is_unannounced(ticket) {
            return;
        }
        if !rule::holds(Rule::SentBeforeSpared) {
            queue.announced(ticket);
        }
        add(&self.me.counts.interrupts);
        self.tlb.send(cpu);
        queue.announced(ticket);
    }

    fn wait(&self, cpu: Cpu, ticket: Ticket) {
        let queue = self.queue(cpu);
        let awaited = ticket.awaited();
        while !queue.is_done(awaited) && (self.is_online(cpu) || !queue.take_back(awaited)) {
            if rule::holds(Rule::ServeWhileWaiting) {
                self.serve();
            }
            self.tlb.relax();
        }
        queue.release(awaited);
    }

    /// The queue of a CPU below the number of CPUs.
    fn queue(&self, cpu: Cpu) -> &Queue {
        &self.all.cpus[usize::from(cpu.0)].queue
    }
}

impl<T> fmt::Debug for OnCpu<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnCpu").field("cpu", &self.cpu).finish_non_exhaustive()
    }
}
