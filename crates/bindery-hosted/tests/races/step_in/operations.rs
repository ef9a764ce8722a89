//! The calls that are held or run in between, each with its guarantees on return.

use std::mem;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::KeyRights;
use bindery::{Access, AddressSpace, Advice, LockPages, PinTime, Protection, Remap, TriedFault};
use bindery_hosted::Walk;
use bindery_linux::proc::{ClearRefs, Unnamed, clear_refs, smaps};

use super::calls_in_steps::calls_in_steps;
use super::stepped::Stepped;
use super::stops;
use super::world::{
    ANON, ELSEWHERE, FILE, LENGTH, PRIVATE, SHARED, SHARED_LENGTH, SLOTS, Which, World,
};
use crate::support::{MIB, READ_WRITE, fixed};

/// A revoked right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Denied {
    Stores,
    Everything,
}

/// A range in which something was revoked.
#[derive(Clone, Copy, Debug)]
pub struct Revoked {
    pub which: Which,
    pub start: u64,
    pub end: u64,
    pub what: Denied,
}

/// The duration of a revocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holds {
    /// The revocation holds when the call returns; a fault may grant the right again.
    OnReturn,
    /// The revocation holds until one of the calls whose names begin like this.
    Until(&'static [&'static str]),
}

/// A move of the space's own addresses.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    pub from: u64,
    pub length: u64,
    pub to: u64,
}

impl Move {
    /// The new address of the page that was at `at`.
    pub fn image(self, at: u64) -> Option<u64> {
        let inside = at.checked_sub(self.from).filter(|inside| *inside < self.length)?;
        Some(self.to + inside)
    }
}

pub struct Operation<A: Walk> {
    pub name: &'static str,
    /// Runs the call. Returns whether it succeeded; only a successful call guarantees anything.
    pub call: fn(&World<'_, A>) -> bool,
    pub revokes: Vec<Revoked>,
    pub holds: Holds,
    /// Whether the call revokes pages of the file, wherever another call has moved their mapping.
    pub of_the_file: bool,
    /// Ranges of the space whose contents may change.
    pub loses: Vec<(u64, u64)>,
    pub moves: Option<Move>,
}

impl<A: Walk> Operation<A> {
    pub fn new(name: &'static str, call: fn(&World<'_, A>) -> bool) -> Self {
        let (revokes, loses) = (Vec::new(), Vec::new());
        let holds = Holds::OnReturn;
        Self { name, call, revokes, holds, of_the_file: false, loses, moves: None }
    }

    pub fn revokes(mut self, which: Which, at: u64, length: u64, what: Denied) -> Self {
        self.revokes.push(Revoked { which, start: at, end: at + length, what });
        self
    }

    /// Pages of the file are removed from both spaces and the child.
    pub fn cuts(mut self, offset: u64, length: u64) -> Self {
        for which in [Which::Space, Which::Other, Which::Child] {
            self = self.revokes(which, FILE + offset, length, Denied::Everything);
        }
        self.of_the_file = true;
        self.loses(FILE + offset, length).loses(PRIVATE + offset, length)
    }

    pub fn holds_until(mut self, until: &'static [&'static str]) -> Self {
        self.holds = Holds::Until(until);
        self
    }

    pub fn loses(mut self, at: u64, length: u64) -> Self {
        self.loses.push((at, at + length));
        self
    }

    pub fn moves(mut self, from: u64, length: u64, to: u64) -> Self {
        self.moves = Some(Move { from, length, to });
        self.revokes(Which::Space, from, length, Denied::Everything)
    }
}

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;

fn remap<A: Walk>(space: &Space<'_, A>, from: u64, length: u64, remap: Remap) -> bool {
    space.mremap(VirtAddr(from), length, length, remap).is_ok()
}

fn advise<A: Walk>(space: &Space<'_, A>, at: u64, length: u64, advice: Advice) -> bool {
    space.madvise(VirtAddr(at), length, advice).is_ok()
}

fn touch<A: Walk>(space: &Space<'_, A>, at: u64, pages: &[u64], access: Access) -> bool {
    let touch = |page: &u64| space.fault(VirtAddr(at + page * PAGE_SIZE), access).is_ok();
    pages.iter().map(touch).fold(true, |all, one| all & one)
}

/// Touches pages by attempts that must not sleep, with waits in between.
fn try_touch<A: Walk>(space: &Space<'_, A>, at: u64, pages: &[u64], access: Access) -> bool {
    let touch = |page: &u64| {
        let at = VirtAddr(at + page * PAGE_SIZE);
        let mut _ready = None;
        loop {
            match stops::awake(|| space.try_fault(at, access, KeyRights::ALL)) {
                Ok(TriedFault::Resolved(_)) => return true,
                Ok(TriedFault::Blocked(wait)) => match wait.wait() {
                    Ok(ready) => _ready = Some(ready),
                    Err(_) => return false,
                },
                Err(_) => return false,
            }
        }
    };
    pages.iter().map(touch).fold(true, |all, one| all & one)
}

/// Attempts that never wait; an attempt that would block is abandoned.
fn give_up<A: Walk>(space: &Space<'_, A>) -> bool {
    for at in [FILE, PRIVATE, ANON, SHARED] {
        for page in [0, 5, 513] {
            for access in [Access::Read, Access::Write] {
                let at = VirtAddr(at + page * PAGE_SIZE);
                drop(stops::awake(|| space.try_fault(at, access, KeyRights::ALL)));
            }
        }
    }
    true
}

/// The page of a guard in the file's mapping, which initially has no guard.
const GUARDED: u64 = FILE + 769 * PAGE_SIZE;
const PART: u64 = FILE + MIB;
pub const UNGUARDS: &[&str] = &["guard remove", "munmap", "map over", "move"];
pub const CHANGES_PROTECTION: &[&str] = &["mprotect", "munmap", "map over", "move"];

/// All operations.
pub fn operations<A: Walk>() -> Vec<Operation<A>> {
    let all = [mappings(), contents(), objects(), users(), swap(), shared_memory()];
    all.into_iter().flatten().chain(calls_in_steps()).collect()
}

fn mappings<A: Walk>() -> Vec<Operation<A>> {
    let file_is_moved = ELSEWHERE + PAGE_SIZE;
    let anon_is_moved = ELSEWHERE + 8 * MIB + PAGE_SIZE;
    vec![
        Operation::new("fork", |w| {
            let child = w.space.fork();
            child.map(|child| w.children.lock().unwrap().push(child)).is_ok()
        })
        .revokes(Which::Space, ANON, LENGTH, Denied::Stores)
        .revokes(Which::Space, PRIVATE, LENGTH, Denied::Stores),
        Operation::new("drop child", |w| {
            let children = mem::take(&mut *w.children.lock().unwrap());
            !children.is_empty()
        }),
        Operation::new("move file", |w| {
            remap(&w.space, FILE, LENGTH, Remap::To(VirtAddr(ELSEWHERE + PAGE_SIZE)))
        })
        .moves(FILE, LENGTH, file_is_moved),
        Operation::new("move file, congruent", |w| {
            remap(&w.space, FILE, LENGTH, Remap::To(VirtAddr(ELSEWHERE)))
        })
        .moves(FILE, LENGTH, ELSEWHERE),
        Operation::new("move part of file", |w| {
            remap(&w.space, PART, 2 * MIB, Remap::To(VirtAddr(ELSEWHERE)))
        })
        .moves(PART, 2 * MIB, ELSEWHERE),
        Operation::new("move anon", |w| {
            let to = VirtAddr(ELSEWHERE + 8 * MIB + PAGE_SIZE);
            remap(&w.space, ANON, LENGTH, Remap::To(to))
        })
        .moves(ANON, LENGTH, anon_is_moved),
        Operation::new("move anon, congruent", |w| {
            remap(&w.space, ANON, LENGTH, Remap::To(VirtAddr(ANON + 8 * MIB)))
        })
        .moves(ANON, LENGTH, ANON + 8 * MIB),
        Operation::new("move private, leaving the mapping", |w| {
            remap(&w.space, PRIVATE, LENGTH, Remap::LeaveTo(VirtAddr(ELSEWHERE + 16 * MIB)))
        })
        .moves(PRIVATE, LENGTH, ELSEWHERE + 16 * MIB)
        .loses(PRIVATE, LENGTH),
        Operation::new("munmap part", |w| {
            w.space.munmap(VirtAddr(FILE + PAGE_SIZE), 3 * MIB).is_ok()
        })
        .revokes(Which::Space, FILE + PAGE_SIZE, 3 * MIB, Denied::Everything)
        .holds_until(&["map over"]),
        Operation::new("munmap anon", |w| w.space.munmap(VirtAddr(ANON), LENGTH).is_ok())
            .revokes(Which::Space, ANON, LENGTH, Denied::Everything)
            .holds_until(&[])
            .loses(ANON, LENGTH),
        Operation::new("munmap all", |w| w.space.munmap(VirtAddr(FILE), 16 * MIB).is_ok())
            .revokes(Which::Space, FILE, 16 * MIB, Denied::Everything)
            .holds_until(&["map over"]),
        Operation::new("map over", |w| w.space.mmap(&fixed(PART, 2 * MIB)).is_ok())
            .revokes(Which::Space, PART, 2 * MIB, Denied::Everything)
            .loses(PART, 2 * MIB),
        Operation::new("mprotect none", |w| {
            w.space.mprotect(VirtAddr(FILE), LENGTH, Protection::empty()).is_ok()
        })
        .revokes(Which::Space, FILE, LENGTH, Denied::Everything)
        .holds_until(CHANGES_PROTECTION),
        Operation::new("mprotect none, one table", |w| {
            w.space.mprotect(VirtAddr(FILE + 2 * MIB), 2 * MIB, Protection::empty()).is_ok()
        })
        .revokes(Which::Space, FILE + 2 * MIB, 2 * MIB, Denied::Everything)
        .holds_until(CHANGES_PROTECTION),
        Operation::new("mprotect read", |w| {
            w.space.mprotect(VirtAddr(FILE), LENGTH, Protection::READ).is_ok()
        })
        .revokes(Which::Space, FILE, LENGTH, Denied::Stores)
        .holds_until(CHANGES_PROTECTION),
        Operation::new("mprotect read and back", |w| {
            let first = VirtAddr(FILE + PAGE_SIZE);
            let read = w.space.mprotect(first, 2 * MIB, Protection::READ);
            read.and(w.space.mprotect(VirtAddr(FILE), LENGTH, READ_WRITE)).is_ok()
        }),
        Operation::new("grow and lock", |w| {
            let grown = w.space.mremap(VirtAddr(ANON), LENGTH, LENGTH + 2 * MIB, Remap::MayMove);
            grown.is_ok() & w.space.mlock(VirtAddr(ANON), 16 * PAGE_SIZE, LockPages::Now).is_ok()
        }),
    ]
}

fn contents<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("dontneed file", |w| advise(&w.space, FILE, LENGTH, Advice::DontNeed))
            .revokes(Which::Space, FILE, LENGTH, Denied::Everything),
        Operation::new("dontneed anon", |w| advise(&w.space, ANON, LENGTH, Advice::DontNeed))
            .revokes(Which::Space, ANON, LENGTH, Denied::Everything)
            .loses(ANON, LENGTH),
        Operation::new("free anon", |w| advise(&w.space, ANON, LENGTH, Advice::Free))
            .loses(ANON, LENGTH),
        Operation::new("cold file", |w| advise(&w.space, FILE, LENGTH, Advice::Cold)),
        Operation::new("guard install in file", |w| {
            advise(&w.space, GUARDED, PAGE_SIZE, Advice::GuardInstall)
        })
        .revokes(Which::Space, GUARDED, PAGE_SIZE, Denied::Everything)
        .holds_until(UNGUARDS),
        Operation::new("guard install in anon", |w| {
            advise(&w.space, ANON + 5 * PAGE_SIZE, PAGE_SIZE, Advice::GuardInstall)
        })
        .revokes(Which::Space, ANON + 5 * PAGE_SIZE, PAGE_SIZE, Denied::Everything)
        .holds_until(UNGUARDS)
        .loses(ANON + 5 * PAGE_SIZE, PAGE_SIZE),
        Operation::new("guard remove", |w| {
            let removed = advise(&w.space, GUARDED, PAGE_SIZE, Advice::GuardRemove);
            removed & advise(&w.space, ANON, LENGTH, Advice::GuardRemove)
        }),
        Operation::new("collapse file", |w| advise(&w.space, FILE, 2 * MIB, Advice::Collapse)),
        Operation::new("collapse anon", |w| advise(&w.space, ANON, 2 * MIB, Advice::Collapse)),
        Operation::new("clear refs", |w| clear_refs(&w.space, ClearRefs::SoftDirty).is_ok())
            .revokes(Which::Space, FILE, LENGTH, Denied::Stores)
            .revokes(Which::Space, PRIVATE, LENGTH, Denied::Stores)
            .revokes(Which::Space, ANON, LENGTH, Denied::Stores),
    ]
}

fn objects<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("sync", |w| w.file.sync(0, u64::MAX).is_ok())
            .revokes(Which::Space, FILE, LENGTH, Denied::Stores)
            .revokes(Which::Other, FILE, LENGTH, Denied::Stores)
            .of_the_file(),
        Operation::new("truncate", |w| w.file.set_size(2 * MIB - 100).is_ok())
            .cuts(2 * MIB, 2 * MIB)
            .revokes(Which::Space, PRIVATE + 2 * MIB, 2 * MIB, Denied::Everything)
            .holds_until(&["map over"]),
        Operation::new("punch", |w| w.file.punch_hole(PAGE_SIZE, 3 * MIB - PAGE_SIZE).is_ok())
            .cuts(PAGE_SIZE, 3 * MIB - PAGE_SIZE)
            .revokes(Which::Space, PRIVATE + 601 * PAGE_SIZE, PAGE_SIZE, Denied::Everything),
        Operation::new("punch all", |w| w.file.punch_hole(0, LENGTH).is_ok())
            .cuts(0, LENGTH)
            .revokes(Which::Space, PRIVATE + 601 * PAGE_SIZE, PAGE_SIZE, Denied::Everything),
        Operation::new("write file", |w| w.file.write(PAGE_SIZE + 100, &[9; 5000]).is_ok()),
    ]
}

fn users<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("fault file, write", |w| touch(&w.space, FILE, &[0, 2, 513], Access::Write)),
        Operation::new("fault file in the other space, write", |w| {
            touch(&w.other, FILE, &[0, 2, 513], Access::Write)
        }),
        Operation::new("fault file, read", |w| touch(&w.space, FILE, &[0, 2, 513], Access::Read)),
        Operation::new("fault private, write", |w| {
            touch(&w.space, PRIVATE, &[0, 600], Access::Write)
        }),
        Operation::new("fault private, read", |w| {
            touch(&w.space, PRIVATE, &[2, 601], Access::Read)
        }),
        Operation::new("fault anon, write", |w| touch(&w.space, ANON, &[0, 5, 700], Access::Write)),
        Operation::new("fault anon, read", |w| touch(&w.space, ANON, &[0, 2, 700], Access::Read)),
        Operation::new("try fault file", |w| {
            try_touch(&w.space, FILE, &[0, 2, 513], Access::Write)
        }),
        Operation::new("try fault private", |w| {
            try_touch(&w.space, PRIVATE, &[0, 600], Access::Write)
        }),
        Operation::new("try fault anon", |w| try_touch(&w.space, ANON, &[0, 5], Access::Write)),
        Operation::new("give up faults", |w| give_up(&w.space)),
        Operation::new("write_user to file", |w| {
            w.space.write_user(VirtAddr(FILE + PAGE_SIZE + 100), &[7; 5000]).is_ok()
        }),
        Operation::new("write_user to anon", |w| {
            w.space.write_user(VirtAddr(ANON + 100), &[7; 5000]).is_ok()
        }),
        // Pages of the file, the process's own page, and a page that is not mapped yet. The program
        // must not be able to store to any of them, before or after.
        Operation::new("write_forced to private", |w| {
            let write = |page: u64, bytes: &[u8]| {
                let at = VirtAddr(PRIVATE + page * PAGE_SIZE + 100);
                w.space.write_forced(at, bytes).is_ok()
            };
            w.space.mprotect(VirtAddr(PRIVATE), LENGTH, Protection::READ).is_ok()
                && write(0, &[7; 5000])
                && [3, 5, 600].into_iter().all(|page| write(page, &[7; 8]))
        })
        .revokes(Which::Space, PRIVATE, LENGTH, Denied::Stores)
        .holds_until(CHANGES_PROTECTION),
        Operation::new("read_user", |w| {
            let mut bytes = [0; 5000];
            let file = w.space.read_user(VirtAddr(FILE + 100), &mut bytes);
            file.and(w.space.read_user(VirtAddr(ANON + 100), &mut bytes)).is_ok()
        }),
        Operation::new("pin", |w| {
            let pinned = w.space.pin(VirtAddr(FILE), 4, Access::Write, PinTime::Short);
            pinned.is_ok() & w.space.pin(VirtAddr(ANON), 4, Access::Write, PinTime::Long).is_ok()
        }),
        Operation::new("smaps", |w| {
            let mut text = String::new();
            smaps(&w.space, &Unnamed, &mut text).is_ok() && !text.is_empty()
        }),
    ]
}

/// Works on the existing children, which other threads cannot find in the meantime.
pub fn with_children<'m, A: Walk>(
    world: &World<'m, A>,
    work: impl FnOnce(&[Space<'m, A>]) -> bool,
) -> bool {
    let mut children = mem::take(&mut *world.children.lock().unwrap());
    let done = work(&children);
    let mut now = world.children.lock().unwrap();
    children.append(&mut now);
    *now = children;
    done
}

fn shared_memory<A: Walk>() -> Vec<Operation<A>> {
    let page = |number: u64| SHARED + number * PAGE_SIZE;
    vec![
        // The advice affects only pages 4 to 7, the only ones that this space maps.
        Operation::new("page out shared", |w| {
            advise(&w.space, SHARED, SHARED_LENGTH, Advice::PageOut)
        }),
        Operation::new("swap in shared, read", |w| {
            touch(&w.space, SHARED, &[5, 9, 10], Access::Read)
        }),
        Operation::new("swap in shared at the other's, write", |w| {
            touch(&w.other, SHARED, &[1, 9], Access::Write)
        }),
        Operation::new("read shared", |w| {
            w.shared.read(7 * PAGE_SIZE + 100, &mut [0; 5000]).is_ok()
        }),
        Operation::new("punch shared", |w| {
            w.shared.punch_hole(5 * PAGE_SIZE, 6 * PAGE_SIZE).is_ok()
        })
        .revokes(Which::Space, page(5), 6 * PAGE_SIZE, Denied::Everything)
        .revokes(Which::Other, page(5), 6 * PAGE_SIZE, Denied::Everything)
        .loses(page(5), 6 * PAGE_SIZE),
        // The truncation cuts a page in swap.
        Operation::new("truncate shared", |w| w.shared.set_size(9 * PAGE_SIZE - 100).is_ok())
            .revokes(Which::Space, page(9), 7 * PAGE_SIZE, Denied::Everything)
            .revokes(Which::Other, page(9), 7 * PAGE_SIZE, Denied::Everything)
            .holds_until(&[])
            .loses(page(9), 7 * PAGE_SIZE),
    ]
}

fn swap<A: Walk>() -> Vec<Operation<A>> {
    vec![
        Operation::new("page out anon", |w| advise(&w.space, ANON, LENGTH, Advice::PageOut)),
        Operation::new("page out the child's", |w| {
            with_children(w, |children| {
                children.first().is_some_and(|child| advise(child, ANON, LENGTH, Advice::PageOut))
            })
        }),
        Operation::new("reclaim", |w| w.space.memory().reclaim(256).scanned > 0),
        Operation::new("swap in, read", |w| touch(&w.space, ANON, &[561, 577], Access::Read)),
        Operation::new("swap in, write", |w| touch(&w.space, ANON, &[561, 577], Access::Write)),
        Operation::new("swap in at the child's", |w| {
            with_children(w, |children| {
                children.first().is_some_and(|child| touch(child, ANON, &[561], Access::Write))
            })
        }),
        Operation::new("dontneed swapped", |w| {
            advise(&w.space, ANON + 560 * PAGE_SIZE, 32 * PAGE_SIZE, Advice::DontNeed)
        })
        .revokes(Which::Space, ANON + 560 * PAGE_SIZE, 32 * PAGE_SIZE, Denied::Everything)
        .loses(ANON + 560 * PAGE_SIZE, 32 * PAGE_SIZE),
        Operation::new("swapoff", |w| {
            let memory = w.space.memory();
            memory.stop_swapping_to(&w.area);
            let done = with_children(w, |children| {
                let mut spaces = children.iter().chain([&w.space, &w.other]);
                spaces.all(|space| space.swap_in_area(&w.area).is_ok())
            });
            let done = done && memory.swap_in_objects(&w.area).is_ok();
            if memory.swap_off(&w.area).is_ok() {
                // The next call finds the initial state.
                return memory.swap_on(SLOTS, 0) == Ok(w.area);
            }
            memory.resume_swapping_to(&w.area);
            done
        }),
    ]
}

impl<A: Walk> Operation<A> {
    pub fn of_the_file(mut self) -> Self {
        self.of_the_file = true;
        self
    }
}
