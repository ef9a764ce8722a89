//! Texts about a process that consist of one entry.

use alloc::format;
use core::fmt::{self, Write};

use bindery_linux::proc;

use crate::errno::Errno;
use crate::memory::Space;
use crate::process::{ALL_CAPABILITIES, Process};
use crate::time;

use super::super::descriptor::Files;
use super::super::listing::EntryText;

/// `status`.
pub(super) fn status(
    process: &Process,
    thread: u32,
    space: Option<&Space>,
    out: &mut EntryText,
) -> fmt::Result {
    out.write_str("Name:\t")?;
    out.push(&process.name_of(thread))?;
    let (letter, parent) = (process.letter_of(thread), process.parent_id());
    writeln!(out, "\nUmask:\t{:04o}", Files::of_process(process).map_or(0, |files| files.umask()))?;
    writeln!(out, "State:\t{letter} ({})", state_name(letter))?;
    writeln!(out, "Tgid:\t{}\nNgid:\t0\nPid:\t{thread}\nPPid:\t{parent}", process.id)?;
    let who = process.credentials();
    writeln!(out, "TracerPid:\t0")?;
    for (name, ids) in [("Uid", who.user), ("Gid", who.group)] {
        writeln!(out, "{name}:\t{}\t{}\t{}\t{}", ids.real, ids.effective, ids.saved, ids.file)?;
    }
    write!(out, "FDSize:\t64\nGroups:\t")?;
    who.groups.iter().try_for_each(|group| write!(out, "{group} "))?;
    out.write_str(if who.groups.is_empty() { " \n" } else { "\n" })?;
    if let Some(space) = space {
        proc::status(space, out)?;
    }
    let [pending, blocked, ignored, caught] = process.signal_sets();
    writeln!(out, "Threads:\t{}", process.thread_ids().len())?;
    writeln!(out, "ShdPnd:\t{pending:016x}\nSigBlk:\t{blocked:016x}")?;
    writeln!(out, "SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}")?;
    let sets = [
        ("CapInh", who.inheritable),
        ("CapPrm", who.permitted),
        ("CapEff", who.effective),
        ("CapBnd", ALL_CAPABILITIES),
        ("CapAmb", 0),
    ];
    for (name, set) in sets {
        writeln!(out, "{name}:\t{set:016x}")?;
    }
    writeln!(out, "Cpus_allowed:\t1\nCpus_allowed_list:\t0")
}

fn state_name(letter: char) -> &'static str {
    match letter {
        'R' => "running",
        'S' => "sleeping",
        'D' => "disk sleep",
        'T' => "stopped",
        _ => "zombie",
    }
}

/// `stat`: one line of numbers; those without a meaning here are 0 (see proc_pid_stat(5)).
pub(super) fn stat(
    process: &Process,
    thread: u32,
    space: Option<&Space>,
    out: &mut EntryText,
) -> fmt::Result {
    const TICK: u64 = time::SECOND / 100;
    let (usage, resident) = match space {
        Some(space) => (space.usage().total << 12, space.resident().total()),
        None => (0, 0),
    };
    write!(out, "{thread} (")?;
    out.push(&process.name_of(thread))?;
    let (letter, parent, group) = (process.letter_of(thread), process.parent_id(), process.group());
    let (time, children) = (process.processor_time() / TICK, process.children_time() / TICK);
    write!(out, ") {letter} {parent} {group} {} 0 -1 0 ", process.session())?;
    let (own, inherited) = (process.faults(), process.children_faults());
    write!(out, "{} {} {} {} ", own.minor, inherited.minor, own.major, inherited.major)?;
    write!(out, "{time} 0 {children} 0 20 0 {} 0 ", process.thread_ids().len())?;
    let facts = process.facts();
    write!(out, "{} {usage} {resident} ", process.start_time / TICK)?;
    write!(out, "{} {} {} {} ", u64::MAX, facts.code.start, facts.code.end, facts.stack)?;
    write!(out, "0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 ")?;
    let (arguments, environment) = (facts.arguments, facts.environment);
    write!(out, "{} {} ", arguments.start, arguments.end)?;
    writeln!(out, "{} {} 0", environment.start, environment.end)
}

/// `limits`.
pub(super) fn limits(process: &Process, out: &mut EntryText) -> fmt::Result {
    const NAMES: [(&str, u32, &str); 9] = [
        ("Max cpu time", 0, "seconds"),
        ("Max file size", 1, "bytes"),
        ("Max data size", 2, "bytes"),
        ("Max stack size", 3, "bytes"),
        ("Max resident set", 5, "bytes"),
        ("Max processes", 6, "processes"),
        ("Max open files", 7, "files"),
        ("Max locked memory", 8, "bytes"),
        ("Max address space", 9, "bytes"),
    ];
    writeln!(out, "{:<26}{:<21}{:<21}Units", "Limit", "Soft Limit", "Hard Limit")?;
    for (name, resource, unit) in NAMES {
        let limit = process.limit(resource);
        let text = |limit| if limit == u64::MAX { "unlimited".into() } else { format!("{limit}") };
        let (current, maximum) = (text(limit.current), text(limit.maximum));
        writeln!(out, "{name:<26}{current:<21}{maximum:<21}{unit}")?;
    }
    Ok(())
}

/// The extremes of `oom_adj` and `oom_score_adj`.
const OLD_EXTREMES: (i32, i32) = (-17, 15);
const EXTREME: i32 = 1000;

/// `oom_adj`: `oom_score_adj` on the older scale.
pub(super) fn old_kill_adjustment(process: &Process, out: &mut EntryText) -> fmt::Result {
    let (lowest, highest) = OLD_EXTREMES;
    writeln!(
        out,
        "{}",
        match process.kill_adjustment() {
            EXTREME => highest,
            adjustment => adjustment * -lowest / EXTREME,
        }
    )
}

/// The `oom_score_adj` of an `oom_adj`.
///
/// # Errors
/// `EINVAL` outside of -17 to 15.
pub(super) fn new_adjustment(old: i32) -> Result<i32, Errno> {
    let (lowest, highest) = OLD_EXTREMES;
    match old {
        _ if old == highest => Ok(EXTREME),
        _ if (lowest..highest).contains(&old) => Ok(old * EXTREME / -lowest),
        _ => Err(Errno::EINVAL),
    }
}
