//! Memory that is freed before a call fails, without any swap.

use std::sync::{Arc, Mutex};

use bindery::addr::{Order, VirtAddr};
use bindery::arch::X86_64;
use bindery::{AddressSpace, FaultError, FrameRange, Memory, Sharing, VmallocOptions};
use bindery_hosted::{Machine, MemoryFiles, Program};

use crate::support::kernel;
use crate::support::objects_fixture::map as map_object;
use crate::support::{GIB, MIB, audit, fixed, options, strict, use_order};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const BYTES: u64 = 16 * MIB;

type X = X86_64<4>;

/// Touches pages one by one until memory runs out. Returns the number of pages.
fn touch_all(machine: &Machine<X>, memory: &Memory<Machine<X>>) -> u64 {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(AT, 2 * BYTES)).unwrap();
    let program = Program::new(machine, &space);
    let full = (0..2 * BYTES / PAGE)
        .find(|page| program.store(VirtAddr(AT + page * PAGE), 1) == Err(FaultError::OutOfMemory));
    full.expect("memory is short")
}

/// A fault purges areas of the kernel map that were freed and wait for a purge.
#[test]
fn a_fault_without_memory_purges_the_kernel_map() {
    let (machine, memory) = strict::<X>(BYTES);
    let memory: &'static _ = Box::leak(Box::new(memory));
    use_order(memory, 0);
    let map: &'static _ = Box::leak(Box::new(kernel::map(memory)));
    machine.on_collect(move || map.purge());
    let before = touch_all(&machine, memory);
    map.set_purge_limit(u64::MAX);
    let area = map.vmalloc(8 * MIB, &VmallocOptions::default()).unwrap();
    // SAFETY: 1. the area was allocated above; 2. and 3. the area is not in use.
    unsafe { map.vfree(area) }.unwrap();
    assert!(map.freed_pages() >= 8 * MIB / PAGE, "nothing waits");
    let after = touch_all(&machine, memory);
    assert!(after + 64 > before, "{after} pages instead of {before}");
    assert_eq!(map.freed_pages(), 0);
}

/// The embedder's caches are freed once, and the next call fails.
#[test]
fn the_embedders_caches_are_freed_before_failing() {
    let (machine, memory) = strict::<X>(BYTES);
    let memory: &'static _ = Box::leak(Box::new(memory));
    use_order(memory, 0);
    let kept = Arc::new(Mutex::new(Vec::<FrameRange>::new()));
    let given = kept.clone();
    machine.on_collect(move || {
        for frames in given.lock().unwrap().drain(..) {
            // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
            assert!(unsafe { memory.free_frames(frames) });
        }
    });
    let before = touch_all(&machine, memory);
    let frames = memory.allocate_frames(Order(10)).unwrap();
    kept.lock().unwrap().push(frames);
    assert_eq!(touch_all(&machine, memory), before);
    assert!(kept.lock().unwrap().is_empty());
}

/// `drop_caches`: clean pages are dropped though they were just used, and dirty ones stay.
#[test]
fn clean_pages_of_files_are_dropped() {
    let files = MemoryFiles::new();
    files.put(1, &[7; 32 * PAGE as usize]);
    let (machine, memory) = strict::<X>(BYTES);
    let file = memory.file(&files, 1, 32 * PAGE).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map_object(&space, &file, AT, 32 * PAGE, Sharing::Shared).unwrap();
    let program = Program::new(&machine, &space);
    let at = |page: u64| VirtAddr(AT + page * PAGE);
    for page in 0..32 {
        program.load(at(page)).unwrap();
    }
    program.store(at(3), 9).unwrap();
    let before = memory.frame_usage().file;
    let freed = memory.drop_clean_pages();
    assert!(freed > 0);
    assert_eq!(memory.frame_usage().file, before - freed);
    assert_eq!(memory.drop_clean_pages(), 0, "the dirty page stays");
    assert_eq!(program.load(at(3)), Ok(9));
    assert_eq!(program.load(at(4)), Ok(0x0707_0707_0707_0707));
    audit(&machine, &memory, &[&space]);
}
