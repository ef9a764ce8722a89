//! Many userfaultfds of one address space: a call visits each of their mappings once.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{AddressSpace, Userfault, UserfaultFeatures, UserfaultModes, UserfaultScope};
use bindery_hosted::{Config, Machine, TlbKind};

use crate::support::{GIB, MIB, audit, fixed, memory_with, options};

type X = X86_64<4>;

/// Each userfaultfd handles this number of non-adjacent mappings.
const EACH: u64 = 2;

fn asked(userfaults: &[Userfault<'_, Machine<X>>]) -> u64 {
    userfaults.iter().map(Userfault::times_asked).sum()
}

#[test]
fn fork_and_munmap_ask_once_for_each_mapping() {
    for count in [500, 4_000] {
        let config = Config { memory: 256 * MIB, tlb: TlbKind::Plain, ..Config::default() };
        let (machine, memory) = memory_with::<X>(config);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let features = UserfaultFeatures::EVENT_FORK | UserfaultFeatures::EVENT_UNMAP;
        let userfaults: Vec<_> =
            (0..count).map(|_| space.userfault(features, UserfaultScope::All).unwrap()).collect();
        let mappings = EACH * count;
        for number in 0..mappings {
            let at = GIB + 2 * number * PAGE_SIZE;
            space.mmap(&fixed(at, PAGE_SIZE)).unwrap();
            let userfault = &userfaults[(number % count) as usize];
            space
                .register_userfault(userfault, VirtAddr(at), PAGE_SIZE, UserfaultModes::MISSING)
                .unwrap();
        }
        // The fork checks for a signal at each mapping. The fork's messages stay unread.
        machine.fatal_signal_after(Some(mappings));
        let before = asked(&userfaults);
        let child = space.fork().unwrap();
        assert_eq!(asked(&userfaults) - before, mappings, "{count} userfaultfds: fork");
        space.munmap(VirtAddr(GIB), 2 * mappings * PAGE_SIZE).unwrap();
        assert_eq!(asked(&userfaults) - before, 2 * mappings, "{count} userfaultfds: munmap");
        machine.fatal_signal_after(None);
        audit(&machine, &memory, &[&space, &child]);
    }
}
