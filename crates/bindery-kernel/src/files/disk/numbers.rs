//! The numbers of the files, and those that wait to be removed.
//!
//! A node may outlive its file, through a descriptor of a path or a lookup concurrent with an
//! `unlink`. No other file gets the number while a node holds it ([`Held`]), so a node never refers
//! to another file.

use super::layout::Record;
use super::storage::{Storage, file_system, storage};

/// The number of a file, which no other file gets.
pub struct Held(u64);

impl Held {
    /// The number.
    pub fn number(&self) -> u64 {
        self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(storage) = storage() {
            let mut volume = storage.volume.lock();
            volume.holders.get_mut(self.0 as usize).into_iter().for_each(|holders| *holders -= 1);
        }
    }
}

impl Storage {
    /// Holds the number of an existing file.
    pub fn hold(&self, number: u64) -> Option<Held> {
        self.hold_if(number, |_| true).map(|(held, _)| held)
    }

    /// Holds the number of an existing file that is wanted; also returns the file's size in bytes.
    fn hold_if(&self, number: u64, is_wanted: impl Fn(&Record) -> bool) -> Option<(Held, u64)> {
        let mut volume = self.volume.lock();
        let size = volume.record(number).filter(|record| is_wanted(record))?.size;
        volume.holders[number as usize] += 1;
        Some((Held(number), size))
    }

    /// Adds a file; returns its number. `None` if there are too many.
    pub fn add(&self, record: impl FnOnce(u64) -> Record) -> Option<u64> {
        let mut volume = self.volume.lock();
        let is_free =
            |number: &usize| volume.records[*number].is_none() && volume.holders[*number] == 0;
        let number = (0..volume.records.len()).find(is_free)?;
        volume.sequence += 1;
        let record = record(volume.sequence);
        volume.records[number] = Some(record);
        Some(number as u64)
    }

    /// Removes the files without a name whose removal has failed, for lack of memory or otherwise.
    pub(super) fn remove_orphans(&self) {
        let Some(system) = file_system() else { return };
        let mut from = 0;
        loop {
            let next = self.volume.lock().next_orphan(from);
            let Some(number) = next else { return };
            from = number + 1;
            // The number is held, because a new file with the same number would otherwise get this
            // file's size.
            let held = self.hold_if(number, |record| record.name.is_none());
            let Some((held, size)) = held else {
                self.volume.lock().set_orphan(number, false);
                continue;
            };
            if let Ok(object) = system.file(held.number(), size) {
                self.volume.lock().set_orphan(number, false);
                // Dropping the object removes the file.
                drop(object);
            }
        }
    }
}
