//! The host's Linux as a subject: the same calls, made as system calls of this process.

use std::ffi::c_void;
use std::ptr;

use bindery::addr::VirtRange;
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap_fixed, munmap,
};
use rustix::param::page_size;

use super::host::{HostFolios, host_folios};
use super::kernel::NO_LINUX;
use super::measure::{Subject, Tally};
use super::workload::{Call, Script, Workload, range};
use crate::size::{FolioSize, show_bytes};

/// A range of this process's addresses in which a script runs.
pub struct Linux {
    advice: Advice,
    /// The current mapping; no call accesses anything else.
    mapped: Option<VirtRange>,
}

impl Linux {
    /// Checks that all addresses of the script are free.
    pub fn new(script: &Script) -> Result<Self, String> {
        let advice = match host_folios(script.folio) {
            HostFolios::Wanted => Advice::LinuxHugepage,
            HostFolios::Base | HostFolios::Unavailable => Advice::LinuxNoHugepage,
        };
        if script.workload == Workload::Pageout && !has_swap() {
            return Err("the host has no swap".to_owned());
        }
        let mut linux = Self { advice, mapped: None };
        for range in script.ranges() {
            linux.map(range)?;
            linux.unmap(range)?;
        }
        Ok(linux)
    }

    /// The start of `range`, which must be the current mapping. This check justifies the calls
    /// below.
    fn mapped(&self, range: VirtRange) -> Result<*mut c_void, String> {
        if self.mapped != Some(range) {
            return Err(format!("the workload uses {range}, which it has not mapped"));
        }
        Ok(address(range.start().0))
    }

    fn map(&mut self, range: VirtRange) -> Result<(), String> {
        if let Some(mapped) = self.mapped {
            return Err(format!("the workload maps {range} while it has {mapped}"));
        }
        let start = address(range.start().0);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: FIXED_NOREPLACE replaces no mapping. A kernel that does not know the flag treats
        // the address as a hint and also replaces no mapping.
        let got = unsafe { mmap_anonymous(start, range.len() as usize, protection, flags) }
            .map_err(|error| failed("mmap", range, error))?;
        if got != start {
            // SAFETY: the mapping was made just now, and no other code knows of it.
            let undone = unsafe { munmap(got, range.len() as usize) };
            undone.map_err(|error| failed("munmap", range, error))?;
            return Err(format!("{range} is in use in this process"));
        }
        self.mapped = Some(range);
        Ok(())
    }

    fn advise(&self, range: VirtRange) -> Result<(), String> {
        let start = self.mapped(range)?;
        // A kernel without transparent huge pages refuses the advice and uses base pages anyway.
        // SAFETY: the range is our own mapping, and the choice of page sizes changes no byte.
        let _refused = unsafe { madvise(start, range.len() as usize, self.advice) };
        Ok(())
    }

    fn touch(&self, range: VirtRange) -> Result<(), String> {
        let start = self.mapped(range)?.cast::<u8>();
        for offset in (0..range.len() as usize).step_by(page_size()) {
            // SAFETY: the range is our own mapping, readable and writable, and no reference to it
            // exists; the offset is inside it.
            unsafe { start.add(offset).write_volatile(1) };
        }
        Ok(())
    }

    /// As [`Linux::touch`], with the number of the page in its first word.
    fn write(&self, range: VirtRange) -> Result<(), String> {
        let start = self.mapped(range)?.cast::<u8>();
        for offset in (0..range.len() as usize).step_by(page_size()) {
            // SAFETY: as in `touch`; the offset is that of a page, and so aligned.
            unsafe { start.add(offset).cast::<u64>().write_volatile(offset as u64 + 1) };
        }
        Ok(())
    }

    fn page_out(&self, range: VirtRange) -> Result<(), String> {
        let start = self.mapped(range)?;
        // SAFETY: the range is our own mapping, and the place of its pages changes no byte.
        unsafe { madvise(start, range.len() as usize, Advice::LinuxPageOut) }
            .map_err(|error| failed("MADV_PAGEOUT", range, error))
    }

    fn remap(&mut self, from: VirtRange, to: VirtRange) -> Result<(), String> {
        let start = self.mapped(from)?;
        let (length, target) = (from.len() as usize, address(to.start().0));
        // SAFETY: the source is our own mapping, to which no reference exists. The target was free
        // when `new` checked. Linux chooses addresses downwards from the stack or upwards from the
        // heap, both far from there, and no other code in this process asks for addresses.
        let moved = unsafe { mremap_fixed(start, length, length, MremapFlags::MAYMOVE, target) };
        moved.map_err(|error| failed("mremap", from, error))?;
        self.mapped = Some(to);
        Ok(())
    }

    fn unmap(&mut self, range: VirtRange) -> Result<(), String> {
        let start = self.mapped(range)?;
        // SAFETY: the range is our own mapping, and no reference to it exists.
        let unmapped = unsafe { munmap(start, range.len() as usize) };
        unmapped.map_err(|error| failed("munmap", range, error))?;
        self.mapped = None;
        Ok(())
    }
}

impl Subject for Linux {
    fn perform(&mut self, call: Call) -> Result<(), String> {
        match call {
            Call::Map(range) => self.map(range),
            Call::Advise(range) => self.advise(range),
            Call::Touch(range) => self.touch(range),
            Call::Write(range) => self.write(range),
            Call::PageOut(range) => self.page_out(range),
            Call::Move { from, to } => self.remap(from, range(to.0, from.len())),
            Call::Unmap(range) => self.unmap(range),
            Call::Kernel(_) => Err(NO_LINUX.to_owned()),
        }
    }

    /// Linux does not count entries.
    fn tally(&self) -> Option<Tally> {
        None
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        if let Some(range) = self.mapped {
            // A failure cannot be handled, and the process will end soon.
            let _failed = self.unmap(range);
        }
    }
}

/// Whether the host has a swap area that is on.
fn has_swap() -> bool {
    std::fs::read_to_string("/proc/swaps").is_ok_and(|areas| areas.lines().count() > 1)
}

fn address(addr: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(addr as usize)
}

fn failed(call: &str, range: VirtRange, error: Errno) -> String {
    format!("{call} of {}: {error}", show_bytes(range.len()))
}

/// The folios that the host provides if the workload wants this size.
pub fn describe_folios(folio: FolioSize) -> String {
    match host_folios(folio) {
        HostFolios::Base => format!("{} pages", show_bytes(page_size() as u64)),
        HostFolios::Wanted => format!("folios of {folio}, or larger where the host allows"),
        HostFolios::Unavailable => {
            format!(
                "{} pages, as the host's {folio} folios are off",
                show_bytes(page_size() as u64)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use bindery::addr::VirtAddr;

    use super::*;
    use crate::bench::floor::Geometry;

    #[test]
    fn the_loop_runs_and_leaves_other_mappings_unchanged() {
        let geometry = Geometry::FOUR_LEVELS;
        let script = Workload::Remap1m.scripts(FolioSize::BASE, geometry, true).swap_remove(0);
        let mut linux = Linux::new(&script).unwrap();
        for step in &script.steps {
            linux.perform(step.call).unwrap();
        }
        let elsewhere = range(1 << 30, 1 << 20);
        for call in [
            Call::Unmap(elsewhere),
            Call::Touch(elsewhere),
            Call::Move { from: elsewhere, to: VirtAddr(1 << 31) },
        ] {
            let error = linux.perform(call).unwrap_err();
            assert!(error.contains("not mapped"), "{error}");
        }
    }
}
