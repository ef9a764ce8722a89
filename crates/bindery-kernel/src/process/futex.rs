//! Futexes: threads sleep on a word of memory until another thread wakes them.
//!
//! A word has the same key for all its users: the object and the offset in it for a shared mapping,
//! otherwise the address space and the address. No thread is preempted in the kernel, so the check
//! of the word and the sleep are atomic. A change of a word (`FUTEX_WAKE_OP`) may fault; the word
//! is then checked again.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

use bindery::MappingFlags;
use bindery::addr::VirtAddr;
use linux_raw_sys::general::{
    FUTEX_BITSET_MATCH_ANY, FUTEX_CLOCK_REALTIME, FUTEX_CMP_REQUEUE, FUTEX_OP_ADD, FUTEX_OP_ANDN,
    FUTEX_OP_CMP_EQ, FUTEX_OP_CMP_GE, FUTEX_OP_CMP_GT, FUTEX_OP_CMP_LE, FUTEX_OP_CMP_LT,
    FUTEX_OP_CMP_NE, FUTEX_OP_OPARG_SHIFT, FUTEX_OP_OR, FUTEX_OP_SET, FUTEX_OP_XOR,
    FUTEX_OWNER_DIED, FUTEX_PRIVATE_FLAG, FUTEX_REQUEUE, FUTEX_TID_MASK, FUTEX_WAIT,
    FUTEX_WAIT_BITSET, FUTEX_WAITERS, FUTEX_WAKE, FUTEX_WAKE_BITSET, FUTEX_WAKE_OP,
};

use crate::errno::{Errno, Outcome};
use crate::memory::Space;
use crate::sync::Mutex;
use crate::{heap, user};

use super::{Interrupted, Process, Thread, WaitQueue, all, clock, credentials, scheduler};

/// The key of a word, the same for all processes that can access it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Name {
    /// An object's identity and the offset in it.
    Shared(u64, u64),
    /// An address space, by its address in the kernel, and the word's address. The waiting thread
    /// keeps the address space alive.
    Private(usize, u64),
}

/// A thread that waits for a word; the waker removes it from the list.
struct Waiter {
    bits: u32,
    is_woken: AtomicBool,
    queue: WaitQueue,
    name: Mutex<Name>,
}

static WAITERS: Mutex<BTreeMap<Name, VecDeque<Arc<Waiter>>>> = Mutex::new(BTreeMap::new());

/// Whether the word may be in a shared mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scope {
    Private,
    Any,
}

/// `futex(2)`.
pub(super) fn futex(arguments: [u64; 6]) -> Outcome {
    let [at, operation, value, fourth, second, third] = arguments;
    let operation = operation as u32;
    let (value, third) = (value as u32, third as u32);
    let scope = if operation & FUTEX_PRIVATE_FLAG != 0 { Scope::Private } else { Scope::Any };
    let realtime = operation & FUTEX_CLOCK_REALTIME != 0;
    let command = operation & !(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME);
    // The time of `FUTEX_WAIT` is relative, so it has no clock.
    if realtime && command != FUTEX_WAIT_BITSET {
        return Err(Errno::ENOSYS);
    }
    let count = |value: u32| usize::try_from(value as i32).map_err(|_| Errno::EINVAL);
    match command {
        FUTEX_WAIT => {
            let deadline = match fourth {
                0 => None,
                at => Some(clock::deadline_of_call(clock::read_time(at)?)),
            };
            wait(at, scope, value, FUTEX_BITSET_MATCH_ANY, deadline).map_err(|errno| {
                match (errno, deadline) {
                    (Errno::RESTART, Some(at)) => clock::interrupted_until(at),
                    _ => errno,
                }
            })
        }
        FUTEX_WAIT_BITSET => {
            let deadline = match fourth {
                0 => None,
                at if realtime => Some(clock::of_real_time(clock::read_time(at)?)),
                at => Some(clock::read_time(at)?),
            };
            wait(at, scope, value, third, deadline).map_err(|errno| match (errno, deadline) {
                // As on Linux, a handler ends every wait with a timeout, despite `SA_RESTART`.
                (Errno::RESTART, Some(_)) => Errno::RESTART_WITHOUT_HANDLER,
                _ => errno,
            })
        }
        FUTEX_WAKE => Ok(wake(name(at, scope)?, value as i32, FUTEX_BITSET_MATCH_ANY)),
        FUTEX_WAKE_BITSET if third == 0 => Err(Errno::EINVAL),
        FUTEX_WAKE_BITSET => Ok(wake(name(at, scope)?, value as i32, third)),
        FUTEX_REQUEUE | FUTEX_CMP_REQUEUE => {
            let (wakes, moves) = (count(value)?, count(fourth as u32)?);
            let (from, to) = (name(at, scope)?, name(second, scope)?);
            if command == FUTEX_CMP_REQUEUE && user::read::<u32>(at)? != third {
                return Err(Errno::EAGAIN);
            }
            let woken =
                if wakes == 0 { 0 } else { wake(from, wakes as i32, FUTEX_BITSET_MATCH_ANY) };
            Ok(woken + requeue(from, to, moves))
        }
        FUTEX_WAKE_OP => {
            let (first, other) = (name(at, scope)?, name(second, scope)?);
            let both = change(second, third)?;
            let woken = wake(first, value as i32, FUTEX_BITSET_MATCH_ANY);
            let more = if both { wake(other, fourth as i32, FUTEX_BITSET_MATCH_ANY) } else { 0 };
            Ok(woken + more)
        }
        _ => Err(Errno::ENOSYS),
    }
}

fn name(at: u64, scope: Scope) -> Result<Name, Errno> {
    if !at.is_multiple_of(4) {
        return Err(Errno::EINVAL);
    }
    scheduler::with_space(|space| name_in(space, at, scope))
}

fn name_in(space: &Space, at: u64, scope: Scope) -> Result<Name, Errno> {
    let private = Name::Private(core::ptr::from_ref(space) as usize, at);
    if scope == Scope::Private {
        return Ok(private);
    }
    let mut found = None;
    space.for_each_mapping(|mapping| {
        if mapping.range.start() <= VirtAddr(at) && VirtAddr(at) < mapping.range.end() {
            found = Some(mapping);
        }
    });
    let mapping = found.ok_or(Errno::EFAULT)?;
    Ok(match mapping.object {
        Some(object) if mapping.flags.contains(MappingFlags::SHARED) => {
            Name::Shared(object, (mapping.page_offset << 12) + (at - mapping.range.start().0))
        }
        _ => private,
    })
}

fn wait(at: u64, scope: Scope, value: u32, bits: u32, deadline: Option<u64>) -> Outcome {
    if bits == 0 {
        return Err(Errno::EINVAL);
    }
    let name = name(at, scope)?;
    heap::room(512)?;
    if user::read::<u32>(at)? != value {
        return Err(Errno::EAGAIN);
    }
    let waiter = Arc::new(Waiter {
        bits,
        is_woken: AtomicBool::new(false),
        queue: WaitQueue::new(),
        name: Mutex::new(name),
    });
    WAITERS.lock().entry(name).or_default().push_back(waiter.clone());
    let woken = || waiter.is_woken.load(Ordering::Relaxed).then_some(0);
    let outcome = waiter.queue.wait(deadline, woken);
    outcome.map_err(|interrupted| {
        forget(&waiter);
        match interrupted {
            Interrupted::Signal => Errno::RESTART,
            Interrupted::Deadline => Errno::ETIMEDOUT,
        }
    })
}

fn forget(waiter: &Arc<Waiter>) {
    let name = *waiter.name.lock();
    let mut waiters = WAITERS.lock();
    if let Some(queue) = waiters.get_mut(&name) {
        queue.retain(|other| !Arc::ptr_eq(other, waiter));
        if queue.is_empty() {
            waiters.remove(&name);
        }
    }
}

/// Wakes up to `count` waiters, but at least one, whose mask shares a bit with `bits`. Returns
/// their number.
fn wake(name: Name, count: i32, bits: u32) -> u64 {
    let mut woken = VecDeque::new();
    let mut waiters = WAITERS.lock();
    let Some(queue) = waiters.get_mut(&name) else { return 0 };
    let count = usize::try_from(count).unwrap_or(0).max(1);
    queue.retain(|waiter| {
        let wanted = woken.len() < count && waiter.bits & bits != 0;
        if wanted {
            woken.push_back(waiter.clone());
        }
        !wanted
    });
    if queue.is_empty() {
        waiters.remove(&name);
    }
    drop(waiters);
    for waiter in &woken {
        waiter.is_woken.store(true, Ordering::Relaxed);
        waiter.queue.wake_all();
    }
    woken.len() as u64
}

/// Moves up to `count` waiters of one word to another. Returns their number.
fn requeue(from: Name, to: Name, count: usize) -> u64 {
    let mut waiters = WAITERS.lock();
    let Some(mut queue) = waiters.remove(&from) else { return 0 };
    let moved = queue.len().min(count);
    let rest = queue.split_off(moved);
    if !rest.is_empty() {
        waiters.insert(from, rest);
    }
    if !queue.is_empty() {
        queue.iter().for_each(|waiter| *waiter.name.lock() = to);
        waiters.entry(to).or_default().append(&mut queue);
    }
    moved as u64
}

/// Changes the word as `FUTEX_WAKE_OP` specifies. Returns whether the word's old value satisfies
/// the comparison.
fn change(at: u64, encoded: u32) -> Result<bool, Errno> {
    let operation = encoded >> 28 & 7;
    let comparison = encoded >> 24 & 15;
    let signed = |bits: u32| (bits << 20) as i32 >> 20;
    let (mut operand, against) = (signed(encoded >> 12 & 0xfff), signed(encoded & 0xfff));
    if encoded >> 28 & FUTEX_OP_OPARG_SHIFT != 0 {
        operand = 1_i32.wrapping_shl(operand as u32);
    }
    let changed = |old: i32| match operation {
        FUTEX_OP_SET => Some(operand),
        FUTEX_OP_ADD => Some(old.wrapping_add(operand)),
        FUTEX_OP_OR => Some(old | operand),
        FUTEX_OP_ANDN => Some(old & !operand),
        FUTEX_OP_XOR => Some(old ^ operand),
        _ => None,
    };
    let compares = matches!(
        comparison,
        FUTEX_OP_CMP_EQ
            | FUTEX_OP_CMP_NE
            | FUTEX_OP_CMP_LT
            | FUTEX_OP_CMP_LE
            | FUTEX_OP_CMP_GT
            | FUTEX_OP_CMP_GE
    );
    if changed(0).is_none() || !compares {
        // As on Linux, the operation is checked only after the word was read.
        user::read::<u32>(at)?;
        return Err(Errno::ENOSYS);
    }
    let old = user::update(at, |old| changed(old as i32).map(|new| new as u32))? as i32;
    Ok(match comparison {
        FUTEX_OP_CMP_EQ => old == against,
        FUTEX_OP_CMP_NE => old != against,
        FUTEX_OP_CMP_LT => old < against,
        FUTEX_OP_CMP_LE => old <= against,
        FUTEX_OP_CMP_GT => old > against,
        _ => old >= against,
    })
}

/// Handles the end of a thread, or its `exec`: marks its robust futexes, and clears the word that
/// shows other threads that the thread exists, if there are any.
pub(super) fn thread_ends(thread: &Thread) {
    // A program that has corrupted its own list harms only itself.
    let _ = mark_robust_futexes(thread);
    let at = thread.clear_child_id.swap(0, Ordering::Relaxed);
    if at != 0 && has_shared_memory(thread) && user::write(at, &0_u32).is_ok() {
        let _ = name(at, Scope::Any).map(|name| wake(name, 1, FUTEX_BITSET_MATCH_ANY));
    }
}

/// Whether another thread or process uses the thread's memory. Linear in the number of processes.
fn has_shared_memory(thread: &Thread) -> bool {
    let process = &thread.process;
    if process.threads().len() > 1 {
        return true;
    }
    let Some(space) = process.try_space() else { return false };
    let has_it = |other: &Process| other.try_space().is_some_and(|its| Arc::ptr_eq(&its, &space));
    all().iter().any(|other| !Arc::ptr_eq(other, process) && has_it(other))
}

/// The maximum number of robust futexes that are visited, since the list may be circular.
const ROBUST_LIMIT: usize = 2048;

fn mark_robust_futexes(thread: &Thread) -> Result<(), Errno> {
    let head = thread.robust_list.swap(0, Ordering::Relaxed);
    if head == 0 {
        return Ok(());
    }
    let [mut entry, offset, pending] = user::read::<[u64; 3]>(head)?;
    for _ in 0..ROBUST_LIMIT {
        // The lowest bit means priority inheritance, which the kernel does not have.
        let at = entry & !1;
        if at == head {
            break;
        }
        let next = user::read::<u64>(at)?;
        if at != pending & !1 {
            owner_ends(thread, at.wrapping_add(offset), Entry::Listed)?;
        }
        entry = next;
    }
    if pending & !1 != 0 {
        let entry = if pending & 1 == 0 { Entry::Pending } else { Entry::Listed };
        owner_ends(thread, (pending & !1).wrapping_add(offset), entry)?;
    }
    Ok(())
}

/// The entry of a robust list that names a futex.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    Listed,
    /// The thread was about to lock or to unlock it, and it has no priority inheritance.
    Pending,
}

fn owner_ends(thread: &Thread, at: u64, entry: Entry) -> Result<(), Errno> {
    let name = name(at, Scope::Any)?;
    let is_owned = |value: u32| value & FUTEX_TID_MASK == thread.id();
    let value = user::update(at, |value| {
        is_owned(value).then_some(value & FUTEX_WAITERS | FUTEX_OWNER_DIED)
    })?;
    // The thread may have ended between the store that unlocked the futex and the wake, or after a
    // wake that it has not used. The word may then have any mark but no owner, and it is unknown
    // whether threads wait.
    let is_unlocked = entry == Entry::Pending && value & FUTEX_TID_MASK == 0;
    if is_owned(value) && value & FUTEX_WAITERS != 0 || is_unlocked {
        wake(name, 1, FUTEX_BITSET_MATCH_ANY);
    }
    Ok(())
}

/// `set_robust_list(2)`.
pub(super) fn set_robust_list(head: u64, length: u64) -> Outcome {
    if length != 24 {
        return Err(Errno::EINVAL);
    }
    scheduler::current().robust_list.store(head, Ordering::Relaxed);
    Ok(0)
}

/// `get_robust_list(2)`.
pub(super) fn get_robust_list(id: u64, head_at: u64, length_at: u64) -> Outcome {
    let thread = match id as u32 {
        0 => scheduler::current_thread(),
        id => super::table::find_thread(id).ok_or(Errno::ESRCH)?,
    };
    if !credentials::may_use_memory_of(&thread.process) {
        return Err(Errno::EPERM);
    }
    user::write(length_at, &24_u64)?;
    user::write(head_at, &thread.robust_list.load(Ordering::Relaxed))?;
    Ok(0)
}
