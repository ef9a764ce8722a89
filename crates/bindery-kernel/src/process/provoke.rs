//! Deliberate defects of the kernel when the first program ends (`provoke=...`), to test how the
//! kernel reports them.

use core::hint::black_box;

use bindery::VmallocOptions;

use crate::memory::Pages;
use crate::options;

/// Does what the command line asks for, if anything.
pub fn as_asked() {
    match options::value("provoke") {
        Some("stack-overflow") => {
            run_over(0);
        }
        Some("use-after-free") => use_after_free(),
        _ => {}
    }
}

/// Dies once the end of another process than the first was audited (`provoke=audited`): so a test
/// knows that it was.
pub fn after_an_audit(process: u32) {
    assert!(
        process == 1 || options::value("provoke") != Some("audited"),
        "process {process} was audited"
    );
}

/// Runs over the kernel stack.
#[expect(unconditional_recursion, reason = "that is what it is for")]
fn run_over(depth: usize) -> usize {
    let frame = black_box([depth; 32]);
    run_over(depth + 1) + black_box(frame)[0]
}

/// Reads memory that was freed, and was never read before, so that no TLB has it.
fn use_after_free() {
    let Ok(mut pages) = Pages::new(4096, &VmallocOptions::default()) else { return };
    let at = pages.bytes().as_ptr();
    drop(pages);
    // SAFETY: none. The MMU refuses.
    black_box(unsafe { at.read_volatile() });
}

/// Whether `reboot(2)` stops the machine at once, as if its power failed (`provoke=power-loss`): so
/// a test knows that nothing was stored after that. With an argument N above 0 it returns, and the
/// power fails when the disk is about to write the Nth piece from then on.
pub fn loses_power() -> bool {
    options::value("provoke") == Some("power-loss")
}
