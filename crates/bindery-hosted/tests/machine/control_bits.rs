//! The boot self-test reports the wrong control bit. The tests break one bit at a time.

use bindery::AddressSpace;
use bindery::arch::{AArch64, Riscv64, Severity, Symptom, X86_64};
use bindery::check::{self, MachineError, MachineReport};
use bindery_hosted::{BrokenControl, Config, SelfTest, Walk};

use crate::support::kernel::map;
use crate::support::{memory_with, options};

on_every_architecture! {
    a_correct_machine_has_no_finding => nothing_is_wrong;
    invalidations_that_do_nothing_are_noticed => invalidations_are_lost;
}

/// Tests a machine with this control bit broken. The test must leave nothing behind.
fn test<A: Walk>(broken: Option<BrokenControl>) -> Result<MachineReport, MachineError> {
    let (machine, memory) = memory_with::<A>(Config { broken, ..Config::default() });
    let map = map(&memory);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let mut accesses = SelfTest::new(&machine, &map, &space);
    let result = check::machine(Some(&map), Some(&space), &mut accesses);
    assert_eq!(space.mapping_count(), 0);
    map.purge();
    assert!(map.freed_pages() == 0);
    if broken.is_none() {
        machine.assert_clean();
    }
    result
}

/// The name of the control bit that a broken machine reports.
fn broken<A: Walk>(control: BrokenControl) -> &'static str {
    match test::<A>(Some(control)) {
        Err(MachineError::ControlBit { bit, .. }) => bit.name,
        other => panic!("{control:?}: {other:?}"),
    }
}

/// The reported control bits of this severity on a machine that works without them.
fn found<A: Walk>(control: BrokenControl, severity: Severity) -> Vec<&'static str> {
    let report = test::<A>(Some(control)).unwrap();
    assert!(report.findings().all(|(_, found)| found == severity), "{control:?}: {report:?}");
    report.findings().map(|(bit, _)| bit.name).collect()
}

fn nothing_is_wrong<A: Walk>() {
    let report = test::<A>(None).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report, MachineReport::default());
}

fn invalidations_are_lost<A: Walk>() {
    let error = test::<A>(Some(BrokenControl::Invalidation)).unwrap_err();
    let symptom = Symptom::StaleWritten;
    assert_eq!(error, MachineError::Unexplained { symptom, fault: None });
}

#[test]
fn x86_64_without_nxe() {
    assert_eq!(broken::<X86_64<4>>(BrokenControl::NoExecute), "EFER.NXE");
    let error = test::<X86_64<4>>(Some(BrokenControl::NoExecute)).unwrap_err().to_string();
    assert!(error.contains("EFER.NXE must be set (Intel SDM volume 3A"), "{error}");
}

#[test]
fn x86_64_without_wp() {
    assert_eq!(broken::<X86_64<4>>(BrokenControl::WriteProtect), "CR0.WP");
}

#[test]
fn x86_64_without_smep_and_smap() {
    let found = |control| found::<X86_64<4>>(control, Severity::Unprotected);
    assert_eq!(found(BrokenControl::UserExecution), ["CR4.SMEP"]);
    assert_eq!(found(BrokenControl::UserAccess), ["CR4.SMAP"]);
}

#[test]
fn x86_64_registers() {
    let found = |control| found::<X86_64<4>>(control, Severity::Slow);
    assert_eq!(found(BrokenControl::GlobalPages), ["CR4.PGE"]);
    assert_eq!(found(BrokenControl::ContextIdentifiers), ["CR4.PCIDE"]);
    assert_eq!(broken::<X86_64<4>>(BrokenControl::MemoryTypes), "IA32_PAT");
}

#[test]
fn aarch64_with_wxn() {
    assert_eq!(broken::<AArch64>(BrokenControl::WriteExecuteNever), "SCTLR_EL1.WXN");
}

#[test]
fn aarch64_without_hardware_updates() {
    let found = |control| found::<AArch64>(control, Severity::Slow);
    assert_eq!(found(BrokenControl::HardwareAccessed), ["TCR_EL1.HA"]);
    assert_eq!(found(BrokenControl::HardwareDirty), ["TCR_EL1.HD"]);
}

#[test]
fn aarch64_without_pan() {
    let found = found::<AArch64>(BrokenControl::UserAccess, Severity::Unprotected);
    assert_eq!(found, ["PSTATE.PAN"]);
}

#[test]
fn aarch64_with_other_memory_types() {
    assert_eq!(broken::<AArch64>(BrokenControl::MemoryTypes), "MAIR_EL1");
}

#[test]
fn riscv64_with_sum_and_mxr() {
    let found = |control| found::<Riscv64<4>>(control, Severity::Unprotected);
    assert_eq!(found(BrokenControl::UserAccess), ["sstatus.SUM"]);
    assert_eq!(found(BrokenControl::ExecutableReadable), ["sstatus.MXR"]);
}

#[test]
fn riscv64_without_extensions() {
    let slow = found::<Riscv64<4>>(BrokenControl::HardwareAccessed, Severity::Slow);
    assert_eq!(slow, ["menvcfg.ADUE"]);
    assert_eq!(broken::<Riscv64<4>>(BrokenControl::Contiguous), "Svnapot");
    assert_eq!(broken::<Riscv64<4>>(BrokenControl::PageBasedTypes), "menvcfg.PBMTE");
}
