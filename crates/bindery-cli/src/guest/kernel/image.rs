//! A flat image: the bytes of an ELF file as they lie in physical memory.
//!
//! QEMU hands the device tree, the initial file system and the command line to an AArch64 kernel
//! only if the kernel is a flat image with the header of Linux's boot protocol. Our kernel has this
//! header at its lowest address.
//!
//! ```text
//! segment 1            segment 2
//! |--- file ---|       |-- file --|..zero..|      physical addresses
//! |------------|0000000|----------|               the image
//! ```

use object::elf::{FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, elf::ProgramHeader64};

use super::no_elf;
use crate::guest::Problem;

/// The maximum size. A larger image means an error in the linker script, a gap between physical
/// addresses.
const MAXIMUM: u64 = 256 << 20;

/// Makes the flat image of an ELF file.
///
/// # Errors
/// If the bytes are not a 64-bit ELF file with segments to load, or the segments are far apart.
pub fn flat(elf: &[u8]) -> Result<Vec<u8>, Problem> {
    let header = FileHeader64::<Endianness>::parse(elf).map_err(no_elf)?;
    let endian = header.endian().map_err(no_elf)?;
    let segments: Vec<&ProgramHeader64<Endianness>> = header
        .program_headers(endian, elf)
        .map_err(no_elf)?
        .iter()
        .filter(|segment| segment.p_type(endian) == PT_LOAD && segment.p_filesz(endian) != 0)
        .collect();
    let start = segments.iter().map(|segment| segment.p_paddr(endian)).min();
    let start = start.ok_or_else(|| {
        Problem::Failed(
            "the kernel's ELF file has no segment to load: check the linker script in \
             crates/bindery-kernel/link"
                .to_owned(),
        )
    })?;
    let mut image = Vec::new();
    for segment in segments {
        let offset = segment.p_paddr(endian) - start;
        let bytes = segment.data(endian, elf).map_err(|()| {
            Problem::Failed(
                "the kernel's ELF file ends within a segment; remove target/kernel and try again"
                    .to_owned(),
            )
        })?;
        if offset > MAXIMUM {
            return Err(Problem::Failed(format!(
                "the kernel's segments lie {offset:#x} bytes apart in physical memory, and at most \
                 {MAXIMUM:#x} are allowed: check the linker script in crates/bindery-kernel/link"
            )));
        }
        let begin = offset as usize;
        let end = begin + bytes.len();
        if image.len() < end {
            image.resize(end, 0);
        }
        image[begin..end].copy_from_slice(bytes);
    }
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with one segment for each (physical address, bytes), and a bss behind the last
    /// one.
    fn elf(segments: &[(u64, &[u8])]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut writer = object::write::elf::Writer::new(Endianness::Little, true, &mut file);
        writer.reserve_file_header();
        writer.reserve_program_headers(segments.len() as u32);
        let offsets: Vec<u64> =
            segments.iter().map(|(_, bytes)| writer.reserve(bytes.len() as u64, 1)).collect();
        writer
            .write_file_header(&object::write::elf::FileHeader {
                os_abi: object::elf::OsAbi(0),
                abi_version: 0,
                e_type: object::elf::ET_EXEC,
                e_machine: object::elf::EM_AARCH64,
                e_entry: 0,
                e_flags: object::elf::FileFlags(0),
            })
            .unwrap();
        writer.write_align_program_headers();
        for ((address, bytes), offset) in segments.iter().zip(&offsets) {
            writer.write_program_header(&object::write::elf::ProgramHeader {
                p_type: PT_LOAD,
                p_flags: object::elf::ProgramFlags(0),
                p_offset: *offset,
                p_vaddr: address | 0xffff_0000_0000_0000,
                p_paddr: *address,
                p_filesz: bytes.len() as u64,
                p_memsz: bytes.len() as u64 + 16,
                p_align: 1,
            });
        }
        for (_, bytes) in segments {
            writer.write(bytes);
        }
        file
    }

    #[test]
    fn segments_are_at_their_addresses_with_zeros_between() {
        let file = elf(&[(0x4020_0008, b"second"), (0x4020_0000, b"first")]);
        assert_eq!(flat(&file).unwrap(), b"first\0\0\0second");
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        assert!(flat(b"").is_err() && flat(b"#!/bin/sh").is_err());
        let problem = flat(&elf(&[])).unwrap_err().to_string();
        assert!(problem.contains("no segment to load"), "{problem}");
        let file = elf(&[(0x4020_0000, b"first"), (0xffff_0000_4020_0000, b"far")]);
        let problem = flat(&file).unwrap_err().to_string();
        assert!(problem.contains("apart"), "{problem}");
        let mut file = elf(&[(0, b"cut off")]);
        file.truncate(file.len() - 3);
        let problem = flat(&file).unwrap_err().to_string();
        assert!(problem.contains("within a segment"), "{problem}");
    }
}
