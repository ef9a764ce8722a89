//! The start of the other CPUs. Each has a stack of its own, reports on the console, and idles until
//! threads run.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicUsize, Ordering};

use aarch64_cpu::registers::{MPIDR_EL1, Readable};

use crate::process::scheduler;
use crate::{log, self_test};

use super::super::cpu_record::CpuRecord;
use super::{boot, control, interrupts, machine, page_tables, per_cpu, time, tlb};

#[repr(align(16))]
struct Stack([u8; 32 << 10]);

/// Bits of `MPIDR_EL1` that name a CPU.
const AFFINITY: u64 = 0xff_00ff_ffff;

/// CPUs that run.
static RUNNING: AtomicUsize = AtomicUsize::new(1);

/// Starts the other CPUs one by one, so that their lines on the console do not mix.
pub fn start_other_cpus(_count: usize) {
    let own = MPIDR_EL1.get() & AFFINITY;
    let others = machine::cpus().filter(|affinity| *affinity != own);
    interrupts::set_affinity(0, own);
    for (affinity, number) in others.zip(1_usize..bindery::platform::MAX_CPUS) {
        interrupts::set_affinity(number as u16, affinity);
        let stack = Box::leak(Box::new(Stack([0; size_of::<Stack>()])));
        // An aligned word at the end of the stack, from which the entry code reads the number.
        let [.., place] = stack.0.as_chunks_mut::<16>().0 else { return };
        place[..size_of::<usize>()].copy_from_slice(&number.to_le_bytes());
        let top = place.as_ptr();
        let begin = page_tables::physical(boot::secondary_start as *const u8);
        match control::start_cpu(affinity, begin, top.addr() as u64) {
            Ok(()) => {
                while RUNNING.load(Ordering::Acquire) <= number {
                    super::pause();
                }
            }
            Err(refused) => {
                log!(
                    "CPU {number} does not start, PSCI error {refused}: the kernel goes on \
                     without it and all further ones"
                );
                return;
            }
        }
    }
}

/// Continues after the entry code of another CPU.
pub extern "C" fn secondary(number: usize) -> ! {
    per_cpu::begin(Box::leak(Box::new(CpuRecord::new(number as u64))));
    interrupts::begin_cpu();
    time::begin_cpu();
    self_test::registers();
    log!("CPU {number} is up");
    tlb::join();
    RUNNING.store(number + 1, Ordering::Release);
    scheduler::run_other()
}
