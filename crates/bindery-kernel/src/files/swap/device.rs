//! `/dev/zram0`: a block device in memory. It can be a swap area.
//!
//! An object of the core holds the bytes that programs write to it. Swapped pages lie in the core's
//! compressed memory instead. So the pages behind the header keep the programs' bytes until the
//! device is reset, and they are never swapped out.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::addr::PAGE_SIZE;
use bindery::{Object, SwapArea};
use bindery_linux as linux;
use linux_raw_sys::general::{O_EXCL, O_RDWR};

use crate::errno::{Errno, Outcome, from_raw};
use crate::memory::memory;
use crate::platform::Machine;
use crate::sync::SleepingMutex;
use crate::user;

use super::super::attributes::{Attributes, Kind, Patience};
use super::super::inode::new_number;
use super::super::node::{Node, file_access};
use super::content::DeviceContent;
use super::failing::FAILING;
use super::header;

/// Requests of `ioctl`, see ioctl_list(2).
const BLKGETSIZE: u32 = 0x1260;
const BLKFLSBUF: u32 = 0x1261;
const BLKSSZGET: u32 = 0x1268;
const BLKGETSIZE64: u32 = 2 << 30 | 8 << 16 | 0x12 << 8 | 114;

/// Bytes of a sector.
pub const SECTOR: u64 = 512;

/// Major and minor number.
pub const NUMBER: (u32, u32) = (252, 0);

/// The device's state.
pub struct Disk {
    /// The written bytes, until a reset; `None` until the device has a size.
    pub content: Option<DeviceContent>,
    /// The number of the device's openings.
    opened: u32,
    /// The swap area on the device.
    pub active: Option<Active>,
}

/// A swap area in use.
#[derive(Clone)]
pub struct Active {
    /// To the core.
    pub area: SwapArea,
    /// The path of the device in the call of `swapon`.
    pub path: Vec<u8>,
    /// `swapoff` is in progress.
    pub leaves: bool,
}

/// The only swap device.
pub static DISK: SleepingMutex<Disk> =
    SleepingMutex::new(Disk { content: None, opened: 0, active: None });

impl Disk {
    /// In bytes.
    pub fn size(&self) -> u64 {
        self.content.as_ref().map_or(0, |content| content.size())
    }

    /// Sets the size of the device.
    ///
    /// # Errors
    /// `EBUSY` if it already has a size, `EINVAL` for a size of 0, `ENOMEM`.
    pub fn set_size(&mut self, bytes: u64) -> Result<(), Errno> {
        if self.content.is_some() {
            return Err(Errno::EBUSY);
        }
        let bytes = bytes.checked_next_multiple_of(PAGE_SIZE).filter(|bytes| *bytes > 0);
        self.content = Some(DeviceContent::new(bytes.ok_or(Errno::EINVAL)?)?);
        Ok(())
    }

    /// Removes content and size.
    ///
    /// # Errors
    /// `EBUSY` while it is open or swapped to.
    pub fn reset(&mut self) -> Result<(), Errno> {
        if self.opened > 0 || self.active.is_some() {
            return Err(Errno::EBUSY);
        }
        self.content = None;
        Ok(())
    }

    /// The number of slots in the area that its header describes.
    ///
    /// # Errors
    /// As [`header::slots`].
    pub fn slots(&self) -> Result<u64, Errno> {
        let mut page = [0; header::SIZE];
        let content = self.content.as_ref().ok_or(Errno::EINVAL)?;
        content.read(0, &mut page).map_err(|_| Errno::EIO)?;
        header::slots(&page, self.size() / PAGE_SIZE)
    }

    fn file(&self) -> Option<linux::OpenFile<'static, Machine>> {
        let object = Object::clone(self.content.as_ref()?);
        Some(linux::OpenFile { object, access: file_access(O_RDWR) })
    }
}

/// The node.
pub struct Device {
    number: u64,
}

impl Device {
    /// `/dev/zram0`.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { number: new_number() })
    }
}

impl Node for Device {
    fn kind(&self) -> Kind {
        Kind::Block
    }

    fn attributes(&self) -> Attributes {
        Attributes { device: NUMBER, ..Attributes::plain(self.number, 0o660) }
    }

    fn open(&self, flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        let mut disk = DISK.lock();
        if flags & O_EXCL != 0 && disk.active.is_some() {
            return Err(Errno::EBUSY);
        }
        disk.opened += 1;
        Ok(None)
    }

    fn closed(&self, _: u32) {
        DISK.lock().opened -= 1;
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let file = DISK.lock().file();
        let Some(file) = file else { return Ok(0) };
        let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
        Ok(from_raw(linux::pread(&file, into, at))? as usize)
    }

    fn write(&self, at: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let file = DISK.lock().file();
        let left = file.as_ref().map_or(0, |file| file.object.size().saturating_sub(at));
        let (Some(file), 1..) = (file, left) else { return Err(Errno::ENOSPC) };
        let count = left.min(from.len() as u64) as usize;
        Ok(from_raw(linux::pwrite(&file, &from[..count], at as i64))? as usize)
    }

    fn is_seekable(&self) -> bool {
        true
    }

    fn length(&self) -> u64 {
        DISK.lock().size()
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        let size = self.length();
        match request {
            BLKGETSIZE => user::write(argument, &(size / SECTOR))?,
            BLKGETSIZE64 => user::write(argument, &size)?,
            BLKSSZGET => user::write(argument, &(PAGE_SIZE as u32))?,
            BLKFLSBUF => {}
            _ => return Err(Errno::ENOTTY),
        }
        Ok(0)
    }
}

/// Removes the swap area and frees the content when the machine ends and no address space is left.
pub fn end() {
    let mut disk = DISK.lock();
    if let Some(active) = disk.active.take()
        && let Err(problem) = memory().swap_off(&active.area)
    {
        panic!("the swap area cannot be turned off at the machine's end: {problem:?}");
    }
    FAILING.forget();
    disk.content = None;
}
