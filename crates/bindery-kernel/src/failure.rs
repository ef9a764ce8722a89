//! A failure of the kernel itself: a panic prints a backtrace and ends the machine.

use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::arch::{self, Ended};
use crate::{control, log, symbols};

static PANICKING: AtomicBool = AtomicBool::new(false);

#[panic_handler]
fn panic(information: &PanicInfo<'_>) -> ! {
    // A panic inside of this one must not begin again.
    if !PANICKING.swap(true, Ordering::Relaxed) {
        control::send(format_args!("panic {}", information.message()));
        log!("{information}");
        log!("backtrace:");
        // Behind a call that never returns, another function may begin: the call itself is named.
        arch::return_addresses(|address| match symbols::name(address - 1) {
            Some((name, offset)) => log!("  {address:#018x} {name}+{:#x}", offset + 1),
            None => log!("  {address:#018x}"),
        });
    }
    arch::power_off(Ended::Failed)
}
