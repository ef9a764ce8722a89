//! `/dev/fb0`: a frame buffer. No screen shows it. Programs map it as they map any device's memory.
//! This is the embedder's side of [`bindery::FrameSource`].

use alloc::sync::Arc;

use bindery::addr::{Order, PAGE_SIZE};
use bindery::arch::MemoryType;
use bindery::{FramePiece, FrameSource, Object, Platform};
use spin::Once;

use crate::errno::{Errno, Outcome};
use crate::memory::memory;
use crate::platform::Machine;
use crate::user;

use super::attributes::{Attributes, Kind};
use super::node::Node;

/// The device number, as on Linux.
const NUMBER: (u32, u32) = (29, 0);
/// Pixels of a line.
const WIDTH: u32 = 800;
/// Lines.
const HEIGHT: u32 = 600;
/// Bytes of a pixel.
const PIXEL: u32 = 4;
/// Bytes of a line.
const LINE: u32 = WIDTH * PIXEL;
/// The size in bytes, in whole pages.
const SIZE: u64 = ((LINE * HEIGHT) as u64).next_multiple_of(PAGE_SIZE);
/// The size of its block of frames: 2 MiB.
const ORDER: Order = Order(9);
const _: () = assert!(SIZE <= ORDER.pages() as u64 * PAGE_SIZE);

/// `FBIOGET_VSCREENINFO`, a request of `ioctl`.
const GET_VARIABLE: u32 = 0x4600;
/// `FBIOGET_FSCREENINFO`.
const GET_FIXED: u32 = 0x4602;

/// The block, allocated by the first opening. The content is preserved, as in a device's memory.
static BLOCK: Once<FramePiece> = Once::new();

/// The source of the device's frames.
struct Frames;

// SAFETY: 1. the kernel itself neither reads nor writes the block after `BLOCK` has it. 2. `end`
// frees the block once no object that uses it is left.
unsafe impl FrameSource for Frames {
    fn piece(&self, page: u64) -> Option<FramePiece> {
        BLOCK.get().copied().filter(|block| block.frame_of(page).is_some())
    }
}

/// Allocates the block, unless an earlier opening did.
///
/// # Errors
/// `ENOMEM`.
fn allocate() -> Result<(), Errno> {
    let make = || {
        let frames = memory().allocate_frames(ORDER).or_else(|| {
            // Tables that wait for a grace period may lie in all large blocks.
            memory().drain_deferred();
            memory().allocate_frames(ORDER)
        });
        let frames = frames.ok_or(Errno::ENOMEM)?;
        // Programs see the whole block.
        Machine.zero(frames.first, frames.count);
        Ok(FramePiece { page: 0, frames })
    };
    BLOCK.try_call_once(make).map(|_| ())
}

/// Frees the block when the machine ends. By then neither an address space nor a file uses the
/// block.
///
/// # Panics
/// If a program still maps the block.
pub fn end() {
    let Some(block) = BLOCK.get() else { return };
    // SAFETY: 1. `allocate` allocated them; 2. the tables that referred to them no longer exist.
    let freed = unsafe { memory().free_frames(block.frames) };
    assert!(freed, "the frame buffer is counted as mapped, although no address space is left");
}

/// The node.
pub struct Device(Object<'static, Machine>);

impl Device {
    /// `/dev/fb0`, which has no frames until it is opened.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new() -> Result<Arc<Self>, Errno> {
        // The direct map is normal memory, and private mappings copy from the direct map.
        let object = memory().frame_object(&Frames, SIZE, MemoryType::Normal);
        Ok(Arc::new(Self(object.map_err(|_| Errno::ENOMEM)?)))
    }
}

impl Node for Device {
    fn kind(&self) -> Kind {
        Kind::Device
    }

    fn attributes(&self) -> Attributes {
        Attributes { device: NUMBER, ..Attributes::plain(self.0.identity(), 0o660) }
    }

    fn open(&self, _flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        allocate()?;
        Ok(None)
    }

    fn object(&self) -> Option<&Object<'static, Machine>> {
        Some(&self.0)
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        match request {
            GET_VARIABLE => user::write(argument, &variable())?,
            GET_FIXED => user::write(argument, &fixed())?,
            _ => return Err(Errno::ENOTTY),
        }
        Ok(0)
    }
}

/// `struct fb_var_screeninfo`: the sizes, the depth, and the places of red, green and blue.
fn variable() -> [u32; 40] {
    let mut words = [0; 40];
    words[..4].copy_from_slice(&[WIDTH, HEIGHT, WIDTH, HEIGHT]);
    words[6] = 8 * PIXEL;
    for (at, shift) in [(8, 16), (11, 8), (14, 0)] {
        words[at..at + 2].copy_from_slice(&[shift, 8]);
    }
    words
}

/// `struct fb_fix_screeninfo`: the name, the bytes, true color, and the bytes of a line.
fn fixed() -> [u32; 20] {
    let mut words = [0; 20];
    words[..2].copy_from_slice(&[u32::from_ne_bytes(*b"bind"), u32::from_ne_bytes(*b"ery\0")]);
    words[6] = SIZE as u32;
    words[9] = 2;
    words[12] = LINE;
    words
}
