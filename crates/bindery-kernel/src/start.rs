//! The order in which the kernel starts.

use crate::boot::Information;
use crate::{
    arch, disk, files, heap, memory, options, process, self_test, services, time, workload,
};

/// Continues after the entry code of each architecture: the MMU is on, the kernel runs at its
/// linked address on its own stack, exceptions are handled and interrupts are off.
pub fn begin(information: &Information) -> ! {
    options::read(information.command_line);
    let information = &information.without_first(options::unused_memory());
    services::begin();
    let taken = heap::begin(information);
    memory::begin(information, taken);
    arch::devices::begin();
    disk::begin();
    process::prepare_audits();
    self_test::run();
    memory::boot_is_over();
    time::begin();
    files::begin(information.initramfs);
    arch::smp::start_other_cpus(information.cpus);
    workload::run();
    process::run_first()
}
