//! The properties of a program's code in its note: the section `.note.gnu.property`, which the
//! segment `PT_GNU_PROPERTY` contains (System V ABI for AArch64, "Program property").
//!
//! ```text
//! | length of the name | length of what follows it | kind | "GNU\0" | properties |
//! property: | kind | length | contents, filled up to 8 bytes |
//! ```

use elf::abi::{ELF_NOTE_GNU, GNU_PROPERTY_AARCH64_FEATURE_1_AND, NT_GNU_PROPERTY_TYPE_0};

use crate::errno::Errno;

/// The maximum size of a note in bytes.
pub(super) const LONGEST: u64 = 1024;

/// In `GNU_PROPERTY_AARCH64_FEATURE_1_AND`: all indirect branches end at landing pads.
const LANDING_PADS: u32 = 1;

/// Removes a number from the beginning of `bytes`.
fn word(bytes: &mut &[u8]) -> Result<u32, Errno> {
    let (first, rest) = bytes.split_first_chunk().ok_or(Errno::ENOEXEC)?;
    *bytes = rest;
    Ok(u32::from_le_bytes(*first))
}

/// Removes `length` bytes from the beginning.
fn part<'a>(bytes: &mut &'a [u8], length: usize) -> Result<&'a [u8], Errno> {
    let (first, rest) = bytes.split_at_checked(length).ok_or(Errno::ENOEXEC)?;
    *bytes = rest;
    Ok(first)
}

/// Whether a program with this note may be mapped with `PROT_BTI`.
///
/// # Errors
/// `ENOEXEC`: the note is malformed.
pub(super) fn has_landing_pads(mut note: &[u8]) -> Result<bool, Errno> {
    let (name, length, kind) = (word(&mut note)?, word(&mut note)?, word(&mut note)?);
    let is_ours = name as usize == ELF_NOTE_GNU.len() && u64::from(kind) == NT_GNU_PROPERTY_TYPE_0;
    if !is_ours || part(&mut note, ELF_NOTE_GNU.len())? != ELF_NOTE_GNU {
        return Err(Errno::ENOEXEC);
    }
    let mut properties = part(&mut note, length as usize)?;
    let mut previous = None;
    let mut found = false;
    while !properties.is_empty() {
        let (kind, length) = (word(&mut properties)?, word(&mut properties)? as usize);
        // Each property type occurs once, in rising order.
        if previous.is_some_and(|previous| kind <= previous) {
            return Err(Errno::ENOEXEC);
        }
        previous = Some(kind);
        let mut contents = part(&mut properties, length.next_multiple_of(8))?;
        if kind == GNU_PROPERTY_AARCH64_FEATURE_1_AND {
            if length != size_of::<u32>() {
                return Err(Errno::ENOEXEC);
            }
            found = word(&mut contents)? & LANDING_PADS != 0;
        }
    }
    Ok(found)
}
