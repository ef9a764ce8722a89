//! `vmalloc`, `vmap` and `ioremap`, seen through the MMU.

use bindery::addr::{PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use bindery::arch::{AArch64, MemoryType, Permissions, X86_64};
use bindery::{
    Content, KernelAddress, KernelMapError, Pauses, Pieces, Reach, Resolution, UnmapTime,
    VmallocOptions, VmapOptions,
};
use bindery_hosted::{AccessKind, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{self, audit, map, map_with, translate};
use crate::support::{KIB, MIB, strict};

on_every_architecture! {
    what_was_allocated_can_be_written_and_read => write_and_read;
    a_guard_page_follows_every_area => guard_pages;
    frames_and_addresses_come_back_after_a_purge => purge;
    a_list_of_frames_keeps_its_order => lists;
    device_registers_are_mapped_with_their_type => devices;
    permissions_of_a_part_change_alone => protect_a_part;
    areas_grow_shrink_and_move_with_their_content => resize;
}

fn write_and_read<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    for (size, pieces) in [
        (1, Pieces::Base),
        (MIB, Pieces::Base),
        (MIB, Pieces::Largest),
        (5 * MIB + 3 * PAGE_SIZE, Pieces::Largest),
    ] {
        let options =
            VmallocOptions { pieces, content: Content::Zeroes, ..VmallocOptions::default() };
        let at = map.vmalloc(size, &options).unwrap();
        for offset in (0..size).step_by(PAGE_SIZE as usize) {
            let place = VirtAddr(at.0 + offset);
            let mut word = [1; 1];
            machine.read_kernel(map.root(), place, &mut word).unwrap();
            assert_eq!(word, [0]);
            machine.write_kernel(map.root(), place, &[offset as u8 ^ 0x5a]).unwrap();
            assert_eq!(translate(&machine, &map, place).ok(), map.physical(place));
        }
        audit(&machine, &memory, &[&map]);
        map.free_vmalloc(at).unwrap();
    }
    map.purge();
    audit(&machine, &memory, &[&map]);
    drop(map);
    audit(&machine, &memory, &[]);
}

fn guard_pages<A: Walk>() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let map = map(&memory);
    let areas: Vec<_> = (0..50)
        .map(|pages| map.vmalloc(pages * PAGE_SIZE + 1, &VmallocOptions::default()).unwrap())
        .collect();
    for (at, pages) in areas.iter().zip(1..) {
        let end = VirtAddr(at.0 + pages * PAGE_SIZE);
        assert!(translate(&machine, &map, VirtAddr(end.0 - 1)).is_ok());
        assert!(translate(&machine, &map, end).is_err());
        let KernelAddress::Guard { area } = map.explain(end) else {
            panic!("{:?}", map.explain(end));
        };
        assert_eq!((area.range.start(), area.range.end()), (*at, end));
        assert_eq!(map.resolve(end, Permissions::READ), Resolution::NotMapped);
    }
    audit(&machine, &memory, &[&map]);
}

fn purge<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    map.set_purge_limit(u64::MAX);
    let before = memory.free_frame_count();
    let options = VmallocOptions::huge();
    let areas: Vec<_> = (0..8).map(|_| map.vmalloc(3 * MIB, &options).unwrap()).collect();
    for at in &areas {
        translate(&machine, &map, *at).unwrap();
    }
    let invalidations = map.counts().invalidations;
    areas.iter().for_each(|at| map.free_vmalloc(*at).unwrap());
    let first = areas[0];
    assert!(matches!(map.explain(first), KernelAddress::Freed { .. }));
    assert!(matches!(map.free_vmalloc(first), Err(KernelMapError::Freed { .. })));
    map.purge();
    assert_eq!(map.counts().invalidations, invalidations + 1);
    assert_eq!(map.explain(first), KernelAddress::Free);
    assert_eq!(map.free_vmalloc(first), Err(KernelMapError::NotAnArea(first)));
    assert!(areas.iter().all(|at| translate(&machine, &map, *at).is_err()));
    memory.trim();
    assert!(memory.free_frame_count() + 1 >= before, "{} {before}", memory.free_frame_count());
    // The lowest suitable addresses are reused.
    assert_eq!(map.vmalloc(3 * MIB, &options), Ok(first));
    audit(&machine, &memory, &[&map]);
}

fn lists<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    for (pages, step) in [(256, 2), (256, 1), (1024, 1), (3, 1), (1, 1)] {
        let (owner, list) = kernel::scattered(&map, pages, step);
        let at = map.vmap(&list, &VmapOptions::default()).unwrap();
        for (page, frame) in (0..).zip(&list) {
            let place = VirtAddr(at.0 + page * PAGE_SIZE + 8);
            let expected = PhysAddr(frame.start().0 + 8);
            assert_eq!(translate(&machine, &map, place), Ok(expected));
            assert_eq!(map.physical(place), Some(expected));
        }
        audit(&machine, &memory, &[&map]);
        map.free_vmap(at, UnmapTime::Now).unwrap();
        assert!(translate(&machine, &map, at).is_err());
        map.free_vmalloc(owner).unwrap();
    }
    map.purge();
    audit(&machine, &memory, &[&map]);
}

fn devices<A: Walk>() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let map = map(&memory);
    for memory_type in [MemoryType::Uncached, MemoryType::Device, MemoryType::WriteCombining] {
        for (from, size) in [(0x3_0000_0000, MIB), (0x3_0001_0000, MIB), (0x3_0000_0804, 4)] {
            let at = map.ioremap(PhysAddr(from), size, memory_type).unwrap();
            assert_eq!(translate(&machine, &map, at), Ok(PhysAddr(from)));
            let last = VirtAddr(at.0 + size - 1);
            assert_eq!(translate(&machine, &map, last), Ok(PhysAddr(from + size - 1)));
            assert_eq!(
                at.0 % (64 * KIB),
                from % (64 * KIB).min(size.next_power_of_two().max(4096))
            );
            map.free_ioremap(at).unwrap();
        }
    }
    let type_of = |at: VirtAddr| {
        let mut found = None;
        let page = VirtRange::from_len(VirtAddr(at.0 & !0xfff), PAGE_SIZE).unwrap();
        map.for_each_piece(page, |piece| found = Some(piece.memory));
        found
    };
    let at = map.ioremap(PhysAddr(0x3_0000_0000), 4, MemoryType::WriteCombining).unwrap();
    assert_eq!(type_of(at), Some(MemoryType::WriteCombining));
    audit(&machine, &memory, &[&map]);
}

fn protect_a_part<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let map = map(&memory);
    let read_only = Permissions::READ;
    for (size, from, until) in [
        (MIB, 0, MIB),
        (MIB, 4 * KIB, 8 * KIB),
        (MIB, 60 * KIB, 132 * KIB),
        (6 * MIB, 3 * MIB + 20 * KIB, 5 * MIB),
        (6 * MIB, 2 * MIB, 4 * MIB),
        (2 * MIB, 4 * KIB, 2 * MIB - 4 * KIB),
    ] {
        let at = map.vmalloc(size, &VmallocOptions::huge()).unwrap();
        for offset in (0..size).step_by(PAGE_SIZE as usize) {
            let place = VirtAddr(at.0 + offset);
            machine.write_kernel(map.root(), place, &[offset as u8 | 1]).unwrap();
        }
        let part = VirtRange::new(VirtAddr(at.0 + from), VirtAddr(at.0 + until)).unwrap();
        map.protect_part(part, read_only).unwrap();
        for offset in (0..size).step_by(PAGE_SIZE as usize) {
            let place = VirtAddr(at.0 + offset);
            let written = machine.write_kernel(map.root(), place, &[7]);
            let inside = part.contains(place);
            assert_eq!(written.is_err(), inside, "{size:#x} {part} {place}");
            let allowed = if inside { Resolution::Denied } else { Resolution::Retry };
            assert_eq!(map.resolve(place, Permissions::WRITE), allowed);
            assert_eq!(translate(&machine, &map, place).ok(), map.physical(place));
        }
        audit(&machine, &memory, &[&map]);
        map.protect_part(part, read_only | Permissions::WRITE).unwrap();
        machine.write_kernel(map.root(), part.start(), &[9]).unwrap();
        audit(&machine, &memory, &[&map]);
        map.free_vmalloc(at).unwrap();
    }
    map.purge();
    audit(&machine, &memory, &[&map]);
}

fn resize<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    let options = VmallocOptions { content: Content::Zeroes, ..VmallocOptions::huge() };
    let mut at = map.vmalloc(3 * MIB, &options).unwrap();
    machine.write_kernel(map.root(), at, b"here").unwrap();
    let mut neighbor = None;
    for size in [5 * MIB, MIB + 12 * KIB, 2 * MIB, 9 * MIB, 4 * KIB, 3 * MIB + 1] {
        at = map.resize_vmalloc(at, size, &options).unwrap();
        let mut content = [0; 4];
        machine.read_kernel(map.root(), at, &mut content).unwrap();
        assert_eq!(&content, b"here");
        let last = VirtAddr(at.0 + (size - 1));
        assert_eq!(translate(&machine, &map, last).ok(), map.physical(last));
        assert!(map.physical(last).is_some());
        let behind = VirtAddr(at.0 + size.next_multiple_of(PAGE_SIZE));
        assert!(translate(&machine, &map, behind).is_err());
        audit(&machine, &memory, &[&map]);
        neighbor = neighbor.or_else(|| map.vmalloc(1, &options).ok());
    }
    map.free_vmalloc(at).unwrap();
    drop(map);
    audit(&machine, &memory, &[]);
}

#[test]
fn what_may_not_pause_is_never_cut() {
    let (machine, memory) = strict::<AArch64>(32 * MIB);
    let map = map(&memory);
    let options = VmallocOptions { pauses: Pauses::Never, ..VmallocOptions::huge() };
    let at = map.vmalloc(4 * MIB, &options).unwrap();
    let page = VirtRange::from_len(at, PAGE_SIZE).unwrap();
    let refused = map.protect_part(page, Permissions::READ);
    assert!(
        matches!(refused, Err(KernelMapError::WouldPause { area }) if area.range.start() == at)
    );
    let whole = VirtRange::from_len(at, 4 * MIB).unwrap();
    map.protect_part(whole, Permissions::READ).unwrap();
    audit(&machine, &memory, &[&map]);
}

#[test]
fn pages_mapped_one_by_one_are_mapped() {
    let (machine, memory) = strict::<X86_64<4>>(32 * MIB);
    let map = map_with(&memory, 1 << 33, Reach::Page);
    let at = map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap();
    let mut pieces = 0;
    map.for_each_piece(map.arena(), |piece| {
        assert_eq!(piece.size, PAGE_SIZE);
        pieces += piece.range.pages();
    });
    assert_eq!(pieces, 1024);
    assert!(machine.translate_kernel(map.root(), at, AccessKind::Write).is_ok());
    map.free_vmalloc(at).unwrap();
    audit(&machine, &memory, &[&map]);
}

#[test]
fn the_last_frame_can_be_mapped_by_pages() {
    let (_, memory) = strict::<X86_64<4>>(16 * MIB);
    for reach in [Reach::Table, Reach::Page] {
        let map = map_with(&memory, 1 << 33, reach);
        let from = PhysAddr((1 << 44) - 3 * PAGE_SIZE);
        let at = map.ioremap(from, 3 * PAGE_SIZE, MemoryType::Device).unwrap();
        let last = VirtAddr(at.0 + 2 * PAGE_SIZE);
        assert_eq!(map.physical(last), Some(PhysAddr((1 << 44) - PAGE_SIZE)));
        map.free_ioremap(at).unwrap();
    }
}
