//! `/proc/sys`: the kernel's settings. Every writable file has an effect; a setting that the kernel
//! cannot change cannot be opened for writing.

use alloc::sync::Arc;
use core::fmt::{self, Write};
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::Overcommit;

use crate::errno::Errno;
use crate::memory::memory;
use crate::{options, process};

use super::super::disk::writer;
use super::super::generated::{FixedDirectory, Text};
use super::super::sequence::SequenceBuffer;
use super::super::userfault;

/// The maximum value of the files that are an `int` on Linux.
const INT_MAX: u64 = i32::MAX as u64;

/// `overcommit_ratio`, in hundredths of memory; 0 if `overcommit_kbytes` is in force.
static OVERCOMMIT_RATIO: AtomicU64 = AtomicU64::new(50);
/// `overcommit_kbytes`; 0 if the ratio is in force.
static OVERCOMMIT_KILOBYTES: AtomicU64 = AtomicU64::new(0);

/// The directory.
pub fn directory() -> Arc<FixedDirectory> {
    let vm = FixedDirectory::of([
        ("dirty_writeback_centisecs", Text::writable(make_interval, take_interval) as _),
        ("drop_caches", Text::write_only(drop_caches)),
        ("max_map_count", Text::writable(make_map_count, take_map_count)),
        ("min_free_kbytes", Text::new(|out| writeln!(out, "{}", memory().reserved_frames() * 4))),
        ("mmap_min_addr", Text::new(|out| out.write_str("65536\n"))),
        ("nr_hugepages", Text::new(|out| out.write_str("0\n"))),
        ("overcommit_kbytes", Text::writable(make_kilobytes, take_kilobytes)),
        ("overcommit_memory", Text::writable(make_overcommit, take_overcommit)),
        ("overcommit_ratio", Text::writable(make_ratio, take_ratio)),
        // All swap is compressed memory, so the kernel performs no readahead around a swapped page.
        ("page-cluster", Text::writable(make_page_cluster, take_page_cluster)),
        ("unprivileged_userfaultfd", Text::writable(make_userfaults, take_userfaults)),
    ]);
    let kernel = FixedDirectory::of([
        // There are no core dumps, as on Linux with a limit of 0 (`RLIMIT_CORE`).
        ("core_pattern", Text::new(|out| out.write_str("core\n")) as _),
        ("hostname", Text::new(|out| out.write_str("bindery\n"))),
        ("ostype", Text::new(|out| out.write_str("Linux\n"))),
        ("osrelease", Text::new(|out| writeln!(out, "{}", options::RELEASE))),
        ("pid_max", Text::writable(make_maximum_id, take_maximum_id)),
        ("randomize_va_space", Text::new(|out| out.write_str("0\n"))),
        ("printk", Text::new(|out| out.write_str("7\t4\t1\t7\n"))),
    ]);
    FixedDirectory::of([("kernel", kernel as _), ("vm", vm)])
}

fn make_page_cluster(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", memory().page_cluster())
}

fn take_page_cluster(text: &str) -> Result<(), Errno> {
    memory().set_page_cluster(number(text, 0..=31)? as u8);
    Ok(())
}

/// A number of a range.
fn number(text: &str, range: RangeInclusive<u64>) -> Result<u64, Errno> {
    let number = text.parse().map_err(|_| Errno::EINVAL)?;
    if range.contains(&number) { Ok(number) } else { Err(Errno::EINVAL) }
}

/// 1: clean pages of files. 2: the kernel's caches. 3: both. 4: neither, silently.
fn drop_caches(text: &str) -> Result<(), Errno> {
    let what = number(text, 1..=4)?;
    if what & 1 != 0 {
        memory().drop_clean_pages();
    }
    if what & 2 != 0 {
        memory().collect();
    }
    Ok(())
}

fn make_interval(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", writer::interval())
}

fn take_interval(text: &str) -> Result<(), Errno> {
    writer::set_interval(number(text, 0..=INT_MAX)?);
    Ok(())
}

fn make_userfaults(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", u8::from(userfault::unprivileged()))
}

fn take_userfaults(text: &str) -> Result<(), Errno> {
    userfault::set_unprivileged(number(text, 0..=1)? == 1);
    Ok(())
}

fn make_map_count(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", process::maximum_mappings())
}

fn take_map_count(text: &str) -> Result<(), Errno> {
    process::set_maximum_mappings(number(text, 0..=INT_MAX)? as usize);
    Ok(())
}

fn make_maximum_id(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", process::maximum_id())
}

fn take_maximum_id(text: &str) -> Result<(), Errno> {
    let (lowest, highest) = process::MAXIMUM_IDS.into_inner();
    process::set_maximum_id(number(text, lowest.into()..=highest.into())? as u32);
    Ok(())
}

fn make_overcommit(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    let mode = match memory().commitment().mode() {
        Overcommit::Heuristic => 0,
        Overcommit::Always => 1,
        Overcommit::Never => 2,
    };
    writeln!(out, "{mode}")
}

fn take_overcommit(text: &str) -> Result<(), Errno> {
    let mode = match number(text, 0..=2)? {
        0 => Overcommit::Heuristic,
        1 => Overcommit::Always,
        _ => Overcommit::Never,
    };
    memory().commitment().set_mode(mode);
    Ok(())
}

fn make_ratio(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", OVERCOMMIT_RATIO.load(Ordering::Relaxed))
}

fn make_kilobytes(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", OVERCOMMIT_KILOBYTES.load(Ordering::Relaxed))
}

fn take_ratio(text: &str) -> Result<(), Errno> {
    set_commit_limit(number(text, 0..=INT_MAX)?, 0);
    Ok(())
}

fn take_kilobytes(text: &str) -> Result<(), Errno> {
    set_commit_limit(0, number(text, 0..=u64::MAX)?);
    Ok(())
}

/// As on Linux, the setting that was written last is in force, and the other is 0.
fn set_commit_limit(ratio: u64, kilobytes: u64) {
    OVERCOMMIT_RATIO.store(ratio, Ordering::Relaxed);
    OVERCOMMIT_KILOBYTES.store(kilobytes, Ordering::Relaxed);
    renew_commit_limit();
}

/// Passes the limit to the core, which is the setting's share plus all swap.
pub fn renew_commit_limit() {
    let kilobytes = OVERCOMMIT_KILOBYTES.load(Ordering::Relaxed);
    let ratio = OVERCOMMIT_RATIO.load(Ordering::Relaxed);
    let share = memory().total_frames().saturating_mul(ratio) / 100;
    let swap: u64 = memory().swap_areas().map(|area| area.slots).sum();
    let own = if kilobytes > 0 { kilobytes / 4 } else { share };
    memory().commitment().set_limit(own.saturating_add(swap));
}
