//! `/proc/self` of the core, compared with that of the host's Linux by the same parser or as text.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::ffi::c_void;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    Advice, Limits, LockPages, Locking, MapFlags, MapRequest, Place, Protection, Sharing,
};
use bindery_linux::proc::{FileId, NameSource, Naming};
use rustix::mm::{self, MlockFlags, MprotectFlags, ProtFlags};

use super::fixture::*;
use crate::support;
use crate::support::alone::ran_alone;

type A = X86_64<4>;

/// The start of the window, in which the process maps nothing of its own.
const WINDOW: u64 = 0x2100_0000_0000;
const PAGES: u64 = 16;
const LENGTH: u64 = PAGES * PAGE;

/// Whether the host's Linux has the expected features: at least 6.18, without folios above one page
/// in small mappings. Prints the reason if not.
fn is_comparable() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next(), numbers.next());
    let small = [16, 32, 64].into_iter().all(|size| {
        let folder = "/sys/kernel/mm/transparent_hugepage";
        let mode = fs::read_to_string(format!("{folder}/hugepages-{size}kB/enabled"));
        mode.is_ok_and(|mode| mode.contains("[never]") || mode.contains("[madvise]"))
    });
    let comparable = version >= (Some(6), Some(18)) && small;
    if !comparable {
        eprintln!("skipped: this Linux is older than 6.18, or uses large folios everywhere");
    }
    comparable
}

/// Reads a listing that does not change during the read.
fn quiet(path: &str) -> String {
    let read = || fs::read_to_string(path).expect("the kernel tells");
    let mut last = read();
    loop {
        let now = read();
        if now == last {
            return now;
        }
        last = now;
    }
}

/// Names objects as in a listing of Linux, in order.
struct Mirror {
    areas: Vec<Area>,
    /// The identity of the object of each mapping.
    identities: Vec<u64>,
}

impl Mirror {
    fn area(&self, identity: u64) -> &Area {
        let index = self.identities.iter().position(|known| *known == identity);
        &self.areas[index.expect("an object of ours")]
    }
}

impl Naming for Mirror {
    fn file_id(&self, identity: u64, _: NameSource) -> FileId {
        self.area(identity).file
    }

    fn write_path(
        &self,
        identity: u64,
        _: NameSource,
        out: &mut dyn std::fmt::Write,
    ) -> std::fmt::Result {
        // Line feeds are already escaped in the listing.
        out.write_str(&self.area(identity).path)
    }

    fn stack(&self) -> Option<VirtAddr> {
        let stack = self.areas.iter().find(|area| area.path == "[stack]");
        stack.map(|area| VirtAddr(area.end - 8))
    }
}

#[test]
fn this_processes_listing_is_equal_to_the_byte() {
    if ran_alone(module_path!(), "this_processes_listing_is_equal_to_the_byte") {
        return;
    }
    let text = quiet("/proc/self/maps");
    // Ignores `[vsyscall]`, which lies behind the end of user space.
    let text = text.split_inclusive('\n').filter(|line| !line.ends_with("[vsyscall]\n"));
    let text: String = text.collect();
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let mut mirror = Mirror { areas: parse(&text), identities: Vec::new() };
        let mut objects = Vec::new();
        for (number, area) in mirror.areas.iter().enumerate() {
            let mut protection = Protection::empty();
            for (letter, flag) in
                [('r', Protection::READ), ('w', Protection::WRITE), ('x', Protection::EXECUTE)]
            {
                protection.set(flag, area.permissions.contains(letter));
            }
            let (start, length) = (VirtAddr(area.start), area.end - area.start);
            let place = Place::Fixed(start);
            let request = MapRequest { length, protection, place, ..MapRequest::default() };
            let shared = area.permissions.ends_with('s');
            let sharing = if shared { Sharing::Shared } else { Sharing::Private };
            mirror.identities.push(u64::MAX);
            if area.path == "[heap]" {
                space.set_break_start(start);
                assert_eq!(space.set_break(VirtAddr(area.end)), VirtAddr(area.end));
            } else if area.path.is_empty() || area.path == "[stack]" {
                space.mmap(&request).unwrap();
                if number % 2 == 0 {
                    // Keeps apart mappings that Linux does not merge.
                    space.madvise(start, length, Advice::DontDump).unwrap();
                }
            } else {
                let object = fixture.memfd(0);
                map_object(&space, &object, area.start, length, area.offset, sharing);
                space.mprotect(start, length, protection).unwrap();
                mirror.identities[number] = object.identity();
                objects.push(object);
            }
        }
        assert!(mirror.areas.iter().any(|area| area.path == "[stack]"));
        assert!(!objects.is_empty());
        assert_eq!(maps(&space, &mirror), text);
        fixture.audit(&[&space]);
    });
}

/// The calls on a mapping of 16 pages, here and on the host.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    protection: Protection,
    sharing: Sharing,
    flags: MapFlags,
    /// Written pages, from the first on.
    written: u64,
    /// The number of read pages behind the written pages.
    read: u64,
    advice: &'static [(Advice, mm::Advice)],
    locked: Option<LockPages>,
    becomes: Protection,
}

const RW: Protection = Protection::READ.union(Protection::WRITE);

const PLAIN: Scenario = Scenario {
    protection: RW,
    sharing: Sharing::Private,
    flags: MapFlags::empty(),
    written: 3,
    read: 2,
    advice: &[],
    locked: None,
    becomes: RW,
};

const SCENARIOS: [Scenario; 12] = [
    PLAIN,
    Scenario { written: 0, read: 0, ..PLAIN },
    Scenario { becomes: Protection::empty(), ..PLAIN },
    Scenario { becomes: Protection::READ, ..PLAIN },
    Scenario { protection: Protection::READ, written: 0, becomes: Protection::READ, ..PLAIN },
    Scenario { becomes: RW.union(Protection::EXECUTE), ..PLAIN },
    Scenario { sharing: Sharing::Shared, read: 0, ..PLAIN },
    Scenario { sharing: Sharing::Shared, read: 0, becomes: Protection::empty(), ..PLAIN },
    Scenario {
        advice: &[
            (Advice::DontDump, mm::Advice::LinuxDontDump),
            (Advice::WipeOnFork, mm::Advice::LinuxWipeOnFork),
            (Advice::DontFork, mm::Advice::LinuxDontFork),
            (Advice::Random, mm::Advice::Random),
            (Advice::NoHuge, mm::Advice::LinuxNoHugepage),
        ],
        ..PLAIN
    },
    Scenario {
        flags: MapFlags::GROWS_DOWN.union(MapFlags::NO_RESERVE),
        advice: &[
            (Advice::Sequential, mm::Advice::Sequential),
            (Advice::Huge, mm::Advice::LinuxHugepage),
        ],
        ..PLAIN
    },
    Scenario { locked: Some(LockPages::Now), ..PLAIN },
    Scenario { locked: Some(LockPages::OnFault), ..PLAIN },
];

/// The visible state of a mapping: its part of `smaps`, and the words of its pages without frames.
#[derive(PartialEq, Eq, Debug)]
struct Look {
    area: Area,
    words: Vec<u64>,
}

impl Look {
    fn new(smaps: &str, at: u64, words: Vec<u64>) -> Self {
        // Only a processor with protection keys makes the host list them.
        let lines = smaps.split_inclusive('\n');
        let smaps: String = lines.filter(|line| !line.starts_with("ProtectionKey:")).collect();
        let area = parse(&smaps).into_iter().find(|area| area.start == at).expect("it is there");
        // The host may be built without soft-dirty.
        let words = words.into_iter().map(|word| word & !FRAME & !SOFT_DIRTY).collect();
        Self { area, words }
    }
}

/// Runs on the host's Linux.
fn play_below(scenario: &Scenario, at: u64) -> Look {
    let flags = |protection: Protection| {
        let mut flags = ProtFlags::empty();
        flags.set(ProtFlags::READ, protection.contains(Protection::READ));
        flags.set(ProtFlags::WRITE, protection.contains(Protection::WRITE));
        flags.set(ProtFlags::EXEC, protection.contains(Protection::EXECUTE));
        flags
    };
    let shared = scenario.sharing == Sharing::Shared;
    let mut how = if shared { mm::MapFlags::SHARED } else { mm::MapFlags::PRIVATE };
    how |= mm::MapFlags::FIXED_NOREPLACE;
    how.set(mm::MapFlags::GROWSDOWN, scenario.flags.contains(MapFlags::GROWS_DOWN));
    how.set(mm::MapFlags::NORESERVE, scenario.flags.contains(MapFlags::NO_RESERVE));
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(at as usize);
    let length = LENGTH as usize;
    // SAFETY: this process maps nothing in the window, as `FIXED_NOREPLACE` guarantees; all later
    // calls affect only this mapping, to which no reference exists.
    unsafe {
        mm::mmap_anonymous(start, length, flags(scenario.protection), how).unwrap();
        for (_, advice) in scenario.advice {
            mm::madvise(start, length, *advice).unwrap();
        }
        match scenario.locked {
            Some(LockPages::Now) => mm::mlock(start, length).unwrap(),
            Some(LockPages::OnFault) => {
                mm::mlock_with(start, length, MlockFlags::ONFAULT).unwrap();
            }
            None => {}
        }
        for page in 0..scenario.written {
            start.byte_add((page * PAGE) as usize).cast::<u64>().write_volatile(1);
        }
        for page in scenario.written..scenario.written + scenario.read {
            start.byte_add((page * PAGE) as usize).cast::<u64>().read_volatile();
        }
        let becomes = MprotectFlags::from_bits_retain(flags(scenario.becomes).bits());
        mm::mprotect(start, length, becomes).unwrap();
    }
    let mut bytes = vec![0; PAGES as usize * 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut bytes, at / PAGE * 8).unwrap();
    let (words, _) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let look = Look::new(&quiet("/proc/self/smaps"), at, words);
    // SAFETY: as above.
    unsafe { mm::munmap(start, length).unwrap() };
    look
}

/// Runs in an address space of the core.
fn play_here(scenario: &Scenario, at: u64, file: FileId) -> Look {
    let mut look = None;
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.set_limits(&Limits { locking: Locking::Privileged, ..Limits::default() });
        let program = fixture.program(&space);
        let start = VirtAddr(at);
        let request = MapRequest {
            protection: scenario.protection,
            sharing: scenario.sharing,
            flags: scenario.flags,
            ..support::fixed(at, LENGTH)
        };
        space.mmap(&request).unwrap();
        for (advice, _) in scenario.advice {
            space.madvise(start, LENGTH, *advice).unwrap();
        }
        if let Some(pages) = scenario.locked {
            space.mlock(start, LENGTH, pages).unwrap();
        }
        for page in 0..scenario.written {
            program.store(VirtAddr(at + page * PAGE), 1).unwrap();
        }
        for page in scenario.written..scenario.written + scenario.read {
            program.load(VirtAddr(at + page * PAGE)).unwrap();
        }
        space.mprotect(start, LENGTH, scenario.becomes).unwrap();
        let naming = OneFile { id: file, path: "/dev/zero (deleted)".to_owned(), stack: 0 };
        let text = smaps(&space, &naming).replace(" sd ", " ");
        look = Some(Look::new(&text, at, pagemap(&space, at, PAGES as usize)));
        fixture.audit(&[&space]);
    });
    look.expect("the scenario was played")
}

#[test]
fn listings_after_calls_equal_the_hosts_linux() {
    if ran_alone(module_path!(), "listings_after_calls_equal_the_hosts_linux") {
        return;
    }
    if !is_comparable() {
        return;
    }
    for (number, scenario) in (0..).zip(&SCENARIOS) {
        let at = WINDOW + number * 0x1000_0000;
        let below = play_below(scenario, at);
        let here = play_here(scenario, at, below.area.file);
        assert_eq!(here.area.text, below.area.text, "{scenario:?}");
        assert_eq!(here.words, below.words, "{scenario:?}");
    }
}

/// Lines of `smaps` that depend on the kernel configuration or the processor.
const CONFIGURED: [&str; 1] = ["ProtectionKey"];

#[test]
fn smaps_has_the_lines_of_linux_in_order() {
    if ran_alone(module_path!(), "smaps_has_the_lines_of_linux_in_order") {
        return;
    }
    if !is_comparable() {
        return;
    }
    let below = parse(&quiet("/proc/self/smaps"));
    let sums = parse(&quiet("/proc/self/smaps_rollup")).remove(0);
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&support::fixed(WINDOW, LENGTH)).unwrap();
        let ours = area(&space, WINDOW);
        for area in &below {
            let mut names = area.names();
            names.retain(|name| !CONFIGURED.contains(name));
            assert_eq!(ours.names(), names);
        }
        let ours = rollup(&space);
        assert_eq!(ours.names(), sums.names());
        assert_eq!((&*ours.path, &*ours.permissions), (&*sums.path, &*sums.permissions));
    });
}
