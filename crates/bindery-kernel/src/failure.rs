//! A failure of the kernel itself: a panic prints a backtrace and ends the machine.

use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::arch::{self, Ended};
use crate::{control, log, symbols};

static PANICKING: AtomicBool = AtomicBool::new(false);

#[panic_handler]
fn panic(information: &PanicInfo<'_>) -> ! {
    // A panic during this one must not start over.
    if !PANICKING.swap(true, Ordering::Relaxed) {
        control::send(format_args!("panic {}", information.message()));
        log!("{information}");
        log!("backtrace:");
        // A call that never returns may be the last instruction of its function, so the return
        // address may belong to the next function. The address of the call is printed instead.
        arch::return_addresses(|address| match symbols::name(address - 1) {
            Some((name, offset)) => log!("  {address:#018x} {name}+{:#x}", offset + 1),
            None => log!("  {address:#018x}"),
        });
    }
    arch::power_off(Ended::Failed)
}
