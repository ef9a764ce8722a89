//! `wait4` and `waitid`.

use alloc::sync::{Arc, Weak};
use core::ptr;

use linux_raw_sys::general::{
    __WALL, __WCLONE, __WNOTHREAD, P_ALL, P_PGID, P_PID, P_PIDFD, SIGCHLD, SIGCONT, WCONTINUED,
    WEXITED, WNOHANG, WNOWAIT, WUNTRACED,
};

use crate::errno::{Errno, Outcome};
use crate::files::{self, Patience};
use crate::user;

use super::signal::{Information, code};
use super::state::{Process, Report};
use super::{end, limits, scheduler};

/// The children for whose state changes a call waits.
enum Whose {
    All,
    Process(u32),
    /// The process of a pidfd.
    Behind(Weak<Process>),
    Group(u32),
}

/// News of a child.
enum News {
    Ended(u32),
    Stopped(u32),
    Continued,
}

/// `wait4(2)`.
pub(super) fn wait4(id: u64, status_at: u64, options: u64, usage_at: u64) -> Outcome {
    let known = WNOHANG | WUNTRACED | WCONTINUED | __WNOTHREAD | __WALL | __WCLONE;
    let options = options as u32;
    if options & !known != 0 {
        return Err(Errno::EINVAL);
    }
    let whose = match id as i32 {
        -1 => Whose::All,
        0 => Whose::Group(scheduler::current().process.group()),
        i32::MIN => return Err(Errno::ESRCH),
        id if id > 0 => Whose::Process(id as u32),
        id => Whose::Group(id.unsigned_abs()),
    };
    let Some((child, news)) = wait(whose, options | WEXITED)? else { return Ok(0) };
    let status = match news {
        News::Ended(status) => status,
        News::Stopped(signal) => signal << 8 | 0x7f,
        News::Continued => 0xffff,
    };
    if status_at != 0 {
        user::write(status_at, &status)?;
    }
    write_usage(usage_at, &child)?;
    Ok(u64::from(child.id))
}

/// `waitid(2)`.
pub(super) fn waitid(kind: u64, id: u64, at: u64, options: u64, usage_at: u64) -> Outcome {
    let options = options as u32;
    let which = WEXITED | WUNTRACED | WCONTINUED;
    let known = which | WNOHANG | WNOWAIT | __WNOTHREAD | __WALL | __WCLONE;
    if options & !known != 0 || options & which == 0 {
        return Err(Errno::EINVAL);
    }
    let mut patience = Patience::Wait;
    let whose = match kind as u32 {
        P_ALL => Whose::All,
        P_PID if id as i32 > 0 => Whose::Process(id as u32),
        P_PGID if id as i32 > 0 => Whose::Group(id as u32),
        P_PGID if id as i32 == 0 => Whose::Group(scheduler::current().process.group()),
        P_PIDFD if id as i32 >= 0 => {
            let process;
            (process, patience) = files::process_to_wait_for(id as i32)?;
            Whose::Behind(process)
        }
        _ => return Err(Errno::EINVAL),
    };
    let at_once = if patience == Patience::None { WNOHANG } else { 0 };
    let found = wait(whose, options | at_once)?;
    if found.is_none() && options & WNOHANG == 0 {
        return Err(Errno::EAGAIN);
    }
    if at != 0 {
        let mut bytes = [0; 128];
        if let Some((child, news)) = &found {
            let of = |code, value| Information::of_child(SIGCHLD, code, child, value, 0);
            bytes = match *news {
                News::Ended(status) => end::about_end(child, SIGCHLD, status),
                News::Stopped(signal) => of(code::STOPPED, signal),
                News::Continued => of(code::CONTINUED, SIGCONT),
            }
            .bytes();
        }
        user::write(at, &bytes)?;
    }
    if let Some((child, _)) = &found {
        write_usage(usage_at, child)?;
    }
    Ok(0)
}

fn write_usage(at: u64, child: &Process) -> Result<(), Errno> {
    if at == 0 {
        return Ok(());
    }
    let time = child.processor_time() + child.children_time();
    let faults = child.faults() + child.children_faults();
    let peak = child.peak().max(child.children_peak());
    user::write(at, &limits::usage(time, peak, faults))
}

/// The state changes to wait for, unless `WNOHANG` says not to wait.
fn wait(whose: Whose, options: u32) -> Result<Option<(Arc<Process>, News)>, Errno> {
    let process = scheduler::current().process.clone();
    let look = || match look(&process, &whose, options) {
        Ok(None) if options & WNOHANG == 0 => None,
        other => Some(other),
    };
    process.children_changed.wait(None, look).map_err(|_| Errno::RESTART)?
}

fn look(
    process: &Process,
    whose: &Whose,
    options: u32,
) -> Result<Option<(Arc<Process>, News)>, Errno> {
    let children = process.state.lock().children.clone();
    let mut is_any = false;
    for child in &children {
        let wanted = match whose {
            Whose::All => true,
            Whose::Process(id) => child.id == *id,
            Whose::Behind(handle) => ptr::eq(handle.as_ptr(), Arc::as_ptr(child)),
            Whose::Group(group) => child.group() == *group,
        };
        if !wanted || !is_of_sort(child, options) {
            continue;
        }
        is_any = true;
        if let Some(news) = news_of(child, options) {
            if matches!(news, News::Ended(_)) && options & WNOWAIT == 0 {
                let time = child.processor_time() + child.children_time();
                let faults = child.faults() + child.children_faults();
                let peak = child.peak().max(child.children_peak());
                let mut state = process.state.lock();
                state.children_time += time;
                state.children_peak = state.children_peak.max(peak);
                state.children_faults = state.children_faults + faults;
                drop(state);
                end::bury(child);
            }
            return Ok(Some((child.clone(), news)));
        }
    }
    if is_any { Ok(None) } else { Err(Errno::ECHILD) }
}

/// Children whose exit signal is not `SIGCHLD` need `__WCLONE`.
fn is_of_sort(child: &Process, options: u32) -> bool {
    let is_clone = child.state.lock().exit_signal != SIGCHLD;
    options & __WALL != 0 || is_clone == (options & __WCLONE != 0)
}

fn news_of(child: &Process, options: u32) -> Option<News> {
    let mut state = child.state.lock();
    if state.is_ended {
        return state.status.filter(|_| options & WEXITED != 0).map(News::Ended);
    }
    let (news, wanted) = match state.report? {
        Report::Stopped(signal) => (News::Stopped(signal), WUNTRACED),
        Report::Continued => (News::Continued, WCONTINUED),
    };
    if options & wanted == 0 {
        return None;
    }
    if options & WNOWAIT == 0 {
        state.report = None;
    }
    Some(news)
}
