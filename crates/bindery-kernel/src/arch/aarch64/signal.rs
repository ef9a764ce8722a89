//! Signal frames in the format that C libraries expect (Linux,
//! arch/arm64/include/uapi/asm/sigcontext.h and ucontext.h).
//!
//! ```text
//! lower addresses, the stack pointer of the handler
//! | siginfo_t, 128 bytes | ucontext_t: stack, mask, registers, 4 KiB of records | x29, x30 |
//! ```
//! The last two words are a frame record, so that backtraces continue past the handler.

use crate::arch::delivery::Delivery;
use crate::errno::Errno;
use crate::user::{self, Plain};

use super::{FloatingPoint, Registers, branch_target_identification};

/// `mov x8, #139; svc #0`: `rt_sigreturn`. A handler returns here if the C library names no
/// address; glibc names none. Mapped into every program.
pub const TRAMPOLINE: [u8; 8] = [0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];

/// The floating-point record, `struct fpsimd_context`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FloatingPointRecord {
    head: Head,
    status: u32,
    control: u32,
    vectors: [u128; 32],
}

/// The head of each record: its kind and its length.
type Head = [u32; 2];

const FLOATING_POINT: Head = [0x4650_8001, size_of::<FloatingPointRecord>() as u32];
const SYNDROME: Head = [0x4553_5201, 16];
const END: Head = [0, 0];

/// `siginfo_t` and `ucontext_t` up to the records.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Frame {
    information: [u8; 128],
    flags: u64,
    link: u64,
    stack: u64,
    stack_flags: u64,
    stack_size: u64,
    mask: u64,
    unused: [u64; 16],
    fault: u64,
    general: [u64; 31],
    stack_pointer: u64,
    program_counter: u64,
    state: u64,
    padding: u64,
}

/// The records, in the order in which the kernel writes them.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Records {
    floating_point: FloatingPointRecord,
    syndrome_head: Head,
    syndrome: u64,
    end: Head,
    padding: u64,
}

/// The size of the area for records; programs may use all of it.
const RECORDS: u64 = 4096;

const _: () = assert!(size_of::<Frame>() == 128 + 464 && size_of::<FloatingPointRecord>() == 528);

// SAFETY: plain numbers, without gaps.
unsafe impl Plain for Frame {}
// SAFETY: as above.
unsafe impl Plain for Records {}
// SAFETY: as above.
unsafe impl Plain for FloatingPointRecord {}

/// The bits of PSTATE that programs may set: N, Z, C, V, TCO, DIT, SSBS and BTYPE. All other bits
/// are clear in EL0, since EL0 itself is encoded as 0.
const PROGRAMS_STATE: u64 = 0b1111 << 28 | 1 << 25 | 1 << 24 | 1 << 12 | 0b11 << 10;
/// The bits of PSTATE that a handler inherits.
const KEPT_STATE: u64 = 0b1111 << 28 | 1 << 24 | 1 << 12;

/// BTYPE of a call through a register (`BLR`). A handler begins with this BTYPE, so a handler in a
/// guarded page needs a landing pad.
const CALLED: u64 = 0b10 << 10;

/// Builds the frame on the program's stack and sets the registers so that the handler runs.
///
/// # Errors
/// `EFAULT` if the stack cannot be written; nothing is changed then.
pub fn push(
    registers: &mut Registers,
    floating_point: &FloatingPoint,
    delivery: &Delivery,
) -> Result<(), Errno> {
    let top = delivery.stack & !15;
    let record = top.checked_sub(16).ok_or(Errno::EFAULT)?;
    let at = record.checked_sub(size_of::<Frame>() as u64 + RECORDS).ok_or(Errno::EFAULT)?;
    let (stack, stack_flags, stack_size) = delivery.alternate;
    let frame = Frame {
        information: delivery.information,
        flags: 0,
        link: 0,
        stack,
        stack_flags: u64::from(stack_flags),
        stack_size,
        mask: delivery.mask,
        unused: [0; 16],
        fault: delivery.fault,
        general: registers.general,
        stack_pointer: registers.stack_pointer,
        program_counter: registers.program_counter,
        state: registers.state,
        padding: 0,
    };
    let records = Records {
        floating_point: FloatingPointRecord {
            head: FLOATING_POINT,
            status: floating_point.status,
            control: floating_point.control,
            vectors: floating_point.vectors,
        },
        syndrome_head: SYNDROME,
        syndrome: registers.syndrome,
        end: END,
        padding: 0,
    };
    user::write(at, &frame)?;
    user::write(at + size_of::<Frame>() as u64, &records)?;
    user::write(record, &[registers.general[29], registers.general[30]])?;

    registers.general[0] = u64::from(delivery.signal);
    if delivery.with_information {
        registers.general[1] = at;
        registers.general[2] = at + 128;
    }
    registers.general[29] = record;
    registers.general[30] = delivery.restorer;
    registers.stack_pointer = at;
    registers.program_counter = delivery.handler;
    registers.state &= KEPT_STATE;
    if branch_target_identification() {
        registers.state |= CALLED;
    }
    Ok(())
}

/// The mask and the alternate stack (base, flags, size) in a frame.
pub type Restored = (u64, (u64, u32, u64));

/// Restores a frame (`rt_sigreturn`): registers, and floating-point state in the CPU.
///
/// # Errors
/// `EFAULT` if there is no frame, or if a program may not have the frame's state; nothing is
/// changed then.
pub fn pop(registers: &mut Registers) -> Result<Restored, Errno> {
    let at = registers.stack_pointer;
    if !at.is_multiple_of(16) {
        return Err(Errno::EFAULT);
    }
    let frame: Frame = user::read(at)?;
    if frame.state & !PROGRAMS_STATE != 0 {
        return Err(Errno::EFAULT);
    }
    let records = at.checked_add(size_of::<Frame>() as u64).ok_or(Errno::EFAULT)?;
    let floating_point = floating_point_record(records)?;
    registers.general = frame.general;
    registers.stack_pointer = frame.stack_pointer;
    registers.program_counter = frame.program_counter;
    registers.state = frame.state;
    FloatingPoint {
        vectors: floating_point.vectors,
        status: floating_point.status,
        control: floating_point.control,
    }
    .restore();
    Ok((frame.mask, (frame.stack, frame.stack_flags as u32, frame.stack_size)))
}

/// Finds the floating-point record in a frame. Programs may have moved the record or added other
/// records.
fn floating_point_record(records: u64) -> Result<FloatingPointRecord, Errno> {
    let mut offset = 0;
    while offset <= RECORDS - 16 {
        let at = records.checked_add(offset).ok_or(Errno::EFAULT)?;
        match user::read::<Head>(at)? {
            FLOATING_POINT => return user::read(at),
            [_, size] if size >= 16 && size % 16 == 0 => offset += u64::from(size),
            _ => break, // the end, or nonsense
        }
    }
    Err(Errno::EFAULT)
}
