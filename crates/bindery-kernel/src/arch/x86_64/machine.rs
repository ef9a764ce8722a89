//! The machine according to its ACPI tables (ACPI specification, chapter 5.2): the MADT lists the
//! CPUs and their local APICs, the FADT a timer of known frequency.

use spin::Once;

use crate::boot::Stretch;

use super::super::boot_tables::Mapping;
use super::page_tables::{Tables, direct_map};

/// The maximum number of CPUs, which is the core's.
const MAX_CPUS: usize = bindery::platform::MAX_CPUS;

/// The maximum size of a table in bytes; a longer one is damaged.
const LONGEST: u32 = 1 << 20;

/// The machine as the firmware describes it.
pub struct Machine {
    apic_ids: [u32; MAX_CPUS],
    count: usize,
    /// The physical address of the local APIC's registers.
    pub local_apic: u64,
    /// The port of the power-management timer, which counts 3,579,545 times a second.
    pub timer_port: u16,
}

impl Machine {
    /// The local APIC numbers of the CPUs.
    pub fn cpus(&self) -> &[u32] {
        &self.apic_ids[..self.count]
    }

    fn add(&mut self, id: u32, flags: u32) {
        const ENABLED: u32 = 1;
        if flags & ENABLED != 0 && self.count < MAX_CPUS {
            self.apic_ids[self.count] = id;
            self.count += 1;
        }
    }
}

static MACHINE: Once<Machine> = Once::new();

/// The machine description that [`begin`] has read.
pub fn get() -> &'static Machine {
    MACHINE.get().expect("read at boot")
}

/// Reads the tables, beginning with the RSDP.
pub fn begin(tables: &mut Tables, rsdp: u64) -> &'static Machine {
    MACHINE.call_once(|| read(tables, rsdp))
}

fn read(tables: &mut Tables, rsdp: u64) -> Machine {
    let mut machine = Machine { apic_ids: [0; MAX_CPUS], count: 0, local_apic: 0, timer_port: 0 };
    let pointer = bytes(tables, rsdp, 36);
    let (list, width) = match pointer[15] {
        0 => (number(pointer, 16, 4), 4),
        _ => (number(pointer, 24, 8), 8),
    };
    for entry in table(tables, list)[36..].chunks_exact(width) {
        let table = table(tables, number(entry, 0, width));
        match &table[..4] {
            b"APIC" => read_madt(&mut machine, table),
            b"FACP" => machine.timer_port = number(table, 76, 4) as u16,
            _ => {}
        }
    }
    assert!(machine.count > 0, "the ACPI tables list no CPU");
    assert!(
        machine.timer_port != 0,
        "the ACPI tables list no power-management timer, which the kernel needs"
    );
    machine
}

fn read_madt(machine: &mut Machine, table: &[u8]) {
    machine.local_apic = number(table, 36, 4);
    let mut rest = &table[44..];
    while let [kind, length, ..] = *rest
        && let Some((entry, behind)) = rest.split_at_checked(usize::from(length).max(2))
    {
        match (kind, length) {
            (0, 8..) => machine.add(number(entry, 3, 1) as u32, number(entry, 4, 4) as u32),
            (5, 12..) => machine.local_apic = number(entry, 4, 8),
            (9, 16..) => machine.add(number(entry, 4, 4) as u32, number(entry, 8, 4) as u32),
            _ => {}
        }
        rest = behind;
    }
}

/// A whole table. Its first 36 bytes always exist.
fn table(tables: &mut Tables, at: u64) -> &'static [u8] {
    let length = number(bytes(tables, at, 36), 4, 4) as u32;
    assert!((36..=LONGEST).contains(&length), "an ACPI table is damaged: its length is impossible");
    bytes(tables, at, u64::from(length))
}

fn bytes(tables: &mut Tables, at: u64, length: u64) -> &'static [u8] {
    tables.map_direct(Stretch { start: at, end: at + length }, Mapping::Constants);
    // SAFETY: the table was mapped above and lies in the firmware's memory, which is never handed
    // out as free memory.
    unsafe { core::slice::from_raw_parts(direct_map(at).as_ptr(), length as usize) }
}

fn number(table: &[u8], at: usize, width: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..width].copy_from_slice(&table[at..][..width]);
    u64::from_le_bytes(bytes)
}
