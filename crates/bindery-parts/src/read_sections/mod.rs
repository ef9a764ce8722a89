//! [`ReadSections`]: read sections of many CPUs, and grace periods.
//!
//! Each CPU has a word in a cache line of its own: how deep it is in read sections, and the number
//! of the grace period that was under way when it entered the outermost one. One word for all CPUs
//! has the number of the latest grace period and how many CPUs it has already left behind:
//!
//! ```text
//! progress   | 52 bits: period | 12 bits: position |   CPUs below the position do not hold it up
//! section    | 52 bits: period | 12 bits: depth    |   depth 0: the CPU holds up no period
//! ```
//!
//! A period has passed when its position is the number of CPUs. The next one then begins by the
//! step to position 0. The thread that asks looks from the position on, and stops at the first CPU
//! that is in a section of an earlier period. So a negative answer costs the line of the CPU that
//! holds the period up, and all looks of one period together cost one line for each CPU. Looks need
//! no lock: any CPU may continue the look of another, and none waits.
//!
//! # Orders
//! A thread unlinks an item, executes a fence, and reads the number *p* of the latest period. The
//! item may be freed when period *p + 1* has passed, which begins later:
//! 1. A CPU that entered its section with a number above *p* has read a number that was stored
//!    after the thread's read. Its fence at the entry comes after the thread's fence, so the
//!    section does not find the item.
//! 2. A CPU that announced a number of at most *p* holds up period *p + 1*.
//! 3. A CPU that read such a number, and announces it after the look, does so before its fence, and
//!    that fence comes after the fence of the look. So this section does not find the item either.
//!
//! A CPU that comes online is a CPU of the third kind for a look that still finds it offline.

#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

use bindery::platform::{Cpu, GracePeriod, MAX_CPUS};

use crate::atomic::{AtomicU32, AtomicU64, Ordering, constructor};
use crate::cpu_mask::CpuMask;
use crate::rule::{self, Rule};

/// The low bits of both words: the depth of a section, or the position of a look.
const LOW_BITS: u32 = 12;
const LOW: u64 = (1 << LOW_BITS) - 1;

const OUTSIDE: u64 = 0;

/// Whether an entry is one instruction, which is a fence too: the locked exchange of x86-64. The
/// memory model of the language does not know it as one, so models run a store and a fence.
const IS_ENTRY_ONE_STEP: bool = cfg!(all(target_arch = "x86_64", not(all(test, loom))));

/// With several CPUs online, a CPU looks at sections once in this number of negative answers.
const QUESTIONS: u32 = 64;

/// The memory of one CPU in [`ReadSections`], two cache lines of 64 bytes.
///
/// ```
/// use bindery_parts::ReadCpu;
///
/// static CPUS: [ReadCpu; 4] = [const { ReadCpu::new() }; 4];
/// assert_eq!(size_of_val(&CPUS), 4 * 128);
/// ```
#[repr(align(128))]
#[derive(Debug)]
pub struct ReadCpu {
    /// The period and depth of the CPU's section. Only the CPU itself writes it.
    section: AtomicU64,
    /// The number of negative answers on the CPU.
    questions: AtomicU32,
}

impl ReadCpu {
    constructor! {
        /// A CPU outside of read sections.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self { section: AtomicU64::new(OUTSIDE), questions: AtomicU32::new(0) }
        }
    }
}

impl Default for ReadCpu {
    fn default() -> Self {
        Self::new()
    }
}

/// In lines of its own, since every entry reads it.
#[repr(align(128))]
#[derive(Debug)]
struct Progress(AtomicU64);

/// Read sections and grace periods for [`Platform`](bindery::Platform).
///
/// The embedder supplies a [`ReadCpu`] for each CPU. A CPU that is outside of sections holds up no
/// grace period, so an idle CPU needs no call. At first, all CPUs count as online. A CPU that is
/// offline costs a look nothing ([`ReadSections::cpu_offline`]).
///
/// Entering a section costs one store and one fence, or on x86-64 one locked exchange; leaving it
/// costs one store. A section may be entered in an interrupt handler that leaves it again. The
/// kernel turns preemption off for a section. Sections nest up to 4,095 levels.
///
/// ```
/// use bindery::platform::{Cpu, GracePeriod};
/// use bindery_parts::{ReadCpu, ReadSections};
///
/// static CPUS: [ReadCpu; 2] = [const { ReadCpu::new() }; 2];
/// static SECTIONS: ReadSections<'static> = ReadSections::new(&CPUS);
///
/// // Functions of a `Platform`; `cpu()` is `Platform::cpu`.
/// # fn cpu() -> Cpu { Cpu(0) }
/// fn enter_read() {
///     // Preemption off, then:
///     SECTIONS.enter(cpu());
/// }
/// fn leave_read() {
///     SECTIONS.leave(cpu());
/// }
/// fn synchronize() {
///     SECTIONS.synchronize(core::hint::spin_loop); // or a yield to other threads
/// }
/// fn grace_period() -> GracePeriod {
///     SECTIONS.grace_period()
/// }
/// fn is_over(period: GracePeriod) -> bool {
///     SECTIONS.is_over(cpu(), period)
/// }
///
/// enter_read();
/// let period = grace_period();
/// SECTIONS.advance();
/// assert!(!SECTIONS.has_passed(period));
/// leave_read();
/// synchronize();
/// assert!(is_over(period));
/// ```
///
/// # Context
/// Context: any. Only [`ReadSections::synchronize`] waits, by its caller's hook.
#[derive(Debug)]
pub struct ReadSections<'m> {
    progress: Progress,
    /// Absent CPUs, rather than those that are online: a CPU of which nothing was announced is
    /// counted.
    offline: CpuMask,
    cpus: &'m [ReadCpu],
}

impl<'m> ReadSections<'m> {
    constructor! {
        /// Sections of the CPUs with the numbers of the slice; elements from [`MAX_CPUS`] on are
        /// not used. All CPUs are outside.
        pub const fn new(cpus: &'m [ReadCpu]) -> Self {
            let cpus = if cpus.len() > MAX_CPUS { cpus.split_at(MAX_CPUS).0 } else { cpus };
            // Period 0 has left all CPUs behind.
            let progress = Progress(AtomicU64::new(cpus.len() as u64));
            Self { progress, offline: CpuMask::new(), cpus }
        }
    }

    /// Begins a read section on the caller's CPU, or enters a nested one.
    ///
    /// # Panics
    /// If `cpu` is not below the number of CPUs.
    #[inline]
    pub fn enter(&self, cpu: Cpu) {
        let section = &self.cpus[usize::from(cpu.0)].section;
        let word = section.load(Ordering::Relaxed);
        if word & LOW == 0 {
            let period = self.progress.0.load(Ordering::Relaxed) & !LOW;
            announce(section, period | 1);
        } else {
            section.store(word + 1, Ordering::Relaxed);
            // An interrupt handler may have interrupted the outer entry before its fence.
            if !IS_ENTRY_ONE_STEP {
                rule::fence(Rule::FenceAtNestedEntry);
            }
        }
    }

    /// Ends the innermost read section of the caller's CPU. Without a section, the call has no
    /// effect; a debug build panics.
    ///
    /// # Panics
    /// If `cpu` is not below the number of CPUs.
    #[inline]
    pub fn leave(&self, cpu: Cpu) {
        let section = &self.cpus[usize::from(cpu.0)].section;
        let word = section.load(Ordering::Relaxed);
        debug_assert!(word & LOW > 0, "left a read section that was never entered");
        if word & LOW > 1 {
            section.store(word - 1, Ordering::Relaxed);
        } else {
            section.store(OUTSIDE, rule::order(Rule::ReleaseAtLeave, Ordering::Release));
        }
    }

    /// Whether the CPU is in a read section. Exact only on the CPU itself.
    #[inline]
    pub fn is_inside(&self, cpu: Cpu) -> bool {
        self.cpus.get(usize::from(cpu.0)).is_some_and(|cpu| cpu.depth() > 0)
    }

    /// Begins a grace period, which ends when all read sections of this moment have ended. Reads
    /// one word. For [`Platform::grace_period`](bindery::Platform::grace_period).
    #[inline]
    pub fn grace_period(&self) -> GracePeriod {
        rule::fence(Rule::FenceBeforeNumber);
        let latest = self.progress.0.load(Ordering::Relaxed) >> LOW_BITS;
        GracePeriod(if rule::holds(Rule::NextPeriod) { latest + 1 } else { latest })
    }

    /// Whether the grace period is known to be over. Reads one word.
    #[inline]
    pub fn has_passed(&self, period: GracePeriod) -> bool {
        let order = rule::order(Rule::AcquirePassed, Ordering::Acquire);
        self.passed(self.progress.0.load(order)) >= period.0
    }

    /// Whether the grace period is over, for [`Platform::is_over`](bindery::Platform::is_over).
    /// Never waits.
    ///
    /// With one CPU online, the answer is exact. With several, a CPU answers from one word and
    /// looks at sections only once in 64 negative answers, so the answer may turn positive later
    /// than the last section ends. `cpu` is the caller's CPU; a wrong one only changes how often is
    /// looked.
    ///
    /// The caller's own section would hold the period up, if all time in the kernel is a section.
    /// Such a kernel asks the three questions itself, and leaves its section for the last one:
    /// [`ReadSections::has_passed`], [`ReadSections::is_to_look`], [`ReadSections::advance_to`].
    #[inline]
    pub fn is_over(&self, cpu: Cpu, period: GracePeriod) -> bool {
        self.has_passed(period) || self.is_to_look(cpu) && self.advance_to(period)
    }

    /// Waits until all read sections of this moment have ended, by calling `relax` until then. For
    /// [`Platform::synchronize`](bindery::Platform::synchronize). The caller is in no read section.
    ///
    /// Context: as `relax`.
    pub fn synchronize(&self, mut relax: impl FnMut()) {
        let period = self.grace_period();
        while !self.advance_to(period) {
            relax();
        }
    }

    /// Looks at sections, and lets the latest grace period pass if none holds it up. If it was over
    /// already, begins the next one. An embedder may call this from its timer or when a CPU goes
    /// idle, so that fewer calls of [`ReadSections::is_over`] look.
    ///
    /// Linear in the number of CPUs at most, and for all looks of one period together.
    pub fn advance(&self) {
        // Relaxed, as the failure of a step: the fence before the look orders what the CPUs before
        // have seen, and the release of their steps.
        let mut seen = self.progress.0.load(Ordering::Relaxed);
        if self.is_complete(seen) {
            let next = (seen & !LOW) + (1 << LOW_BITS);
            match self.step(seen, next) {
                Ok(_) => seen = next,
                Err(now) => seen = now,
            }
        }
        rule::fence(Rule::FenceBeforeLook);
        let (period, from) = (seen & !LOW, (seen & LOW) as usize);
        let ahead = self.cpus.get(from..).unwrap_or_default();
        let clear = ahead.iter().zip(from..).take_while(|(cpu, number)| {
            self.is_offline(Cpu(*number as u16)) || !cpu.is_inside_before(period)
        });
        let to = from + clear.count();
        if to > from {
            // If this fails, another CPU has come further or equally far.
            let _ = self.step(seen, period | to as u64);
        }
    }

    /// Announces that a CPU is online, before its first read section. Needed only after
    /// [`ReadSections::cpu_offline`]. Called on the CPU itself.
    pub fn cpu_online(&self, cpu: Cpu) {
        // The fence at the first entry orders this store too.
        self.offline.remove(cpu, Ordering::Relaxed);
    }

    /// Announces that a CPU is offline, after its last read section: from here on, no look reads
    /// its line. Called on the CPU itself, or on another one after it has stopped.
    pub fn cpu_offline(&self, cpu: Cpu) {
        debug_assert!(!self.is_inside(cpu), "CPU {} goes offline in a read section", cpu.0);
        self.offline.insert(cpu, rule::order(Rule::ReleaseAtOffline, Ordering::Release));
    }

    fn step(&self, from: u64, to: u64) -> Result<u64, u64> {
        let order = rule::order(Rule::PassOnLook, Ordering::Release);
        self.progress.0.compare_exchange(from, to, order, Ordering::Relaxed)
    }

    fn is_complete(&self, progress: u64) -> bool {
        progress & LOW >= self.cpus.len() as u64
    }

    /// The latest period that has passed. A period that is under way has a number above 0.
    #[inline]
    fn passed(&self, progress: u64) -> u64 {
        (progress >> LOW_BITS) - u64::from(!self.is_complete(progress))
    }

    /// Tries to bring the progress up to a period, which is at most the one after the latest.
    /// Looks at sections, like [`ReadSections::advance`], for a period whose predecessor may still
    /// be under way. Returns whether the period is over. The caller is in no read section.
    ///
    /// Linear in the number of CPUs at most.
    pub fn advance_to(&self, period: GracePeriod) -> bool {
        (0..2).any(|_| {
            self.advance();
            self.has_passed(period)
        })
    }

    fn is_offline(&self, cpu: Cpu) -> bool {
        self.offline.contains(cpu, rule::order(Rule::AcquireOffline, Ordering::Acquire))
    }

    /// Counts a negative answer ([`ReadSections::has_passed`]). Returns whether the caller has to
    /// look at sections: once in 64 negative answers of a CPU, or if no other CPU is online.
    pub fn is_to_look(&self, cpu: Cpu) -> bool {
        let Some(cpu) = self.cpus.get(usize::from(cpu.0)) else { return true };
        // The thread may have left the CPU, so an addition may be lost, which is harmless.
        let number = cpu.questions.load(Ordering::Relaxed).wrapping_add(1);
        cpu.questions.store(number, Ordering::Relaxed);
        number.is_multiple_of(QUESTIONS) || self.offline.count() + 1 >= self.cpus.len()
    }
}

impl ReadCpu {
    fn depth(&self) -> u64 {
        self.section.load(Ordering::Relaxed) & LOW
    }

    /// Whether the CPU is in a section that it entered before the period began.
    fn is_inside_before(&self, period: u64) -> bool {
        let word = self.section.load(rule::order(Rule::AcquireSection, Ordering::Acquire));
        word & LOW != 0 && word & !LOW < period
    }
}

/// Announces a section before any later load of this CPU.
#[inline]
fn announce(section: &AtomicU64, word: u64) {
    if IS_ENTRY_ONE_STEP {
        // A locked exchange keeps later loads after it, and costs half of what a fence does.
        section.swap(word, Ordering::SeqCst);
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        store_entry(section, word);
        rule::fence(Rule::FenceAtEntry);
    }
}

/// The part of an entry after which an interrupt handler may enter a section inside this one.
#[inline]
fn store_entry(section: &AtomicU64, word: u64) {
    section.store(word, rule::order(Rule::ReleaseAtEntry, Ordering::Release));
}
