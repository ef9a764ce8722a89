//! The threads of a model, which share its world.

use std::rc::Rc;
use std::vec::Vec;

use super::model::thread;

/// A model's world, which each of its threads has.
struct Shared<W>(Rc<W>);

// SAFETY: the model checker runs one thread at a time, and `beside` joins its threads, so that no
// two threads use the count at once.
unsafe impl<W> Send for Shared<W> {}

/// Runs `work` on this thread of the model, concurrently with a thread for each of `others`.
pub(crate) fn beside<W: 'static, R>(
    world: &Rc<W>,
    others: impl IntoIterator<Item = impl FnOnce(&W) + Send + 'static>,
    work: impl FnOnce(&W) -> R,
) -> R {
    let start = |other| {
        let shared = Shared(Rc::clone(world));
        thread::spawn(move || run(shared, other))
    };
    let threads: Vec<_> = others.into_iter().map(start).collect();
    let result = work(world);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    result
}

fn run<W>(world: Shared<W>, work: impl FnOnce(&W)) {
    work(&world.0);
}
