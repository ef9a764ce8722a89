//! Reclaim and `MADV_PAGEOUT` concurrent with calls that leave `PROT_NONE` entries, permanently or
//! briefly. Both swap out the entries of mappings without access, but never the entries of a move
//! or unmapping in progress.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Absent, Riscv64, X86_64};
use bindery::check;
use bindery::testing::{self, PageMove, move_pages};
use bindery::{AddressSpace, Advice, Inspection, Memory, Protection, SizeMode};
use bindery_hosted::Walk;

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Stops};
use crate::support::{GIB, MIB, READ_WRITE, fixed, options};

const FROM: u64 = GIB;
/// Misaligned, so that a 64 KiB folio is not one run in one table.
const TO: u64 = 2 * GIB + 2 * MIB - 5 * PAGE_SIZE;
const PAGES: u64 = 32;
const LENGTH: u64 = PAGES * PAGE_SIZE;

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;
type Call<A> = fn(&Space<'_, A>);

fn content(page: u64) -> u64 {
    page << 8 | 7
}

/// Cold, written folios of that order at [`FROM`], which may be swapped out.
fn cold_pages<A: Walk>(memory: &Memory<Stepped<A>>, order: u8) -> Space<'_, A> {
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    memory.swap_on(4096, 0).unwrap();
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(FROM, LENGTH)).unwrap();
    for page in 0..PAGES {
        let at = VirtAddr(FROM + page * PAGE_SIZE);
        space.write_user(at, &content(page).to_ne_bytes()).unwrap();
    }
    space.madvise(VirtAddr(FROM), LENGTH, Advice::Cold).unwrap();
    space
}

fn protect<A: Walk>(space: &Space<'_, A>, protection: Protection) {
    space.mprotect(VirtAddr(FROM), LENGTH, protection).unwrap();
}

/// The content of a page, at its original address or at its destination.
fn contents<A: Walk>(space: &Space<'_, A>, page: u64) -> Vec<u64> {
    let places = [FROM, TO].map(|base| VirtAddr(base + page * PAGE_SIZE));
    let is_there = |at: &VirtAddr| !matches!(space.inspect(*at), Inspection::Empty);
    let read = |at| {
        let mut bytes = [0; 8];
        space.read_user(at, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    places.into_iter().filter(is_there).map(read).collect()
}

/// One run: `held` at a step, with `other` in between. Returns whether `held` reached the step. In
/// the end each page exists once unless one of the calls has dropped it.
fn run<A: Walk>(
    hold_at: HoldAt,
    order: u8,
    before: Call<A>,
    held: Call<A>,
    other: Call<A>,
    drops: bool,
) -> bool {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    let space = cold_pages(&memory, order);
    space.mmap(&fixed(TO, LENGTH)).unwrap();
    before(&space);
    let stops = Arc::new(Stops::default());
    let was_held = stops.meet(&machine, hold_at, &|| held(&space), &|| other(&space)).is_some();
    let mut scratch = vec![0; check::scratch_words(&memory)];
    check::check(&memory, &[&space], &mut scratch).unwrap();
    protect(&space, READ_WRITE);
    for page in 0..PAGES {
        let found = contents(&space, page);
        let kept = found == [content(page)];
        assert!(kept || drops && found.is_empty(), "page {page}: {found:x?}");
    }
    check::check(&memory, &[&space], &mut scratch).unwrap();
    machine.assert_clean();
    was_held
}

fn reclaim<A: Walk>(space: &Space<'_, A>) {
    space.memory().reclaim(1024);
}

fn page_out<A: Walk>(space: &Space<'_, A>) {
    space.madvise(VirtAddr(FROM), LENGTH, Advice::PageOut).unwrap();
}

fn discard<A: Walk>(space: &Space<'_, A>) {
    space.discard(VirtAddr(FROM), LENGTH).unwrap();
}

fn close<A: Walk>(space: &Space<'_, A>) {
    protect(space, Protection::empty());
}

fn open<A: Walk>(space: &Space<'_, A>) {
    protect(space, READ_WRITE);
}

fn moves<A: Walk>(space: &Space<'_, A>) {
    let (source, destination) = (VirtAddr(FROM), VirtAddr(TO));
    let what =
        PageMove { source, destination, length: LENGTH, allows_holes: true, ..PageMove::default() };
    // Succeeds only if no other process maps the pages.
    let _ = move_pages(space, &what);
}

/// Both calls, each held at all its steps while the other runs.
fn meet<A: Walk>(order: u8, before: Call<A>, pair: [Call<A>; 2], drops: bool) {
    for (held, other) in [(pair[0], pair[1]), (pair[1], pair[0])] {
        let mut step = 0;
        while run::<A>(HoldAt::Number(step), order, before, held, other, drops) {
            step += 1;
        }
        assert!(step > 0, "the first call was never held");
    }
}

fn all<A: Walk>(order: u8) {
    for takes in [reclaim::<A>, page_out::<A>] {
        // The content of a mapping without access is swapped out, and present when access is
        // allowed again.
        meet::<A>(order, close, [takes, open], false);
        meet::<A>(order, close, [takes, discard], true);
        // Pages that the other calls release temporarily stay in place.
        meet::<A>(order, |_| (), [takes, close], false);
        meet::<A>(order, |_| (), [takes, discard], true);
        meet::<A>(order, |_| (), [takes, moves], false);
    }
    meet::<A>(order, close, [reclaim, page_out], false);
    a_locked_folio_keeps_its_entries::<A>(order, reclaim);
    a_locked_folio_keeps_its_entries::<A>(order, page_out);
}

/// A thread locks the folio of a page and is held at each of its steps in turn. While it holds the
/// lock, reclaim and the advice leave the folio's entries unchanged and swap out all others.
fn a_locked_folio_keeps_its_entries<A: Walk>(order: u8, takes: Call<A>) {
    let refused = AtomicU32::new(0);
    for step in 0.. {
        let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
        let space = cold_pages(&memory, order);
        close(&space);
        let entries = |pages: Range<u64>| -> Vec<_> {
            pages.map(|page| space.inspect(VirtAddr(FROM + page * PAGE_SIZE))).collect()
        };
        let (locked, before) = (16..16 + (1 << order), entries(0..PAGES));
        let Inspection::Absent(Absent::ProtNone { frame, .. }) = before[16] else {
            panic!("{:?}", before[16]);
        };
        let is_locked = AtomicBool::new(false);
        let stops = Arc::new(Stops::default());
        let locks = || {
            testing::with_folio_locked(&memory, frame, || {
                is_locked.store(true, Relaxed);
                // Passes some steps.
                space.inspect(VirtAddr(FROM));
                is_locked.store(false, Relaxed);
            });
        };
        let meanwhile = || {
            let was_locked = is_locked.load(Relaxed);
            takes(&space);
            // If this call waited for readers, the other call was released and may have ended.
            let is_locked = is_locked.load(Relaxed);
            let is_out =
                |entry: &&Inspection<A>| matches!(entry, Inspection::Absent(Absent::Swap { .. }));
            let out = entries(0..PAGES).iter().filter(is_out).count() as u64;
            let others = PAGES - (locked.end - locked.start);
            assert!(out == PAGES && !is_locked || out == others && was_locked, "{out} pages out");
            if out == others {
                assert_eq!(entries(locked.clone()), before[16..locked.end as usize]);
            }
            refused.fetch_add(u32::from(is_locked), Relaxed);
        };
        let was_held = stops.meet(&machine, HoldAt::Number(step), &locks, &meanwhile).is_some();
        let mut scratch = vec![0; check::scratch_words(&memory)];
        check::check(&memory, &[&space], &mut scratch).unwrap();
        open(&space);
        for page in 0..PAGES {
            assert_eq!(contents(&space, page), [content(page)]);
        }
        machine.assert_clean();
        if !was_held {
            break;
        }
    }
    assert!(refused.into_inner() > 0, "no thread was held with the lock");
}

#[test]
fn on_x86_64() {
    all::<X86_64<4>>(0);
}

#[test]
fn on_aarch64_with_folios_of_64_kib() {
    all::<AArch64>(4);
}

#[test]
fn on_riscv64() {
    all::<Riscv64<3>>(0);
}
