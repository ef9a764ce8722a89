//! A scene for calls that must fail, and all state that a failed call could have changed.

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Counts, Error, MapRequest, Mapping, Protection, Usage};
use bindery_hosted::{Machine, Walk};

use crate::support::fixture::{Fixture, layout, with_fixture};
use crate::support::{GIB, fixed};

pub const PAGE: u64 = 4096;
pub const AT: u64 = GIB;
/// The lowest address that may be mapped.
pub const MINIMUM: VirtAddr = VirtAddr(0x1_0000);

/// Sixteen read-write pages, one of them written, followed by sixteen read-only pages.
pub fn scene<A: Walk>(scenario: impl FnOnce(&Fixture<'_, '_, A>, u64)) {
    with_fixture::<A>(0, |fixture| {
        fixture.space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        let read_only =
            MapRequest { protection: Protection::READ, ..fixed(AT + 16 * PAGE, 16 * PAGE) };
        fixture.space.mmap(&read_only).unwrap();
        fixture.fill(AT, 1);
        scenario(fixture, A::USER_END);
        fixture.assert_filled(AT, 1, AT);
    });
}

/// All state of an address space that a refused call could have changed.
#[derive(Clone, PartialEq, Debug)]
pub struct State {
    pub layout: Vec<Mapping>,
    pub counts: Counts,
    pub usage: Usage,
    pub free_frames: u64,
    pub mapping_count: usize,
}

pub fn state<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> State {
    State {
        layout: layout(space),
        counts: space.counts(),
        usage: space.usage(),
        free_frames: space.memory().free_frame_count(),
        mapping_count: space.mapping_count(),
    }
}

/// Makes a call that must fail with this error and change nothing.
#[track_caller]
pub fn refused<A: Walk, T, E: Copy + PartialEq + core::fmt::Debug>(
    fixture: &Fixture<'_, '_, A>,
    expected: E,
    call: impl FnOnce(&AddressSpace<'_, Machine<A>>) -> Result<T, E>,
) {
    let before = state(fixture.space);
    let result = call(fixture.space).err();
    assert_eq!(result, Some(expected));
    assert_eq!(state(fixture.space), before);
}

pub fn out_of_range(end: u64) -> Error {
    Error::OutOfRange { limit: VirtAddr(end) }
}

/// Addresses that no user program can map.
pub fn nowhere(end: u64) -> [u64; 7] {
    let kernel = 0xffff_8000_0000_0000;
    [end, end + PAGE, 1 << 57, 1 << 63, kernel, u64::MAX - 2 * PAGE + 1, u64::MAX - PAGE + 1]
}
