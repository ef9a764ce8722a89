//! The names of mappings in `maps` and `smaps`.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use core::fmt::{self, Write};

use bindery::addr::VirtAddr;
use bindery_linux::proc::{NameSource, Naming, Unnamed};

use crate::heap;
use crate::process::Process;
use crate::sync::Mutex;

use super::super::node::{Node, Place};

/// The paths of opened files, for `maps`, by the identity of the object.
static PATHS: Mutex<BTreeMap<u64, Found>> = Mutex::new(BTreeMap::new());

/// A file, and the path by which it was opened.
type Found = (Weak<dyn Node>, Arc<[u8]>);

/// The maximum number of remembered paths.
const PATHS_MAX: usize = 4096;

/// Remembers the path of an opened file.
pub fn remember(place: &Arc<Place>) {
    let Some(object) = place.node.object() else { return };
    let mut paths = PATHS.lock();
    if paths.len() >= PATHS_MAX {
        paths.retain(|_, (node, _)| node.strong_count() > 0);
    }
    if paths.len() < PATHS_MAX && heap::room(1024).is_ok() {
        paths.insert(object.identity(), (Arc::downgrade(&place.node), place.path().into()));
    }
}

/// Names for one process.
pub(super) struct Names {
    pub(super) stack: u64,
}

impl Names {
    pub(super) fn of(process: &Process) -> Self {
        Self { stack: process.with_facts(|facts| facts.stack) }
    }
}

impl Naming for Names {
    fn write_path(&self, identity: u64, backing: NameSource, out: &mut dyn Write) -> fmt::Result {
        if matches!(backing, NameSource::Segment { .. } | NameSource::Secret) {
            return Unnamed.write_path(identity, backing, out);
        }
        // A device with frames has a path, although its source is that of shared anonymous memory.
        // The handle is dropped without the lock, because it may be the last handle of a file.
        let known = PATHS.lock().get(&identity).cloned();
        let Some((node, path)) = known else {
            return Unnamed.write_path(identity, backing, out);
        };
        out.write_str(&String::from_utf8_lossy(&path))?;
        let named = node.upgrade().is_some_and(|node| node.attributes().links > 0);
        let tells = path.ends_with(b" (deleted)");
        if named || tells { Ok(()) } else { out.write_str(" (deleted)") }
    }

    fn stack(&self) -> Option<VirtAddr> {
        Some(VirtAddr(self.stack)).filter(|at| at.0 != 0)
    }
}
