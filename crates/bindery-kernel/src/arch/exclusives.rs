//! Atomic instructions on an AArch64 processor that lacks them (before ARMv8.1, without FEAT_LSE).
//!
//! The compiler may use such an instruction anywhere in the kernel. On a processor without them,
//! each one becomes at boot a branch to a loop of an exclusive load and an exclusive store, which
//! branches back. A processor with FEAT_LSE runs the image as it was built. (Arm ARM, C4.1.94
//! "Loads and Stores"; B2.17 "Synchronization and semaphores".)
//!
//! ```text
//!     ldaddal x1, x2, [x3]      b     1f
//!                            1: stp   x0, x4, [sp, #-48]!  // registers that it does not name
//!                               stp   x5, x6, [sp, #16]
//!                               stp   x7, x8, [sp, #32]
//!                            2: ldaxr x0, [x3]
//!                               add   x4, x0, x1
//!                               stlxr w5, x4, [x3]
//!                               cbnz  w5, 2b
//!                               mov   x2, x0
//!                               ldp   x7, x8, [sp, #32]
//!                               ldp   x5, x6, [sp, #16]
//!                               ldp   x0, x4, [sp], #48
//!                               b     the instruction after the first one
//! ```
//!
//! [`replace`] runs before the replacement, so it uses no atomics.

use core::arch::asm;
use core::hint::black_box;
use core::sync::atomic::{
    AtomicI8, AtomicI16, AtomicI32, AtomicI64, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering,
};

/// A reason why a replacement is not possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// There is no room for all loops.
    Room,
    /// An atomic instruction of two words (`CASP`), which no type of Rust needs.
    Pair,
}

/// Replaces the atomic instructions in `code` by branches to loops in `room`. Returns the number of
/// words used in `room`. The caller makes instruction fetches see both.
///
/// # Errors
/// A [`Refusal`]; some instructions may have been replaced.
pub fn replace(code: &mut [u32], room: &mut [u32]) -> Result<usize, Refusal> {
    let mut used = 0;
    for instruction in code {
        let Some(atomic) = Atomic::decode(*instruction)? else { continue };
        let mut writer = Writer { room: &mut room[used..], used: 0 };
        let begin = branch(instruction, writer.next());
        atomic.write_loop(&mut writer)?;
        let next = (&raw mut *instruction).wrapping_add(1);
        writer.push(branch(writer.next(), next))?;
        *instruction = begin;
        used += writer.used;
    }
    Ok(used)
}

/// Words that are written one by one.
struct Writer<'a> {
    room: &'a mut [u32],
    used: usize,
}

impl Writer<'_> {
    fn push(&mut self, word: u32) -> Result<(), Refusal> {
        *self.room.get_mut(self.used).ok_or(Refusal::Room)? = word;
        self.used += 1;
        Ok(())
    }

    /// The address of the next word.
    fn next(&self) -> *const u32 {
        self.room.as_ptr().wrapping_add(self.used)
    }
}

/// The value that an atomic instruction stores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Add,
    Clear,
    ExclusiveOr,
    Set,
    SignedMaximum,
    SignedMinimum,
    UnsignedMaximum,
    UnsignedMinimum,
    Swap,
    CompareAndSwap,
}

impl Operation {
    /// Whether it compares, which changes the flags.
    fn extreme(self) -> Option<Extreme> {
        let (signed, condition) = match self {
            Self::SignedMaximum => (true, 0b1100),    // GT
            Self::SignedMinimum => (true, 0b1011),    // LT
            Self::UnsignedMaximum => (false, 0b1000), // HI
            Self::UnsignedMinimum => (false, 0b0011), // LO
            Self::Add
            | Self::Clear
            | Self::ExclusiveOr
            | Self::Set
            | Self::Swap
            | Self::CompareAndSwap => return None,
        };
        Some(Extreme { signed, condition })
    }
}

/// A maximum or a minimum.
#[derive(Clone, Copy)]
struct Extreme {
    signed: bool,
    /// The condition under which the operand, compared with the old value, is stored.
    condition: u32,
}

/// An atomic instruction.
struct Atomic {
    operation: Operation,
    /// Binary logarithm of the size in bytes.
    size: u32,
    acquire: bool,
    release: bool,
    /// Rs, Rn and Rt.
    operand: u32,
    address: u32,
    target: u32,
}

/// The register that is zero in most positions, and the stack pointer in others.
const ZERO: u32 = 31;
const STACK: u32 = 31;

/// Bytes on the stack: three pairs of registers.
const SAVED: u32 = 48;

/// The registers of a loop, which are saved: those that the instruction does not name.
struct Free {
    old: u32,
    new: u32,
    status: u32,
    /// The address, if it is the stack pointer's.
    address: u32,
    flags: u32,
    /// The operand, extended to a whole register.
    operand: u32,
}

impl Atomic {
    fn decode(word: u32) -> Result<Option<Self>, Refusal> {
        const PAIR: (u32, u32) = (0xbfa0_7c00, 0x0820_7c00);
        const COMPARE: (u32, u32) = (0x3fa0_7c00, 0x08a0_7c00);
        const OTHER: (u32, u32) = (0x3f20_0c00, 0x3820_0000);
        let is = |(mask, value): (u32, u32)| word & mask == value;
        let bit = |position: u32| word >> position & 1 != 0;
        if is(PAIR) {
            return Err(Refusal::Pair);
        }
        let (operation, acquire, release) = if is(COMPARE) {
            (Operation::CompareAndSwap, bit(22), bit(15))
        } else if is(OTHER) {
            let operation = match word >> 12 & 0xf {
                0 => Operation::Add,
                1 => Operation::Clear,
                2 => Operation::ExclusiveOr,
                3 => Operation::Set,
                4 => Operation::SignedMaximum,
                5 => Operation::SignedMinimum,
                6 => Operation::UnsignedMaximum,
                7 => Operation::UnsignedMinimum,
                8 => Operation::Swap,
                // Of other features, which the kernel is not built with.
                _ => return Ok(None),
            };
            (operation, bit(23), bit(22))
        } else {
            return Ok(None);
        };
        Ok(Some(Self {
            operation,
            size: word >> 30,
            acquire,
            release,
            operand: word >> 16 & 0x1f,
            address: word >> 5 & 0x1f,
            target: word & 0x1f,
        }))
    }

    /// Writes the loop without the branch back.
    fn write_loop(&self, to: &mut Writer<'_>) -> Result<(), Refusal> {
        let free = self.free_registers();
        let extreme = self.operation.extreme();
        let address = if self.address == STACK { free.address } else { self.address };
        to.push(store_pair(0xa980_0000, -(SAVED as i32), free.old, free.new))?;
        to.push(store_pair(0xa900_0000, 16, free.status, free.address))?;
        to.push(store_pair(0xa900_0000, 32, free.flags, free.operand))?;
        if self.address == STACK {
            to.push(0x9100_0000 | SAVED << 10 | STACK << 5 | free.address)?;
        }
        if let Some(extreme) = extreme {
            to.push(0xd53b_4200 | free.flags)?; // mrs, nzcv
            to.push(self.extend(extreme.signed, self.operand, free.operand))?;
        }
        let size = self.size << 30;
        let again = to.used;
        let acquire = u32::from(self.acquire) << 15;
        to.push(0x085f_7c00 | size | acquire | address << 5 | free.old)?; // ldxr
        let new = self.write_new(&free, to)?;
        let release = u32::from(self.release) << 15;
        to.push(0x0800_7c00 | size | free.status << 16 | release | address << 5 | new)?; // stxr
        let back = again as i32 - to.used as i32;
        to.push(branch_unless_zero(free.status, back))?;
        if extreme.is_some() {
            to.push(0xd51b_4200 | free.flags)?; // msr, nzcv
        }
        let compares = self.operation == Operation::CompareAndSwap;
        let result = if compares { self.operand } else { self.target };
        to.push(self.data(0x2a00_0000, result, ZERO, free.old))?; // mov
        to.push(store_pair(0xa940_0000, 32, free.flags, free.operand))?;
        to.push(store_pair(0xa940_0000, 16, free.status, free.address))?;
        to.push(store_pair(0xa8c0_0000, SAVED as i32, free.old, free.new))
    }

    /// Writes the instructions that compute the new value. Returns its register.
    fn write_new(&self, free: &Free, to: &mut Writer<'_>) -> Result<u32, Refusal> {
        let operation = |code, left| self.data(code, free.new, left, self.operand);
        match self.operation {
            Operation::Add => to.push(operation(0x0b00_0000, free.old))?,
            Operation::Clear => to.push(operation(0x0a20_0000, free.old))?, // bic
            Operation::ExclusiveOr => to.push(operation(0x4a00_0000, free.old))?,
            Operation::Set => to.push(operation(0x2a00_0000, free.old))?, // orr
            Operation::Swap => to.push(operation(0x2a00_0000, ZERO))?,
            Operation::CompareAndSwap => {
                to.push(operation(0x4a00_0000, free.old))?;
                // The operand's bits above the size do not count.
                to.push(self.extend(false, free.new, free.new))?;
                // Past the store and its branch.
                to.push(branch_unless_zero(free.new, 3))?;
                return Ok(self.target);
            }
            Operation::SignedMaximum
            | Operation::SignedMinimum
            | Operation::UnsignedMaximum
            | Operation::UnsignedMinimum => {
                let Some(extreme) = self.operation.extreme() else { return Ok(free.old) };
                let extended = (u32::from(extreme.signed) << 2 | self.size) << 13;
                let compare = self.data(0x6b20_0000, ZERO, free.operand, free.old);
                to.push(compare | extended)?;
                let select = self.data(0x1a80_0000, free.new, free.operand, free.old);
                to.push(select | extreme.condition << 12)?;
            }
        }
        Ok(free.new)
    }

    fn free_registers(&self) -> Free {
        let named = [self.operand, self.address, self.target];
        let mut number = 0;
        let mut next = || {
            while named.contains(&number) {
                number += 1;
            }
            number += 1;
            number - 1
        };
        Free {
            old: next(),
            new: next(),
            status: next(),
            address: next(),
            flags: next(),
            operand: next(),
        }
    }

    /// Bit 31: 64 bits instead of 32.
    fn width(&self) -> u32 {
        u32::from(self.size == 3) << 31
    }

    /// An instruction on three registers.
    fn data(&self, code: u32, to: u32, left: u32, right: u32) -> u32 {
        code | self.width() | right << 16 | left << 5 | to
    }

    /// `UBFM` or `SBFM`, which extends the lowest bytes of a register to all of it.
    fn extend(&self, signed: bool, from: u32, to: u32) -> u32 {
        let code = if signed { 0x1300_0000 } else { 0x5300_0000 };
        let last_bit = (8 << self.size) - 1;
        code | self.width() | self.width() >> 9 | last_bit << 10 | from << 5 | to
    }
}

/// A load or store of two registers near the stack pointer, `offset` in bytes.
fn store_pair(code: u32, offset: i32, first: u32, second: u32) -> u32 {
    code | (offset as u32 / 8 & 0x7f) << 15 | second << 10 | STACK << 5 | first
}

/// `CBNZ`, `offset` in instructions.
fn branch_unless_zero(register: u32, offset: i32) -> u32 {
    0xb500_0000 | (offset as u32 & 0x7_ffff) << 5 | register
}

/// `B`. The image is smaller than its range of 128 MiB.
fn branch(from: *const u32, to: *const u32) -> u32 {
    let words = (to.addr().wrapping_sub(from.addr()) / size_of::<u32>()) as u32;
    0x1400_0000 | words & 0x3ff_ffff
}

/// Whether operations on atomics of a type return the old value and store the right new one.
macro_rules! is_right {
    ($atomic:ident, $number:ident) => {{
        const VALUES: [$number; 5] = [0, 1, 0x55, $number::MIN, $number::MAX];
        let is_right = |old: $number, operand: $number| {
            let gives = |new: $number, operation: fn(&$atomic, $number) -> $number| {
                let word = $atomic::new(old);
                operation(black_box(&word), operand) == old && word.load(Ordering::Relaxed) == new
            };
            let exchanged = if old == operand { !operand } else { old };
            gives(old.wrapping_add(operand), |word, by| word.fetch_add(by, Ordering::SeqCst))
                && gives(old & operand, |word, by| word.fetch_and(by, Ordering::Acquire))
                && gives(old ^ operand, |word, by| word.fetch_xor(by, Ordering::Release))
                && gives(old | operand, |word, by| word.fetch_or(by, Ordering::Relaxed))
                && gives(old.max(operand), |word, by| word.fetch_max(by, Ordering::SeqCst))
                && gives(old.min(operand), |word, by| word.fetch_min(by, Ordering::Relaxed))
                && gives(operand, |word, by| word.swap(by, Ordering::AcqRel))
                && gives(exchanged, |word, by| {
                    let exchange =
                        word.compare_exchange(by, !by, Ordering::SeqCst, Ordering::Relaxed);
                    exchange.unwrap_or_else(|old| old)
                })
        };
        VALUES.iter().all(|old| VALUES.iter().all(|operand| is_right(*old, *operand)))
    }};
}

/// Whether the loops do what the instructions do, once they have replaced them.
pub fn are_right() -> bool {
    is_right!(AtomicU8, u8)
        && is_right!(AtomicU16, u16)
        && is_right!(AtomicU32, u32)
        && is_right!(AtomicU64, u64)
        && is_right!(AtomicI8, i8)
        && is_right!(AtomicI16, i16)
        && is_right!(AtomicI32, i32)
        && is_right!(AtomicI64, i64)
        && keeps_state()
        && reaches_stack()
}

/// Whether the loop of an instruction that compares leaves the flags and all registers but its
/// target as they were. The loop of this one uses x3 to x8.
fn keeps_state() -> bool {
    let word = AtomicU64::new(7);
    let mut others = [3_u64, 4, 5, 6, 7, 8];
    let [third, fourth, fifth, sixth, seventh, eighth] = &mut others;
    let (operand, old, equal): (u64, u64, u64);
    let address: *mut u64;
    // SAFETY: a maximum of the local word, after a comparison of equal numbers.
    unsafe {
        asm!(
            "cmp xzr, xzr",
            "ldumax x0, x1, [x2]",
            "cset {equal}, eq",
            equal = lateout(reg) equal,
            inout("x0") 9_u64 => operand, out("x1") old, inout("x2") word.as_ptr() => address,
            inout("x3") *third, inout("x4") *fourth, inout("x5") *fifth,
            inout("x6") *sixth, inout("x7") *seventh, inout("x8") *eighth,
        );
    }
    let kept = (operand, address) == (9, word.as_ptr()) && others == [3, 4, 5, 6, 7, 8];
    kept && equal == 1 && old == 7 && word.into_inner() == 9
}

/// Whether a loop finds a word at the stack pointer, which the loop moves.
fn reaches_stack() -> bool {
    let (old, new): (u64, u64);
    // SAFETY: changes two words of the stack that nothing else uses, and frees them.
    unsafe {
        asm!(
            "stp {seven}, xzr, [sp, #-16]!",
            "ldadd {seven}, {old}, [sp]",
            "ldp {new}, xzr, [sp], #16",
            seven = in(reg) 7_u64, old = out(reg) old, new = out(reg) new
        );
    }
    old == 7 && new == 14
}
