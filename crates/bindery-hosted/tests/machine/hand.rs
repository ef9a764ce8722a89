//! Helpers for tests of the machine itself: handwritten tables, and accesses that must or must not
//! fault.
use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::platform::{Cpu, CpuSet, Invalidation, Platform, Tables};
use bindery_hosted::{AccessKind, Config, Machine, MmuFault, Violation, Walk};

pub use AccessKind::{Execute, Read, Write};

/// The tables of a walk, by level. The root has the highest level.
pub const L5: Frame = Frame(0x8_0005);
pub const L4: Frame = Frame(0x8_0004);
pub const L3: Frame = Frame(0x8_0003);
pub const L2: Frame = Frame(0x8_0002);
pub const L1: Frame = Frame(0x8_0001);

/// Indexes 1, 2, 3 and 16 from level 4 down to 1.
pub const VA: u64 = 0x80_8061_0000;
pub const I4: usize = 1;
pub const I3: usize = 2;
pub const I2: usize = 3;
pub const I1: usize = 16;

pub const PAGE: u64 = 4096;
pub const KIB64: u64 = 64 << 10;
pub const MIB2: u64 = 2 << 20;
pub const GIB: u64 = 1 << 30;

pub fn machine<A: Walk>() -> Machine<A> {
    Machine::new(Config { cpus: 2, memory: 2 << 30, ..Config::default() })
}

fn slot<A: Walk>(machine: &Machine<A>, table: Frame, index: usize) -> *mut u64 {
    assert!(index < 512);
    machine.direct_map(table).cast::<u64>().as_ptr().wrapping_add(index)
}

pub fn set<A: Walk>(machine: &Machine<A>, table: Frame, index: usize, entry: u64) {
    // SAFETY: the slot is in a frame of the machine, which no other code uses: no other thread
    // accesses memory through this table now.
    unsafe { slot(machine, table, index).write_volatile(entry) }
}

pub fn get<A: Walk>(machine: &Machine<A>, table: Frame, index: usize) -> u64 {
    // SAFETY: as in `set`.
    unsafe { slot(machine, table, index).read_volatile() }
}

/// The result of the access on the thread's CPU: a physical address, or whether a translation was
/// present.
pub fn go<A: Walk>(
    machine: &Machine<A>,
    root: Frame,
    addr: u64,
    access: AccessKind,
) -> Result<u64, bool> {
    match machine.translate(root, VirtAddr(addr), access) {
        Ok(phys) => Ok(phys.0),
        Err(MmuFault { addr: VirtAddr(at), access: kind, present }) => {
            assert_eq!((at, kind), (addr, access));
            Err(present)
        }
    }
}

pub fn what(start: u64, len: u64, tables: Tables) -> Invalidation {
    let range = VirtRange::from_len(VirtAddr(start), len).unwrap();
    Invalidation { range, stride: PAGE, tables }
}

pub fn flush<A: Walk>(machine: &Machine<A>, root: Frame, cpus: &[u16], what: Invalidation) {
    let mut set = CpuSet::EMPTY;
    cpus.iter().for_each(|cpu| set.insert(Cpu(*cpu)));
    machine.invalidate(root, &set, &what);
}

/// The only violation.
#[track_caller]
pub fn only<A: Walk>(machine: &Machine<A>) -> Violation {
    let mut found = machine.take_violations();
    assert_eq!(found.len(), 1, "{found:#?}");
    found.remove(0)
}

/// The rule that the only malformed entry breaks.
#[track_caller]
pub fn malformed<A: Walk>(machine: &Machine<A>) -> &'static str {
    match only(machine) {
        Violation::Malformed { why, .. } => why,
        other => panic!("{other}"),
    }
}
