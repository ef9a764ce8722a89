//! Large, mostly empty mappings: the work of a call is linear in the number of pages, not in the
//! address range. Every call that passes over a range belongs in [`CALLS`].

use bindery::addr::{VirtAddr, VirtRange};
use bindery::arch::X86_64;
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, LockPages, MapObject, MapRequest, Memory,
    Object, PageScan, Protection, Remap, Sealing, Sharing, SwapArea, SyncFlags, UserfaultFeatures,
    UserfaultModes, UserfaultScope,
};
use bindery_hosted::MemoryFiles;
use bindery_linux::proc::{self, ClearRefs};

use crate::support::measured::{Measured, measured};
use crate::support::{GIB, MIB, fixed, options};

type P = Measured<X86_64<4>>;
type Space<'m> = AddressSpace<'m, P>;

/// A TiB, which needs half a million level-1 tables if it is full.
const LENGTH: u64 = 1 << 40;
const PAGE: u64 = 4096;
const AT: VirtAddr = VirtAddr(1 << 41);
/// Another TiB of free addresses.
const ELSEWHERE: VirtAddr = VirtAddr(1 << 44);

/// Kinds of mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Anonymous,
    SharedMemory,
    SharedFile,
    PrivateFile,
}

const KINDS: [Kind; 4] = [Kind::Anonymous, Kind::SharedMemory, Kind::SharedFile, Kind::PrivateFile];

/// A call, and its name. Errors are ignored: a call may refuse a kind of mapping.
type Call = (&'static str, fn(&Space<'_>, &SwapArea));

const CALLS: &[Call] = &[
    ("mprotect", |space, _| {
        let _ = space.mprotect(AT, LENGTH, Protection::READ);
    }),
    ("mprotect to PROT_NONE", |space, _| {
        let _ = space.mprotect(AT, LENGTH, Protection::empty());
    }),
    ("mremap", |space, _| {
        let _ = space.mremap(AT, LENGTH, LENGTH, Remap::To(ELSEWHERE));
    }),
    ("mremap, which shrinks", |space, _| {
        let _ = space.mremap(AT, LENGTH, PAGE, Remap::InPlace);
    }),
    ("munmap", |space, _| {
        let _ = space.munmap(AT, LENGTH);
    }),
    ("fork", |space, _| {
        let _ = space.fork();
    }),
    ("mlock2, munlock", |space, _| {
        let _ = space.mlock(AT, LENGTH, LockPages::OnFault);
        let _ = space.munlock(AT, LENGTH);
    }),
    ("msync", |space, _| {
        let _ = space.msync(AT, LENGTH, SyncFlags::SYNC);
        let _ = space.msync(AT, LENGTH, SyncFlags::ASYNC);
    }),
    ("mseal", |space, _| {
        let _ = space.mseal(AT, LENGTH);
    }),
    ("mincore", |space, _| {
        let _ = space.mincore(AT, LENGTH, |_, _| {});
    }),
    ("PAGEMAP_SCAN", |space, _| {
        let range = VirtRange::from_len(AT, LENGTH).unwrap();
        let _ = space.scan_pages(&PageScan::of(range), None);
    }),
    ("smaps", |space, _| {
        let _ = proc::smaps_rollup(space, &mut String::new());
    }),
    ("clear_refs", |space, _| {
        let _ = proc::clear_refs(space, ClearRefs::All);
    }),
    ("clear_refs, soft-dirty", |space, _| {
        let _ = proc::clear_refs(space, ClearRefs::SoftDirty);
    }),
    ("userfaultfd", |space, _| {
        let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        let _ = space.register_userfault(&fd, AT, LENGTH, UserfaultModes::MISSING);
        let _ = space.unregister_userfault(&fd, AT, LENGTH);
        space.close_userfault(fd);
    }),
    ("swapoff", |space, area| {
        let _ = space.swap_in_area(area);
    }),
    ("process_mrelease", |space, _| {
        let _ = space.reap();
    }),
];

/// Advice that fills its range or marks each table in it.
fn fills(kind: Kind, advice: Advice) -> bool {
    matches!(advice, Advice::PopulateRead | Advice::PopulateWrite | Advice::GuardInstall)
        // As on Linux, it allocates pages that the object lacks, a span at a time.
        || advice == Advice::Collapse && kind != Kind::Anonymous
        // The pager reads missing pages until memory is short.
        || advice == Advice::WillNeed && matches!(kind, Kind::SharedFile | Kind::PrivateFile)
}

/// Calls `each` with a mapping of this kind that has a page at each of `touched`.
fn with_mapping(
    kind: Kind,
    touched: &[VirtAddr],
    each: impl FnOnce(&Space<'_>, &SwapArea, &dyn Fn() -> u64),
) {
    let files = MemoryFiles::new();
    let (_machine, memory) = measured::<X86_64<4>>(64 * MIB);
    let area = memory.swap_on(4096, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let sharing = match kind {
        Kind::SharedMemory | Kind::SharedFile => Sharing::Shared,
        Kind::Anonymous | Kind::PrivateFile => Sharing::Private,
    };
    let request = MapRequest { sharing, ..fixed(AT.0, LENGTH) };
    let object = object_of(kind, &memory, &files);
    if let Some(object) = &object {
        let access = FileAccess::READ | FileAccess::WRITE;
        space.mmap_object(&request, &MapObject { object, offset: 0, access }).unwrap();
    } else {
        space.mmap(&request).unwrap();
    }
    // Gives the mapping its anon group, if its kind has one. The discard covers the whole mapping
    // because a partial discard would leave the emptied tables.
    space.fault(AT, Access::Write).unwrap();
    space.madvise(AT, LENGTH, Advice::DontNeed).unwrap();
    let _ = space.madvise(AT, PAGE, Advice::Remove);
    for at in touched {
        space.fault(*at, Access::Write).unwrap();
    }
    let steps = || {
        let counts = space.counts();
        let of_object =
            object.as_ref().map_or(0, |object| object.page_steps() + object.mapping_steps());
        memory.platform().steps()
            + space.mappings_looked_at()
            + of_object
            + counts.entries_descended
            + counts.entries_read
            + counts.entries_written
            + counts.tables_locked
    };
    each(&space, &area, &steps);
}

fn object_of<'m>(
    kind: Kind,
    memory: &'m Memory<P>,
    files: &'m MemoryFiles,
) -> Option<Object<'m, P>> {
    match kind {
        Kind::Anonymous => None,
        Kind::SharedMemory => {
            Some(memory.shared_memory(LENGTH, Sealing::Allowed, Accounting::PerPage).unwrap())
        }
        Kind::SharedFile | Kind::PrivateFile => Some(memory.file(files, 1, LENGTH).unwrap()),
    }
}

/// The names of the calls that take more than `most` steps, and their steps.
fn too_many(touched: &[VirtAddr], most: u64) -> Vec<(Kind, String, u64)> {
    let mut found = Vec::new();
    for kind in KINDS {
        let mut count = |name: String, call: &dyn Fn(&Space<'_>, &SwapArea)| {
            with_mapping(kind, touched, |space, area, steps| {
                let before = steps();
                call(space, area);
                let taken = steps() - before;
                if taken > most {
                    found.push((kind, name, taken));
                }
            });
        };
        for (name, call) in CALLS {
            count((*name).to_owned(), call);
        }
        for advice in Advice::ALL.iter().filter(|advice| !fills(kind, **advice)) {
            count(format!("{advice:?}"), &|space, _| {
                let _ = space.madvise(AT, LENGTH, *advice);
            });
        }
    }
    found
}

#[test]
fn no_call_looks_for_what_is_not_there() {
    assert_eq!(too_many(&[], 300), []);
}

#[test]
fn a_page_per_gib_costs_one_page_each() {
    let each_gib: Vec<_> = (0..LENGTH / GIB).map(|number| VirtAddr(AT.0 + number * GIB)).collect();
    // A level-1 and a level-2 table for each page, each visited a few times.
    assert_eq!(too_many(&each_gib, 5 * 1024 * each_gib.len() as u64), []);
}
