//! [`FairLock`]: a spin lock that threads acquire in the order in which they arrive.
//!
//! A thread draws a ticket from `next`. It holds the lock while `serving` is its ticket:
//!
//! ```text
//! next - serving    0: free    1: held    1 + n: held, and n threads wait
//! ```
//!
//! Both words are in one cache line. So a lock that is free costs one line, which matters more than
//! the wait of many: each arrival takes the line from the waiters, but they read it the more rarely
//! the further they are from their turn. Only equality and distances of tickets count, so they may
//! wrap around.
//!
//! # Waiting
//! 1. CPU A waits for the lock with interrupts off.
//! 2. CPU B holds it, unmaps a page, and waits until CPU A has invalidated its TLB.
//! 3. CPU A takes no interrupt. If its wait does not serve the request, neither CPU goes on.
//!
//! So a waiter calls a hook between its reads of `serving`.

#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

use core::fmt;
use core::marker::PhantomData;

use crate::atomic::{AtomicU32, Ordering, constructor, spin_loop};
use crate::rule::{self, Rule};

/// A spin lock that threads acquire in the order in which they arrive, 8 bytes.
///
/// A call of [`FairLock::lock`] has interrupts off, or no interrupt handler acquires the lock.
/// Otherwise, a handler that interrupts a waiter waits behind it for ever. So that other CPUs do not
/// wait for a CPU with interrupts off, its waits serve their requests:
///
/// ```
/// use bindery_parts::{FairLock, FairLockGuard, FairTicket};
/// use bindery::sync::{Mutex, RawLock};
///
/// /// A `Platform::SpinLock`.
/// struct KernelLock(FairLock);
///
/// # fn interrupts_off() -> bool { true }
/// # fn restore_interrupts(_: bool) {}
/// /// `Platform::relax`: `OnCpu::serve`, and a pause.
/// fn relax() {
///     core::hint::spin_loop();
/// }
///
/// // SAFETY: 1. a thread holds the lock from its turn until it passes the turn on. 2. No function
/// // panics.
/// unsafe impl RawLock for KernelLock {
///     type State = (bool, FairTicket);
///     const UNLOCKED: Self = Self(FairLock::new());
///     fn lock(&self) -> Self::State {
///         let were_on = interrupts_off();
///         (were_on, self.0.lock(relax).into_ticket())
///     }
///     fn try_lock(&self) -> Option<Self::State> {
///         let were_on = interrupts_off();
///         let ticket = self.0.try_lock().map(FairLockGuard::into_ticket);
///         if ticket.is_none() {
///             restore_interrupts(were_on);
///         }
///         Some((were_on, ticket?))
///     }
///     unsafe fn unlock(&self, (were_on, ticket): Self::State) {
///         self.0.unlock(ticket);
///         restore_interrupts(were_on);
///     }
/// }
///
/// static COUNT: Mutex<KernelLock, u64> = Mutex::new(0);
/// *COUNT.lock() += 1;
/// assert_eq!(*COUNT.lock(), 1);
///
/// // Without data:
/// static TURN: FairLock = FairLock::new();
/// let turn = TURN.lock(relax);
/// assert!(TURN.try_lock().is_none() && TURN.waiters() == 0);
/// drop(turn);
/// assert!(!TURN.is_locked());
/// ```
///
/// # Context
/// Context: any. [`FairLock::lock`] spins, and calls its caller's hook; no other function waits. Not
/// reentrant. At most 2<sup>31</sup> threads wait at once.
#[repr(align(8))]
pub struct FairLock {
    /// The ticket that the next thread draws.
    next: AtomicU32,
    /// The ticket of the holder, or of the next thread if the lock is free. Only the holder
    /// changes it.
    serving: AtomicU32,
}

/// A held [`FairLock`], which its drop releases, also if the holder panics.
///
/// It stays on the thread that acquired the lock, and so on the CPU that turned interrupts off.
#[must_use = "the lock is released when the guard is dropped"]
pub struct FairLockGuard<'l> {
    lock: &'l FairLock,
    ticket: FairTicket,
    /// Not `Send`.
    thread: PhantomData<*const ()>,
}

/// A held [`FairLock`] without a borrow of it, for a lock type of the embedder's
/// ([`FairLockGuard::into_ticket`]).
///
/// It has a size only in a debug build: the lock itself knows which ticket it serves.
#[must_use = "the lock stays held until `FairLock::unlock` takes the ticket"]
#[derive(PartialEq, Eq, Debug)]
pub struct FairTicket {
    #[cfg(debug_assertions)]
    number: u32,
}

/// A turn that will come. Its drop waits for it, and passes it on.
struct Turn<'l> {
    lock: &'l FairLock,
    ticket: u32,
}

impl FairLock {
    constructor! {
        /// A lock that is free.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self::starting_at(0)
        }
    }

    constructor! {
        const fn starting_at(ticket: u32) -> Self {
            Self { next: AtomicU32::new(ticket), serving: AtomicU32::new(ticket) }
        }
    }

    /// Acquires the lock. While other threads are first, calls `relax` again and again: as often
    /// between two reads of the lock as there are threads before this one. The hook serves what
    /// other CPUs ask of this one ([`OnCpu::serve`](crate::OnCpu::serve),
    /// [`Platform::relax`](bindery::Platform::relax)), and does not acquire this lock.
    ///
    /// If the hook panics, the thread waits for its turn without the hook, and passes it on.
    ///
    /// Context: interrupts off, or no interrupt handler acquires the lock.
    #[inline]
    pub fn lock(&self, relax: impl FnMut()) -> FairLockGuard<'_> {
        let ticket = self.draw();
        if self.distance(ticket) > 0 {
            self.wait(ticket, relax);
        }
        FairLockGuard { lock: self, ticket: FairTicket::of(ticket), thread: PhantomData }
    }

    /// Acquires the lock if it is free. Otherwise draws no ticket, so no thread waits for this one.
    /// Never waits.
    #[inline]
    pub fn try_lock(&self) -> Option<FairLockGuard<'_>> {
        let serving = self.serving.load(rule::order(Rule::AcquireFreeLock, Ordering::Acquire));
        // If this ticket is the next one, the lock is free: no ticket from it on was drawn. Only
        // 2^32 acquisitions between the two steps would defeat that.
        let ticket = if rule::holds(Rule::DrawOnlyIfFree) {
            let after = serving.wrapping_add(1);
            self.next.compare_exchange(serving, after, Ordering::Relaxed, Ordering::Relaxed).ok()?
        } else {
            (self.next.load(Ordering::Relaxed) == serving).then(|| self.draw())?
        };
        Some(FairLockGuard { lock: self, ticket: FairTicket::of(ticket), thread: PhantomData })
    }

    /// Releases a lock whose guard was given up for the ticket. With the ticket of another lock, a
    /// debug build panics; other builds let two threads in or none.
    #[inline]
    pub fn unlock(&self, ticket: FairTicket) {
        let serving = || self.serving.load(Ordering::Relaxed);
        debug_assert_eq!(ticket, FairTicket::of(serving()), "the ticket of another lock");
        self.pass_on();
    }

    /// Whether a thread holds the lock. Not exact while other threads acquire and release it.
    #[inline]
    pub fn is_locked(&self) -> bool {
        self.drawn() > 0
    }

    /// The number of threads that wait for the lock. Not exact while other threads acquire and
    /// release it. A holder that can stop early may ask.
    #[inline]
    pub fn waiters(&self) -> u32 {
        self.drawn().saturating_sub(1)
    }

    /// The number of threads that hold the lock or wait for it.
    fn drawn(&self) -> u32 {
        // In this order `next` is at least `serving`, unless the loads are reordered.
        let serving = self.serving.load(Ordering::Relaxed);
        let drawn = self.next.load(Ordering::Relaxed).wrapping_sub(serving);
        if drawn > u32::MAX / 2 { 0 } else { drawn }
    }

    #[inline]
    fn draw(&self) -> u32 {
        if rule::holds(Rule::DrawInOneStep) {
            return self.next.fetch_add(1, Ordering::Relaxed);
        }
        let ticket = self.next.load(Ordering::Relaxed);
        self.next.store(ticket.wrapping_add(1), Ordering::Relaxed);
        ticket
    }

    /// The number of threads that hold the lock before the one with the ticket does.
    #[inline]
    fn distance(&self, ticket: u32) -> u32 {
        let order = rule::order(Rule::AcquireTurn, Ordering::Acquire);
        ticket.wrapping_sub(self.serving.load(order))
    }

    /// Waits for the turn of a ticket.
    ///
    /// Apart, and with the ticket by value, so that a free lock costs neither stack nor registers.
    #[cold]
    #[inline(never)]
    fn wait(&self, ticket: u32, relax: impl FnMut()) {
        let turn = Turn { lock: self, ticket };
        turn.wait(relax);
        core::mem::forget(turn);
    }

    /// Called by the holder, which alone changes the word. So it needs no ticket: on x86-64, this is
    /// one instruction.
    #[inline]
    fn pass_on(&self) {
        let order = rule::order(Rule::ReleaseTurn, Ordering::Release);
        self.serving.store(self.serving.load(Ordering::Relaxed).wrapping_add(1), order);
    }
}

impl FairTicket {
    #[inline]
    fn of(number: u32) -> Self {
        #[cfg(not(debug_assertions))]
        let _ = number;
        Self {
            #[cfg(debug_assertions)]
            number,
        }
    }

    /// The same ticket once more, for a caller that forgets this one.
    #[inline]
    fn moved(&self) -> Self {
        Self {
            #[cfg(debug_assertions)]
            number: self.number,
        }
    }
}

impl Default for FairLock {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for FairLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (is_locked, waiters) = (self.is_locked(), self.waiters());
        f.debug_struct("FairLock").field("locked", &is_locked).field("waiters", &waiters).finish()
    }
}

impl Turn<'_> {
    fn wait(&self, mut relax: impl FnMut()) {
        loop {
            let distance = self.lock.distance(self.ticket);
            if distance == 0 {
                return;
            }
            // The lock changes hands as often before this turn.
            for _ in 0..distance {
                if rule::holds(Rule::RelaxWhileWaiting) {
                    relax();
                } else {
                    spin_loop();
                }
            }
        }
    }
}

/// The hook has panicked.
impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.wait(spin_loop);
        self.lock.pass_on();
    }
}

impl Drop for FairLockGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lock.pass_on();
    }
}

impl FairLockGuard<'_> {
    /// Gives the guard up. The lock stays held until [`FairLock::unlock`] takes the ticket, on the
    /// same thread.
    ///
    /// Context: any.
    #[inline]
    pub fn into_ticket(self) -> FairTicket {
        let guard = core::mem::ManuallyDrop::new(self);
        guard.ticket.moved()
    }
}

impl fmt::Debug for FairLockGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FairLockGuard").field("waiters", &self.lock.waiters()).finish()
    }
}
