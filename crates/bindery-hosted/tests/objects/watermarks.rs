//! An embedder's reclaimer: watermarks and short steps.

use bindery::{Error, Reclaimed};
use bindery_hosted::MemoryFiles;

use crate::support::MIB;
use crate::support::objects::{content, in_memory};

#[test]
fn files_fill_memory_up_to_the_watermark() {
    let files = MemoryFiles::new();
    in_memory(|memory, audit| {
        // Without swap and watermarks, memory is never short.
        assert_eq!((memory.is_short(), memory.shortage()), (false, 0));
        let file = memory.file(&files, 1, 24 * MIB).unwrap();
        let _ = content(&file);
        let (free, half) = (memory.free_frame_count(), memory.total_frames() / 2);
        assert!(free < half - 1000, "the file fills more than half of the memory");
        assert_eq!(memory.set_watermarks(free, half + 1), Err(Error::Invalid));
        assert_eq!(memory.set_watermarks(half, free), Err(Error::Invalid));
        assert_eq!((memory.is_short(), memory.shortage()), (false, 0));
        memory.set_watermarks(free, half).unwrap();
        assert_eq!((memory.is_short(), memory.shortage()), (false, half - free));
        memory.set_watermarks(free + 1, free + 500).unwrap();
        assert_eq!((memory.is_short(), memory.shortage()), (true, 500));
        audit();
    });
}

#[test]
fn a_step_passes_no_more_frames_than_allowed() {
    let files = MemoryFiles::new();
    in_memory(|memory, audit| {
        let file = memory.file(&files, 1, 24 * MIB).unwrap();
        let _ = content(&file);
        let high = memory.total_frames() / 2;
        memory.set_watermarks(high / 2, high).unwrap();
        assert!(memory.is_short());
        memory.trim();
        assert_eq!(memory.reclaim_step(100, 0), Reclaimed::default());
        let mut steps = 0;
        while memory.shortage() > 0 {
            let free = memory.free_frame_count();
            let done = memory.reclaim_step(memory.shortage(), 200);
            assert!(done.scanned <= 256, "{done:?}");
            assert_eq!(memory.free_frame_count(), free + done.freed);
            steps += 1;
            // Two scans find each folio unused before it is evicted.
            assert!(steps <= 4 * memory.total_frames() / 192, "it does not end");
        }
        assert!(!memory.is_short());
        assert!(memory.free_frame_count() < high + 256, "more than the watermark");
        assert!(file.resident_pages() > 0, "no more leaves than is short");
        audit();
    });
}
