//! `/sys/block/zram0`: the size of the swap device, and its content.

use alloc::sync::Arc;
use core::fmt::{self, Write};

use crate::errno::Errno;
use crate::memory::memory;

use super::super::generated::{FixedDirectory, Text};
use super::super::node::Node;
use super::super::sequence::SequenceBuffer;
use super::super::swap::{DISK, NUMBER, SECTOR};

/// `/sys/block`.
pub fn directory() -> Arc<dyn Node> {
    let device = FixedDirectory::of([
        ("comp_algorithm", Text::writable(|out| out.write_str("[lz4]\n"), take_algorithm) as _),
        ("dev", Text::new(|out| writeln!(out, "{}:{}", NUMBER.0, NUMBER.1))),
        ("disksize", Text::writable(make_size, take_size)),
        ("initstate", Text::new(make_state)),
        ("mem_limit", Text::write_only(take_limit)),
        ("mm_stat", Text::new(make_usage)),
        ("reset", Text::write_only(take_reset)),
        ("size", Text::new(|out| writeln!(out, "{}", DISK.lock().size() / SECTOR))),
    ]);
    FixedDirectory::of([("zram0", device as _)])
}

/// There is one algorithm.
fn take_algorithm(text: &str) -> Result<(), Errno> {
    match text {
        "lz4" if DISK.lock().content.is_some() => Err(Errno::EBUSY),
        "lz4" => Ok(()),
        _ => Err(Errno::EINVAL),
    }
}

fn make_size(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", DISK.lock().size())
}

fn take_size(text: &str) -> Result<(), Errno> {
    let bytes = bytes(text)?;
    DISK.lock().set_size(bytes)
}

fn make_state(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    writeln!(out, "{}", u8::from(DISK.lock().content.is_some()))
}

fn take_limit(text: &str) -> Result<(), Errno> {
    let pages = bytes(text)?.div_ceil(4096);
    // 0 is no limit.
    let all = memory().total_frames();
    memory().set_compressed_limit(if pages == 0 { all } else { pages });
    Ok(())
}

fn take_reset(text: &str) -> Result<(), Errno> {
    match text.parse::<u16>() {
        Ok(1..) => DISK.lock().reset(),
        _ => Err(Errno::EINVAL),
    }
}

/// `mm_stat`: bytes stored, compressed, and with all overhead; the limit, the maximum so far; pages
/// with a single value, pages moved by compaction, and pages stored uncompressed.
fn make_usage(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    let (usage, filled) = (memory().compressed_usage(), memory().swap_usage().filled);
    let limit = memory().compressed_limit() << 12;
    let (stored, raw) = ((usage.pages_stored + filled) << 12, usage.pages_raw);
    let (used, most) = (usage.frames_used << 12, usage.frames_used_max << 12);
    let compressed = usage.bytes_compressed;
    write!(out, "{stored:8} {compressed:8} {used:8} {limit:8} {most:8}")?;
    writeln!(out, " {filled:8} {:8} {raw:8} {raw:8}", 0)
}

/// A number of bytes, in the notation of Linux's own parameters: a letter multiplies by powers of
/// 1,024.
fn bytes(text: &str) -> Result<u64, Errno> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err(Errno::EINVAL),
    };
    let number: u64 = digits.parse().map_err(|_| Errno::EINVAL)?;
    number.checked_mul(1 << shift).ok_or(Errno::EINVAL)
}
