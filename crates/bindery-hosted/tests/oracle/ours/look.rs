//! Observes an address space of the core in the form in which `/proc` reports one on Linux.

use bindery::addr::Frame;
use bindery::{AddressSpace, FrameKind, Mapping, MappingFlags, Object, Usage};
use bindery_hosted::{Machine, Walk};
use bindery_linux::proc::{PhysicalAddresses, pagemap};

use super::super::observation::{
    ANONYMOUS, Area, Counters, FIRST_FILE, FileState, LETTERS, OTHER_OBJECT, Presence, Snapshot,
    Stretch,
};
use super::super::place::{PAGE, REGION, REGION_PAGES, in_region};

/// The category of `PAGEMAP_SCAN`.
const IS_SWAPPED: u64 = 1 << 4;

type Space<'m, A> = AddressSpace<'m, Machine<A>>;
type Files<'m, A> = [Object<'m, Machine<A>>];

/// The flags of the letters of `VmFlags`, in the order of [`LETTERS`].
const FLAGS: [MappingFlags; LETTERS.len()] = [
    MappingFlags::READ,
    MappingFlags::WRITE,
    MappingFlags::EXECUTE,
    MappingFlags::MAY_READ,
    MappingFlags::MAY_WRITE,
    MappingFlags::MAY_EXECUTE,
    MappingFlags::SHARED,
    MappingFlags::GROWS_DOWN,
    MappingFlags::LOCKED,
    MappingFlags::NO_RESERVE,
    MappingFlags::ACCOUNT,
    MappingFlags::DONT_FORK,
    MappingFlags::WIPE_ON_FORK,
    MappingFlags::HUGE,
    MappingFlags::NO_HUGE,
    MappingFlags::SEALED,
    MappingFlags::SEQUENTIAL,
    MappingFlags::RANDOM,
    MappingFlags::DONT_DUMP,
    MappingFlags::DROPPABLE,
    MappingFlags::USERFAULT_MISSING,
    MappingFlags::USERFAULT_WRITE_PROTECT,
    MappingFlags::USERFAULT_MINOR,
];

fn letters(flags: MappingFlags) -> u64 {
    let set = (0..).zip(FLAGS).filter(|(_, flag)| flags.contains(*flag));
    set.map(|(bit, _)| 1 << bit).sum()
}

/// Everything that can be observed of an address space without touching it.
pub fn snapshot<A: Walk>(space: &Space<'_, A>, files: &Files<'_, A>, base: &Usage) -> Snapshot {
    let usage = space.usage();
    Snapshot {
        areas: areas(space, files),
        stretches: stretches(space),
        files: std::array::from_fn(|index| file_state(&files[index])),
        counters: Counters {
            mapped: usage.total.wrapping_sub(base.total),
            data: usage.data.wrapping_sub(base.data),
            locked: usage.locked,
        },
    }
}

fn file_state<A: Walk>(file: &Object<'_, Machine<A>>) -> FileState {
    let seals = u64::from(file.seals().bits());
    let pages = file.resident_pages() + file.swapped_pages();
    FileState { size: file.size(), pages, seals }
}

/// The mappings in the region, by rising address.
fn mappings<A: Walk>(space: &Space<'_, A>) -> Vec<Mapping> {
    let mut mappings = Vec::new();
    space.for_each_mapping(|mapping| {
        if in_region(mapping.range.start().0) {
            mappings.push(mapping);
        }
    });
    mappings
}

/// The mappings in the region in the form of `/proc`.
pub fn areas<A: Walk>(space: &Space<'_, A>, files: &Files<'_, A>) -> Vec<Area> {
    // Objects without a descriptor are distinguished by their order.
    let mut others = Vec::new();
    let area = |mapping: &Mapping| {
        let backing = match mapping.object {
            None => ANONYMOUS,
            Some(object) => match files.iter().position(|file| file.identity() == object) {
                Some(index) => FIRST_FILE + index as u64,
                None => {
                    let known = others.iter().position(|other| *other == object);
                    let place = known.unwrap_or_else(|| {
                        others.push(object);
                        others.len() - 1
                    });
                    OTHER_OBJECT + place as u64
                }
            },
        };
        Area {
            start: mapping.range.start().0,
            end: mapping.range.end().0,
            letters: letters(mapping.flags),
            backing,
            offset: if backing == ANONYMOUS { 0 } else { mapping.page_offset * PAGE },
        }
    };
    mappings(space).iter().map(area).collect()
}

/// The stretches of the region with equal `/proc/self/pagemap` flags.
fn stretches<A: Walk>(space: &Space<'_, A>) -> Vec<Stretch> {
    let mut words = vec![0; REGION_PAGES as usize];
    pagemap(space, REGION / PAGE, PhysicalAddresses::Shown, &mut words);
    let mut stretches: Vec<Stretch> = Vec::new();
    for (at, word) in (REGION..).step_by(PAGE as usize).zip(words) {
        let Some(presence) = presence(space, word) else { continue };
        match stretches.last_mut() {
            Some(last) if last.end == at && last.presence == presence => last.end += PAGE,
            _ => stretches.push(Stretch { start: at, end: at + PAGE, presence }),
        }
    }
    stretches
}

fn presence<A: Walk>(space: &Space<'_, A>, word: u64) -> Option<Presence> {
    let has = |bit: u32| word >> bit & 1 == 1;
    // Ignores the frame bits and soft-dirty, which the host's kernel may lack.
    if word & !(1 << 55) == 0 {
        return None;
    }
    let (present, file, guard) = (has(63), has(61), has(58));
    if !present {
        // Linux reports every entry that is neither a guard nor a page, such as a marker, as
        // swapped.
        return Some(if guard { Presence::Guard } else { Presence::Other(IS_SWAPPED) });
    }
    let frame = Frame((word & ((1 << 55) - 1)) as u32);
    Some(match (space.memory().frame_kind(frame), file) {
        (FrameKind::Zero, false) => Presence::Zero,
        (FrameKind::Anonymous, false) => Presence::Anonymous,
        (FrameKind::Object, true) => Presence::Object,
        _ => Presence::Other(word),
    })
}
