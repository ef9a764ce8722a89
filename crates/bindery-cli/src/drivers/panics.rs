//! Panics of the core: they are either caught with their message and place and not printed, or end
//! the program.

use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, Once};

use super::world::lock;

thread_local! {
    /// Whether panics of this thread are caught.
    static CATCHES: Cell<bool> = const { Cell::new(false) };
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
    /// Whether a panic of this thread ends the program.
    static DIES: Cell<bool> = const { Cell::new(false) };
}

/// Called with the message of a panic that ends the program.
static END: Mutex<fn(&str)> = Mutex::new(|_| ());

fn install() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let place = info.location().map_or(String::new(), |place| format!(" ({place})"));
            let text = info.payload_as_str().unwrap_or("a panic without a message");
            let message = format!("{text}{place}");
            if CATCHES.get() {
                LAST.set(message);
            } else if DIES.get() {
                let end = *lock(&END);
                end(&message);
            } else {
                before(info);
            }
        }));
    });
}

/// Calls `f`; returns its result, or the message of its panic.
pub(super) fn caught<R>(f: impl FnOnce() -> R) -> Result<R, String> {
    install();
    let before = CATCHES.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    CATCHES.set(before);
    result.map_err(|_| LAST.take())
}

/// Sets the function that a panic calls on a thread that holds a [`Dies`]. The function must not
/// return.
pub(super) fn die_by(end: fn(&str)) {
    install();
    *lock(&END) = end;
}

/// While this value lives, a panic of the thread ends the program.
pub(super) struct Dies {
    before: bool,
}

impl Dies {
    pub(super) fn new() -> Self {
        Self { before: DIES.replace(true) }
    }
}

impl Drop for Dies {
    fn drop(&mut self) {
        DIES.set(self.before);
    }
}
