//! `fork`, `vfork`, `clone` and `clone3`: new processes and threads.

use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use bindery::Operation;
use bindery::addr::PAGE_SIZE;
use linux_raw_sys::general::{
    CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID, CLONE_DETACHED, CLONE_FILES, CLONE_FS, CLONE_IO,
    CLONE_PARENT, CLONE_PARENT_SETTID, CLONE_PIDFD, CLONE_SETTLS, CLONE_SIGHAND, CLONE_SYSVSEM,
    CLONE_THREAD, CLONE_UNTRACED, CLONE_VFORK, CLONE_VM, CSIGNAL, RLIMIT_NPROC,
};

use crate::arch::{self, FloatingPoint, Registers};
use crate::errno::{Errno, Outcome};
use crate::files::{self, Files, Inherited};
use crate::{heap, user};

use super::signal::{Alternate, MAXIMUM, ThreadSignals};
use super::state::{ProcessParts, State};
use super::table::{self, Counted};
use super::thread::work;
use super::{Capability, Process, Thread, end, scheduler, signal};

/// Resets all handlers of the child (`clone3`).
const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;

/// The parts that a new thread shares, and its initial registers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub flags: u64,
    /// The signal that tells the parent of the child's end. As on Linux, `clone(2)` accepts any
    /// number below 256; one that is no signal tells nothing.
    pub exit_signal: u32,
    /// The stack pointer; 0 for the caller's.
    pub stack: u64,
    pub thread_pointer: u64,
    pub parent_id_at: u64,
    pub child_id_at: u64,
    pub descriptor_at: u64,
}

impl Wanted {
    /// The arguments of `clone(2)`. The order of the last two depends on the architecture.
    pub(super) fn of_clone(arguments: [u64; 6]) -> Self {
        let [flags, stack, parent_id_at, fourth, fifth, _] = arguments;
        let (child_id_at, thread_pointer) =
            if cfg!(target_arch = "x86_64") { (fourth, fifth) } else { (fifth, fourth) };
        Self {
            flags: flags & !u64::from(CSIGNAL) & 0xffff_ffff,
            exit_signal: flags as u32 & CSIGNAL,
            stack,
            thread_pointer,
            parent_id_at,
            child_id_at,
            descriptor_at: parent_id_at,
        }
    }

    /// The structure of `clone3(2)`.
    pub(super) fn of_clone3(at: u64, size: u64) -> Result<Self, Errno> {
        // Flags, descriptor, child's and parent's place, exit signal, stack and its size, thread
        // pointer; then numbers to choose and a control group, neither of which this kernel
        // supports.
        const KNOWN: usize = 11;
        let words = read_growing::<KNOWN>(at, size, 64)?;
        let [
            flags,
            descriptor_at,
            child_id_at,
            parent_id_at,
            signal,
            base,
            length,
            thread_pointer,
            chosen_ids_at,
            chosen_ids,
            _control_group,
        ] = words;
        let stack = base.checked_add(length).ok_or(Errno::EINVAL)?;
        let misplaced = (base == 0) != (length == 0)
            || flags & u64::from(CSIGNAL | CLONE_DETACHED) != 0
            || flags & u64::from(CLONE_THREAD | CLONE_PARENT) != 0 && signal != 0;
        let chosen = chosen_ids_at != 0 || chosen_ids != 0;
        if chosen || misplaced || signal > u64::from(MAXIMUM) {
            return Err(Errno::EINVAL);
        }
        let exit_signal = signal as u32;
        Ok(Self {
            flags,
            exit_signal,
            stack,
            thread_pointer,
            parent_id_at,
            child_id_at,
            descriptor_at,
        })
    }

    fn has(&self, flag: u32) -> bool {
        self.flags & u64::from(flag) != 0
    }

    fn check(&self) -> Result<(), Errno> {
        let known = CLONE_VM
            | CLONE_FS
            | CLONE_FILES
            | CLONE_SIGHAND
            | CLONE_PIDFD
            | CLONE_VFORK
            | CLONE_PARENT
            | CLONE_THREAD
            | CLONE_SYSVSEM
            | CLONE_SETTLS
            | CLONE_PARENT_SETTID
            | CLONE_CHILD_CLEARTID
            | CLONE_DETACHED
            | CLONE_UNTRACED
            | CLONE_CHILD_SETTID
            | CLONE_IO;
        let unknown = self.flags & !(u64::from(known) | CLONE_CLEAR_SIGHAND) != 0;
        let without_memory = self.has(CLONE_SIGHAND) && !self.has(CLONE_VM);
        let half_thread = self.has(CLONE_THREAD) && !self.has(CLONE_SIGHAND);
        let odd = self.has(CLONE_PIDFD) && (self.has(CLONE_THREAD) || self.has(CLONE_DETACHED))
            || self.has(CLONE_SIGHAND) && self.flags & CLONE_CLEAR_SIGHAND != 0;
        let one_place = self.has(CLONE_PIDFD)
            && self.has(CLONE_PARENT_SETTID)
            && self.descriptor_at == self.parent_id_at;
        if unknown || without_memory || half_thread || odd || one_place {
            Err(Errno::EINVAL)
        } else {
            Ok(())
        }
    }
}

/// Reads a structure of `N` words in a shorter or longer version. Words that a shorter one lacks
/// are zero.
///
/// # Errors
/// `EINVAL` if the structure has less than `least` bytes; `E2BIG` if it has more than a page, or if
/// an unknown word is not zero; `EFAULT`.
fn read_growing<const N: usize>(at: u64, size: u64, least: u64) -> Result<[u64; N], Errno> {
    if size > PAGE_SIZE {
        return Err(Errno::E2BIG);
    }
    if size < least {
        return Err(Errno::EINVAL);
    }
    let known = size.min(8 * N as u64);
    let mut bytes = [0_u8; 256];
    for start in (known..size).step_by(bytes.len()) {
        let part = &mut bytes[..(size - start).min(256) as usize];
        user::read_bytes(at.checked_add(start).ok_or(Errno::EFAULT)?, part)?;
        if part.iter().any(|byte| *byte != 0) {
            return Err(Errno::E2BIG);
        }
    }
    let mut words = [0; N];
    for (index, word) in words.iter_mut().enumerate() {
        let start = 8 * index as u64;
        let mut bytes = [0; 8];
        let part = &mut bytes[..known.saturating_sub(start).min(8) as usize];
        user::read_bytes(at.checked_add(start).ok_or(Errno::EFAULT)?, part)?;
        *word = u64::from_le_bytes(bytes);
    }
    Ok(words)
}

/// Creates a thread in this process or in a new one. Returns its number.
pub(super) fn clone(wanted: Wanted, registers: &Registers) -> Outcome {
    wanted.check()?;
    let parent = scheduler::current_thread();
    let who = parent.credentials();
    let user = who.user.real;
    let exempt = user == 0 || who.can(Capability::Resource) || who.can(Capability::Admin);
    let most = (!exempt).then(|| parent.process.limit(RLIMIT_NPROC).current);
    if wanted.has(CLONE_THREAD) {
        let number = table::new_id(Counted::Thread, user, most)?;
        let id = number.id();
        let thread = new_thread(&parent, &parent.process, id, &wanted, registers)?;
        announce(&thread, &wanted);
        begin(&parent, &thread)?;
        return Ok(u64::from(id));
    }
    let new_id = || table::new_id(Counted::Process, user, most);
    let number = new_id().or_else(|errno| {
        end::bury_orphans();
        if errno == Errno::EAGAIN { new_id() } else { Err(errno) }
    })?;
    let id = number.id();
    let process = new_process(&parent.process, id, &wanted)?;
    let thread = new_thread(&parent, &process, id, &wanted, registers)?;
    let mut handle = None;
    if wanted.has(CLONE_PIDFD) {
        let (descriptor, description) = files::insert_process(&process, 0)?;
        if let Err(errno) = user::write(wanted.descriptor_at, &descriptor) {
            Files::current().withdraw(descriptor, &description);
            return Err(errno);
        }
        handle = Some((descriptor, description));
    }
    announce(&thread, &wanted);
    // Nothing sleeps from here on. The parent may have slept until now, so a signal to its group,
    // or its end, applies to the child too; otherwise the child would survive it.
    let is_alive = !signal::is_fatal_waiting(&parent);
    let above = is_alive.then(|| settle_family(&parent.process, &process, &wanted)).flatten();
    let Some(above) = above else {
        if let Some((descriptor, description)) = handle {
            Files::current().withdraw(descriptor, &description);
        }
        return Err(if is_alive { Errno::EINVAL } else { Errno::RESTART });
    };
    table::add_process(&process);
    above.state.lock().children.push(process.clone());
    begin(&parent, &thread)?;
    drop((thread, number));
    if wanted.has(CLONE_VFORK) {
        // The end takes effect on the way back.
        let _ = process
            .life_changed
            .wait_to_the_end(|| process.has_own_memory.load(Ordering::Relaxed).then_some(()));
    }
    Ok(u64::from(id))
}

/// Gives a child the creator's current group and session. Sets the child's parent and returns it.
fn settle_family(creator: &Arc<Process>, child: &Process, wanted: &Wanted) -> Option<Arc<Process>> {
    let (above, exit_signal) = if wanted.has(CLONE_PARENT) {
        (creator.parent()?, creator.state.lock().exit_signal)
    } else {
        (creator.clone(), wanted.exit_signal)
    };
    let (group, session) = {
        let of = creator.state.lock();
        (of.group, of.session)
    };
    let mut state = child.state.lock();
    (state.group, state.session) = (group, session);
    (state.parent, state.exit_signal) = (Arc::downgrade(&above), exit_signal);
    Some(above)
}

fn new_process(parent: &Arc<Process>, id: u32, wanted: &Wanted) -> Result<Arc<Process>, Errno> {
    heap::room(16 << 10)?;
    let actions = parent.actions();
    let actions = if wanted.has(CLONE_SIGHAND) {
        actions
    } else if wanted.flags & CLONE_CLEAR_SIGHAND != 0 {
        actions.without_handlers()
    } else {
        actions.duplicate()
    };
    if wanted.has(CLONE_PARENT) && parent.parent().is_none() {
        return Err(Errno::EINVAL);
    }
    // The child's family is set once the child can be found (`settle_family`).
    let state = State::new(Some(parent), wanted.exit_signal);
    let limits = parent.limits.lock().clone();
    let facts = parent.facts();
    let standing = parent.standing.clone();
    let space = parent.space();
    let space = if wanted.has(CLONE_VM) {
        space
    } else {
        table::known(space.fork().map_err(|error| error.errno(Operation::Mmap))?)?
    };
    let space = Some(space);
    // The fork may have slept while other threads used up the heap.
    heap::room(16 << 10)?;
    let barriers = parent.barriers.lock().clone();
    let barriers = if wanted.has(CLONE_VM) { barriers } else { barriers.duplicate() };
    let (credentials, dumpable) = (scheduler::current().credentials(), parent.is_dumpable());
    let parts = ProcessParts {
        space,
        actions,
        state,
        facts,
        limits,
        standing,
        barriers,
        credentials,
        dumpable,
    };
    Ok(Process::new(id, parts))
}

fn new_thread(
    parent: &Arc<Thread>,
    process: &Arc<Process>,
    id: u32,
    wanted: &Wanted,
    registers: &Registers,
) -> Result<Arc<Thread>, Errno> {
    let files = Files::current();
    let of = |flag| if wanted.has(flag) { Inherited::Shared } else { Inherited::Copied };
    let files = if wanted.has(CLONE_THREAD) && wanted.has(CLONE_FILES) && wanted.has(CLONE_FS) {
        files
    } else {
        Arc::new(files.inherit(of(CLONE_FILES), of(CLONE_FS))?)
    };
    let mut registers = registers.clone();
    registers.set_result(0);
    if wanted.stack != 0 {
        registers.set_stack_pointer(wanted.stack);
    }
    let signals = {
        let signals = parent.signals.lock();
        let kept = !wanted.has(CLONE_VM) || wanted.has(CLONE_VFORK);
        let alternate = if kept { signals.alternate } else { Alternate::default() };
        ThreadSignals::new(signals.blocked, alternate)
    };
    let thread_pointer =
        if wanted.has(CLONE_SETTLS) { wanted.thread_pointer } else { arch::thread_pointer() };
    let mut floating_point = FloatingPoint::new();
    floating_point.save();
    let thread = Thread::new(
        id,
        process.clone(),
        files,
        &registers,
        floating_point,
        thread_pointer,
        signals,
    )?;
    thread.set_name(parent.name());
    Ok(thread)
}

/// Writes the thread's number to the requested addresses. May sleep, so the process is not in the
/// table yet: a process without a thread could neither run nor end.
fn announce(thread: &Arc<Thread>, wanted: &Wanted) {
    let id = thread.id();
    // As on Linux, a failing write is ignored.
    if wanted.has(CLONE_PARENT_SETTID) {
        let _ = user::write(wanted.parent_id_at, &id);
    }
    if wanted.has(CLONE_CHILD_SETTID) {
        let space = thread.process.space();
        let _ = user::write_bytes_of(&space, wanted.child_id_at, &id.to_le_bytes());
    }
    if wanted.has(CLONE_CHILD_CLEARTID) {
        thread.clear_child_id.store(wanted.child_id_at, Ordering::Relaxed);
    }
}

/// Starts the thread.
fn begin(parent: &Arc<Thread>, thread: &Arc<Thread>) -> Result<(), Errno> {
    let mut state = thread.process.state.lock();
    let joins = Arc::ptr_eq(&parent.process, &thread.process);
    if joins && (state.status.is_some() || signal::must_end(parent)) {
        // A process that is ending or becoming another program gets no new thread.
        return Err(Errno::RESTART);
    }
    state.threads.push(thread.clone());
    if state.stopped.is_some() {
        // Its creator slept while the process stopped, which marked only the threads of then.
        thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
    }
    drop(state);
    table::add_new_thread(thread);
    scheduler::wake(thread);
    Ok(())
}

/// `unshare(2)`: the running thread gets its own descriptors or directory.
///
/// # Errors
/// `EINVAL` for unknown flags, and for shared parts that the thread cannot leave (memory, handlers,
/// its process); `ENOMEM`.
pub(super) fn unshare(flags: u64) -> Outcome {
    let has = |flag: u32| flags as u32 & flag != 0;
    let known = CLONE_FILES | CLONE_FS | CLONE_SYSVSEM | CLONE_THREAD | CLONE_SIGHAND | CLONE_VM;
    let thread = scheduler::current_thread();
    let process = &thread.process;
    if flags as u32 & !known != 0 {
        return Err(Errno::EINVAL);
    }
    let is_alone = process.threads().len() == 1;
    if has(CLONE_THREAD | CLONE_SIGHAND | CLONE_VM) && !is_alone {
        return Err(Errno::EINVAL);
    }
    let others = || table::all().into_iter().filter(|other| !Arc::ptr_eq(other, process));
    let (space, actions) = (process.space(), process.actions());
    let has_space =
        |other: &Arc<Process>| other.try_space().is_some_and(|of| Arc::ptr_eq(&of, &space));
    let shares_space = || others().any(|other| has_space(&other));
    let shares_handlers = || others().any(|other| has_actions(&other, &actions));
    if has(CLONE_SIGHAND | CLONE_VM) && shares_handlers() || has(CLONE_VM) && shares_space() {
        return Err(Errno::EINVAL);
    }
    if has(CLONE_FILES | CLONE_FS) {
        let of = |flag| if has(flag) { Inherited::Copied } else { Inherited::Shared };
        let files = Files::current().inherit(of(CLONE_FILES), of(CLONE_FS))?;
        thread.set_files(Some(Arc::new(files)));
    }
    Ok(0)
}

/// Whether a process has these handlers, and can still use them.
fn has_actions(process: &Process, actions: &Arc<signal::Actions>) -> bool {
    process.try_space().is_some() && Arc::ptr_eq(&process.actions(), actions)
}
