//! Free frames that other CPUs keep for themselves.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, FaultError, Memory};
use bindery_hosted::{Config, Machine, MemoryFiles};

use super::on_cpus;
use crate::support::objects::PAGE;
use crate::support::{GIB, MIB, audit, fixed, memory_with, options};

const CPUS: u16 = 3;
/// The frames that each CPU keeps.
const KEPT: u64 = 512;

type Hosted = Machine<X86_64>;

fn touch(space: &AddressSpace<'_, Hosted>, page: u64) -> Result<bindery::Resolved, FaultError> {
    space.fault(VirtAddr(GIB + page * PAGE_SIZE), Access::Write)
}

/// A machine whose CPUs 1 and 2 keep many free frames each.
fn with_full_fronts() -> (Hosted, Memory<Hosted>) {
    let config = Config { memory: 32 * MIB, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64>(config);
    memory.set_front_limit(KEPT as u32);
    on_cpus(&machine, CPUS, |cpu| {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(GIB, 2 * KEPT * PAGE_SIZE)).unwrap();
        if cpu > 0 {
            (0..2 * KEPT).for_each(|page| assert!(touch(&space, page).is_ok()));
        }
    });
    memory.drain_deferred();
    (machine, memory)
}

#[test]
fn a_program_gets_other_cpus_last_frame() {
    let (machine, memory) = with_full_fronts();
    let files = MemoryFiles::new();
    let file = memory.file(&files, 1, 64 * PAGE).unwrap();
    let mut content = [0; 64 * PAGE as usize];
    assert_eq!(file.read(0, &mut content), Ok(content.len()));
    assert_eq!(file.resident_pages(), 64, "clean pages, which reclaim could take");

    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(GIB, memory.total_frames() * PAGE_SIZE)).unwrap();
    machine.on_cpu(Cpu(0), || {
        let mut page = 0;
        while memory.free_frame_count() > 0 {
            assert!(touch(&space, page).is_ok(), "page {page}");
            page += 1;
        }
        assert_eq!(file.resident_pages(), 64, "nothing was reclaimed for {page} pages");
        // From here on, pages of the file pay for the program's.
        assert!(touch(&space, page).is_ok());
        assert!(file.resident_pages() < 64);
    });
    audit(&machine, &memory, &[&space]);
}

/// CPUs that free and allocate beside each other: an allocation fails only if all frames are used.
#[test]
fn no_allocation_fails_beside_full_fronts() {
    let (machine, memory) = with_full_fronts();
    // Enough for the records and tables of all, and less than one CPU's front.
    let spare = KEPT / 2;
    let each = (memory.free_frame_count() - spare) / u64::from(CPUS);
    for _ in 0..10 {
        on_cpus(&machine, CPUS, |cpu| {
            let space = AddressSpace::new(&memory, options()).unwrap();
            space.mmap(&fixed(GIB, each * PAGE_SIZE)).unwrap();
            for page in 0..each {
                assert!(touch(&space, page).is_ok(), "page {page} of {each} on CPU {cpu}");
            }
        });
        memory.drain_deferred();
    }
    audit(&machine, &memory, &[]);
}
