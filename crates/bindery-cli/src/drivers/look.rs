//! Checks after a step in addition to the audit: the MMU permits no more than the mapping does, and
//! no process sees the bystander's bytes.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Protection};
use bindery_hosted::{AccessKind, Machine, Walk};

use super::bystander::is_tagged;
use super::step::Step;
use super::world::World;

impl<A: Walk> World<'_, A> {
    /// Checks the pages of a step.
    pub(super) fn look(&self, step: &Step) {
        let (Some(process), addresses) = step.touches() else { return };
        let guard = self.process(process);
        let Some(process) = guard.as_ref() else { return };
        let pages = addresses.map(|address| address & !(PAGE_SIZE - 1));
        let allowed = protections(&process.space, pages);
        process.space.enter();
        for (page, allowed) in pages.into_iter().zip(allowed) {
            if page < A::USER_END {
                look_at(self.machine, &process.space, VirtAddr(page), allowed);
            }
        }
    }
}

impl<A: Walk> World<'_, A> {
    /// Checks some pages of each mapping of a process.
    pub(super) fn look_all_over(&self, process: usize) {
        let guard = self.process(process);
        let Some(process) = guard.as_ref() else { return };
        let mut pages = Vec::new();
        process.space.for_each_mapping(|mapping| {
            let (first, end) = (mapping.range.start().0, mapping.range.end().0);
            for page in [0, 1, 2, 5, 11, 16, 23, 64, 512] {
                let at = first + page * PAGE_SIZE;
                if at < end {
                    pages.push((VirtAddr(at), mapping.protection));
                }
            }
        });
        process.space.enter();
        for (page, allowed) in pages {
            look_at(self.machine, &process.space, page, allowed);
        }
    }
}

/// The protections of the mappings of the pages.
fn protections<A: Walk>(space: &AddressSpace<'_, Machine<A>>, pages: [u64; 4]) -> [Protection; 4] {
    let mut allowed = [Protection::empty(); 4];
    space.for_each_mapping(|mapping| {
        for (page, allowed) in pages.into_iter().zip(&mut allowed) {
            if mapping.range.contains(VirtAddr(page)) {
                *allowed = mapping.protection;
            }
        }
    });
    allowed
}

fn look_at<A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'_, Machine<A>>,
    page: VirtAddr,
    allowed: Protection,
) {
    let translates = |access| machine.translate(space.root(), page, access).is_ok();
    let readable = translates(AccessKind::Read);
    // Other rights may imply reading, as on Linux.
    assert!(!readable || !allowed.is_empty(), "{page} is readable; its mapping allows nothing");
    let writable = translates(AccessKind::Write);
    assert!(
        !writable || allowed.contains(Protection::WRITE),
        "{page} is writable; its mapping allows {allowed:?}"
    );
    let executable = translates(AccessKind::Execute);
    assert!(
        !executable || allowed.contains(Protection::EXECUTE),
        "{page} is executable; its mapping allows {allowed:?}"
    );
    if !readable {
        return;
    }
    for offset in [0, 8, 2048, PAGE_SIZE - 8] {
        let mut bytes = [0; 8];
        let at = VirtAddr(page.0 + offset);
        let read = machine.read_user(space.root(), at, &mut bytes, Err);
        let word = u64::from_ne_bytes(bytes);
        assert!(read.is_err() || !is_tagged(word), "{page} shows the bystander's word {word:#x}");
    }
}
