//! `execve`, and the first program.
//!
//! All steps that can fail come first: the new program is loaded into an address space of its own
//! before the other threads are ended.

use alloc::sync::Arc;

use linux_raw_sys::general::{AT_EMPTY_PATH, AT_FDCWD, AT_SYMLINK_NOFOLLOW, SIGCHLD};

use crate::arch::{self, FloatingPoint, Registers};
use crate::errno::Errno;
use crate::files::{self, Files, Inherited, Program};
use crate::memory::Space;
use crate::{control, heap, options, time, user};

use super::barriers::Barriers;
use super::credentials::{self, Credentials};
use super::memory_shortage::Standing;
use super::program::{Loaded, Texts, Words, load};
use super::signal::{Actions, Alternate, ThreadSignals};
use super::state::{ProcessParts, State};
use super::table::{self, Counted, LeftSpace};
use super::{Process, Thread, end, futex, limits, scheduler, timer};

/// The maximum length of an argument or environment string, including its zero.
const LONGEST_TEXT: usize = 128 << 10;

/// The maximum depth of scripts that name scripts (`#!`).
const MAXIMUM_SCRIPTS: usize = 4;

/// The maximum length of a script's first line, in bytes.
const SCRIPT_LINE: usize = 256;

/// Starts the first program. Never returns, because the machine ends with the program.
///
/// # Panics
/// If the program cannot be started.
pub fn run_first() -> ! {
    let path = options::first_program();
    match first_process(&path) {
        Ok(thread) => {
            files::listen();
            scheduler::wake(&thread);
        }
        Err(errno) => {
            let cause = match errno {
                Errno::ENOENT => "the initramfs has no such file",
                Errno::ENOEXEC => "it is no static ELF program, or a damaged one",
                Errno::ENOMEM => "give the machine more memory (`--memory`)",
                _ => "see errno(3)",
            };
            panic!(
                "the first program, {}, cannot be started ({errno:?}): {cause}",
                path.escape_ascii()
            )
        }
    }
    scheduler::idle(end::end_machine_if_due)
}

fn first_process(path: &[u8]) -> Result<Arc<Thread>, Errno> {
    let files = Arc::new(files::first_files()?);
    let mut words =
        Words { path: path.into(), arguments: Texts::default(), environment: Texts::default() };
    options::arguments().iter().try_for_each(|word| words.arguments.push(word))?;
    options::environment().iter().try_for_each(|word| words.environment.push(word))?;
    let limits = limits::Limits::default();
    let program = files::open_program(&files, AT_FDCWD, path)?;
    let loaded = prepare(&files, program, &mut words, &limits, None)?;
    let number = table::new_id(Counted::Process, 0, None)?;
    let id = number.id();
    let process = Process::new(
        id,
        ProcessParts {
            space: Some(loaded.space),
            actions: Actions::new(),
            state: State::new(None, 0),
            facts: loaded.facts,
            limits,
            standing: Standing::default(),
            barriers: Barriers::default(),
            credentials: Credentials::root(),
            dumpable: true,
        },
    );
    process.set_name(base_name(path));
    let registers = Registers::new(loaded.entry, loaded.stack_pointer);
    let signals = ThreadSignals::default();
    let thread =
        Thread::new(id, process.clone(), files, &registers, FloatingPoint::new(), 0, signals)?;
    process.state.lock().threads.push(thread.clone());
    table::add_process(&process);
    table::add_new_thread(&thread);
    control::send(format_args!("first-user-instruction {}", time::now()));
    Ok(thread)
}

/// `execve(2)` and `execveat(2)`.
///
/// # Errors
/// The errors of execve(2); the running program is unchanged then.
pub(super) fn execute(
    directory: i32,
    [path_at, arguments_at, environment_at, flags]: [u64; 4],
    registers: &mut Registers,
) -> Result<(), Errno> {
    let thread = scheduler::current_thread();
    let process = thread.process.clone();
    let (loaded, name) = {
        if flags as u32 & !(AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0 {
            return Err(Errno::EINVAL);
        }
        let path = user::text(path_at, 4096)?;
        let files = Files::current();
        let program = if path.is_empty() && flags as u32 & AT_EMPTY_PATH != 0 {
            files::program_of(&files, directory)?
        } else {
            files::open_program(&files, directory, &path)?
        };
        let path = if path.is_empty() { program.path.clone() } else { path };
        let name = base_name(&path).to_vec();
        let mut arguments = read_texts(arguments_at)?;
        if arguments.is_empty() {
            // As on Linux, every program gets an argument 0.
            arguments.push(b"")?;
        }
        let environment = read_texts(environment_at)?;
        let limits = process.limits.lock().clone();
        let mut words = Words { path, arguments, environment };
        (prepare(&files, program, &mut words, &limits, Some(&process.space()))?, name)
    };
    let shared = Files::current();
    let files = if shared.are_shared() {
        Arc::new(shared.inherit(Inherited::Copied, Inherited::Shared)?)
    } else {
        shared
    };
    // A thread that is interrupted here ends on the way back.
    end::end_other_threads().map_err(|_| Errno::EINTR)?;
    become_program(&thread, &process, loaded, files, registers);
    process.set_name(&name);
    Ok(())
}

/// Loads a program, or the interpreter in its first line.
fn prepare(
    files: &Files,
    mut program: Program,
    words: &mut Words,
    limits: &limits::Limits,
    caller: Option<&Space>,
) -> Result<Loaded, Errno> {
    for _ in 0..=MAXIMUM_SCRIPTS {
        let mut line = [0; SCRIPT_LINE];
        let length = program.object.read(0, &mut line).map_err(|_| Errno::EIO)?;
        let Some(line) = line[..length].strip_prefix(b"#!") else {
            return load(&program, words, limits, caller);
        };
        let end = line.iter().position(|byte| *byte == b'\n').unwrap_or(line.len());
        let line = line[..end].trim_ascii();
        let space = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let (interpreter, argument) = (&line[..space], line[space..].trim_ascii());
        if interpreter.is_empty() {
            return Err(Errno::ENOEXEC);
        }
        let first = [interpreter, argument, &words.path];
        let first = if argument.is_empty() { &[first[0], first[2]][..] } else { &first[..] };
        words.arguments = words.arguments.behind(first)?;
        words.path = interpreter.to_vec();
        program = files::open_program(files, AT_FDCWD, interpreter)?;
    }
    Err(Errno::ELOOP)
}

/// Reads an array of strings that ends with a null pointer. A null array is empty.
fn read_texts(at: u64) -> Result<Texts, Errno> {
    let mut texts = Texts::default();
    for index in 0.. {
        let place = at.checked_add(8 * index).ok_or(Errno::EFAULT)?;
        let text = if at == 0 { 0 } else { user::read::<u64>(place)? };
        if text == 0 {
            break;
        }
        heap::room(2 * LONGEST_TEXT)?;
        let text = user::text(text, LONGEST_TEXT);
        texts.push(
            &text.map_err(
                |errno| {
                    if errno == Errno::ENAMETOOLONG { Errno::E2BIG } else { errno }
                },
            )?,
        )?;
    }
    Ok(texts)
}

/// The point of no return: the running thread, the only one of its process, becomes the new
/// program.
fn become_program(
    thread: &Arc<Thread>,
    process: &Arc<Process>,
    loaded: Loaded,
    files: Arc<Files>,
    registers: &mut Registers,
) {
    futex::thread_ends(thread);
    if thread.id() != process.id {
        table::remove_thread(thread.id());
        thread.become_first();
        table::add_thread(thread);
    }
    let old = LeftSpace::new(process.space.lock().replace(loaded.space));
    scheduler::reload_space();
    // Nothing sleeps from here until the process has the rights of its program. Otherwise:
    // 1. A program of root that a user runs would have its new memory but still the user's rights.
    // 2. Another process of the user could then write to that memory (`process_vm_writev`).
    credentials::commit(loaded.who);
    process.set_dumpable(loaded.is_dumpable);
    *process.facts.lock() = loaded.facts;
    {
        let mut state = process.state.lock();
        state.has_executed = true;
        state.exit_signal = SIGCHLD;
    }
    *process.barriers.lock() = Barriers::default();
    // Other processes that share them are unaffected.
    let actions = process.actions().without_handlers();
    *process.actions.lock() = actions;
    timer::cancel_created(process);
    if let Some(old) = old.get() {
        process.note_left_memory(old);
    }
    // Sleeping is safe from here on.
    drop(old);
    end::lend_back(process);
    thread.set_files(Some(files.clone()));
    files.close_on_exec();
    {
        let mut signals = thread.signals.lock();
        signals.alternate = Alternate::default();
    }
    // SAFETY: the running thread's own place; nothing else reads it while it runs.
    unsafe {
        let saved = thread.saved();
        (*saved).floating_point = FloatingPoint::new();
        (*saved).floating_point.restore();
    }
    arch::set_thread_pointer(0);
    *registers = Registers::new(loaded.entry, loaded.stack_pointer);
}

fn base_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}
