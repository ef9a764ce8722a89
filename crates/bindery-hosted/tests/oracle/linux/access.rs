//! Loads and stores that may end in a signal. The handler reports the signal's number and code and
//! resumes the program after the access.

use std::arch::asm;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use libc::{REG_R10, REG_RDI, REG_RDX, REG_RIP, siginfo_t, ucontext_t};

use super::super::observation::Signal;

/// The value of `r8` during an access, by which the handler distinguishes the access from a crash
/// of the test.
const ACCESSING: u64 = 0x6269_6e64_6572_7921;

/// The size of the handler's stack.
const STACK: usize = 64 << 10;

/// Loads eight bytes.
pub fn load(at: u64) -> Result<u64, Signal> {
    let value: u64;
    let signal: u64;
    // SAFETY: the address is in the program's region, which holds no data of this process, or it is
    // `SCRATCH`, which holds plain words; a load changes nothing. If it faults, the handler returns
    // to the label.
    unsafe {
        asm!(
            "lea r10, [rip + 2f]",
            "xor edx, edx",
            "mov rax, [rdi]",
            "2:",
            in("rdi") at, in("r8") ACCESSING, out("rax") value, out("rdx") signal, out("r10") _,
            options(nostack),
        );
    }
    if signal == 0 { Ok(value) } else { Err(decode(signal)) }
}

/// Stores eight bytes.
pub fn store(at: u64, value: u64) -> Result<(), Signal> {
    let signal: u64;
    // SAFETY: as above; the overwritten bytes belong to a program, and no reference to them exists.
    unsafe {
        asm!(
            "lea r10, [rip + 2f]",
            "xor edx, edx",
            "mov [rdi], rax",
            "2:",
            in("rdi") at, in("r8") ACCESSING, in("rax") value, out("rdx") signal, out("r10") _,
            options(nostack),
        );
    }
    if signal == 0 { Ok(()) } else { Err(decode(signal)) }
}

fn decode(signal: u64) -> Signal {
    Signal::from_numbers((signal >> 16) as i32, i32::from(signal as u16))
}

/// The handler of `SIGSEGV` and `SIGBUS`.
extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes both pointers, which may be read and written until the handler
    // returns.
    let (info, context) = unsafe { (&*info, &mut *context.cast::<ucontext_t>()) };
    let registers = &mut context.uc_mcontext.gregs;
    // SAFETY: both signals carry an address.
    let address = unsafe { info.si_addr() } as u64;
    let accessed = registers[REG_RDI as usize] as u64;
    let ours = registers[libc::REG_R8 as usize] as u64 == ACCESSING;
    if !ours || !(accessed..accessed.saturating_add(8)).contains(&address) {
        // A crash of the worker, which recurs and ends the process. SAFETY: restoring the default
        // action does not affect memory.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    registers[REG_RDX as usize] = i64::from(signal) << 16 | i64::from(info.si_code as u16);
    registers[REG_RIP as usize] = registers[REG_R10 as usize];
}

/// Registers the handler for both signals, on a stack of its own.
pub fn handle_signals() {
    let stack = Box::leak(vec![0_u8; STACK].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK };
    // SAFETY: the stack lives forever, and no other code uses it.
    let installed = unsafe { libc::sigaltstack(&stack, ptr::null_mut()) };
    assert_eq!(installed, 0, "sigaltstack");
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: all zeroes is a valid action: no flags, no mask, the default.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler makes only calls that a signal handler may make, and leaves other
        // faults to the default action, as it documents.
        let installed = unsafe { libc::sigaction(signal, &action, ptr::null_mut()) };
        assert_eq!(installed, 0, "sigaction");
    }
}
