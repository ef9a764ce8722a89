//! The self-test at boot ([`check::machine`]): it checks that the MMU is set up as the core's
//! tables require. A wrong control bit stops the machine with a message that names the bit.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::Register;
use bindery::check::{self, AccessBy, AccessFault, Accesses, MachineError, MachineReport};
use bindery::{AddressSpace, SpaceOptions};

use crate::arch::{self, probe};
use crate::memory::{Space, kernel_map, memory};
use crate::platform::Machine;
use crate::{log, options};

/// Bytes of an access.
const WORD: usize = size_of::<u64>();

/// The accesses of the self-test. Accesses to programs' memory use the kernel's user copies.
struct Probes;

impl Accesses for Probes {
    fn read(&mut self, at: VirtAddr, by: AccessBy) -> Result<u64, AccessFault> {
        match by {
            // SAFETY: pages that only the self-test uses, at aligned addresses.
            AccessBy::Kernel => unsafe { probe::load(at.0) },
            AccessBy::UserCopy => {
                let mut bytes = [0; WORD];
                // SAFETY: 1. the array. 2. a page of the self-test's address space.
                let copied = unsafe { arch::copy_from_user(bytes.as_mut_ptr(), at.0, WORD) };
                whole(copied).map(|()| u64::from_ne_bytes(bytes))
            }
        }
    }

    fn write(&mut self, at: VirtAddr, value: u64, by: AccessBy) -> Result<(), AccessFault> {
        match by {
            // SAFETY: as above.
            AccessBy::Kernel => unsafe { probe::store(at.0, value) },
            AccessBy::UserCopy => {
                let bytes = value.to_ne_bytes();
                // SAFETY: as above.
                whole(unsafe { arch::copy_to_user(at.0, bytes.as_ptr(), WORD) })
            }
        }
    }

    fn execute(&mut self, at: VirtAddr) -> Result<(), AccessFault> {
        // The core has already done this for programs' pages.
        if let Some(code) = kernel_map().physical(at) {
            arch::synchronize_instructions(code.0, PAGE_SIZE);
        }
        // SAFETY: a page that only the self-test uses and that begins with `code`.
        unsafe { probe::call(at.0) }
    }

    fn code(&self) -> &[u8] {
        &arch::RETURN
    }

    fn register(&mut self, register: Register) -> Option<u64> {
        arch::control_register(register)
    }
}

/// Whether a user copy completed. A failed copy does not report the reason.
fn whole(copied: usize) -> Result<(), AccessFault> {
    if copied == WORD { Ok(()) } else { Err(AccessFault::Unknown) }
}

/// Tests the first CPU, before any program has an address space. With `self-test=off` it checks
/// only the registers and maps nothing, so that the core's lists are unused when later work begins.
///
/// # Panics
/// If a control bit is wrong, or memory for the test is missing.
pub fn run() {
    if options::value("provoke") == Some("control-bit") {
        arch::break_control_bit();
    }
    if options::value("self-test") == Some("off") {
        return registers();
    }
    let space: Space = match AddressSpace::new(memory(), SpaceOptions::default()) {
        Ok(space) => space,
        Err(problem) => panic!(
            "the self-test gets no address space: {problem}; give the machine more memory \
             (`--memory`), or boot with `self-test=off`"
        ),
    };
    space.enter();
    arch::load_root(space.root());
    let found = check::machine(Some(kernel_map()), Some(&space), &mut Probes);
    arch::unload_root();
    // SAFETY: the load of the kernel's root has flushed what was not global, with interrupts off.
    unsafe { space.leave() };
    let report = good(found);
    if options::value("log") == Some("machine") {
        log!("the self-test has found no wrong control bit");
        for (bit, severity) in report.findings() {
            log!("{bit}: {severity:?}");
        }
    }
}

/// Tests another CPU by its registers. That is enough, because the first CPU has tested the tables.
///
/// # Panics
/// If a control bit is wrong.
pub fn registers() {
    good(check::machine::<Machine>(None, None, &mut Probes));
}

fn good(found: Result<MachineReport, MachineError>) -> MachineReport {
    match found {
        Ok(report) => report,
        Err(wrong) => panic!("the self-test of the machine failed: {wrong}"),
    }
}
