//! Files in the memory of this process: [`MemoryFiles`], a pager without a disk.

use std::collections::{BTreeMap, HashMap};

use bindery::addr::PAGE_SIZE;
use bindery::{Pager, PagerError, ReadBuffer, StoredBytes};
use parking_lot::Mutex;

const PAGE: usize = PAGE_SIZE as usize;

/// The content of one file. Zero pages may be absent.
#[derive(Debug, Default)]
struct File {
    size: u64,
    pages: BTreeMap<u64, Box<[u8; PAGE]>>,
}

impl File {
    /// The page, which is created if absent.
    fn page(&mut self, number: u64) -> &mut [u8; PAGE] {
        self.pages.entry(number).or_insert_with(|| Box::new([0; PAGE]))
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let inside = (at % PAGE_SIZE) as usize;
            let count = (PAGE - inside).min(into.len() - done);
            let part = &mut into[done..done + count];
            match self.pages.get(&(at / PAGE_SIZE)) {
                Some(page) => part.copy_from_slice(&page[inside..inside + count]),
                None => part.fill(0),
            }
            done += count;
        }
    }

    fn write(&mut self, offset: u64, from: &StoredBytes<'_>) {
        let mut done = 0;
        while done < from.len() {
            let at = offset + done as u64;
            let inside = (at % PAGE_SIZE) as usize;
            let count = (PAGE - inside).min(from.len() - done);
            let page = self.page(at / PAGE_SIZE);
            from.copy_to(done, &mut page[inside..inside + count]);
            done += count;
        }
        self.size = self.size.max(offset + from.len() as u64);
    }

    /// Drops the content after `size`, so that it reads as zeroes if the file grows again.
    fn resize(&mut self, size: u64) {
        if size < self.size {
            drop(self.pages.split_off(&size.div_ceil(PAGE_SIZE)));
            if let Some(last) = self.pages.get_mut(&(size / PAGE_SIZE)) {
                last[(size % PAGE_SIZE) as usize..].fill(0);
            }
        }
        self.size = size;
    }
}

/// The number and extent of the calls of a pager.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PagerCounts {
    /// Calls of [`Pager::read`].
    pub reads: u64,
    /// Pages that those calls requested.
    pub pages_read: u64,
    /// Calls of [`Pager::write`].
    pub writes: u64,
    /// Pages that those calls stored, including partial ones.
    pub pages_written: u64,
    /// Pieces in which the stored pages were passed.
    pub pieces_written: u64,
    /// Calls of [`Pager::removed`].
    pub removed: u64,
}

/// Files in the memory of this process, by number; all of them exist, empty at first. Their content
/// is independent of the machine's memory, as if on a disk.
#[derive(Debug, Default)]
pub struct MemoryFiles {
    files: Mutex<HashMap<u64, File>>,
    counts: Mutex<PagerCounts>,
}

impl MemoryFiles {
    /// All files are empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the content of a file.
    pub fn put(&self, file: u64, content: &[u8]) {
        let mut new = File::default();
        new.write(0, &content.into());
        self.files.lock().insert(file, new);
    }

    /// The whole stored content of a file, without regard to pages in memory.
    pub fn content(&self, file: u64) -> Vec<u8> {
        let files = self.files.lock();
        let Some(file) = files.get(&file) else { return Vec::new() };
        let mut content = vec![0; file.size as usize];
        file.read(0, &mut content);
        content
    }

    /// The size of a file, in bytes.
    pub fn size(&self, file: u64) -> u64 {
        self.files.lock().get(&file).map_or(0, |file| file.size)
    }

    /// The number of stored pages of a file.
    pub fn stored_pages(&self, file: u64) -> usize {
        self.files.lock().get(&file).map_or(0, |file| file.pages.len())
    }

    /// The counts so far.
    pub fn counts(&self) -> PagerCounts {
        *self.counts.lock()
    }
}

impl Pager for MemoryFiles {
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        let files = self.files.lock();
        let mut counts = self.counts.lock();
        counts.reads += 1;
        counts.pages_read += into.length() as u64 / PAGE_SIZE;
        // A file without content gets nothing appended, so it reads as zeroes.
        let Some(file) = files.get(&file) else { return Ok(()) };
        let mut offset = first_page * PAGE_SIZE;
        while into.left() > 0 {
            let read = |piece: &mut [u8]| {
                file.read(offset, piece);
                Ok(piece.len())
            };
            offset += into.append_with(read)? as u64;
        }
        Ok(())
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        let mut files = self.files.lock();
        let file = files.entry(file).or_default();
        let mut offset = first_page * PAGE_SIZE;
        let mut counts = self.counts.lock();
        counts.writes += 1;
        for piece in from {
            file.write(offset, piece);
            offset += piece.len() as u64;
            counts.pieces_written += 1;
            counts.pages_written += (piece.len() as u64).div_ceil(PAGE_SIZE);
        }
        Ok(())
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.lock().entry(file).or_default().resize(size);
        Ok(())
    }

    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        if let Some(file) = self.files.lock().get_mut(&file) {
            let end = first_page.saturating_add(pages);
            file.pages.retain(|page, _| !(first_page..end).contains(page));
        }
        Ok(())
    }

    fn removed(&self, _file: u64) {
        self.counts.lock().removed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_cut_off_reads_as_zeroes_later() {
        let files = MemoryFiles::new();
        files.put(7, &[1; 3 * PAGE]);
        files.resize(7, 5000).unwrap();
        assert_eq!(files.stored_pages(7), 2);
        files.resize(7, 9000).unwrap();
        let content = files.content(7);
        assert_eq!(content.len(), 9000);
        assert!(content[..5000].iter().all(|byte| *byte == 1));
        assert!(content[5000..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn pieces_are_consecutive_and_may_end_mid_page() {
        let files = MemoryFiles::new();
        files.write(1, 2, &[(&[3; PAGE][..]).into(), (&[4; 10][..]).into()]).unwrap();
        let mut page = [9; PAGE];
        ReadBuffer::over(&mut page, |into| files.read(1, 3, into)).unwrap();
        assert!(page[..10].iter().all(|byte| *byte == 4));
        assert!(page[10..].iter().all(|byte| *byte == 0));
        assert_eq!(files.size(1), 3 * PAGE_SIZE + 10);
        let counts = files.counts();
        assert_eq!((counts.writes, counts.pieces_written, counts.pages_written), (1, 2, 2));
    }

    #[test]
    fn a_discarded_page_reads_as_zeroes_without_storage() {
        let files = MemoryFiles::new();
        files.put(1, &[5; 2 * PAGE]);
        files.discard(1, 0, 1).unwrap();
        assert_eq!(files.stored_pages(1), 1);
        assert_eq!(files.size(1), 2 * PAGE_SIZE);
        let content = files.content(1);
        assert!(content[..PAGE].iter().all(|byte| *byte == 0));
        assert!(content[PAGE..].iter().all(|byte| *byte == 5));
    }
}
