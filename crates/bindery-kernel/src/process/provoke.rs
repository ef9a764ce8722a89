//! Deliberate defects of the kernel when the first program ends (`provoke=...`), to test how it
//! reports them.

use core::hint::black_box;

use bindery::VmallocOptions;

use crate::memory::Pages;
use crate::options;

/// Provokes the defect that the command line names, if any.
pub fn as_asked() {
    match options::value("provoke") {
        Some("stack-overflow") => {
            run_over(0);
        }
        Some("use-after-free") => use_after_free(),
        _ => {}
    }
}

/// Panics after the audit at the end of any process except the first (`provoke=audited`), which
/// proves to a test that the audit ran.
pub fn after_an_audit(process: u32) {
    assert!(
        process == 1 || options::value("provoke") != Some("audited"),
        "process {process} was audited"
    );
}

/// Overflows the kernel stack.
#[expect(unconditional_recursion, reason = "that is what it is for")]
fn run_over(depth: usize) -> usize {
    let frame = black_box([depth; 32]);
    run_over(depth + 1) + black_box(frame)[0]
}

/// Reads freed memory that was never read before, so that no TLB holds a translation for it.
fn use_after_free() {
    let Ok(mut pages) = Pages::new(4096, &VmallocOptions::default()) else { return };
    let at = pages.bytes().as_ptr();
    drop(pages);
    // SAFETY: none. The MMU refuses.
    black_box(unsafe { at.read_volatile() });
}

/// Whether `reboot(2)` stops the machine at once, as if its power failed (`provoke=power-loss`), so
/// that a test knows that nothing was stored afterwards. With an argument above 0, the call returns
/// and plans faults for pieces that the disk writes from then on ([`crate::disk::plan`]).
pub fn loses_power() -> bool {
    options::value("provoke") == Some("power-loss")
}
