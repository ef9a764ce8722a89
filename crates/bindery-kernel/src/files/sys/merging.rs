//! `/sys/kernel/mm/ksm`: the merging of pages with equal contents, as on a Linux whose `ksmd` is
//! stopped. This kernel merges no pages, so merging cannot be started.

use alloc::sync::Arc;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::errno::Errno;

use super::super::generated::{FixedDirectory, Text};
use super::super::sequence::SequenceBuffer;
use super::setting::{Setting, Value};

/// Whether the last write to `run` was 2, not 0.
static WAS_UNMERGED: AtomicBool = AtomicBool::new(false);

/// `run`: 0 stops the merging, and 2 also splits all merged pages. 1 would start it.
struct Run;

impl Value for Run {
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        out.write_str(if WAS_UNMERGED.load(Ordering::Relaxed) { "2" } else { "0" })
    }

    fn take(&self, text: &str) -> Result<(), Errno> {
        let unmerges = match text {
            "0" => false,
            "2" => true,
            _ => return Err(Errno::EINVAL),
        };
        WAS_UNMERGED.store(unmerges, Ordering::Relaxed);
        Ok(())
    }
}

/// The directory.
pub fn directory() -> Arc<FixedDirectory> {
    let zero = || Text::new(|out| out.write_str("0\n")) as _;
    FixedDirectory::of([
        ("run", Setting::file(Run)),
        ("full_scans", zero()),
        ("general_profit", zero()),
        ("ksm_zero_pages", zero()),
        ("max_page_sharing", Text::new(|out| out.write_str("256\n"))),
        ("pages_scanned", zero()),
        ("pages_shared", zero()),
        ("pages_sharing", zero()),
        ("pages_skipped", zero()),
        ("pages_to_scan", Text::new(|out| out.write_str("100\n"))),
        ("pages_unshared", zero()),
        ("pages_volatile", zero()),
        ("sleep_millisecs", Text::new(|out| out.write_str("20\n"))),
        ("stable_node_chains", zero()),
        ("stable_node_dups", zero()),
        ("use_zero_pages", zero()),
    ])
}
