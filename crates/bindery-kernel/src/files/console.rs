//! The console: the serial line as a terminal.
//!
//! No interrupt announces a byte, so a thread that waits for a byte polls the line every ten
//! milliseconds. An interactive terminal (`terminal=` on the command line) is polled all the time,
//! so that the user can interrupt a program that computes.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use linux_raw_sys::general::{
    ECHO, ICANON, ICRNL, ISIG, NOFLSH, O_RDWR, POLLIN, POLLOUT, SIGINT, SIGQUIT, SIGTSTP, SIGWINCH,
    termios,
};
use linux_raw_sys::ioctl::{
    FIONREAD, TCGETS, TCSETS, TCSETSF, TCSETSW, TIOCGPGRP, TIOCGWINSZ, TIOCSCTTY, TIOCSPGRP,
    TIOCSWINSZ,
};

use crate::errno::{Errno, Outcome};
use crate::options::{self, Standard};
use crate::process::{Interrupted, WaitQueue, signal};
use crate::sync::Mutex;
use crate::time::{self, Event};
use crate::{arch, console, user};

use super::attributes::{Attributes, Kind, Patience};
use super::descriptor::Description;
use super::node::{Node, Place};
use super::poll;

/// The interval of polling while a thread waits, in nanoseconds.
const INTERVAL: u64 = 10_000_000;

/// The maximum number of unread bytes.
const TYPED_AHEAD: usize = 4096;

/// Erases a character, like the one in the settings.
const BACKSPACE: u8 = 8;

// Indices of the control characters in the settings (termios(3)).
const INTERRUPT: usize = 0;
const QUIT: usize = 1;
const ERASE: usize = 2;
const KILL: usize = 3;
const END_OF_FILE: usize = 4;
const SUSPEND: usize = 10;

struct Line {
    /// Bytes to read; `None` is a typed end of file.
    ready: VecDeque<Option<u8>>,
    /// The line that is being typed.
    typing: VecDeque<u8>,
    settings: termios,
    size: [u16; 4],
    /// Whether every byte can be read as it arrives, because the other end is not a terminal.
    takes_bytes: bool,
}

static LINE: Mutex<Option<Line>> = Mutex::new(None);
static ARRIVED: WaitQueue = WaitQueue::new();
static IS_WATCHED: AtomicBool = AtomicBool::new(false);
static GROUP: AtomicU32 = AtomicU32::new(1);

/// Makes the console a terminal with the usual settings.
pub fn begin() {
    let settings = termios {
        c_iflag: ICRNL,
        c_oflag: 0,
        c_cflag: 0o2277, // 115,200 baud, 8 bits, receiver on
        c_lflag: ICANON | ECHO | ISIG,
        c_line: 0,
        c_cc: [3, 28, 127, 21, 4, 0, 1, 0, 17, 19, 26, 0, 18, 15, 23, 22, 0, 0, 0],
    };
    let (ready, typing) = (VecDeque::new(), VecDeque::new());
    let (rows, columns) = options::terminal().unwrap_or((24, 80));
    let takes_bytes = options::standard().0 == Standard::Stream;
    let size = [rows, columns, 0, 0];
    *LINE.lock() = Some(Line { ready, typing, settings, size, takes_bytes });
}

/// Polls the line from now on, if it is an interactive terminal.
pub fn listen() {
    if options::terminal().is_some() {
        time::schedule(time::now() + INTERVAL, Event::Call(Box::new(poll_line)));
    }
}

fn poll_line() {
    pump();
    if has_input() {
        ARRIVED.wake_all();
        poll::changed();
    }
    listen();
}

/// The console's node.
pub fn node() -> Arc<dyn Node> {
    Arc::new(Console)
}

/// The console, opened for a program.
///
/// # Errors
/// `ENOMEM`.
pub fn open() -> Result<Arc<Description>, Errno> {
    Description::new(Place::alone(node(), b"/dev/console"), node(), O_RDWR)
}

struct Console;

impl Line {
    fn accept(&mut self, byte: u8) {
        if self.takes_bytes {
            self.ready.push_back(Some(byte));
            return;
        }
        let (input, local) = (self.settings.c_iflag, self.settings.c_lflag);
        let byte = if byte == b'\r' && input & ICRNL != 0 { b'\n' } else { byte };
        // A control character of zero is disabled.
        let means = |what: usize| byte != 0 && self.settings.c_cc[what] == byte;
        let signal = [(INTERRUPT, SIGINT), (QUIT, SIGQUIT), (SUSPEND, SIGTSTP)];
        let signal = signal.into_iter().find(|(what, _)| means(*what)).map(|(_, signal)| signal);
        if let Some(signal) = signal.filter(|_| local & ISIG != 0) {
            if local & NOFLSH == 0 {
                self.typing.clear();
                self.ready.clear();
            }
            signal::send_to_group(GROUP.load(Ordering::Relaxed), signal);
            return;
        }
        let (erases, kills) = (means(ERASE) || byte == BACKSPACE, means(KILL));
        let ends_file = means(END_OF_FILE);
        if self.ready.len() + self.typing.len() >= TYPED_AHEAD {
            return;
        }
        if local & ICANON == 0 {
            self.ready.push_back(Some(byte));
        } else if erases || kills {
            let count = if kills { self.typing.len() } else { self.typing.len().min(1) };
            for _ in 0..count {
                self.typing.pop_back();
                if local & ECHO != 0 {
                    console::write(b"\x08 \x08");
                }
            }
            return;
        } else if ends_file {
            let ends = self.typing.is_empty();
            self.ready.extend(self.typing.drain(..).map(Some));
            if ends {
                self.ready.push_back(None);
            }
            return;
        } else {
            self.typing.push_back(byte);
            if byte == b'\n' {
                self.ready.extend(self.typing.drain(..).map(Some));
            }
        }
        if local & ECHO != 0 {
            console::write(&[byte]);
        }
    }
}

/// Stores the bytes that the line has received.
fn pump() {
    let mut line = LINE.lock();
    let Some(line) = &mut *line else { return };
    // Further bytes of a stream wait in the device and with the sender.
    while !(line.takes_bytes && line.ready.len() >= TYPED_AHEAD)
        && let Some(byte) = arch::read_console()
    {
        line.accept(byte);
    }
}

/// Wakes all waiters after the interval; each then polls the line.
fn watch() {
    if IS_WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    let look = || {
        IS_WATCHED.store(false, Ordering::Relaxed);
        ARRIVED.wake_all();
        poll::changed();
    };
    time::schedule(time::now() + INTERVAL, Event::Call(Box::new(look)));
}

/// Whether there are bytes to read. If not, schedules the next poll of the line.
pub fn has_input() -> bool {
    pump();
    let some = LINE.lock().as_ref().is_some_and(|line| !line.ready.is_empty());
    if !some {
        watch();
    }
    some
}

/// Reads received bytes, or waits for them.
///
/// # Errors
/// `EAGAIN`; [`Errno::RESTART`] after a signal.
pub fn read(into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
    if patience == Patience::None && !has_input() {
        return Err(Errno::EAGAIN);
    }
    match ARRIVED.wait(None, || has_input().then_some(())) {
        Ok(()) => {}
        Err(Interrupted::Signal | Interrupted::Deadline) => return Err(Errno::RESTART),
    }
    let mut line = LINE.lock();
    let Some(line) = &mut *line else { return Ok(0) };
    let by_line = line.settings.c_lflag & ICANON != 0 && !line.takes_bytes;
    let mut count = 0;
    while count < into.len() {
        match line.ready.front() {
            Some(Some(byte)) => into[count] = *byte,
            // An end of file ends a read of its own.
            Some(None) if count == 0 => {
                line.ready.pop_front();
                break;
            }
            Some(None) | None => break,
        }
        line.ready.pop_front();
        count += 1;
        if by_line && into[count - 1] == b'\n' {
            break;
        }
    }
    Ok(count)
}

impl Node for Console {
    fn kind(&self) -> Kind {
        Kind::Device
    }

    fn attributes(&self) -> Attributes {
        Attributes { device: (5, 1), ..Attributes::plain(1, 0o620) }
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        read(into, patience)
    }

    fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        console::write(from);
        Ok(from.len())
    }

    fn ready(&self) -> u32 {
        POLLOUT | if has_input() { POLLIN } else { 0 }
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        // The lock is not held during accesses to a program's memory, which may sleep.
        let (settings, size, waiting) = match &*LINE.lock() {
            Some(line) => (line.settings, line.size, line.ready.len() as u32),
            None => return Err(Errno::EIO),
        };
        match request {
            TCGETS => user::write(argument, &settings)?,
            TCSETS | TCSETSW | TCSETSF => {
                let new = user::read(argument)?;
                LINE.lock().as_mut().ok_or(Errno::EIO)?.settings = new;
            }
            TIOCGWINSZ => user::write(argument, &size)?,
            TIOCSWINSZ => {
                let new = user::read(argument)?;
                LINE.lock().as_mut().ok_or(Errno::EIO)?.size = new;
                if new != size {
                    signal::send_to_group(GROUP.load(Ordering::Relaxed), SIGWINCH);
                }
            }
            TIOCGPGRP => user::write(argument, &GROUP.load(Ordering::Relaxed))?,
            TIOCSPGRP => GROUP.store(user::read(argument)?, Ordering::Relaxed),
            TIOCSCTTY => {}
            FIONREAD => user::write(argument, &waiting)?,
            _ => return Err(Errno::ENOTTY),
        }
        Ok(0)
    }
}
