//! The directories of `/proc`, and the links in them.

use alloc::format;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use crate::errno::Errno;
use crate::process::{self, Process};

use super::super::attributes::{Attributes, Entry, Kind};
use super::super::descriptor::Files;
use super::super::generated::FixedDirectory;
use super::super::node::{Node, Place};
use super::descriptors::DescriptorText;
use super::file::{FILES, File};
use super::{machine, number};

/// The root of `/proc`.
pub fn root() -> Arc<dyn Node> {
    Arc::new(Root { machine: machine::directory() })
}

struct Root {
    machine: Arc<FixedDirectory>,
}

impl Node for Root {
    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn attributes(&self) -> Attributes {
        Attributes { links: 2, ..Attributes::plain(number(0, 0), 0o555) }
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        let text = core::str::from_utf8(name).map_err(|_| Errno::ENOENT)?;
        if text == "self" || text == "thread-self" {
            let thread = process::current();
            let (process, thread) = (thread.process.id, thread.id());
            let own = text == "self";
            let target =
                if own { format!("{process}") } else { format!("{process}/task/{thread}") };
            return Ok(Arc::new(Jump { target: target.into_bytes(), place: None }));
        }
        if let Ok(id) = text.parse::<u32>() {
            // Threads have a directory too, though only processes are listed.
            let has_thread = |process: &Arc<Process>| process.thread_ids().contains(&id);
            let process = process::find(id).or_else(|| process::all().into_iter().find(has_thread));
            let (process, sort) = (process.ok_or(Errno::ENOENT)?.id, DirectorySort::Process);
            return Ok(Arc::new(Directory { process, thread: id, sort }));
        }
        self.machine.child(name)
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let mut entries = self.machine.children()?;
        let link =
            Entry { name: b"self".into(), number: number(0, 1), kind: Kind::Link, cookie: 999 };
        entries.push(link);
        entries.extend(process::all().iter().map(|process| Entry {
            name: format!("{}", process.id).into_bytes(),
            number: number(process.id, 0),
            kind: Kind::Directory,
            cookie: 1000 + u64::from(process.id),
        }));
        Ok(entries)
    }
}

/// A link to a place without a path, if there is one.
struct Jump {
    target: Vec<u8>,
    place: Option<Arc<Place>>,
}

impl Jump {
    fn to(place: Arc<Place>) -> Arc<dyn Node> {
        Arc::new(Self { target: place.path(), place: Some(place) })
    }

    /// The same link, for a thread that may not access the process.
    fn to_nowhere() -> Arc<dyn Node> {
        Arc::new(Self { target: Vec::new(), place: None })
    }
}

impl Node for Jump {
    fn kind(&self) -> Kind {
        Kind::Link
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(number(0, 2), 0o777)
    }

    fn target(&self) -> Result<Vec<u8>, Errno> {
        if self.target.is_empty() { Err(Errno::EACCES) } else { Ok(self.target.clone()) }
    }

    fn jump(&self) -> Option<Arc<Place>> {
        self.place.clone()
    }

    fn open(&self, _: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        Err(Errno::ELOOP)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DirectorySort {
    Process,
    Descriptors,
    DescriptorTexts,
    Tasks,
}

struct Directory {
    process: u32,
    /// The thread of the directory, or of the directory above it.
    thread: u32,
    sort: DirectorySort,
}

impl Directory {
    fn process(&self) -> Result<Arc<Process>, Errno> {
        process::find(self.process).ok_or(Errno::ENOENT)
    }

    /// A directory inside this one.
    fn inside(&self, sort: DirectorySort) -> Arc<Self> {
        Arc::new(Self { process: self.process, thread: self.thread, sort })
    }
}

impl Node for Directory {
    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn attributes(&self) -> Attributes {
        let number = number(self.process, self.sort as usize);
        let own = process::current().process.id == self.process;
        // A caller that may access the process may list its descriptors; the process itself always
        // may.
        let sorts = [DirectorySort::Descriptors, DirectorySort::DescriptorTexts];
        let mode = if sorts.contains(&self.sort) && !own { 0o500 } else { 0o555 };
        let owner = super::owner(self.process);
        Attributes { links: 2, owner, ..Attributes::plain(number, mode) }
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        let process = self.process()?;
        let text = core::str::from_utf8(name).map_err(|_| Errno::ENOENT)?;
        let id = self.process;
        match self.sort {
            DirectorySort::Descriptors => {
                let files = Files::of_process(&process).ok_or(Errno::ENOENT)?;
                let descriptor: i32 = text.parse().map_err(|_| Errno::ENOENT)?;
                let description = files.get(descriptor).map_err(|_| Errno::ENOENT)?;
                if !process::may_look_into(&process) {
                    return Ok(Jump::to_nowhere());
                }
                Ok(Jump::to(description.place.clone()))
            }
            DirectorySort::DescriptorTexts => {
                let files = Files::of_process(&process).ok_or(Errno::ENOENT)?;
                let descriptor: i32 = text.parse().map_err(|_| Errno::ENOENT)?;
                files.get(descriptor).map_err(|_| Errno::ENOENT)?;
                Ok(Arc::new(DescriptorText { process: id, descriptor }))
            }
            DirectorySort::Tasks => {
                let thread: u32 = text.parse().map_err(|_| Errno::ENOENT)?;
                if !process.thread_ids().contains(&thread) {
                    return Err(Errno::ENOENT);
                }
                Ok(Arc::new(Directory { process: id, thread, sort: DirectorySort::Process }))
            }
            DirectorySort::Process => match text {
                "fd" => Ok(self.inside(DirectorySort::Descriptors)),
                "fdinfo" => Ok(self.inside(DirectorySort::DescriptorTexts)),
                "task" => Ok(self.inside(DirectorySort::Tasks)),
                "exe" | "cwd" | "root" if !process::may_look_into(&process) => {
                    Ok(Jump::to_nowhere())
                }
                "exe" => match process.facts().path {
                    path if path.is_empty() => Err(Errno::ENOENT),
                    path => Ok(Arc::new(Jump { target: path, place: None })),
                },
                "cwd" => {
                    Ok(Jump::to(Files::of_process(&process).ok_or(Errno::ENOENT)?.directory()))
                }
                "root" => Ok(Jump::to(super::super::root::root())),
                _ => {
                    let found = FILES.iter().position(|(known, _)| *known == text);
                    let index = found.ok_or(Errno::ENOENT)?;
                    Ok(Arc::new(File::new((id, self.thread), index, Weak::new())))
                }
            },
        }
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let process = self.process()?;
        let entry = |name: String, kind, index: usize| Entry {
            name: name.into_bytes(),
            number: number(self.process, index + 10),
            kind,
            cookie: index as u64 + 3,
        };
        Ok(match self.sort {
            DirectorySort::Descriptors | DirectorySort::DescriptorTexts => {
                let texts = self.sort == DirectorySort::DescriptorTexts;
                let kind = if texts { Kind::Regular } else { Kind::Link };
                let open = Files::of_process(&process)
                    .map_or(Vec::new(), |files| files.open_descriptors());
                open.iter().map(|at| entry(format!("{at}"), kind, *at as usize)).collect()
            }
            DirectorySort::Tasks => {
                let threads = process.thread_ids();
                let entries = threads.iter();
                entries.map(|id| entry(format!("{id}"), Kind::Directory, *id as usize)).collect()
            }
            DirectorySort::Process => {
                let links = ["exe", "cwd", "root"].map(|name| (name, Kind::Link));
                let directories = ["fd", "fdinfo", "task"].map(|name| (name, Kind::Directory));
                let files = FILES.iter().map(|(name, _)| (*name, Kind::Regular));
                let all = files.chain(links).chain(directories).enumerate();
                all.map(|(index, (name, kind))| entry(name.into(), kind, index)).collect()
            }
        })
    }
}
