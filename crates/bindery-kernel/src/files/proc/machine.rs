//! Files of `/proc` about the machine as a whole.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::{self, Write};

use bindery_linux::proc::{FaultCounts, vmstat};

use crate::arch::{INTERRUPT_NAMES, interrupt_counts};
use crate::calls::segments;
use crate::disk::Direction;
use crate::memory::memory;
use crate::process::{self, cpus, scheduler};
use crate::{options, time};

use super::super::generated::{FixedDirectory, Text};
use super::super::sequence::SequenceBuffer;
use super::super::{disk, huge_pages, swap};
use super::{frames, sysctl};

/// The files and directories of `/proc` that belong to no process.
pub fn directory() -> Arc<FixedDirectory> {
    FixedDirectory::of([
        ("cpuinfo", Text::new(make_cpuinfo) as _),
        ("diskstats", Text::new(make_diskstats)),
        ("filesystems", Text::new(make_filesystems)),
        ("interrupts", Text::new(make_interrupts)),
        ("kpagecount", frames::counts()),
        ("kpageflags", frames::flags()),
        ("loadavg", Text::new(|out| out.write_str("0.00 0.00 0.00 1/1 1\n"))),
        ("meminfo", Text::new(make_meminfo)),
        ("mounts", Text::new(mounts)),
        ("stat", Text::new(make_stat)),
        ("swaps", Text::new(swap::listing)),
        ("sysvipc", FixedDirectory::of([("shm", Text::new(|out| segments::listing(out)) as _)])),
        ("uptime", Text::new(make_uptime)),
        ("vmstat", Text::new(make_vmstat)),
        ("version", Text::new(|out| writeln!(out, "Linux version {}", options::RELEASE))),
        ("sys", sysctl::directory()),
    ])
}

/// `mounts`, of the machine and of each process.
pub fn mounts(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    out.write_str(
        "rootfs / tmpfs rw 0 0\n\
         proc /proc proc rw 0 0\n\
         sysfs /sys sysfs rw 0 0\n\
         devtmpfs /dev devtmpfs rw 0 0\n\
         tmpfs /dev/shm tmpfs rw 0 0\n",
    )?;
    if disk::size_and_free().is_some() {
        out.write_str("disk /disk bindery rw 0 0\n")
    } else {
        Ok(())
    }
}

/// The disk's line, in Linux's order: reads, merged reads, sectors and time, followed by the same
/// for writes. A request of a pager counts as one read or write. Its pieces after the first count
/// as merged, although the device gets each of them. Times are not measured.
fn make_diskstats(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    if crate::disk::blocks().is_none() {
        return Ok(());
    }
    out.write_str(" 254 0 vda")?;
    for direction in [Direction::Read, Direction::Write] {
        let [requests, pieces, bytes] = crate::disk::transfers(direction);
        write!(out, " {requests} {} {} 0", pieces.saturating_sub(requests), bytes / 512)?;
    }
    out.write_str(" 0 0 0\n")
}

fn make_filesystems(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    for name in ["sysfs", "tmpfs", "proc", "devtmpfs"] {
        writeln!(out, "nodev\t{name}")?;
    }
    Ok(())
}

fn make_meminfo(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    let memory = memory();
    let commitment = memory.commitment();
    let (swap, usage) = (memory.swap_usage(), memory.frame_usage());
    let lines = [
        ("MemTotal", memory.total_frames()),
        ("MemFree", usage.free),
        // All files are in memory only, and leave it only for swap.
        ("MemAvailable", usage.free),
        ("Buffers", 0),
        ("Cached", usage.file + usage.shared_memory),
        ("SwapCached", swap.cached),
        ("SwapTotal", swap.slots),
        ("SwapFree", swap.slots - swap.taken),
        ("Dirty", memory.dirty_limit().pages()),
        ("AnonPages", usage.anonymous),
        ("Mapped", usage.mapped),
        ("Shmem", usage.shared_memory),
        ("Slab", usage.slab),
        ("SReclaimable", 0),
        ("SUnreclaim", usage.slab),
        ("PageTables", usage.tables),
        ("CommitLimit", commitment.limit()),
        ("Committed_AS", commitment.committed()),
        ("AnonHugePages", usage.anonymous_huge),
    ];
    for (name, pages) in lines {
        writeln!(out, "{:<16}{:>8} kB", alloc::format!("{name}:"), pages * 4)?;
    }
    huge_pages::meminfo(out)
}

fn make_cpuinfo(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    (0..cpus::count()).try_for_each(|cpu| write!(out, "processor\t: {cpu}\n\n"))
}

/// The interrupts that CPUs have sent to each other, one line for each reason. Those of devices and
/// timers are not counted.
fn make_interrupts(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    let count = cpus::count();
    write!(out, "     ")?;
    (0..count).try_for_each(|cpu| write!(out, "{:>11}", alloc::format!("CPU{cpu}")))?;
    writeln!(out)?;
    for (reason, name, text) in INTERRUPT_NAMES {
        write!(out, "{name:>4}:")?;
        let sent = |cpu: u32| interrupt_counts::sent(reason, cpu as u16);
        (0..count).try_for_each(|cpu| write!(out, " {:>10}", sent(cpu)))?;
        writeln!(out, "   {text}")?;
    }
    Ok(())
}

fn make_stat(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    const TICK: u64 = time::SECOND / 100;
    // One reading of the clock for all: user time never goes back.
    let now = time::now();
    let started = (time::real_time() - time::now()) / time::SECOND;
    let count = cpus::count();
    // Threads' time in the kernel counts as user time, as in their own clocks.
    let idle: Vec<u64> = (0..count).map(|cpu| cpus::idle_time(cpu, now).min(now)).collect();
    let mut line = |name: fmt::Arguments<'_>, total: u64, idle: u64| {
        writeln!(out, "cpu{name} {} 0 0 {} 0 0 0 0 0 0", (total - idle) / TICK, idle / TICK)
    };
    line(format_args!(" "), now * u64::from(count), idle.iter().sum())?;
    (0u32..).zip(&idle).try_for_each(|(cpu, &idle)| line(format_args!("{cpu}"), now, idle))?;
    let (switches, created) = (cpus::switches(), process::created());
    writeln!(out, "ctxt {switches}\nbtime {started}\nprocesses {created}")?;
    writeln!(out, "procs_running {}\nprocs_blocked 0", cpus::threads_in_use())
}

fn make_vmstat(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    let major = memory().events().major_faults;
    vmstat(memory(), FaultCounts { all: scheduler::page_faults(), major }, out)
}

fn make_uptime(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    let (seconds, rest) = (time::now() / time::SECOND, time::now() % time::SECOND);
    let now = time::now();
    let idle: u64 = (0..cpus::count()).map(|cpu| cpus::idle_time(cpu, now)).sum();
    let (idle, part) = (idle / time::SECOND, idle % time::SECOND / 10_000_000);
    writeln!(out, "{seconds}.{:02} {idle}.{part:02}", rest / 10_000_000)
}
