//! The loop of system 1, to count the instructions of a call:
//!
//! ```text
//! cargo build --release -p bindery-cli --example mremap_loop
//! valgrind --tool=callgrind --callgrind-out-file=callgrind.out \
//!     --toggle-collect='*AddressSpace*::mremap' target/release/examples/mremap_loop 100 64k
//! callgrind_annotate --inclusive=yes --auto=no callgrind.out
//! ```
//!
//! "Collected" divided by the iterations is the cost of one call of `AddressSpace::mremap`. That
//! cost includes the hosted machine's invalidation, whose share is shown in the line of
//! `machine.rs` that ends with `Platform>::invalidate`. For another call replace the name `mremap`:
//! `mmap`, `fault`, `munmap`.
//!
//! Arguments: ITERATIONS (100), FOLIO (64k; 4k to 2m), REACH (table; page, folio), ARCH (x86-64),
//! DISTANCE in KiB that the mapping moves by (1024).

use std::error::Error;

use bindery::addr::{Order, VirtAddr};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Counts, MapRequest, Place, Protection, Reach, Remap, Resolved, SizeMode,
    SpaceOptions,
};
use bindery_hosted::{ArchitectureName, Config, Machine, TlbKind, Visitor, Walk, dispatch};

const SOURCE: VirtAddr = VirtAddr(1 << 30);
const LENGTH: u64 = 1 << 20;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The loop, for an architecture known by name.
struct Loop {
    iterations: u64,
    order: u8,
    reach: Reach,
    target: VirtAddr,
}

impl Visitor for Loop {
    type Output = Result<()>;

    fn visit<A: Walk>(self) -> Result<()> {
        let config = Config { tlb: TlbKind::Plain, ..Config::default() };
        let machine = Machine::<A>::new(config);
        let memory = machine.memory().map_err(|error| format!("{error:?}"))?;
        // Only base pages, unless the caller chooses.
        memory.folio_policy().set_global(bindery::SizeMode::Never);
        if self.order > 0 {
            memory.folio_policy().set(Order(self.order), SizeMode::Always);
        }
        let _on_cpu = machine.bind(Cpu(0));
        let space = AddressSpace::with_reach(&memory, SpaceOptions::default(), self.reach)?;
        space.enter();
        let mut moves = Counts::default();
        for _ in 0..self.iterations {
            moves += once(&space, self.target)?;
        }
        println!(
            "{} calls of mremap: {} entries read, {} written, {} invalidations",
            self.iterations, moves.entries_read, moves.entries_written, moves.invalidations
        );
        Ok(())
    }
}

/// Maps, touches, moves and unmaps; returns what the move counted.
fn once<A: Walk>(space: &AddressSpace<'_, Machine<A>>, target: VirtAddr) -> Result<Counts> {
    let protection = Protection::READ | Protection::WRITE;
    space.mmap(&MapRequest {
        length: LENGTH,
        protection,
        place: Place::Fixed(SOURCE),
        ..MapRequest::default()
    })?;
    let mut at = SOURCE;
    while at.0 < SOURCE.0 + LENGTH {
        at = match space.fault(at, Access::Write)? {
            Resolved::New(range) => range.end(),
            other => return Err(format!("a first touch at {at} found {other:?}").into()),
        };
    }
    let before = space.counts();
    space.mremap(SOURCE, LENGTH, LENGTH, Remap::To(target))?;
    let moved = space.counts() - before;
    space.munmap(target, LENGTH)?;
    Ok(moved)
}

fn order(folio: &str) -> Result<u8> {
    const SIZES: [&str; 10] = ["4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1m", "2m"];
    let order = SIZES.iter().position(|size| *size == folio);
    let order = order.ok_or_else(|| format!("{folio:?} is none of {}", SIZES.join(", ")))?;
    Ok(order as u8)
}

fn reach(name: &str) -> Result<Reach> {
    match name {
        "page" => Ok(Reach::Page),
        "folio" => Ok(Reach::Folio),
        "table" => Ok(Reach::Table),
        _ => Err(format!("{name:?} is none of page, folio, table").into()),
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |position: usize, default: &'static str| {
        arguments.get(position).map_or(default, String::as_str)
    };
    let distance = argument(4, "1024").parse::<u64>()? << 10;
    let what = Loop {
        iterations: argument(0, "100").parse()?,
        order: order(argument(1, "64k"))?,
        reach: reach(argument(2, "table"))?,
        target: VirtAddr(SOURCE.0 + distance),
    };
    dispatch(argument(3, "x86-64").parse::<ArchitectureName>()?, what)
}
