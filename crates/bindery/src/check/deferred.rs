//! Verifies that no tree contains items that wait for a grace period, and that no item is lost.

use crate::addr::VirtAddr;
use crate::frame::meta::MetaKind;
use crate::memory::RecordKind;
use crate::platform::Platform;

use super::{Audit, Violation};

/// Records that wait for a grace period.
#[derive(Clone, Copy, Default)]
pub(super) struct WaitingItems {
    pub(super) vmas: u64,
    pub(super) groups: u64,
    pub(super) areas: u64,
}

impl<P: Platform> Audit<'_, '_, P> {
    /// Counts the waiting items. Their tables are found only here.
    pub(super) fn deferred(&mut self) -> Result<(), Violation> {
        let memory = self.memory;
        let (mut waiting, mut result) = (WaitingItems::default(), Ok(()));
        memory.deferred.for_each_batch(&memory.cpus, |batch| {
            waiting.vmas += u64::from(batch.count(RecordKind::Vma));
            waiting.groups += u64::from(batch.count(RecordKind::AnonGroup));
            waiting.areas += u64::from(batch.count(RecordKind::KernelArea));
            for table in batch.tables.iter(&memory.frames) {
                let at = VirtAddr(0);
                let is_table = memory.frames.meta(table).kind() == MetaKind::Table;
                let met = self.count(table).filter(|_| is_table).map(|count| {
                    *count += 1;
                    *count
                });
                let found = match met {
                    None => Err(Violation::NotATable { table, at }),
                    Some(1) => Ok(()),
                    Some(_) => Err(Violation::TableTwice { table, at }),
                };
                result = result.and(found);
            }
        });
        self.waiting = waiting;
        result
    }
}
