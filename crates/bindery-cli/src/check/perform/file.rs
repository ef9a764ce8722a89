//! Actions on shared memory and files.

use bindery::{Errno, FileAccess, Object, Operation, Pager};
use bindery_hosted::{Machine, Walk};
use bindery_linux::{self as linux, OpenFile};

use super::ended;
use crate::check::failure::Failure;
use crate::check::fixture::{Fixture, Stop};
use crate::check::outcome::{Outcome, Style};
use crate::check::script::{FILE_ACCESSES, File, FileAction, OnFile, name_of};
use crate::check::show;
use crate::check::words;

type Open<'m, A> = OpenFile<'m, Machine<A>>;

impl<'m, A: Walk> Fixture<'m, A> {
    pub(super) fn on_file(
        &mut self,
        index: usize,
        action: &FileAction,
        line: usize,
    ) -> Result<(String, Outcome), Stop> {
        match action {
            FileAction::Memfd { name, flags } => {
                let object = linux::memfd_create(self.memory, *flags as u32);
                let call = format!("memfd_create({name:?}, {})", words::MEMFD.show(*flags));
                let path = format!("/memfd:{name} (deleted)");
                Ok((call, self.made(index, name, path, object, line)))
            }
            FileAction::New { name, size } => {
                let size = size.as_ref().map(|size| self.number(size)).transpose()?.unwrap_or(0);
                let call = format!("file({name:?}, {})", show::size(size));
                let object = self.new_file(size);
                Ok((call, self.made(index, name, format!("/{name}"), object, line)))
            }
            FileAction::Open { name, file, access } => {
                let (file, shown) = self.file(index, file)?;
                let call = format!("open({name:?}, {shown}, {})", name_of(FILE_ACCESSES, access));
                // The user of a script owns the files that it creates.
                let access = *access | FileAccess::OWNER;
                let opened = file.map(|file| Open { access, ..file });
                Ok((call, self.opened(index, name, opened.ok_or(Errno::EBADF), line)))
            }
            FileAction::Close { file } => {
                let (descriptor, shown) = self.descriptor(file)?;
                let closed = self.process_mut(index).files.remove(&descriptor);
                let outcome = closed.map_or(failed(Errno::EBADF), |_| Outcome::Done);
                Ok((format!("close({shown})"), outcome))
            }
            FileAction::On { file, what } => self.on_open_file(index, file, what),
        }
    }

    /// Runs an action that leaves the file open.
    fn on_open_file(
        &self,
        index: usize,
        file: &File,
        what: &OnFile,
    ) -> Result<(String, Outcome), Stop> {
        let (file, shown) = self.file(index, file)?;
        match what {
            OnFile::Truncate { length } => {
                let length = self.number(length)?;
                let call = format!("ftruncate({shown}, {})", show::size(length));
                Ok((call, made_of(file, |file| linux::ftruncate(file, length as i64))))
            }
            OnFile::Allocate { offset, length, mode } => {
                let (offset, length) = (self.number(offset)?, self.number(length)?);
                let (flags, from, size) =
                    (words::ALLOCATE.show(*mode), show::size(offset), show::size(length));
                let call = format!("fallocate({shown}, {flags}, {from}, {size})");
                let outcome = made_of(file, |file| {
                    linux::fallocate(file, *mode as i32, offset as i64, length as i64)
                });
                Ok((call, outcome))
            }
            OnFile::Seal { seals } => {
                let call = format!("add_seals({shown}, {})", words::SEALS.show(*seals));
                Ok((call, made_of(file, |file| linux::add_seals(file, *seals as u32))))
            }
            OnFile::Seals => {
                let seals = file.map(|file| linux::get_seals(&file) as u64);
                let outcome = seals.map_or(failed(Errno::EBADF), |bits| Outcome::Seals { bits });
                Ok((format!("get_seals({shown})"), outcome))
            }
            OnFile::Read { offset, length } => {
                let offset = self.number(offset)?;
                let bytes = match length {
                    Some(length) => self.buffer(length)?,
                    None => vec![0; size_of::<u64>()],
                };
                let (from, size) = (show::size(offset), show::size(bytes.len() as u64));
                let what = if length.is_none() { Reading::Number } else { Reading::Bytes };
                let outcome = file.map(|file| read(&file, offset, bytes, what));
                let call = format!("pread({shown}, {from}, {size})");
                Ok((call, outcome.unwrap_or(failed(Errno::EBADF))))
            }
            OnFile::Write { offset, values } => {
                let offset = self.number(offset)?;
                let (bytes, values) = self.words(values)?;
                let call = format!("pwrite({shown}, {}, {values})", show::size(offset));
                Ok((call, made_of(file, |file| linux::pwrite(file, &bytes, offset as i64))))
            }
        }
    }

    /// The open file, if the process has it, and its text.
    fn file(&self, index: usize, file: &File) -> Result<(Option<Open<'m, A>>, String), Stop> {
        let (descriptor, shown) = self.descriptor(file)?;
        Ok((self.process(index).files.get(&descriptor).cloned(), shown))
    }

    fn new_file(&mut self, size: u64) -> Result<Object<'m, Machine<A>>, Errno> {
        let number = self.next_disk_file();
        let disk = self.disk;
        disk.resize(number, size).map_err(|_| Errno::EIO)?;
        self.memory.file(disk, number, size).map_err(|error| error.errno(Operation::Object))
    }

    /// Opens a new object under its name, or records why it is missing.
    fn made(
        &mut self,
        index: usize,
        name: &str,
        path: String,
        object: Result<Object<'m, Machine<A>>, Errno>,
        line: usize,
    ) -> Outcome {
        let access = FileAccess::READ | FileAccess::WRITE;
        let file = object.map(|object| OpenFile { object, access });
        if let Ok(file) = &file {
            self.name_object(&file.object, path);
        }
        self.opened(index, name, file, line)
    }

    fn opened(
        &mut self,
        index: usize,
        name: &str,
        file: Result<Open<'m, A>, Errno>,
        line: usize,
    ) -> Outcome {
        match file {
            Ok(file) => Outcome::decimal(self.open(index, name, file) as u64),
            Err(errno) => {
                let outcome = failed(errno);
                self.no_file(name, ended(line, &outcome));
                outcome
            }
        }
    }
}

fn failed(errno: Errno) -> Outcome {
    Outcome::Failure(Failure::of_errno(errno))
}

/// The result of a call on an open file, if it exists.
fn made_of<'m, A: Walk>(
    file: Option<Open<'m, A>>,
    call: impl FnOnce(&Open<'m, A>) -> i64,
) -> Outcome {
    let result = file.map(|file| call(&file));
    result.map_or(failed(Errno::EBADF), |result| Outcome::of_call(result, Style::Decimal))
}

/// The form in which a file is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// Eight bytes, as a number.
    Number,
    Bytes,
}

fn read<A: Walk>(file: &Open<'_, A>, offset: u64, mut bytes: Vec<u8>, what: Reading) -> Outcome {
    let result = linux::pread(file, &mut bytes, offset as i64);
    let Ok(count) = usize::try_from(result) else {
        return Outcome::of_call(result, Style::Decimal);
    };
    bytes.truncate(count);
    match <[u8; 8]>::try_from(&*bytes) {
        Ok(word) if what == Reading::Number => Outcome::hexadecimal(u64::from_ne_bytes(word)),
        // Less than a number, at the end of the file.
        _ => Outcome::Bytes { value: Some(count as u64), bytes },
    }
}
