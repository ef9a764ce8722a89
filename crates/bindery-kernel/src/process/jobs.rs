//! Process groups as the jobs of a shell: which of them have lost it.

use alloc::sync::Arc;

use linux_raw_sys::general::{SIGCONT, SIGHUP};

use super::signal::send_to_group;
use super::{Process, all};

/// Whether a group is orphaned, that is, no member has a parent in another group of the same
/// session. Terminals do not stop such groups. The first process does not count as a parent of the
/// processes that it has adopted.
pub(super) fn is_orphaned(group: u32) -> bool {
    let is_cared_for = |member: &Arc<Process>| {
        let (is_ended, is_adopted) = {
            let state = member.state.lock();
            (state.is_ended, state.is_orphan)
        };
        let is_outside =
            |parent: Arc<Process>| parent.group() != group && parent.session() == member.session();
        !is_ended && !is_adopted && member.parent().is_some_and(is_outside)
    };
    !all().iter().filter(|member| member.group() == group).any(is_cared_for)
}

/// Called when `parent` is no longer the parent of `process`, because one of them has ended. If
/// that orphans the group of `process`, continues its stopped members, which nothing else would do.
pub(super) fn lose_parent(process: &Process, parent: &Process) {
    let group = process.group();
    if parent.group() == group || parent.session() != process.session() {
        return;
    }
    let is_stopped =
        |member: &Arc<Process>| member.group() == group && member.state.lock().stopped.is_some();
    if all().iter().any(is_stopped) && is_orphaned(group) {
        send_to_group(group, SIGHUP);
        send_to_group(group, SIGCONT);
    }
}
