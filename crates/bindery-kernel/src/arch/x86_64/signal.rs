//! Signal frames in the format that C libraries, debuggers and unwinders expect (`struct
//! rt_sigframe` of the Linux ABI for x86-64, `ucontext_t` and `mcontext_t` of the C libraries).
//!
//! ```text
//!   stack to use
//!   [128 bytes that the program may use below its stack pointer]
//!   floating-point image, aligned to 64, with the rights to protection keys
//!   Frame: return address, ucontext, siginfo         so that the address of the return address
//!   ^ stack pointer of the handler                   plus 8 is a multiple of 16
//! ```
//! A program may forge the frame with which it returns. Every value ends in a register that the
//! program could have loaded itself.

use core::mem::{offset_of, size_of};

use bindery::arch::KeyRights;

use crate::arch::delivery::Delivery;
use crate::errno::Errno;
use crate::user::{self, Plain};

use super::floating_point::{self, FloatingPoint, LEGACY_SIZE};
use super::per_cpu::{USER_CODE, USER_DATA};
use super::protection_keys;
use super::registers::Registers;

/// `struct sigcontext`, the C libraries' `mcontext_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct MachineContext {
    r8: u64,
    r9: u64,
    r10: u64,
    r11: u64,
    r12: u64,
    r13: u64,
    r14: u64,
    r15: u64,
    rdi: u64,
    rsi: u64,
    rbp: u64,
    rbx: u64,
    rdx: u64,
    rax: u64,
    rcx: u64,
    rsp: u64,
    rip: u64,
    flags: u64,
    cs: u16,
    gs: u16,
    fs: u16,
    ss: u16,
    error: u64,
    vector: u64,
    old_mask: u64,
    cr2: u64,
    floating_point: u64,
    reserved: [u64; 8],
}

/// `struct rt_sigframe`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Frame {
    return_address: u64,
    flags: u64,
    link: u64,
    stack_base: u64,
    stack_flags: u32,
    padding: u32,
    stack_size: u64,
    machine: MachineContext,
    mask: u64,
    information: [u8; 128],
}

const _: () = assert!(size_of::<Frame>() == 440 && offset_of!(Frame, machine) == 48);

// SAFETY: only numbers, without padding between them.
unsafe impl Plain for Frame {}

/// The red zone: bytes below its stack pointer that the program may use.
const RED_ZONE: u64 = 128;

/// `uc_flags`: the image is in `XSAVE` format; the stack segment is saved and restored strictly.
const HAS_HEADER: u64 = 1;
const STACK_SEGMENT: u64 = 6;

/// The words at the end of the legacy image that describe the state behind it (`struct
/// _fpx_sw_bytes`), and the word behind the whole image.
#[derive(Clone, Copy)]
#[repr(C)]
struct Description {
    magic: u32,
    extended_size: u32,
    parts: u64,
    size: u32,
    reserved: [u32; 7],
}

// SAFETY: only numbers, without padding between them.
unsafe impl Plain for Description {}

const DESCRIPTION: usize = LEGACY_SIZE - size_of::<Description>();
const MAGIC: u32 = 0x4650_5853;
const END_MAGIC: u32 = 0x4650_5845;

/// The flags that a program may change: carry, parity, adjust, zero, sign, trap, direction,
/// overflow, resume, alignment check.
const CHANGEABLE: u64 = 0x0005_0dd5;

/// Builds the frame on the program's stack and sets the registers so that the handler runs.
/// Floating-point state and rights to protection keys get their initial values. So key 0 must allow
/// the handler's stack, as on Linux.
///
/// # Errors
/// `EFAULT` if the stack cannot be written, if the alternate stack has no room for the frame, or if
/// there is no return address.
pub fn push(
    registers: &mut Registers,
    floating_point: &FloatingPoint,
    delivery: &Delivery,
) -> Result<(), Errno> {
    with_all_keys(|| push_frame(registers, floating_point, delivery))
}

/// Writes or reads a frame with full rights to all keys, because the thread's rights do not apply,
/// as on Linux. `work` sets the rights anew, unless it fails.
fn with_all_keys<T>(work: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let rights = protection_keys::key_rights();
    protection_keys::set_key_rights(KeyRights::ALL);
    work().inspect_err(|_| protection_keys::set_key_rights(rights))
}

#[inline(never)]
fn push_frame(
    registers: &mut Registers,
    floating_point: &FloatingPoint,
    delivery: &Delivery,
) -> Result<(), Errno> {
    if delivery.restorer == 0 {
        return Err(Errno::EFAULT);
    }
    let own = delivery.stack == registers.rsp;
    let top = delivery.stack.checked_sub(if own { RED_ZONE } else { 0 });
    let image = floating_point.image();
    let size = image_size();
    let end = if floating_point::has_header() { size_of::<u32>() } else { 0 };
    let image_at =
        top.and_then(|top| top.checked_sub((size + end) as u64)).ok_or(Errno::EFAULT)? & !63;
    let below = image_at.checked_sub(size_of::<Frame>() as u64 + 16).ok_or(Errno::EFAULT)?;
    let at = (below & !15) + 8;
    let (base, _, stack_size) = delivery.alternate;
    let is_within = |above: u64| above > 0 && above <= stack_size;
    if delivery.on_alternate && !at.checked_sub(base).is_some_and(is_within) {
        return Err(Errno::EFAULT);
    }

    user::write_bytes(image_at, image)?;
    if floating_point::has_header() {
        let description = Description {
            magic: MAGIC,
            extended_size: (size + end) as u32,
            parts: image_parts(),
            size: size as u32,
            reserved: [0; 7],
        };
        user::write(image_at + DESCRIPTION as u64, &description)?;
        user::write(image_at + size as u64, &END_MAGIC)?;
        if let Some((offset, _)) = protection_keys::place() {
            let parts = floating_point.present_parts() | protection_keys::PART;
            user::write(image_at + LEGACY_SIZE as u64, &parts)?;
            user::write(image_at + offset as u64, &u64::from(floating_point.key_rights.0))?;
        }
    }
    let header = if floating_point::has_header() { HAS_HEADER } else { 0 };
    user::write(
        at,
        &Frame {
            return_address: delivery.restorer,
            flags: header | STACK_SEGMENT,
            link: 0,
            stack_base: delivery.alternate.0,
            stack_flags: delivery.alternate.1,
            padding: 0,
            stack_size: delivery.alternate.2,
            machine: machine_context(registers, delivery, image_at),
            mask: delivery.mask,
            information: if delivery.with_information { delivery.information } else { [0; 128] },
        },
    )?;

    registers.forget_cause();
    registers.set_program_counter(delivery.handler);
    registers.rsp = at;
    registers.rax = 0;
    registers.rdi = u64::from(delivery.signal);
    registers.rsi = at + offset_of!(Frame, information) as u64;
    registers.rdx = at + offset_of!(Frame, flags) as u64;
    // Direction and trap are cleared, because the handler starts with the flags of any function.
    registers.flags &= !(1 << 10 | 1 << 8 | 1 << 16);
    let initial = FloatingPoint::new();
    initial.restore_image();
    protection_keys::set_key_rights(initial.key_rights);
    Ok(())
}

fn machine_context(registers: &Registers, delivery: &Delivery, image: u64) -> MachineContext {
    // An exception's own number and code; other signals have none.
    let (vector, error) =
        if registers.vector < 32 { (registers.vector, registers.error) } else { (0, 0) };
    MachineContext {
        r8: registers.r8,
        r9: registers.r9,
        r10: registers.r10,
        r11: registers.r11,
        r12: registers.r12,
        r13: registers.r13,
        r14: registers.r14,
        r15: registers.r15,
        rdi: registers.rdi,
        rsi: registers.rsi,
        rbp: registers.rbp,
        rbx: registers.rbx,
        rdx: registers.rdx,
        rax: registers.rax,
        rcx: registers.rcx,
        rsp: registers.rsp,
        rip: registers.rip,
        flags: registers.flags,
        cs: USER_CODE,
        ss: USER_DATA,
        error,
        vector,
        old_mask: delivery.mask,
        cr2: delivery.fault,
        floating_point: image,
        ..MachineContext::default()
    }
}

/// Restores a frame (`rt_sigreturn`): registers and floating-point state. Returns the mask, and
/// base, flags and size of the alternate stack.
///
/// # Errors
/// `EFAULT` if no frame can be read.
pub fn pop(registers: &mut Registers) -> Result<(u64, (u64, u32, u64)), Errno> {
    with_all_keys(|| pop_frame(registers))
}

#[inline(never)]
fn pop_frame(registers: &mut Registers) -> Result<(u64, (u64, u32, u64)), Errno> {
    // The handler's return popped the return address.
    let frame: Frame = user::read(registers.rsp.wrapping_sub(8))?;
    let machine = &frame.machine;
    let floating_point = match machine.floating_point {
        0 => FloatingPoint::new(),
        at => read_image(at)?,
    };
    floating_point.restore_image();
    protection_keys::set_key_rights(floating_point.key_rights);
    let flags = registers.flags & !CHANGEABLE | machine.flags & CHANGEABLE;
    *registers = Registers {
        r15: machine.r15,
        r14: machine.r14,
        r13: machine.r13,
        r12: machine.r12,
        rbp: machine.rbp,
        rbx: machine.rbx,
        r11: machine.r11,
        r10: machine.r10,
        r9: machine.r9,
        r8: machine.r8,
        rax: machine.rax,
        rcx: machine.rcx,
        rdx: machine.rdx,
        rsi: machine.rsi,
        rdi: machine.rdi,
        flags,
        // Code and stack segment are always those of a program.
        ..Registers::new(machine.rip, machine.rsp)
    };
    registers.flags = flags;
    Ok((frame.mask, (frame.stack_base, frame.stack_flags, frame.stack_size)))
}

/// Reads a floating-point image: all of it if its description is valid, otherwise only the legacy
/// part.
fn read_image(at: u64) -> Result<FloatingPoint, Errno> {
    let mut bytes = [0; floating_point::MOST];
    let size = image_size();
    let described = floating_point::has_header() && {
        let description: Description =
            user::read(at.checked_add(DESCRIPTION as u64).ok_or(Errno::EFAULT)?)?;
        description.magic == MAGIC
            && description.size as usize == size
            && description.extended_size as usize == size + size_of::<u32>()
            && at.checked_add(size as u64).is_some_and(|end| user::read(end) == Ok(END_MAGIC))
    };
    let used = if described { floating_point::size() } else { LEGACY_SIZE };
    user::read_bytes(at, &mut bytes[..used])?;
    let parts = described.then(floating_point::parts);
    let mut image = FloatingPoint::from_program(&bytes[..used], parts);
    image.key_rights = match protection_keys::place() {
        Some((offset, _)) if described && given_parts(&bytes) & protection_keys::PART != 0 => {
            KeyRights(user::read(at + offset as u64)?)
        }
        // Components that an image lacks get their initial values.
        _ => KeyRights::ALL,
    };
    Ok(image)
}

/// The components that an image claims to have.
fn given_parts(bytes: &[u8; floating_point::MOST]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[LEGACY_SIZE..][..8]);
    u64::from_le_bytes(word)
}

/// The number of meaningful bytes in a frame's image. The gap between the floating-point state and
/// the rights to keys is never written or read.
fn image_size() -> usize {
    protection_keys::place().map_or(floating_point::size(), |(_, end)| end)
}

/// The components that a frame's image can have.
fn image_parts() -> u64 {
    let keys = protection_keys::place().map_or(0, |_| protection_keys::PART);
    floating_point::parts() | keys
}
