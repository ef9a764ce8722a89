//! Pages of all kinds, stored, loaded and freed.

mod cpus;

use core::sync::atomic::Ordering::Relaxed;
use std::vec::Vec;

use proptest::prelude::*;

use super::extent::LINK;
use super::workspace::WORKSPACE_FRAMES;
use super::*;
use crate::addr::Order;
use crate::bytes;
use crate::folio::FrameUse;
use crate::frame::AllocateFor;
use crate::frame::meta::MetaKind;
use crate::frame::tests::{Machine, assert_all_free, new_frames};

const PAGE: usize = PAGE_SIZE as usize;

type Page = [u8; PAGE];

/// Pseudorandom numbers.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ mixed >> 27
    }

    fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }
}

/// A page with `random` bytes that cannot be compressed, and zeroes after them.
fn page_of(random: usize, seed: u64) -> Page {
    let mut numbers = Numbers(seed);
    core::array::from_fn(|at| if at < random { numbers.next() as u8 } else { 0 })
}

/// A page of words.
fn text(seed: u64) -> Page {
    const WORDS: [&str; 8] =
        ["page ", "frame ", "swap ", "a ", "the ", "table\n", "entry, ", "of "];
    let mut numbers = Numbers(seed);
    let words = core::iter::repeat_with(|| WORDS[numbers.below(WORDS.len())]);
    let bytes: Vec<u8> = words.flat_map(str::bytes).take(PAGE).collect();
    bytes.try_into().unwrap()
}

/// A zero page with a few other words.
fn sparse(seed: u64) -> Page {
    let mut numbers = Numbers(seed);
    let mut page = [0; PAGE];
    for _ in 0..1 + numbers.below(200) {
        let at = numbers.below(PAGE / 8) * 8;
        page[at..at + 8].copy_from_slice(&numbers.next().to_ne_bytes());
    }
    page
}

/// Pages from easy to impossible to compress.
fn any_page(seed: u64) -> Page {
    match seed % 6 {
        0 => text(seed),
        1 => sparse(seed),
        2 => page_of(PAGE, seed),
        3 => page_of(16, seed),
        _ => page_of(Numbers(seed).below(PAGE), seed),
    }
}

/// Writes to a frame of the caller.
fn write(frames: &Frames<Machine>, frame: Frame, at: usize, content: &[u8]) {
    // SAFETY: 1. a single frame. 2. and 3. the machine runs no other user of the bytes.
    unsafe { bytes::write(frames.platform(), frame, at, content) };
}

/// Reads a frame of the caller.
fn read(frames: &Frames<Machine>, frame: Frame) -> Page {
    let mut content = [0; PAGE];
    // SAFETY: as in `write`.
    unsafe { bytes::read(frames.platform(), frame, 0, &mut content) };
    content
}

/// Frees a page of the caller.
fn free(frames: &Frames<Machine>, page: Frame) {
    // SAFETY: 1. and 2. the page belongs to the caller, which no longer uses it.
    unsafe { frames.free(page, Order::PAGE) };
}

/// A store, its frames, and a page to store from and load into.
struct Fixture {
    frames: Frames<Machine>,
    store: CompressedStore<Machine>,
    page: Frame,
}

impl Fixture {
    fn new(frames: u32, limit: u64) -> Self {
        let frames = new_frames(frames);
        let page = frames.allocate(Order::PAGE, AllocateFor::Use).unwrap();
        let store = CompressedStore::new(limit);
        store.prepare(&frames).unwrap();
        Self { frames, store, page }
    }

    fn store(&self, content: &Page) -> Result<Handle, StoreError> {
        write(&self.frames, self.page, 0, content);
        // SAFETY: 1. and 2. the page belongs to the fixture, and this is the only thread.
        unsafe { self.store.store(&self.frames, self.page) }
    }

    fn load(&self, handle: &Handle) -> Result<Page, Corrupt> {
        write(&self.frames, self.page, 0, &[0x5a; PAGE]);
        // SAFETY: 1. this is the only thread, so the stored bytes stay. 2. the page belongs to the
        // fixture.
        unsafe { self.store.load(&self.frames, handle, self.page) }?;
        Ok(read(&self.frames, self.page))
    }

    fn free(&self, handle: Handle) {
        // SAFETY: 1. and 2. this is the only thread; where a test frees twice, nothing was stored
        // in between.
        unsafe { self.store.free(&self.frames, handle) };
    }

    /// Asserts that the counters agree with the frames.
    fn check(&self) {
        assert_eq!(self.store.check(&self.frames), Ok(()));
        let mut found = 0;
        self.frames.for_each_block(|_, order, kind| {
            if kind == MetaKind::Compressed {
                found += u64::from(order.pages());
            }
        });
        assert_eq!(self.store.frames_held(), found);
        assert_eq!(crate::folio::frame_usage(&self.frames, Order(9)).compressed, found);
        assert!(self.store.usage().frames_used <= self.store.limit());
    }

    /// Asserts that everything was freed.
    fn finish(self) {
        let usage = self.store.usage();
        let left = (usage.pages_stored, usage.pages_raw, usage.bytes_compressed, usage.frames_used);
        assert_eq!(left, (0, 0, 0, 0));
        self.check();
        self.store.release(&self.frames);
        free(&self.frames, self.page);
        assert_all_free(&self.frames);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn pages_of_all_kinds_survive(
        steps in prop::collection::vec((0u8..8, any::<u64>()), 1..300),
        limit in 1u64..120,
    ) {
        let fixture = Fixture::new(256, limit);
        let mut live: Vec<(Handle, u64)> = Vec::new();
        for (what, seed) in steps {
            match what {
                0..5 => match fixture.store(&any_page(seed)) {
                    Ok(handle) => live.push((handle, seed)),
                    Err(error) => prop_assert_eq!(error, StoreError::Limit),
                },
                5 if !live.is_empty() => {
                    let (handle, seed) = &live[seed as usize % live.len()];
                    prop_assert!(fixture.load(handle) == Ok(any_page(*seed)));
                }
                6 if !live.is_empty() => {
                    fixture.free(live.swap_remove(seed as usize % live.len()).0);
                }
                _ => fixture.check(),
            }
            prop_assert_eq!(fixture.store.usage().pages_stored, live.len() as u64);
        }
        for (handle, seed) in live {
            let handle = Handle::from_raw(handle.to_raw()).unwrap();
            prop_assert!(fixture.load(&handle) == Ok(any_page(seed)));
            fixture.free(handle);
        }
        fixture.finish();
    }

    #[test]
    fn damaged_bytes_and_handles_are_errors(seed: u64, damage: u64, made_up: u64) {
        let fixture = Fixture::new(64, 40);
        let seeds = (0..12).map(|n| seed.wrapping_add(n));
        let handles: Vec<_> =
            seeds.map(|seed| fixture.store(&any_page(seed)).unwrap()).collect();
        let mut numbers = Numbers(damage);
        for handle in &handles {
            let extent = handle.extent().unwrap();
            let start = extent.start() + if extent.is_last() { 0 } else { LINK };
            for _ in 0..1 + numbers.below(3) {
                let (at, byte) = (start + numbers.below(extent.bytes()), numbers.next() as u8);
                write(&fixture.frames, extent.frame, at, &[byte]);
            }
            // The length may be right by chance.
            let _ = fixture.load(handle);
        }
        for bits in 0..64 {
            if let Some(handle) = Handle::from_raw(made_up >> bits) {
                prop_assert_eq!(fixture.load(&handle), Err(Corrupt));
            }
            let near = handles[bits % handles.len()].to_raw() ^ 1 << bits;
            let _ = Handle::from_raw(near).map(|handle| fixture.load(&handle));
        }
        handles.into_iter().for_each(|handle| fixture.free(handle));
        fixture.finish();
    }
}

#[test]
fn the_limit_is_reached_and_never_passed() {
    let fixture = Fixture::new(128, 20);
    let raw = |seed| fixture.store(&page_of(PAGE, seed));
    let mut handles: Vec<_> = (0..20).map(|seed| raw(seed).unwrap()).collect();
    assert_eq!(raw(20), Err(StoreError::Limit));
    assert_eq!(fixture.store(&page_of(16, 0)), Err(StoreError::Limit));
    fixture.free(handles.remove(7));
    handles.push(raw(21).unwrap());
    assert_eq!(raw(22), Err(StoreError::Limit));
    fixture.store.set_limit(21);
    handles.push(raw(23).unwrap());
    fixture.store.set_limit(3);
    let usage = fixture.store.usage();
    assert_eq!((usage.frames_used, usage.frames_used_max, usage.pages_raw), (21, 21, 21));
    handles.drain(..19).for_each(|handle| fixture.free(handle));
    assert_eq!(fixture.store.usage().frames_used, 2);
    handles.push(fixture.store(&page_of(16, 0)).unwrap());
    // A frame that is already allocated has room.
    handles.push(fixture.store(&page_of(2_000, 1)).unwrap());
    assert_eq!(raw(24), Err(StoreError::Limit));
    handles.into_iter().for_each(|handle| fixture.free(handle));
    fixture.finish();
}

#[test]
fn pages_of_one_awkward_size_leave_no_holes() {
    // The unused ends of last chunks matter for small objects.
    for (random, most) in [(300, 17), (1_400, 5), (2_100, 5), (2_500, 5), (3_000, 5), (3_500, 5)] {
        let fixture = Fixture::new(512, 400);
        let stored = |seed| fixture.store(&page_of(random, seed)).unwrap();
        let handles: Vec<_> = (0..300).map(stored).collect();
        let usage = fixture.store.usage();
        assert_eq!(usage.pages_raw, 0);
        let wasted = usage.wasted() * 100 / (usage.frames_used * PAGE_SIZE);
        assert!(wasted <= most, "{random} bytes: {wasted} % of {usage:?}");
        for (seed, handle) in handles.into_iter().enumerate() {
            assert!(fixture.load(&handle) == Ok(page_of(random, seed as u64)));
            fixture.free(handle);
        }
        fixture.finish();
    }
}

#[test]
fn mixed_sizes_leave_few_holes() {
    let fixture = Fixture::new(2_048, 1_800);
    let mut numbers = Numbers(7);
    let mut page = || page_of(numbers.below(3_000), numbers.next());
    let mut live: Vec<_> = (0..1_500).map(|_| fixture.store(&page()).unwrap()).collect();
    let mut numbers = Numbers(8);
    for _ in 0..20_000 {
        fixture.free(live.swap_remove(numbers.below(live.len())));
        live.push(fixture.store(&page()).unwrap());
    }
    let usage = fixture.store.usage();
    let wasted = usage.wasted() * 100 / (usage.frames_used * PAGE_SIZE);
    assert!(wasted < 8, "{wasted} % of {usage:?}");
    fixture.check();
    live.into_iter().for_each(|handle| fixture.free(handle));
    fixture.finish();
}

#[test]
fn a_store_without_memory_changes_nothing() {
    let fixture = Fixture::new(64, 64);
    let keep: Vec<_> = (0..6).map(|n| fixture.store(&page_of(2_500, n)).unwrap()).collect();
    for random in [16, 2_900, PAGE] {
        let before = fixture.store.usage();
        fixture.frames.inject.fail_after(Some(0));
        let result = fixture.store(&page_of(random, 9));
        fixture.frames.inject.fail_after(None);
        if let Ok(handle) = result {
            assert!(random < PAGE);
            fixture.free(handle);
        } else {
            assert_eq!(result, Err(StoreError::NoMemory));
            assert_eq!(fixture.store.usage(), before);
        }
        fixture.check();
    }
    let mut rest = Vec::new();
    let error = loop {
        match fixture.store(&page_of(2_900, rest.len() as u64)) {
            Ok(handle) => rest.push(handle),
            Err(error) => break error,
        }
    };
    assert_eq!((error, fixture.frames.free_frame_count()), (StoreError::NoMemory, 0));
    for (seed, handle) in rest.into_iter().enumerate() {
        assert!(fixture.load(&handle) == Ok(page_of(2_900, seed as u64)));
        fixture.free(handle);
    }
    keep.into_iter().for_each(|handle| fixture.free(handle));
    fixture.finish();
}

#[test]
fn without_memory_for_a_compressor_nothing_is_stored() {
    let frames = new_frames(64);
    let page = frames.allocate(Order::PAGE, AllocateFor::Use).unwrap();
    let store = CompressedStore::new(8);
    frames.inject.fail_after(Some(0));
    assert_eq!(store.prepare(&frames), Err(NoMemory));
    // SAFETY: 1. and 2. the page belongs to this test, and this is the only thread.
    let stored = || unsafe { store.store(&frames, page) };
    assert_eq!(stored(), Err(StoreError::NoMemory));
    frames.inject.fail_after(None);
    let handle = stored().unwrap();
    assert_eq!(store.frames_held(), store.usage().frames_used + WORKSPACE_FRAMES);
    // SAFETY: 1. the page was stored above. 2. This is the only thread.
    unsafe { store.free(&frames, handle) };
    store.release(&frames);
    free(&frames, page);
    assert_all_free(&frames);
}

#[test]
fn what_is_freed_twice_is_refused() {
    let fixture = Fixture::new(64, 8);
    let keep = fixture.store(&page_of(100, 1)).unwrap();
    let handle = fixture.store(&page_of(200, 2)).unwrap();
    let again = Handle::from_raw(handle.to_raw()).unwrap();
    fixture.free(handle);
    assert_eq!(fixture.load(&again), Err(Corrupt));
    fixture.free(again);
    assert_eq!(fixture.frames.refused(), 1);
    assert_eq!(fixture.store.usage().pages_stored, 1);
    assert!(fixture.load(&keep) == Ok(page_of(100, 1)));
    fixture.check();
}

#[test]
fn a_frame_on_a_wrong_list_is_found() {
    let fixture = Fixture::new(64, 8);
    let handle = fixture.store(&page_of(100, 1)).unwrap();
    let frame = handle.extent().unwrap().frame;
    let meta = fixture.frames.meta(frame);
    for (field, bit) in [(&meta.word, 1 << 40), (&meta.word, u64::MAX)] {
        field.fetch_xor(bit, Relaxed);
        assert_eq!(fixture.store.check(&fixture.frames), Err(frame));
        field.fetch_xor(bit, Relaxed);
    }
    for (field, bits) in [(&meta.previous, 1), (&meta.state, 1)] {
        field.fetch_xor(bits, Relaxed);
        assert_eq!(fixture.store.check(&fixture.frames), Err(frame));
        field.fetch_xor(bits, Relaxed);
    }
    fixture.free(handle);
    fixture.finish();
}

#[test]
fn readers_of_all_frames_see_compressed_memory() {
    let fixture = Fixture::new(64, 8);
    let handle = fixture.store(&text(1)).unwrap();
    let frame = handle.extent().unwrap().frame;
    assert_eq!(crate::folio::frame_view(&fixture.frames, frame).usage, FrameUse::Compressed);
    fixture.free(handle);
    assert_eq!(crate::folio::frame_view(&fixture.frames, frame).usage, FrameUse::Free);
    fixture.finish();
}

#[test]
fn threads_use_the_store_within_the_limit() {
    const LIMIT: u64 = 60;
    let fixture = Fixture::new(256, LIMIT);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let Fixture { frames, store, .. } = &fixture;
            scope.spawn(move || {
                let page = frames.allocate(Order::PAGE, AllocateFor::Use).unwrap();
                let mut numbers = Numbers(thread);
                let mut live: Vec<(Handle, u64)> = Vec::new();
                for _ in 0..1_500 {
                    let seed = numbers.next();
                    write(frames, page, 0, &any_page(seed));
                    // SAFETY: 1. and 2. the page belongs to this thread.
                    match unsafe { store.store(frames, page) } {
                        Ok(handle) => live.push((handle, seed)),
                        Err(error) => assert_eq!(error, StoreError::Limit),
                    }
                    assert!(store.usage().frames_used <= LIMIT);
                    if live.len() > 30 || numbers.below(3) == 0 && !live.is_empty() {
                        let (handle, seed) = live.swap_remove(numbers.below(live.len()));
                        // SAFETY: 1. the page was stored above and is freed below. 2. As above.
                        unsafe { store.load(frames, &handle, page) }.unwrap();
                        assert!(read(frames, page) == any_page(seed));
                        // SAFETY: 1. the page was stored above and is removed from the list. 2. The
                        // load has finished.
                        unsafe { store.free(frames, handle) };
                    }
                }
                for (handle, _) in live {
                    // SAFETY: as above.
                    unsafe { store.free(frames, handle) };
                }
                free(frames, page);
            });
        }
    });
    assert!(fixture.store.usage().frames_used_max <= LIMIT);
    fixture.finish();
}
