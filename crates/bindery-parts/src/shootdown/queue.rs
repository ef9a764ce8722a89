//! [`Queue`]: the requests to one CPU.
//!
//! A thread claims a slot, writes its request there, and sets the slot's bit among the pending
//! ones. The CPU takes all pending bits in one step, performs the requests, and sets the bits among
//! those that are done. The thread waits for its bit and releases the slot. If all slots are
//! claimed, the thread asks for a flush of everything, which has a number in place of a slot.
//!
//! # Interrupts
//! A thread spares its interrupt only if another one is on its way to the CPU. An interrupt that
//! another thread owes does not count, since that thread may be the one that this call interrupted:
//! 1. A thread posts a request to CPU B. An interrupt arrives before it interrupts CPU B.
//! 2. The handler posts a request to CPU B, finds the first one, and waits.
//! 3. CPU B is never interrupted, since the thread does not run before its handler returns.
//!
//! So a thread sets a bit of its own among the pending ones, [`SENT`], after it has sent the
//! interrupt, and only while its request is still pending: the handler of this interrupt has not
//! taken the bits yet, and will take all that are set until then.
//!
//! An interrupt handler may serve the queue between any two steps of a call that serves it. It
//! takes only bits that the call has not taken.

use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::platform::{Invalidation, Tables};

use crate::atomic::{AtomicU32, AtomicU64, Ordering, constructor};
use crate::rule::{self, Rule};

/// The number of requests that a CPU can have at once.
#[cfg(not(all(test, loom)))]
pub(super) const SLOTS: u32 = 8;
#[cfg(all(test, loom))]
pub(super) const SLOTS: u32 = 1;

const ALL_SLOTS: u32 = (1 << SLOTS) - 1;
/// The pending bit of a flush of everything.
const EVERYTHING: u32 = 1 << 31;
/// Beside the pending bits: an interrupt has been sent whose handler has not yet taken them.
const SENT: u32 = 1 << 30;

/// What a thread asks a CPU for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    /// An invalidation of a program's root.
    Program(Frame, Invalidation),
    /// An invalidation of the kernel's addresses.
    Kernel(Invalidation),
    /// An order of accesses.
    Order,
}

/// The slot of a request, or the number of a flush of everything with [`Ticket::NUMBERED`]. One
/// word, because a call has a ticket for each CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ticket(u64);

impl Ticket {
    /// No request.
    pub(super) const NONE: Self = Self(u64::MAX);

    /// The bit of a ticket for a flush of everything.
    const NUMBERED: u64 = 1 << 63;

    fn bit(self) -> u32 {
        if self.0 & Self::NUMBERED == 0 { 1 << self.0 } else { EVERYTHING }
    }

    /// The event that the thread with this ticket waits for.
    pub(super) fn awaited(self) -> Awaited {
        if self.0 & Self::NUMBERED == 0 {
            Awaited::Slot(self.0 as u8)
        } else {
            // The thread's own number. A later one may be that of a thread that was interrupted
            // before it set the bit, and does not go on before this wait ends.
            Awaited::Flush(self.0 & !Self::NUMBERED)
        }
    }
}

/// The event that a thread waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Awaited {
    Slot(u8),
    /// The flush of everything with this number, or a later one.
    Flush(u64),
}

/// Requests that the CPU has taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken(u32);

impl Taken {
    pub(super) const NONE: Self = Self(0);

    pub(super) fn is_for_everything(self) -> bool {
        self.0 & EVERYTHING != 0
    }

    pub(super) fn slots(self) -> impl Iterator<Item = usize> {
        (0..SLOTS as usize).filter(move |slot| self.0 & 1 << slot != 0)
    }
}

/// A request as words, since several CPUs access it.
#[derive(Debug)]
struct Slot {
    /// [`Slot::KERNEL`], [`Slot::ORDER`], or [`Slot::PROGRAM`] plus the root's number.
    root: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    /// The stride, and bit 0 if tables have changed.
    stride: AtomicU64,
}

impl Slot {
    const KERNEL: u64 = 0;
    const ORDER: u64 = 1;
    const PROGRAM: u64 = 2;

    constructor! {
        const fn new() -> Self {
            Self {
                root: AtomicU64::new(0),
                start: AtomicU64::new(0),
                end: AtomicU64::new(0),
                stride: AtomicU64::new(0),
            }
        }
    }
}

#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Queue {
    pending: AtomicU32,
    claimed: AtomicU32,
    done: AtomicU32,
    /// Flushes of everything: the number asked for, and the last one that is done.
    asked: AtomicU64,
    flushed: AtomicU64,
    slots: [Slot; SLOTS as usize],
}

impl Queue {
    #[cfg(not(all(test, loom)))]
    pub(super) const fn new() -> Self {
        Self {
            pending: AtomicU32::new(0),
            claimed: AtomicU32::new(0),
            done: AtomicU32::new(0),
            asked: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            slots: [const { Slot::new() }; SLOTS as usize],
        }
    }

    #[cfg(all(test, loom))]
    pub(super) fn new() -> Self {
        Self {
            pending: AtomicU32::new(0),
            claimed: AtomicU32::new(0),
            done: AtomicU32::new(0),
            asked: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            slots: core::array::from_fn(|_| Slot::new()),
        }
    }

    /// Adds a request. The thread then sends an interrupt if [`Queue::is_unannounced`].
    pub(super) fn post(&self, request: &Request) -> Ticket {
        let ticket = match self.claim() {
            Some(slot) => {
                self.slots[slot].write(request);
                Ticket(slot as u64)
            }
            None => {
                // Relaxed: the thread's fence orders its stores to entries before it.
                let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
                Ticket(number | Ticket::NUMBERED)
            }
        };
        self.pending.fetch_or(ticket.bit(), rule::order(Rule::ReleaseRequest, Ordering::Release));
        ticket
    }

    /// Whether the thread that posted the request must interrupt the CPU: the request is pending,
    /// and no interrupt is on its way.
    pub(super) fn is_unannounced(&self, ticket: Ticket) -> bool {
        self.pending.load(Ordering::Relaxed) & (ticket.bit() | SENT) == ticket.bit()
    }

    /// Records that the thread has sent an interrupt after it posted the request.
    ///
    /// A flush of everything records nothing: the bit may be that of a later flush, and the
    /// interrupt may have been handled before.
    pub(super) fn announced(&self, ticket: Ticket) {
        let bit = ticket.bit();
        if bit == EVERYTHING {
            return;
        }
        let sent = |pending: u32| {
            let is_pending = pending & bit != 0 || !rule::holds(Rule::SentWhilePending);
            is_pending.then_some(pending | SENT)
        };
        // Release: the compiler keeps the hook before it, and so before a handler on this CPU. If
        // it fails, the CPU has taken the request.
        let _ = self.pending.fetch_update(Ordering::Release, Ordering::Relaxed, sent);
    }

    fn claim(&self) -> Option<usize> {
        // The last thread has cleared the slot's bit among those that are done.
        let order = rule::order(Rule::AcquireSlot, Ordering::Acquire);
        let mut claimed = self.claimed.load(Ordering::Relaxed);
        loop {
            let slot = (!claimed & ALL_SLOTS).trailing_zeros();
            if slot >= SLOTS {
                return None;
            }
            let more = claimed | 1 << slot;
            let exchange = self.claimed.compare_exchange(claimed, more, order, Ordering::Relaxed);
            match exchange {
                Ok(_) => return Some(slot as usize),
                Err(now) => claimed = now,
            }
        }
    }

    #[inline]
    pub(super) fn is_asked(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Takes all pending requests. Only the CPU itself does so.
    pub(super) fn take(&self) -> Taken {
        let order = rule::order(Rule::AcquireRequest, Ordering::Acquire);
        if !rule::holds(Rule::TakeInOneStep) {
            let taken = self.pending.load(order);
            self.pending.store(0, Ordering::Relaxed);
            return Taken(taken);
        }
        Taken(self.pending.swap(0, order))
    }

    pub(super) fn request(&self, slot: usize) -> Request {
        self.slots[slot].read()
    }

    /// Reports requests as performed.
    pub(super) fn finish(&self, taken: Taken) {
        let slots = taken.0 & ALL_SLOTS;
        if slots != 0 {
            self.done.fetch_or(slots, rule::order(Rule::ReleaseDone, Ordering::Release));
        }
    }

    /// The number of flushes of everything that were asked for before the CPU took the bit.
    pub(super) fn full_flushes_asked(&self) -> u64 {
        self.asked.load(rule::order(Rule::AcquireAsked, Ordering::Acquire))
    }

    /// Reports a flush that began after the number was read. An interrupt handler may have reported
    /// a later one.
    pub(super) fn full_flush_done(&self, number: u64) {
        let order = rule::order(Rule::ReleaseFlushed, Ordering::Release);
        if rule::holds(Rule::FlushedNeverFalls) {
            self.flushed.fetch_max(number, order);
        } else {
            self.flushed.store(number, order);
        }
    }

    pub(super) fn is_done(&self, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Slot(slot) => {
                let order = rule::order(Rule::AcquireDone, Ordering::Acquire);
                self.done.load(order) & 1 << slot != 0
            }
            Awaited::Flush(number) => {
                let order = rule::order(Rule::AcquireFlushed, Ordering::Acquire);
                self.flushed.load(order) >= number
            }
        }
    }

    /// Takes back a request to a CPU that is offline. Returns `false` if the CPU has taken it
    /// first, and so will finish it.
    pub(super) fn take_back(&self, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Slot(_) if !rule::holds(Rule::TakeBack) => true,
            Awaited::Slot(slot) => {
                let bit = 1 << slot;
                self.pending.fetch_and(!bit, Ordering::Relaxed) & bit != 0
            }
            // It has no slot. The CPU flushes once more when it serves its queue again.
            Awaited::Flush(_) => true,
        }
    }

    /// Ends a request that is done or was taken back.
    pub(super) fn release(&self, awaited: Awaited) {
        if let Awaited::Slot(slot) = awaited {
            self.done.fetch_and(!(1 << slot), Ordering::Relaxed);
            let order = rule::order(Rule::ReleaseSlot, Ordering::Release);
            self.claimed.fetch_and(!(1 << slot), order);
        }
    }
}

impl Slot {
    fn write(&self, request: &Request) {
        let (root, what) = match request {
            Request::Program(root, what) => (u64::from(root.0) + Self::PROGRAM, what),
            Request::Kernel(what) => (Self::KERNEL, what),
            Request::Order => return self.root.store(Self::ORDER, Ordering::Relaxed),
        };
        let Invalidation { range, stride, tables } = *what;
        let tables = u64::from(tables == Tables::Changed);
        self.root.store(root, Ordering::Relaxed);
        self.start.store(range.start().0, Ordering::Relaxed);
        self.end.store(range.end().0, Ordering::Relaxed);
        self.stride.store(stride & !1 | tables, Ordering::Relaxed);
    }

    fn read(&self) -> Request {
        let root = self.root.load(Ordering::Relaxed);
        if root == Self::ORDER {
            return Request::Order;
        }
        let start = VirtAddr(self.start.load(Ordering::Relaxed));
        let end = VirtAddr(self.end.load(Ordering::Relaxed));
        let stride = self.stride.load(Ordering::Relaxed);
        let range = VirtRange::new(start, end).unwrap_or_default();
        let tables = if stride & 1 != 0 { Tables::Changed } else { Tables::Unchanged };
        let what = Invalidation { range, stride: stride & !1, tables };
        match root.checked_sub(Self::PROGRAM) {
            Some(root) => Request::Program(Frame(root as u32), what),
            None => Request::Kernel(what),
        }
    }
}
