//! System calls that only x86-64 has.

use linux_raw_sys::general::__NR_arch_prctl;
use x86_64::VirtAddr;
use x86_64::registers::model_specific::{FsBase, KernelGsBase};

use crate::errno::{Errno, Outcome};
use crate::user;

use super::{USER_END, thread_pointer};

/// `arch_prctl(2)`; `None` for any other number.
pub fn call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    const ARCH_SET_GS: u64 = 0x1001;
    const ARCH_SET_FS: u64 = 0x1002;
    const ARCH_GET_FS: u64 = 0x1003;
    const ARCH_GET_GS: u64 = 0x1004;
    if number != __NR_arch_prctl {
        return None;
    }
    let [operation, address, ..] = arguments;
    let base = || if address < USER_END { Ok(VirtAddr::new(address)) } else { Err(Errno::EPERM) };
    Some(match operation {
        ARCH_SET_FS => base().map(FsBase::write).map(|()| 0),
        // In the kernel, the program's GS base is in the other register (`swapgs`).
        ARCH_SET_GS => base().map(KernelGsBase::write).map(|()| 0),
        ARCH_GET_FS => user::write(address, &thread_pointer()).map(|()| 0),
        ARCH_GET_GS => {
            // SAFETY: as for FS.
            let base: u64 = unsafe { KernelGsBase::MSR.read() };
            user::write(address, &base).map(|()| 0)
        }
        _ => Err(Errno::EINVAL),
    })
}
