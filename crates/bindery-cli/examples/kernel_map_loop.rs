//! The loop of system 5, to count the instructions of a call:
//!
//! ```text
//! cargo build --release -p bindery-cli --example kernel_map_loop
//! valgrind --tool=callgrind --callgrind-out-file=callgrind.out \
//!     --toggle-collect='*KernelMap*::vmalloc' target/release/examples/kernel_map_loop 100
//! callgrind_annotate --inclusive=yes --auto=no callgrind.out
//! ```
//!
//! Each round makes all the calls once; the pattern chooses among them: `vmalloc`, `vfree`, `vmap`,
//! `vunmap`, `ioremap`, `iounmap`.
//!
//! Arguments: ITERATIONS (100), KIND (base; huge, and for vmap: order0, order4, order8), ARCH
//! (x86-64), REACH (table; page).

use std::error::Error;

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use bindery::arch::MemoryType;
use bindery::{KernelMap, Reach, UnmapTime, VmallocOptions, VmapOptions};
use bindery_hosted::{ArchitectureName, Config, Machine, TlbKind, Visitor, Walk, dispatch};

const SIZE: u64 = 1 << 20;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The loop, for an architecture known by name.
struct Loop {
    iterations: u64,
    kind: String,
    reach: Reach,
}

impl Visitor for Loop {
    type Output = Result<()>;

    fn visit<A: Walk>(self) -> Result<()> {
        let machine = Machine::<A>::new(Config { tlb: TlbKind::Plain, ..Config::default() });
        let memory = machine.memory()?;
        // Only base pages, unless the caller chooses other folios.
        memory.folio_policy().set_global(bindery::SizeMode::Never);
        memory.trim();
        let start = VirtAddr(!0 << (11 + 9 * u32::from(A::LEVELS)));
        let arena = VirtRange::from_len(start, 1 << 34).ok_or("no arena")?;
        let map = KernelMap::with_reach(&memory, arena, self.reach)?;
        map.set_purge_limit(8192);
        let options = match self.kind.as_str() {
            "huge" => VmallocOptions::huge(),
            _ => VmallocOptions::default(),
        };
        let pages = list(&map, &self.kind)?;
        for _ in 0..self.iterations {
            let at = map.vmalloc(SIZE, &options)?;
            // SAFETY: 1. made above; 2. and 3. nothing uses it.
            unsafe { map.vfree(at) }?;
        }
        map.purge();
        for _ in 0..self.iterations {
            let at = map.vmap(&pages, &VmapOptions::default())?;
            // SAFETY: 1. made above; 2. nothing uses it.
            unsafe { map.vunmap(at, UnmapTime::Later) }?;
        }
        map.purge();
        for _ in 0..self.iterations {
            let at = map.ioremap(PhysAddr(0x3_0000_0000), SIZE, MemoryType::Device)?;
            // SAFETY: 1. made above; 2. nothing uses it.
            unsafe { map.iounmap(at) }?;
        }
        println!("{:?}", map.counts());
        Ok(())
    }
}

/// Frames of 1 MiB, in pieces of the kind's order, no two of them adjacent.
fn list<A: Walk>(map: &KernelMap<'_, Machine<A>>, kind: &str) -> Result<Vec<Frame>> {
    let order = match kind {
        "order4" => 4,
        "order8" => 8,
        _ => 0,
    };
    let area = map.vmalloc(2 * SIZE, &VmallocOptions::huge())?;
    let mut pages = Vec::new();
    for page in 0..2 * SIZE / PAGE_SIZE {
        if page >> order & 1 == 0 {
            let at = map.physical(VirtAddr(area.0 + page * PAGE_SIZE)).ok_or("not mapped")?;
            pages.push(Frame((at.0 / PAGE_SIZE) as u32));
        }
    }
    Ok(pages)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |position: usize, default: &'static str| {
        arguments.get(position).map_or(default, String::as_str)
    };
    let what = Loop {
        iterations: argument(0, "100").parse()?,
        kind: argument(1, "base").to_owned(),
        reach: if argument(3, "table") == "page" { Reach::Page } else { Reach::Table },
    };
    dispatch(argument(2, "x86-64").parse::<ArchitectureName>()?, what)
}
