//! An area in compressed memory whose store is full, with a device of lower priority.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    Accounting, Advice, FileAccess, MapObject, MapRequest, Place, Sealing, Sharing, SwapArea,
};
use bindery_hosted::{SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device};
use crate::support::{GIB, MIB, READ_WRITE, audit};

type Amd64 = X86_64<4>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const SLOTS: u64 = 4096;
/// Pages of one table, which are sent out together.
const PAGES: u64 = 512;
/// The store has room for so many pages that do not compress: for two folios of 16 pages, and then
/// not for a third.
const LIMIT: u64 = 40;

/// Content that does not compress.
fn noise(page: u64) -> Vec<u8> {
    let mut state = page + 1;
    let words = (0..PAGE / 8).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_le_bytes).collect()
}

fn scramble(swapping: &Swapping<'_, '_, Amd64>, at: u64, pages: u64) {
    for page in 0..pages {
        let at = at + page * PAGE;
        swapping.space.write_user(VirtAddr(at), &noise(at)).unwrap();
    }
}

#[track_caller]
fn assert_scrambled(swapping: &Swapping<'_, '_, Amd64>, at: u64, pages: u64) {
    for page in 0..pages {
        let at = at + page * PAGE;
        let mut found = vec![0; PAGE as usize];
        swapping.program.read(VirtAddr(at), &mut found).unwrap();
        assert!(found == noise(at), "page {page}");
    }
}

/// Runs `scenario` with a device, and with an area of higher priority whose store is full: the
/// pages of the first table have filled it. The pages after them, as many as `more`, are mapped.
fn with_full_store(
    order: u8,
    more: u64,
    scenario: impl FnOnce(&Swapping<'_, '_, Amd64>, &'static SwapFile),
) {
    let file = device(SLOTS, SwapService::AtOnce);
    with_device::<Amd64>(64 * MIB, order, file, |swapping| {
        let store: SwapArea = swapping.memory.swap_on(SLOTS, 1).unwrap();
        swapping.memory.set_compressed_limit(LIMIT);
        swapping.map(AT, PAGES + more);
        scramble(swapping, AT, PAGES + more);
        swapping.page_out(AT, PAGES);
        assert!(swapping.memory.compressed_usage().frames_used <= LIMIT);
        scenario(swapping, file);
        swapping.space.munmap(VirtAddr(AT), (PAGES + more) * PAGE).unwrap();
        swapping.memory.swap_off(&store).unwrap();
    });
}

#[test]
fn a_full_store_leaves_pages_to_a_device() {
    for order in [0, 4, 9] {
        with_full_store(order, PAGES, |swapping, file| {
            let (free, second) = (swapping.memory.free_frame_count(), AT + PAGES * PAGE);
            let before = file.counts().pages_written;
            swapping.page_out(second, PAGES);
            assert_eq!(file.counts().pages_written - before, PAGES, "order {order}");
            assert!(swapping.memory.free_frame_count() >= free + PAGES);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            assert_scrambled(swapping, second, PAGES);
            assert_scrambled(swapping, AT, PAGES);
        });
    }
}

#[test]
fn reclaim_passes_a_full_store_over() {
    with_full_store(0, PAGES, |swapping, file| {
        let second = VirtAddr(AT + PAGES * PAGE);
        swapping.space.madvise(second, PAGES * PAGE, Advice::Cold).unwrap();
        assert!(swapping.memory.reclaim(PAGES).freed >= PAGES / 2);
        assert!(file.counts().pages_written >= PAGES / 2);
        assert_scrambled(swapping, AT, 2 * PAGES);
    });
}

/// Pages that the store has refused stay in the swap cache until they are used.
#[test]
fn refused_pages_find_the_device_later() {
    with_full_store(0, 0, |swapping, file| {
        assert_eq!((swapping.swapped(AT, PAGES), file.counts().pages_written), (PAGES, 0));
        // The last pages were refused, so no room appears in the store.
        let (used, rest) = (AT + PAGES / 2 * PAGE, PAGES / 2);
        assert_scrambled(swapping, used, rest);
        assert_eq!(swapping.swapped(used, rest), 0);
        let free = swapping.memory.free_frame_count();
        swapping.page_out(used, rest);
        assert_eq!(file.counts().pages_written, rest);
        assert!(swapping.memory.free_frame_count() >= free + rest);
        assert_scrambled(swapping, AT, PAGES);
    });
}

/// No other area takes pages, and those of one word need no room in the store.
#[test]
fn pages_of_one_word_use_a_full_store() {
    with_full_store(0, PAGES, |swapping, file| {
        swapping.memory.stop_swapping_to(&swapping.area);
        let second = AT + PAGES * PAGE;
        for page in 0..PAGES {
            let bytes = [page as u8; PAGE as usize];
            swapping.space.write_user(VirtAddr(second + page * PAGE), &bytes).unwrap();
        }
        let free = swapping.memory.free_frame_count();
        swapping.page_out(second, PAGES);
        assert_eq!(file.counts().pages_written, 0);
        assert!(swapping.memory.free_frame_count() >= free + PAGES);
    });
}

#[test]
fn shared_memory_passes_a_full_store_over() {
    with_full_store(0, 0, |swapping, file| {
        let (memory, at) = (swapping.memory, VirtAddr(2 * GIB));
        let length = PAGES * PAGE;
        let object = memory.shared_memory(length, Sealing::Allowed, Accounting::PerPage).unwrap();
        let request = MapRequest {
            length,
            protection: READ_WRITE,
            place: Place::Fixed(at),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: &object, offset: 0, access };
        swapping.space.mmap_object(&request, &source).unwrap();
        scramble(swapping, at.0, PAGES);
        let free = memory.free_frame_count();
        swapping.page_out(at.0, PAGES);
        assert_eq!(file.counts().pages_written, PAGES);
        assert!(memory.free_frame_count() >= free + PAGES);
        assert_scrambled(swapping, at.0, PAGES);
        swapping.space.munmap(at, length).unwrap();
    });
}
