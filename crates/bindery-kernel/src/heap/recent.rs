//! The blocks that each CPU has freed last, for its next allocations of the same layout.
//!
//! Otherwise two CPUs that create processes would hand each other the same memory: each process and
//! thread is a hundred cache lines that the other CPU has written last. As long as only the first
//! CPU runs threads, blocks go to the heap at once.

use core::alloc::Layout;
use core::mem;
use core::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::sync::Mutex;
use crate::{arch, kernel_lock};

/// The most blocks of a CPU, and their most bytes.
const MOST: usize = 32;
const MOST_BYTES: usize = 32 << 10;
/// The largest block that is kept, in bytes.
const LARGEST: usize = 8 << 10;

/// A free block, as it was allocated.
pub struct Block {
    pub start: NonNull<u8>,
    pub layout: Layout,
}

// SAFETY: no other code has the address of a free block.
unsafe impl Send for Block {}

/// The blocks of one CPU, oldest first.
struct Blocks {
    blocks: ArrayVec<Block, MOST>,
    bytes: usize,
}

impl Blocks {
    const NONE: Self = Self { blocks: ArrayVec::new_const(), bytes: 0 };

    fn remove(&mut self, at: usize) -> Block {
        let block = self.blocks.remove(at);
        self.bytes -= block.layout.size();
        block
    }
}

/// On cache lines of its own.
#[repr(align(128))]
struct Recent(Mutex<Blocks>);

static RECENT: [Recent; kernel_lock::MOST_CPUS] =
    [const { Recent(Mutex::new(Blocks::NONE)) }; kernel_lock::MOST_CPUS];

/// The blocks of the caller's CPU, if several CPUs run threads and such blocks are kept. Nothing
/// preempts the caller or interrupts it.
#[inline]
fn own(layout: Layout) -> Option<&'static Mutex<Blocks>> {
    let keeps = kernel_lock::is_used() && layout.size() <= LARGEST;
    let recent = if keeps { RECENT.get(usize::from(arch::cpu())) } else { None };
    recent.map(|recent| &recent.0)
}

/// A block that the CPU has freed.
#[inline]
pub fn take(layout: Layout) -> Option<NonNull<u8>> {
    let mut recent = own(layout)?.lock();
    let found = recent.blocks.iter().rposition(|block| block.layout == layout)?;
    Some(recent.remove(found).start)
}

/// Keeps a block. Passes the blocks that have no place to `give`, which takes the heap's lock.
#[inline]
pub fn put(block: Block, mut give: impl FnMut(Block)) {
    let Some(own) = own(block.layout) else { return give(block) };
    let mut recent = own.lock();
    while recent.blocks.is_full() || recent.bytes + block.layout.size() > MOST_BYTES {
        let oldest = recent.remove(0);
        give(oldest);
    }
    recent.bytes += block.layout.size();
    recent.blocks.push(block);
}

/// Passes the blocks of all CPUs to `give`, which takes the heap's lock. Returns whether there were
/// any.
#[cold]
pub fn drain(mut give: impl FnMut(Block)) -> bool {
    let mut found = false;
    for cpu in &RECENT {
        let recent = mem::replace(&mut *cpu.0.lock(), Blocks::NONE);
        found |= !recent.blocks.is_empty();
        recent.blocks.into_iter().for_each(&mut give);
    }
    found
}
