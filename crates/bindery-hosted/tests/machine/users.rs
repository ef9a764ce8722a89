//! Accesses of user programs: across pages, with resolved faults, on several CPUs.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

use bindery::addr::{Frame, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::{Cpu, Platform, Tables};
use bindery_hosted::{Config, Machine, MmuFault, TlbKind};

use super::hand::*;
use crate::support::kernel::Finished;

const TABLE: u64 = 0x27;
const RW: u64 = 0x8000_0000_0000_0007;

fn config(tlb: TlbKind) -> Config {
    Config { cpus: 4, memory: 64 << 20, tlb, ..Config::default() }
}

/// Tables for the 512 pages around `VA`, none of them mapped.
fn with_tables(tlb: TlbKind) -> Machine<X86_64> {
    let machine = Machine::new(config(tlb));
    set(&machine, L4, I4, 0x8_0003_000 | TABLE);
    set(&machine, L3, I3, 0x8_0002_000 | TABLE);
    set(&machine, L2, I2, 0x8_0001_000 | TABLE);
    machine
}

/// Maps the faulting page to a new frame.
fn map(machine: &Machine<X86_64>, fault: MmuFault) -> Result<(), MmuFault> {
    let index = (fault.addr.0 >> 12) % 512;
    set(machine, L1, index as usize, (0x8_0100_000 + index * PAGE) | RW);
    Ok(())
}

fn never(fault: MmuFault) -> Result<(), MmuFault> {
    Err(fault)
}

#[test]
fn bytes_written_across_pages_are_read_back() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        let machine = with_tables(tlb);
        let at = VirtAddr(VA + 0xffd);
        let bytes: Vec<u8> = (0..10_000).map(|i| (i % 251) as u8).collect();
        machine.write_user(L4, at, &bytes, |fault| map(&machine, fault)).unwrap();
        let mut back = vec![0; bytes.len()];
        machine.read_user(L4, at, &mut back, never).unwrap();
        assert_eq!(back, bytes);
        machine.fill_user(L4, VirtAddr(at.0 + 1), 5000, 7, never).unwrap();
        machine.read_user(L4, at, &mut back, never).unwrap();
        assert_eq!((back[0], back[5001]), (bytes[0], bytes[5001]));
        assert!(back[1..5001].iter().all(|byte| *byte == 7));
        machine.assert_clean();
    }
}

#[test]
fn words_may_cross_pages() {
    let machine = with_tables(TlbKind::Strict);
    let at = VirtAddr(VA + 0xffc);
    machine.store_user(L4, at, 0x0123_4567_89ab_cdef, |fault| map(&machine, fault)).unwrap();
    assert_eq!(machine.load_user(L4, at, never), Ok(0x0123_4567_89ab_cdef));
}

#[test]
fn what_the_handler_refuses_comes_back() {
    let machine = with_tables(TlbKind::Strict);
    let at = VirtAddr(VA);
    let fault = MmuFault { addr: at, access: Execute, present: false };
    assert_eq!(machine.execute_user(L4, at, never), Err(fault));
    map(&machine, fault).unwrap();
    assert_eq!(machine.execute_user(L4, at, never), Err(MmuFault { present: true, ..fault }));
    assert_eq!(machine.load_user(L4, at, never), Ok(0));
}

#[test]
#[should_panic(expected = "livelock")]
fn a_handler_that_resolves_nothing_is_found_out() {
    let machine = with_tables(TlbKind::Strict);
    let _ = machine.load_user(L4, VirtAddr(VA), |_| Ok::<_, ()>(()));
}

#[test]
fn a_plain_tlb_forgets_what_it_is_told() {
    let machine = with_tables(TlbKind::Plain);
    for len in [PAGE, 512 * PAGE] {
        machine.fill_user(L4, VirtAddr(VA), PAGE, 1, |fault| map(&machine, fault)).unwrap();
        set(&machine, L1, I1, 0);
        flush(&machine, L4, &[0], what(VA, len, Tables::Unchanged));
        assert!(machine.load_user(L4, VirtAddr(VA), never).is_err());
    }
}

/// The frame that `map` gives to the page at `VA`.
const DATA: Frame = Frame(0x8_0110);

/// CPUs 1 to 3 write the page at `VA` repeatedly while it is mapped. CPU 0 unmaps it, invalidates,
/// zeroes the frame, waits for a while and checks that it is still zero.
fn revoke_under_writers(machine: &Machine<X86_64>) {
    // SAFETY: the entry is in a frame of the machine, is aligned, and all threads access it
    // atomically while they run.
    let entry = unsafe { machine.direct_map(L1).cast::<AtomicU64>().add(I1).as_ref() };
    let (writes, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let wait_for_writes = |count| {
        let seen = writes.load(Ordering::Relaxed);
        while writes.load(Ordering::Relaxed) < seen + count {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        let _finished = Finished(&stop);
        for cpu in 1..4 {
            let (writes, stop) = (&writes, &stop);
            let write = move || {
                while !stop.load(Ordering::Relaxed) {
                    // While the page is revoked, the access faults and is retried.
                    let _ = machine.fill_user(L4, VirtAddr(VA), PAGE, cpu as u8, never);
                    writes.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                }
            };
            scope.spawn(move || machine.on_cpu(Cpu(cpu), write));
        }
        for _ in 0..100 {
            wait_for_writes(3);
            let old = entry.swap(0, Ordering::SeqCst);
            flush(machine, L4, &[0, 1, 2, 3], what(VA, PAGE, Tables::Unchanged));
            machine.zero(DATA, 1);
            wait_for_writes(6);
            // SAFETY: the frame belongs to the page, which no thread can reach now.
            let bytes = unsafe { machine.direct_map(DATA).cast::<[u8; 4096]>().read() };
            assert_eq!(bytes, [0; 4096], "somebody wrote after the invalidation");
            entry.store(old, Ordering::SeqCst);
        }
    });
}

#[test]
fn no_revoked_access_outlives_the_invalidation() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        let machine = with_tables(tlb);
        map(&machine, MmuFault { addr: VirtAddr(VA), access: Write, present: false }).unwrap();
        revoke_under_writers(&machine);
        machine.assert_clean();
    }
}
