//! Modules that come with Debian's Linux, such as its compressed swap device.
//!
//! The package with the kernel's modules is unpacked under `target`, once for each kernel. A module
//! lists the modules that it needs; the host's `xz` decompresses all of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use object::read::{Object, ObjectSection};

use super::module::release;
use crate::guest::{Architecture, Problem, process, workspace};

/// A module of the kernel of [`super::newest`], after all modules that it needs, in loading order.
///
/// # Errors
/// If the package is missing and cannot be fetched, or the kernel has no such module.
pub fn modules(architecture: Architecture, name: &str) -> Result<Vec<PathBuf>, Problem> {
    let release = release(&super::newest(architecture)?)?;
    let directory = workspace::target("guest/modules")?.join(&release);
    if !directory.is_dir() {
        fetch(architecture, &release, &directory)?;
    }
    let mut order = Vec::new();
    add(&directory, name, &mut order)?;
    Ok(order)
}

/// Fetches the package. Unpacks it to another place and renames the directory, which is thus always
/// complete.
fn fetch(architecture: Architecture, release: &str, directory: &Path) -> Result<(), Problem> {
    let list = super::packages(architecture)?;
    if directory.is_dir() {
        // Another process fetched the package while this one waited for the list.
        return Ok(());
    }
    let package = format!("linux-modules-{release}");
    eprintln!("bindery: fetching {package}, 24 MB (once)");
    let aside = tempfile::tempdir_in(workspace::target("guest/modules")?)
        .map_err(|error| Problem::io("write to", directory, &error))?;
    list.unpack(&package, aside.path())?;
    fs::rename(aside.keep(), directory).map_err(|error| Problem::io("make", directory, &error))
}

/// Adds a module to `order`, after those modules that it needs and that are not yet in the list.
fn add(directory: &Path, name: &str, order: &mut Vec<PathBuf>) -> Result<(), Problem> {
    let missing = || {
        Problem::Missing(format!(
            "cannot find or unpack Linux's module {name} below {}: check that xz is installed (on \
             Debian `apt-get install xz-utils`), or remove that directory to fetch it again",
            directory.display()
        ))
    };
    let module = find(directory, name).ok_or_else(missing)?;
    if order.contains(&module) {
        return Ok(());
    }
    let bytes = fs::read(&module).map_err(|error| Problem::io("read", &module, &error))?;
    let needed = needed(&bytes).ok_or_else(|| {
        Problem::Failed(format!(
            "{} is not a kernel module; remove {} to fetch it again",
            module.display(),
            directory.display()
        ))
    })?;
    for name in needed {
        add(directory, &name, order)?;
    }
    order.push(module);
    Ok(())
}

/// The unpacked file of a module below a directory.
fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    let (plain, packed) = (format!("{name}.ko"), format!("{name}.ko.xz"));
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).ok()?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
            } else if entry.file_name() == *plain {
                return Some(path);
            } else if entry.file_name() == *packed {
                return unpack(&path);
            }
        }
    }
    None
}

/// Replaces a compressed file by its content.
fn unpack(packed: &Path) -> Option<PathBuf> {
    process::output(Command::new("xz").arg("--decompress").arg(packed)).ok()?;
    Some(packed.with_extension(""))
}

/// The names of the modules that a module needs; `None` for another file.
fn needed(bytes: &[u8]) -> Option<Vec<String>> {
    let file = object::File::parse(bytes).ok()?;
    let information = file.section_by_name(".modinfo")?.data().ok()?;
    let field = information
        .split(|byte| *byte == 0)
        .find_map(|field| std::str::from_utf8(field).ok()?.strip_prefix("depends="))?;
    Some(field.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use object::write::{Object as Written, StandardSection};
    use object::{BinaryFormat, Endianness, SectionKind};

    use super::*;

    /// A module whose own information says this.
    fn module(information: &[u8]) -> Vec<u8> {
        let architecture = object::Architecture::X86_64;
        let mut file = Written::new(BinaryFormat::Elf, architecture, Endianness::Little);
        let _text = file.section_id(StandardSection::Text);
        let section = file.add_section(Vec::new(), b".modinfo".to_vec(), SectionKind::ReadOnlyData);
        file.append_section_data(section, information, 1);
        file.write().unwrap()
    }

    #[test]
    fn a_module_comes_after_all_that_it_needs() {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| directory.path().join(name);
        fs::create_dir(place("deeper")).unwrap();
        for (name, information) in [
            ("disk.ko", &b"license=GPL\0depends=squeeze,count\0name=disk\0"[..]),
            ("deeper/squeeze.ko", b"depends=count\0"),
            ("deeper/count.ko", b"depends=\0"),
            ("other.ko", b"depends=absent\0"),
            ("text.ko", b"no field"),
        ] {
            fs::write(place(name), module(information)).unwrap();
        }
        let mut order = Vec::new();
        add(directory.path(), "disk", &mut order).unwrap();
        let expected = ["deeper/count.ko", "deeper/squeeze.ko", "disk.ko"].map(place);
        assert_eq!(order, expected);
        for (name, part) in [("other", "absent"), ("text", "not a kernel module"), ("none", "none")]
        {
            let problem = add(directory.path(), name, &mut Vec::new()).unwrap_err().to_string();
            assert!(problem.contains(part), "{problem}");
        }
    }
}
