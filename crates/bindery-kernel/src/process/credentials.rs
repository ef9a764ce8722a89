//! Users, groups and capabilities of a thread.
//!
//! Files have no capabilities. The superuser has all of them; other users have those that `setuid`
//! and `capset` leave them.

use alloc::sync::Arc;

use linux_raw_sys::general::SIGCONT;

use crate::errno::{Errno, Outcome};
use crate::{heap, user};

use super::{Process, find, scheduler};

/// The maximum number of supplementary groups of a thread (`NGROUPS_MAX`).
const GROUPS_MAX: u64 = 65_536;

/// Privileges of the superuser, by their numbers in capabilities(7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are those of capabilities(7)")]
pub enum Capability {
    Chown = 0,
    DacOverride = 1,
    DacReadSearch = 2,
    FileOwner = 3,
    FileSetId = 4,
    Kill = 5,
    SetGroup = 6,
    SetUser = 7,
    LockMemory = 14,
    IpcOwner = 15,
    Trace = 19,
    Admin = 21,
    Boot = 22,
    Nice = 23,
    Resource = 24,
    Time = 25,
}

/// All capabilities that Linux 6.18 has.
pub const ALL: u64 = (1 << 41) - 1;

/// The user or group ids of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ids {
    /// The id of the owner.
    pub real: u32,
    /// The id whose rights the thread has.
    pub effective: u32,
    /// The saved id.
    pub saved: u32,
    /// The id for files.
    pub file: u32,
}

impl Ids {
    fn has(&self, id: u32) -> bool {
        [self.real, self.effective, self.saved].contains(&id)
    }

    fn all(id: u32) -> Self {
        Self { real: id, effective: id, saved: id, file: id }
    }

    /// Whether a user with the file ID `id` is all of these.
    fn are(&self, id: u32) -> bool {
        [self.real, self.effective, self.saved] == [id; 3]
    }
}

/// The credentials of a thread.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The thread's user ids.
    pub user: Ids,
    /// The thread's group ids.
    pub group: Ids,
    /// Further groups.
    pub groups: Arc<[u32]>,
    /// The effective capabilities.
    pub effective: u64,
    /// The permitted capabilities.
    pub permitted: u64,
    /// The inheritable capabilities.
    pub inheritable: u64,
    /// Whether programs give the thread no other rights (`PR_SET_NO_NEW_PRIVS`).
    pub no_new_privileges: bool,
}

impl Credentials {
    /// The superuser's.
    pub fn root() -> Self {
        Self {
            user: Ids::default(),
            group: Ids::default(),
            groups: Arc::new([]),
            effective: ALL,
            permitted: ALL,
            inheritable: 0,
            no_new_privileges: false,
        }
    }

    /// Whether the thread has the capability.
    pub fn can(&self, what: Capability) -> bool {
        self.effective & 1 << what as u32 != 0
    }

    /// Fails with `EPERM` without the capability.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn demand(&self, what: Capability) -> Result<(), Errno> {
        if self.can(what) { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Whether the thread accesses files as a member of the group.
    pub fn is_in_group(&self, group: u32) -> bool {
        self.group.file == group || self.groups.contains(&group)
    }

    /// The credentials that `access(2)` checks: with the real ids instead of the effective ones.
    pub fn with_real_ids(&self) -> Self {
        let mut other = self.clone();
        other.user.file = self.user.real;
        other.group.file = self.group.real;
        other.effective = if self.user.real == 0 { self.permitted } else { 0 };
        other
    }

    /// The credentials after the start of a program with the set-user-ID bit (`owner`) or the
    /// set-group-ID bit (`group`).
    pub fn at_exec(&self, owner: Option<u32>, group: Option<u32>) -> Self {
        let mut new = self.clone();
        let (owner, group) = if self.no_new_privileges { (None, None) } else { (owner, group) };
        new.user.effective = owner.unwrap_or(self.user.effective);
        new.group.effective = group.unwrap_or(self.group.effective);
        for ids in [&mut new.user, &mut new.group] {
            (ids.saved, ids.file) = (ids.effective, ids.effective);
        }
        let is_root = new.user.real == 0 || new.user.effective == 0;
        new.permitted = if is_root { ALL } else { 0 };
        new.effective = if new.user.effective == 0 { ALL } else { 0 };
        new
    }

    /// Whether the thread's program has other rights than the caller that started it (`AT_SECURE`).
    pub fn is_secure(&self) -> bool {
        self.user.real != self.user.effective || self.group.real != self.group.effective
    }

    /// Whether the thread may send a signal to a process with the credentials `other`.
    fn may_signal(&self, other: &Self) -> bool {
        let (own, other) = (&self.user, &other.user);
        self.can(Capability::Kill)
            || [own.real, own.effective].iter().any(|id| [other.real, other.saved].contains(id))
    }

    /// Adjusts capabilities to a change of users (capabilities(7), "Effect of user ID changes").
    fn users_changed(&mut self, old: &Ids) {
        if old.has(0) && !self.user.has(0) {
            (self.permitted, self.effective) = (0, 0);
        }
        match (old.effective, self.user.effective) {
            (0, 0) => {}
            (0, _) => self.effective = 0,
            (_, 0) => self.effective = self.permitted,
            _ => {}
        }
    }
}

/// The credentials of the running thread; the superuser's while no thread runs.
pub fn credentials() -> Credentials {
    if scheduler::is_in_thread() { scheduler::current().credentials() } else { Credentials::root() }
}

/// Calls `act` with changed credentials.
pub fn acting_as<R>(who: Credentials, act: impl FnOnce() -> R) -> R {
    let thread = scheduler::current();
    let old = thread.replace_credentials(who);
    let result = act();
    thread.replace_credentials(old);
    result
}

/// Installs the credentials in the running thread.
pub(super) fn commit(new: Credentials) {
    let thread = scheduler::current();
    let process = &thread.process;
    let old = thread.replace_credentials(new.clone());
    let same = |of: fn(&Ids) -> (u32, u32)| {
        of(&old.user) == of(&new.user) && of(&old.group) == of(&new.group)
    };
    if !same(|ids| (ids.effective, ids.file)) || new.permitted & !old.permitted != 0 {
        // As on Linux, processes of the new ids must not read data that this process had access to.
        process.set_dumpable(false);
        process.state.lock().parent_end_signal = 0;
    }
    if thread.id() == process.id || process.threads().len() == 1 {
        process.set_credentials(new);
    }
    process.apply_limits();
}

/// Whether the running thread may inspect a process: its memory, its descriptors (ptrace(2),
/// `PTRACE_MODE_READ_FSCREDS`).
pub fn may_look_into(process: &Process) -> bool {
    let who = credentials();
    may_be_looked_into(process, &who, (who.user.file, who.group.file), who.effective)
}

/// Whether the running thread, with the credentials `who`, this user and group and these
/// capabilities, may inspect a process.
fn may_be_looked_into(
    process: &Process,
    who: &Credentials,
    (user, group): (u32, u32),
    capabilities: u64,
) -> bool {
    if scheduler::is_running(process) {
        return true;
    }
    let other = process.credentials();
    let same = other.user.are(user) && other.group.are(group);
    let is_open = process.is_dumpable() && other.permitted & !capabilities == 0;
    who.can(Capability::Trace) || same && is_open
}

/// Whether the running process may read and write the memory of another. (Linux:
/// `ptrace_may_access` with `PTRACE_MODE_ATTACH_REALCREDS`.)
pub(super) fn may_use_memory_of(process: &Process) -> bool {
    let who = credentials();
    may_be_looked_into(process, &who, (who.user.real, who.group.real), who.permitted)
}

/// Refuses a signal that the running thread may not send.
///
/// # Errors
/// `EPERM`.
pub(super) fn check_signal(process: &Process, signal: u32) -> Result<(), Errno> {
    let own = scheduler::current();
    let continues = signal == SIGCONT && own.process.session() == process.session();
    if scheduler::is_running(process)
        || continues
        || own.credentials().may_signal(&process.credentials())
    {
        return Ok(());
    }
    Err(Errno::EPERM)
}

/// The kind of ids that a call changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    User,
    Group,
}

impl Kind {
    fn of(self, who: &mut Credentials) -> &mut Ids {
        match self {
            Self::User => &mut who.user,
            Self::Group => &mut who.group,
        }
    }

    fn capability(self) -> Capability {
        match self {
            Self::User => Capability::SetUser,
            Self::Group => Capability::SetGroup,
        }
    }
}

/// The id that leaves the old one unchanged.
const KEPT: u32 = u32::MAX;

fn given(id: u64) -> Option<u32> {
    Some(id as u32).filter(|id| *id != KEPT)
}

/// Changes ids of the running thread. `change` returns the new ones or an error; its argument says
/// whether the thread may assume any id.
fn change(kind: Kind, change: impl FnOnce(Ids, bool) -> Result<Ids, Errno>) -> Result<(), Errno> {
    let mut who = credentials();
    let free = who.can(kind.capability());
    let old = *kind.of(&mut who);
    let new = change(old, free)?;
    if new != old {
        *kind.of(&mut who) = new;
        if kind == Kind::User {
            who.users_changed(&old);
        }
        commit(who);
    }
    Ok(())
}

/// `setuid(2)`, `setgid(2)`.
pub(super) fn set(kind: Kind, id: u64) -> Outcome {
    let id = given(id).ok_or(Errno::EINVAL)?;
    change(kind, |old, free| match free {
        true => Ok(Ids::all(id)),
        false if id == old.real || id == old.saved => Ok(Ids { effective: id, file: id, ..old }),
        false => Err(Errno::EPERM),
    })?;
    Ok(0)
}

/// `setreuid(2)`, `setregid(2)`.
pub(super) fn set_two(kind: Kind, real: u64, effective: u64) -> Outcome {
    let (real, effective) = (given(real), given(effective));
    change(kind, |old, free| {
        let mut new = old;
        if let Some(real) = real {
            if !free && real != old.real && real != old.effective {
                return Err(Errno::EPERM);
            }
            new.real = real;
        }
        if let Some(effective) = effective {
            if !free && !old.has(effective) {
                return Err(Errno::EPERM);
            }
            new.effective = effective;
        }
        if real.is_some() || effective.is_some_and(|id| id != old.real) {
            new.saved = new.effective;
        }
        new.file = new.effective;
        Ok(new)
    })?;
    Ok(0)
}

/// `setresuid(2)`, `setresgid(2)`.
pub(super) fn set_three(kind: Kind, ids: [u64; 3]) -> Outcome {
    let wanted = ids.map(given);
    change(kind, |old, free| {
        if !free && !wanted.iter().flatten().all(|id| old.has(*id)) {
            return Err(Errno::EPERM);
        }
        let [real, effective, saved] = wanted;
        let effective = effective.unwrap_or(old.effective);
        let (real, saved) = (real.unwrap_or(old.real), saved.unwrap_or(old.saved));
        Ok(Ids { real, effective, saved, file: effective })
    })?;
    Ok(0)
}

/// `setfsuid(2)`, `setfsgid(2)`: returns the old id. A refusal leaves it unchanged.
pub(super) fn set_file(kind: Kind, id: u64) -> Outcome {
    let mut who = credentials();
    let old = kind.of(&mut who).file;
    // Never fails, because an id that may not be taken has no effect.
    change(kind, |old, free| {
        let wanted = given(id).filter(|id| free || old.has(*id) || old.file == *id);
        Ok(Ids { file: wanted.unwrap_or(old.file), ..old })
    })?;
    Ok(old.into())
}

/// `getresuid(2)`, `getresgid(2)`.
pub(super) fn get_three(kind: Kind, places: [u64; 3]) -> Outcome {
    let Ids { real, effective, saved, .. } = *kind.of(&mut credentials());
    for (place, id) in places.into_iter().zip([real, effective, saved]) {
        user::write(place, &id)?;
    }
    Ok(0)
}

/// `getgroups(2)`.
pub(super) fn get_groups(size: u64, at: u64) -> Outcome {
    let groups = credentials().groups;
    let size = u64::try_from(size as i32).map_err(|_| Errno::EINVAL)?;
    if size != 0 {
        if size < groups.len() as u64 {
            return Err(Errno::EINVAL);
        }
        for (index, group) in groups.iter().enumerate() {
            user::write(at.wrapping_add(4 * index as u64), group)?;
        }
    }
    Ok(groups.len() as u64)
}

/// `setgroups(2)`.
pub(super) fn set_groups(size: u64, at: u64) -> Outcome {
    let mut who = credentials();
    who.demand(Capability::SetGroup)?;
    let size = size as u32;
    if u64::from(size) > GROUPS_MAX {
        return Err(Errno::EINVAL);
    }
    heap::room(8 * size as usize + 256)?;
    let read = |index| user::read::<u32>(at.wrapping_add(4 * u64::from(index)));
    who.groups = (0..size).map(read).collect::<Result<alloc::vec::Vec<_>, _>>()?.into();
    commit(who);
    Ok(0)
}

/// The versions of the structures of capget(2), and the number of words of each set.
const VERSIONS: [(u32, usize); 3] = [(0x1998_0330, 1), (0x2007_1026, 2), (0x2008_0522, 2)];

/// The version of a capget(2) header, as a number of words, and the thread that the header names.
/// `None` for an unknown version; the call then writes a known one.
fn header(at: u64) -> Result<(Option<usize>, i32), Errno> {
    let [version, id] = user::read::<[u32; 2]>(at)?;
    let words = VERSIONS.iter().find(|(known, _)| *known == version).map(|(_, words)| *words);
    if words.is_none() {
        user::write(at, &VERSIONS[2].0)?;
    }
    Ok((words, id as i32))
}

/// `capget(2)`.
pub(super) fn capget(header_at: u64, at: u64) -> Outcome {
    let (words, id) = header(header_at)?;
    let words = match words {
        Some(words) => words,
        // A null pointer requests only the version.
        None if at == 0 => return Ok(0),
        None => return Err(Errno::EINVAL),
    };
    let of = match id {
        ..0 => return Err(Errno::EINVAL),
        0 => credentials(),
        id => find(id as u32).ok_or(Errno::ESRCH)?.credentials(),
    };
    for index in 0..words {
        let sets = [of.effective, of.permitted, of.inheritable];
        let parts = sets.map(|set| (set >> (32 * index)) as u32);
        user::write(at.wrapping_add(12 * index as u64), &parts)?;
    }
    Ok(0)
}

/// `capset(2)`: can only drop capabilities.
pub(super) fn capset(header_at: u64, at: u64) -> Outcome {
    let (words, id) = header(header_at)?;
    let words = words.ok_or(Errno::EINVAL)?;
    let own = scheduler::current();
    if id != 0 && id as u32 != own.id() {
        return Err(Errno::EPERM);
    }
    let mut sets = [0_u64; 3];
    for index in 0..words {
        let parts: [u32; 3] = user::read(at.wrapping_add(12 * index as u64))?;
        for (set, part) in sets.iter_mut().zip(parts) {
            *set |= u64::from(part) << (32 * index);
        }
    }
    let mut who = credentials();
    let [effective, permitted, inheritable] = sets.map(|set| set & ALL);
    let grows = permitted & !who.permitted != 0
        || effective & !permitted != 0
        || inheritable & !(who.inheritable | who.permitted) != 0;
    if grows {
        return Err(Errno::EPERM);
    }
    (who.effective, who.permitted, who.inheritable) = (effective, permitted, inheritable);
    commit(who);
    Ok(0)
}
