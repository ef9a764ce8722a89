//! Sequences that `bindery random calls` has found, as it printed them.

use bindery::arch::X86_64;
use bindery_cli::drivers::Setup;
use bindery_cli::drivers::sequence::{replay, run};
use bindery_cli::drivers::step::Step::*;
use bindery_linux::Call::*;

const SETUP: Setup = Setup {
    memory: 12 << 20,
    cpus: 1,
    huge_zero_page: false,
    stable_pages: true,
    device_fails: 0,
    pager_keeps: false,
    slots: 8192,
    compressed_limit: None,
    dirty_limit: u64::MAX,
    pager_fails: 0,
    broken: None,
};

#[test]
fn a_sequence_is_replayed_as_it_is_printed() {
    let steps = [
        Call { process: 0x0, call: Mmap, arguments: [0x40000000, 0x1000, 0x3, 0x32, 0x2, 0x0] },
        Store { process: 0x0, at: 0x40000000, value: 0x1 },
        Fork { process: 0x0, child: 0x1 },
        Call { process: 0x1, call: Madvise, arguments: [0x40000000, 0x1000, 0x15, 0x0, 0x0, 0x0] },
        Load { process: 0x0, at: 0x40000000 },
    ];
    assert_eq!(replay(run::<X86_64<4>>, &SETUP, &steps).unwrap().steps, 5);
}
