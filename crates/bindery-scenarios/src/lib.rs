//! Shared parts of the scenario tests of `bindery-hosted`: a machine with the core on it, and the
//! audit at the end.
//!
//! Each folder of `crates/bindery-hosted/tests` is a test program that compiles only its own code.
//! The core is compiled once, together with the machines (feature `instances` of `bindery-hosted`).

#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]
#![allow(missing_docs, reason = "scaffolding of tests: names say it, and no user sees it")]

pub mod alone;
pub mod areas;
pub mod devices;
pub mod fixture;
pub mod kernel;
pub mod measured;
pub mod objects;
pub mod objects_fixture;
pub mod waiting;

use bindery::addr::{Order, VirtAddr};
use bindery::check::{self, Report};
use bindery::{
    AddressSpace, MapRequest, Memory, Overcommit, Place, Protection, SizeMode, SpaceOptions,
};
use bindery_hosted::{Config, Contents, Machine, Walk};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// All accesses, on every architecture.
pub const READ_WRITE_EXECUTE: Protection =
    Protection::READ.union(Protection::WRITE).union(Protection::EXECUTE);

pub const READ_WRITE: Protection = Protection::READ.union(Protection::WRITE);

/// A machine of the given configuration, and its memory, managed by the core and with arbitrary
/// initial content.
pub fn memory_with<A: Walk>(config: Config) -> (Machine<A>, Memory<Machine<A>>) {
    let machine = Machine::<A>::new(Config { contents: Contents::Anything, ..config });
    let memory = machine.memory().expect("memory");
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    // The machines are small, and most scenarios map more than they access.
    memory.commitment().set_mode(Overcommit::Always);
    (machine, memory)
}

/// A strict machine with one CPU.
pub fn strict<A: Walk>(bytes: u64) -> (Machine<A>, Memory<Machine<A>>) {
    memory_with(Config { memory: bytes, ..Config::default() })
}

/// Allows faults to use folios of 2^`order` pages wherever they fit.
pub fn use_order<A: Walk>(memory: &Memory<Machine<A>>, order: u8) {
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
}

pub fn fixed(at: u64, length: u64) -> MapRequest {
    MapRequest {
        length,
        protection: READ_WRITE,
        place: Place::Fixed(VirtAddr(at)),
        ..MapRequest::default()
    }
}

pub fn anywhere(length: u64) -> MapRequest {
    MapRequest { length, protection: READ_WRITE, place: Place::Anywhere, ..MapRequest::default() }
}

pub fn options() -> SpaceOptions {
    SpaceOptions::default()
}

/// Audits the core and the TLBs. Panics with the first violation.
#[track_caller]
pub fn audit<A: Walk>(
    machine: &Machine<A>,
    memory: &Memory<Machine<A>>,
    spaces: &[&AddressSpace<'_, Machine<A>>],
) -> Report {
    machine.assert_clean();
    let mut scratch = vec![0; check::scratch_words(memory)];
    match check::check(memory, spaces, &mut scratch) {
        Ok(report) => report,
        Err(violation) => panic!("the audit found: {violation}"),
    }
}

/// Calls the generic test function for every real architecture.
#[macro_export]
macro_rules! on_every_architecture {
    ($($test:ident => $run:ident;)*) => {
        $(mod $test {
            #[test]
            fn x86_64() { super::$run::<bindery::arch::X86_64<4>>(); }
            #[test]
            fn x86_64_five_levels() { super::$run::<bindery::arch::X86_64<5>>(); }
            #[test]
            fn aarch64() { super::$run::<bindery::arch::AArch64>(); }
            #[test]
            fn riscv64_sv39() { super::$run::<bindery::arch::Riscv64<3>>(); }
            #[test]
            fn riscv64_sv48() { super::$run::<bindery::arch::Riscv64<4>>(); }
        })*
    };
}
