//! The calls that stop instead of waiting, driven to their end. A call can also be held between two
//! of its steps. Each has the guarantees of its blocking form.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::KeyRights;
use bindery::{
    AddressSpace, Advice, CallPoll, CallReady, CallWait, LockPages, Memory, PendingEvents,
    PendingRead, PendingUserCopy, PendingWrite, Platform, Populate, ProtectFrom, Protection, Remap,
    Step, SyncFlags,
};
use bindery_hosted::Walk;

use super::operations::{CHANGES_PROTECTION, Denied, Operation, UNGUARDS, with_children};
use super::stepped::Stepped;
use super::stops;
use super::world::{ANON, ELSEWHERE, FILE, LENGTH, PRIVATE, SHARED, SHARED_LENGTH, SLOTS, Which};
use crate::support::{MIB, fixed};

type P<A> = Stepped<A>;
type Space<'m, A> = AddressSpace<'m, P<A>>;

/// The part of the file in which a call punches a hole.
const PART: u64 = FILE + MIB;

/// Waits for the end of a wait, in the thread only if no poll ends it.
fn wait<'m, A: Walk>(
    memory: &Memory<P<A>>,
    mut wait: CallWait<'_, 'm, P<A>>,
) -> CallReady<'m, P<A>> {
    stops::pass(stops::Step::Blocked);
    loop {
        match wait.poll() {
            CallPoll::Ready(ready) => return ready,
            CallPoll::Pending(on) => memory.platform().park(on.word(), on.expected()),
            CallPoll::NeedsThread => break,
        }
    }
    wait.wait()
}

/// Takes steps up to the end. Returns whether the call has succeeded.
fn finish<'s, 'm: 's, A: Walk, E>(
    memory: &Memory<P<A>>,
    mut step: impl FnMut(Option<CallReady<'m, P<A>>>) -> Result<Step<'s, 'm, P<A>>, E>,
) -> bool {
    let mut ready = None;
    loop {
        match stops::in_step(|| step(ready.take())) {
            Ok(Step::Done) => return true,
            Ok(Step::Blocked(event)) => ready = Some(wait(memory, event)),
            Err(_) => return false,
        }
    }
}

/// The first half of a call, when the mutex was free.
fn begin<'m, A: Walk, R>(space: &Space<'m, A>, work: impl FnOnce(&Space<'m, A>) -> R) -> R {
    let mut ready = None;
    while let Some(event) = space.wait_for_mutex(&mut ready) {
        ready = Some(wait(space.memory(), event));
    }
    stops::in_step(|| work(space))
}

/// The second half of a call that has made its change.
fn finish_change<A: Walk, E>(
    space: &Space<'_, A>,
    (made, mut events): (Result<Populate, E>, PendingEvents<'_, P<A>>),
) -> bool {
    let memory = space.memory();
    let Ok(mut populate) = made else { return false };
    finish(memory, |ready| Ok::<_, ()>(events.step(ready)))
        && finish(memory, |ready| populate.step(space, ready))
}

fn advise<A: Walk>(space: &Space<'_, A>, at: u64, length: u64, advice: Advice) -> bool {
    let at = VirtAddr(at);
    let call = begin(space, |space| space.begin_madvise(at, length, advice, KeyRights::ALL));
    call.is_ok_and(|mut call| finish(space.memory(), |ready| call.step(space, ready)))
}

fn protect<A: Walk>(space: &Space<'_, A>, at: u64, protection: Protection) -> bool {
    let from = ProtectFrom::Address(VirtAddr(at));
    let mut call = begin(space, |space| space.begin_mprotect(from, LENGTH, protection, None));
    finish(space.memory(), |ready| call.step(space, ready))
}

pub fn calls_in_steps<A: Walk>() -> Vec<Operation<A>> {
    [mappings(), contents(), bytes()].into_iter().flatten().collect()
}

fn mappings<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("fork, in steps", |w| {
            let (child, mut events) = begin(&w.space, |space| space.begin_fork());
            let Ok(child) = child else { return false };
            let told = finish(w.space.memory(), |ready| Ok::<_, ()>(events.step(ready)));
            w.children.lock().unwrap().push(child);
            told
        })
        .revokes(Which::Space, ANON, LENGTH, Denied::Stores)
        .revokes(Which::Space, PRIVATE, LENGTH, Denied::Stores),
        Operation::new("move file, in steps", |w| {
            let to = Remap::To(VirtAddr(ELSEWHERE + PAGE_SIZE));
            let (moved, events) =
                begin(&w.space, |space| space.begin_mremap(VirtAddr(FILE), LENGTH, LENGTH, to));
            finish_change(&w.space, (moved.map(|(_, populate)| populate), events))
        })
        .moves(FILE, LENGTH, ELSEWHERE + PAGE_SIZE),
        Operation::new("munmap part, in steps", |w| {
            let (done, events) =
                begin(&w.space, |space| space.begin_munmap(VirtAddr(FILE + PAGE_SIZE), 3 * MIB));
            finish_change(&w.space, (done.map(|()| Populate::default()), events))
        })
        .revokes(Which::Space, FILE + PAGE_SIZE, 3 * MIB, Denied::Everything)
        .holds_until(&["map over"]),
        Operation::new("map over, in steps", |w| {
            let (mapped, events) = begin(&w.space, |space| space.begin_mmap(&fixed(PART, 2 * MIB)));
            finish_change(&w.space, (mapped.map(|(_, populate)| populate), events))
        })
        .revokes(Which::Space, PART, 2 * MIB, Denied::Everything)
        .loses(PART, 2 * MIB),
        Operation::new("mprotect read, in steps", |w| protect(&w.space, FILE, Protection::READ))
            .revokes(Which::Space, FILE, LENGTH, Denied::Stores)
            .holds_until(CHANGES_PROTECTION),
        Operation::new("mlock, in steps", |w| {
            let at = VirtAddr(ANON + 560 * PAGE_SIZE);
            let length = 32 * PAGE_SIZE;
            let call = begin(&w.space, |space| space.begin_mlock(at, length, LockPages::Now));
            call.is_ok_and(|mut call| finish(w.space.memory(), |ready| call.step(&w.space, ready)))
        }),
    ]
}

fn contents<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("dontneed anon, in steps", |w| {
            advise(&w.space, ANON, LENGTH, Advice::DontNeed)
        })
        .revokes(Which::Space, ANON, LENGTH, Denied::Everything)
        .loses(ANON, LENGTH),
        Operation::new("guard install in anon, in steps", |w| {
            advise(&w.space, ANON + 5 * PAGE_SIZE, PAGE_SIZE, Advice::GuardInstall)
        })
        .revokes(Which::Space, ANON + 5 * PAGE_SIZE, PAGE_SIZE, Denied::Everything)
        .holds_until(UNGUARDS)
        .loses(ANON + 5 * PAGE_SIZE, PAGE_SIZE),
        Operation::new("punch, in steps", |w| {
            advise(&w.space, FILE + PAGE_SIZE, 3 * MIB - PAGE_SIZE, Advice::Remove)
        })
        .cuts(PAGE_SIZE, 3 * MIB - PAGE_SIZE),
        Operation::new("collapse file, in steps", |w| {
            advise(&w.space, FILE, 2 * MIB, Advice::Collapse)
        }),
        Operation::new("collapse anon, in steps", |w| {
            advise(&w.space, ANON, 2 * MIB, Advice::Collapse)
        }),
        Operation::new("page out anon, in steps", |w| {
            advise(&w.space, ANON, LENGTH, Advice::PageOut)
        }),
        Operation::new("page out shared, in steps", |w| {
            advise(&w.space, SHARED, SHARED_LENGTH, Advice::PageOut)
        }),
        Operation::new("swapoff, in steps", |w| {
            let memory = w.space.memory();
            memory.stop_swapping_to(&w.area);
            let empty = |space: &Space<'_, A>| {
                let mut call = space.begin_swap_in_area(&w.area);
                finish(memory, |ready| call.step(space, ready))
            };
            let done =
                with_children(w, |children| children.iter().chain([&w.space, &w.other]).all(empty));
            let mut call = memory.begin_swap_in_objects(&w.area);
            let done = done && finish(memory, |ready| call.step(ready));
            if memory.swap_off(&w.area).is_ok() {
                // The next call finds the initial state.
                return memory.swap_on(SLOTS, 0) == Ok(w.area);
            }
            memory.resume_swapping_to(&w.area);
            done
        }),
    ]
}

fn bytes<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("sync, in steps", |w| {
            let mut call = w.file.begin_sync(0, u64::MAX);
            finish(w.space.memory(), |_| call.step())
        })
        .revokes(Which::Space, FILE, LENGTH, Denied::Stores)
        .revokes(Which::Other, FILE, LENGTH, Denied::Stores)
        .of_the_file(),
        Operation::new("msync, in steps", |w| {
            let call = w.space.begin_msync(VirtAddr(FILE), LENGTH, SyncFlags::SYNC);
            call.is_ok_and(|mut call| finish(w.space.memory(), |_| call.step(&w.space)))
        }),
        Operation::new("write file, in steps", |w| {
            let from = [9; 5000];
            let call = PendingWrite::new(&w.file, PAGE_SIZE + 100, from.len());
            call.is_ok_and(|mut call| {
                finish(w.space.memory(), |ready| call.step(ready, &from)) && call.moved() == 5000
            })
        }),
        Operation::new("read shared, in steps", |w| {
            let mut into = [0; 5000];
            let call = PendingRead::new(&w.shared, 7 * PAGE_SIZE + 100, into.len());
            call.is_ok_and(|mut call| finish(w.space.memory(), |ready| call.step(ready, &mut into)))
        }),
        Operation::new("copy to anon, in steps", |w| {
            let mut call = PendingUserCopy::new(VirtAddr(ANON + 562 * PAGE_SIZE + 100));
            finish(w.space.memory(), |ready| call.write(&w.space, ready, &[7; 5000]))
        }),
    ]
}
