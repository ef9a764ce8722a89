//! All processes and threads, by number. A process has the number of its first thread.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::errno::Errno;
use crate::memory::Space;
use crate::sync::Mutex;
use crate::{heap, options};

use super::{Process, Thread, memory_shortage};

/// New numbers are below this (`/proc/sys/kernel/pid_max`).
static MAXIMUM_ID: AtomicU32 = AtomicU32::new(32_768);

/// The range of [`MAXIMUM_ID`], as on 64-bit Linux.
pub const MAXIMUM_IDS: RangeInclusive<u32> = FIRST_OF_ROUND + 1..=4 << 20;

/// After a wrap, numbers start here.
const FIRST_OF_ROUND: u32 = 300;

/// The number of processes and threads since power-on.
static CREATED: AtomicU64 = AtomicU64::new(0);

/// The number of [`LeftSpace`]s.
static LEAVING: AtomicU32 = AtomicU32::new(0);

/// The maximum number of threads per process, on average.
const THREADS_PER_PROCESS: usize = 4;

static TABLE: Mutex<Table> = Mutex::new(Table {
    processes: BTreeMap::new(),
    threads: BTreeMap::new(),
    reserved: BTreeMap::new(),
    spaces: Vec::new(),
    last_id: 0,
    has_wrapped: false,
});

struct Table {
    processes: BTreeMap<u32, Arc<Process>>,
    threads: BTreeMap<u32, Weak<Thread>>,
    /// Reserved numbers of processes and threads in creation.
    reserved: BTreeMap<u32, Reserved>,
    /// All address spaces, including those that no process has yet.
    spaces: Vec<Weak<Space>>,
    last_id: u32,
    /// Whether numbers have started again. Until then, each new number is above all that were used.
    has_wrapped: bool,
}

impl Table {
    /// The number of a real user's threads, those in creation and processes that were not waited
    /// for included.
    fn threads_of(&self, user: u32) -> usize {
        let coming = self.reserved.values().filter(|reserved| reserved.user == user).count();
        self.processes.values().map(|process| process.threads_of(user)).sum::<usize>() + coming
    }
}

/// The number below which new numbers lie.
pub fn maximum_id() -> u32 {
    MAXIMUM_ID.load(Ordering::Relaxed)
}

/// Sets [`maximum_id`] to a number of [`MAXIMUM_IDS`]. Processes and threads keep higher numbers.
pub fn set_maximum_id(maximum: u32) {
    MAXIMUM_ID.store(maximum, Ordering::Relaxed);
}

/// The number of processes and threads that were created since power-on.
pub fn created() -> u64 {
    CREATED.load(Ordering::Relaxed)
}

/// The process with this number, if it exists. A process that has ended exists until it is waited
/// for.
pub fn find(id: u32) -> Option<Arc<Process>> {
    TABLE.lock().processes.get(&id).cloned()
}

/// The process that a handle names, if it exists as for [`find`]. Another process may have its
/// number by now.
pub fn find_behind(handle: &Weak<Process>) -> Option<Arc<Process>> {
    let process = handle.upgrade()?;
    find(process.id).filter(|found| Arc::ptr_eq(found, &process))
}

/// All processes, by rising number, including ended processes that were not waited for.
pub fn all() -> Vec<Arc<Process>> {
    TABLE.lock().processes.values().cloned().collect()
}

/// The first process.
pub(super) fn first() -> Option<Arc<Process>> {
    find(1)
}

/// The thread with this number.
pub(super) fn find_thread(id: u32) -> Option<Arc<Thread>> {
    TABLE.lock().threads.get(&id)?.upgrade()
}

/// A reserved number, which counts towards the limits. By the time the number is dropped, the
/// process or the thread is in the table, or was never created.
pub(super) struct Number(u32);

impl Number {
    pub(super) fn id(&self) -> u32 {
        self.0
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        TABLE.lock().reserved.remove(&self.0);
    }
}

/// The use of a reserved number, and the real user of the thread in creation.
struct Reserved {
    what: Counted,
    user: u32,
}

/// Reserves a number for a thread, or for a process and its first thread. `most` is the maximum
/// number of threads of the real user; `None` for none.
///
/// # Errors
/// `EAGAIN` at the limits; `ENOMEM`.
pub(super) fn new_id(what: Counted, user: u32, most: Option<u64>) -> Result<Number, Errno> {
    heap::room(4096)?;
    let processes = options::PROCESSES.load(Ordering::Relaxed);
    let mut table = TABLE.lock();
    let is_process = |reserved: &&Reserved| reserved.what == Counted::Process;
    let coming = table.reserved.values().filter(is_process).count();
    let threads = table.threads.len() + table.reserved.len();
    if what == Counted::Process && table.processes.len() + coming >= processes
        || threads >= processes.saturating_mul(THREADS_PER_PROCESS)
        || most.is_some_and(|most| table.threads_of(user) as u64 >= most)
    {
        return Err(Errno::EAGAIN);
    }
    let mut groups: Option<Vec<_>> = None;
    let mut used = |table: &Table, id| {
        if !table.has_wrapped {
            return false;
        }
        // Groups and sessions keep the numbers of their leaders.
        let groups = groups.get_or_insert_with(|| {
            let processes = table.processes.values();
            processes.map(|process| (process.group(), process.session())).collect()
        });
        table.processes.contains_key(&id)
            || table.threads.contains_key(&id)
            || table.reserved.contains_key(&id)
            || groups.iter().any(|(group, session)| *group == id || *session == id)
    };
    let mut id = table.last_id;
    let maximum = maximum_id();
    for _ in 0..maximum {
        id += 1;
        if id >= maximum {
            id = FIRST_OF_ROUND;
            table.has_wrapped = true;
        }
        if !used(&table, id) {
            table.last_id = id;
            table.reserved.insert(id, Reserved { what, user });
            return Ok(Number(id));
        }
    }
    Err(Errno::EAGAIN)
}

/// The use of a new number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Counted {
    Process,
    Thread,
}

pub(super) fn add_process(process: &Arc<Process>) {
    TABLE.lock().processes.insert(process.id, process.clone());
}

pub(super) fn remove_process(id: u32) {
    let removed = TABLE.lock().processes.remove(&id);
    drop(removed);
}

/// As [`add_thread`], for a thread that has just been created.
pub(super) fn add_new_thread(thread: &Arc<Thread>) {
    CREATED.fetch_add(1, Ordering::Relaxed);
    add_thread(thread);
}

pub(super) fn add_thread(thread: &Arc<Thread>) {
    TABLE.lock().threads.insert(thread.id(), Arc::downgrade(thread));
}

pub(super) fn remove_thread(id: u32) {
    TABLE.lock().threads.remove(&id);
}

/// Makes an address space known to the audit.
fn add_space(space: &Arc<Space>) {
    let mut table = TABLE.lock();
    if table.spaces.len() == table.spaces.capacity() {
        table.spaces.retain(|known| known.strong_count() > 0);
    }
    table.spaces.push(Arc::downgrade(space));
}

/// The handle of a process that leaves its address space, and drops it. From here until its memory
/// is free, the space has no process, and at the end no handle either, and the dropping thread may
/// lend the kernel's lock: [`leaving_spaces`] counts it for all that time.
pub(super) struct LeftSpace(Option<Arc<Space>>);

impl LeftSpace {
    pub(super) fn new(space: Option<Arc<Space>>) -> Self {
        LEAVING.fetch_add(1, Ordering::Relaxed);
        Self(space)
    }

    pub(super) fn get(&self) -> Option<&Space> {
        self.0.as_deref()
    }
}

impl Drop for LeftSpace {
    fn drop(&mut self) {
        if let Some(space) = self.0.take() {
            drop_space(space);
        }
        LEAVING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Drops a process's handle to its address space. If it was the last one, the CPU that has used the
/// memory of the handle frees it, and not the next one that adds a space.
fn drop_space(space: Arc<Space>) {
    let known = Arc::downgrade(&space);
    drop(space);
    if known.strong_count() == 0 {
        memory_shortage::note_freed(&known);
        let mut table = TABLE.lock();
        let found = table.spaces.iter().position(|other| other.ptr_eq(&known));
        let found = found.map(|at| table.spaces.swap_remove(at));
        drop(table);
        drop(found);
    }
}

/// The number of processes that are about to free their address space, or drop their handle to it.
pub(super) fn leaving_spaces() -> u32 {
    LEAVING.load(Ordering::Relaxed)
}

/// All address spaces, each held while the caller uses it, so the memory of an ended process is
/// freed only when nothing holds its address space.
pub fn spaces() -> impl Iterator<Item = Arc<Space>> {
    let known = TABLE.lock().spaces.clone();
    known.into_iter().filter_map(|space| space.upgrade())
}

/// The maximum number of mappings of a process (`vm.max_map_count`).
static MAXIMUM_MAPPINGS: AtomicUsize = AtomicUsize::new(65_530);

/// The maximum number of mappings of a process.
pub fn maximum_mappings() -> usize {
    MAXIMUM_MAPPINGS.load(Ordering::Relaxed)
}

/// Sets the maximum number of mappings of a process, for existing processes and new ones.
pub fn set_maximum_mappings(most: usize) {
    MAXIMUM_MAPPINGS.store(most, Ordering::Relaxed);
    for space in spaces() {
        space.set_maximum_mappings(most);
    }
}

/// A new address space that the audit knows.
pub(super) fn known(space: Space) -> Result<Arc<Space>, Errno> {
    heap::room(4096)?;
    let space = Arc::new(space);
    add_space(&space);
    Ok(space)
}
