//! A thread's work before it returns to its program: it ends, stops, yields the CPU, runs a signal
//! handler, or restarts an interrupted call.

use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use linux_raw_sys::general::{
    SA_NODEFER, SA_ONSTACK, SA_RESETHAND, SA_RESTART, SA_RESTORER, SA_SIGINFO, SIGSEGV,
    SS_AUTODISARM,
};

use crate::arch::delivery::Delivery;
use crate::arch::signal::{pop, push};
use crate::arch::{FloatingPoint, Registers};
use crate::errno::Errno;

use super::signal::{
    Action, Alternate, DEFAULT, IGNORE, Information, STOPPING, TERMINAL_STOPPING, UNBLOCKABLE, bit,
    code,
};
use super::thread::{Thread, work};
use super::{end, jobs, kill, program, scheduler, signal};

/// The way in which a thread entered the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum From {
    /// By a system call, which may have to be restarted.
    SystemCall,
    /// By anything else, with the program's own registers.
    Exception,
}

/// The slow part of [`crate::trap::leave`].
pub fn do_work(registers: &mut Registers, mut from: From) {
    let thread = scheduler::current_thread();
    loop {
        let todo = thread.work.load(Ordering::Relaxed);
        if todo & work::END != 0 {
            drop(thread);
            end::end_thread();
        }
        if todo & work::RESCHEDULE != 0 {
            thread.work.fetch_and(!work::RESCHEDULE, Ordering::Relaxed);
            scheduler::yield_now();
            continue;
        }
        if todo & work::SIGNAL == 0 {
            break;
        }
        if thread.process.state.lock().stopped.is_some() {
            // The next round handles the end.
            let _ = thread
                .process
                .life_changed
                .wait_to_the_end(|| thread.process.state.lock().stopped.is_none().then_some(()));
            continue;
        }
        thread.work.fetch_and(!work::SIGNAL, Ordering::Relaxed);
        let allowed = !thread.signals.lock().blocked;
        if let Some(information) = signal::take(&thread, allowed) {
            thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
            act(&thread, registers, &mut from, &information);
            continue;
        }
        let mut signals = thread.signals.lock();
        if let Some(mask) = signals.mask_after_call.take() {
            signals.blocked = mask;
            thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
        }
    }
    if from == From::SystemCall && registers.is_restart() {
        registers.restart();
    }
}

/// Carries out the process's action for a signal.
fn act(
    thread: &Arc<Thread>,
    registers: &mut Registers,
    from: &mut From,
    information: &Information,
) {
    let process = &thread.process;
    let number = information.signal;
    let actions = process.actions();
    let action = actions.get(number);
    match action.handler {
        IGNORE => {}
        DEFAULT if bit(number) & TERMINAL_STOPPING != 0 && jobs::is_orphaned(process.group()) => {}
        DEFAULT if bit(number) & STOPPING != 0 => signal::stop_process(process, number),
        DEFAULT if signal::ends_by_default(number) => kill::end_group(process, number),
        DEFAULT => {}
        _ => {
            if action.flags & u64::from(SA_RESETHAND) != 0 {
                actions.set(number, Action { handler: DEFAULT, ..action });
            }
            if *from == From::SystemCall && registers.is_restart() {
                let again = registers.result() == -i64::from(Errno::RESTART.0);
                if again && action.flags & u64::from(SA_RESTART) != 0 {
                    registers.restart();
                } else {
                    registers.set_result(-i64::from(Errno::EINTR.0));
                }
            }
            *from = From::Exception;
            thread.deadline_of_restart.store(0, Ordering::Relaxed);
            if run_handler(thread, registers, &action, information).is_err() {
                // If a frame for `SIGSEGV` does not fit, that signal's own handler cannot run to
                // report it.
                if number == SIGSEGV {
                    actions.set(SIGSEGV, Action::default());
                }
                signal::exception(SIGSEGV, code::KERNEL, 0);
            }
        }
    }
}

fn run_handler(
    thread: &Thread,
    registers: &mut Registers,
    action: &Action,
    information: &Information,
) -> Result<(), Errno> {
    let (mask, alternate) = {
        let signals = thread.signals.lock();
        (signals.mask_after_call.unwrap_or(signals.blocked), signals.alternate)
    };
    let at = registers.stack_pointer();
    let wanted = action.flags & u64::from(SA_ONSTACK) != 0 && alternate.size != 0;
    // A forged frame may contain any numbers.
    let top = alternate.base.checked_add(alternate.size);
    let is_on_it = is_on(&alternate, at);
    let enters = wanted && !is_on_it;
    let stack = if enters { top.unwrap_or(at) } else { at };
    let restorer = if action.flags & u64::from(SA_RESTORER) != 0 {
        action.restorer
    } else {
        program::SIGNAL_RETURN
    };
    let delivery = Delivery {
        signal: information.signal,
        information: information.bytes(),
        handler: action.handler,
        restorer,
        with_information: action.flags & u64::from(SA_SIGINFO) != 0,
        mask,
        stack,
        on_alternate: enters || is_on_it && alternate.flags & SS_AUTODISARM == 0,
        alternate: (alternate.base, flags_of(&alternate, at), alternate.size),
        fault: information.fields[0],
    };
    // The rights are kept outside the thread's own copy. A fault on the frame may switch threads,
    // and the switch would save the current rights there, which allow the kernel to write the
    // frame.
    let mut floating_point = FloatingPoint::new();
    floating_point.save();
    push(registers, &floating_point, &delivery)?;
    let mut signals = thread.signals.lock();
    signals.mask_after_call = None;
    signals.blocked |= action.mask & !UNBLOCKABLE;
    if action.flags & u64::from(SA_NODEFER) == 0 {
        signals.blocked |= bit(information.signal);
    }
    if alternate.flags & SS_AUTODISARM != 0 {
        signals.alternate = Alternate::default();
    }
    Ok(())
}

/// Returns from a handler (`rt_sigreturn`). The registers become those of the frame.
pub(super) fn signal_return(registers: &mut Registers) {
    match pop(registers) {
        Ok((mask, (base, flags, size))) => {
            let at = registers.stack_pointer();
            let thread = scheduler::current();
            let mut signals = thread.signals.lock();
            if !is_on(&signals.alternate, at) {
                let size = if flags & DISABLED == 0 { size } else { 0 };
                signals.alternate = Alternate { base, size, flags: flags & SS_AUTODISARM };
            }
            drop(signals);
            signal::set_blocked(mask);
        }
        Err(_) => signal::exception(SIGSEGV, code::KERNEL, 0),
    }
}

/// `SS_DISABLE`, and `SS_ONSTACK`.
pub(super) const DISABLED: u32 = 2;
pub(super) const ON_STACK: u32 = 1;

/// Whether a stack pointer is in the stack.
pub(super) fn is_on(alternate: &Alternate, at: u64) -> bool {
    at > alternate.base && at - alternate.base <= alternate.size
}

/// The flags as `sigaltstack` reports them.
pub(super) fn flags_of(alternate: &Alternate, at: u64) -> u32 {
    match alternate {
        Alternate { size: 0, .. } => DISABLED,
        _ if is_on(alternate, at) && alternate.flags & SS_AUTODISARM == 0 => {
            alternate.flags | ON_STACK
        }
        _ => alternate.flags,
    }
}
