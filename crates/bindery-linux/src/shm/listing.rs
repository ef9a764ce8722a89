//! `/proc/sysvipc/shm`.

use core::fmt::{self, Write};

use bindery::Platform;
use bindery::addr::PAGE_SHIFT;

use super::Segments;

/// Writes `/proc/sysvipc/shm`: one line for each segment, including those marked for destruction.
///
/// Context: spins; otherwise any that `out` allows. Complexity: linear in the slots. No lock is
/// held while `out` writes.
///
/// # Errors
/// Only errors of `out`, which end the listing.
pub fn sysvipc_shm<P: Platform>(segments: &Segments<'_, P>, out: &mut dyn Write) -> fmt::Result {
    out.write_str(
        "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  \
         cgid      atime      dtime      ctime                   rss                  swap\n",
    )?;
    let count = segments.slots.lock().slots.len();
    for index in 0..count {
        // Copies the figures under the lock and writes them after releasing it.
        let line = segments.slots.lock().by_index(index).map(|(id, segment)| {
            let first = (segment.key, id as i32, segment.mode, segment.size);
            let people = (segment.owner, segment.creator);
            let processes = (segment.created_by, segment.last_process, segment.attached);
            let times = [segment.attached_at, segment.detached_at, segment.changed_at];
            let pages = [segment.object.resident_pages(), segment.object.swapped_pages()];
            (first, people, processes, times, pages.map(|pages| pages << PAGE_SHIFT))
        });
        let Some((first, (owner, creator), processes, times, [resident, swapped])) = line else {
            continue;
        };
        write!(out, "{:10} {:10}  {:4o} {:21} ", first.0, first.1, first.2, first.3)?;
        write!(out, "{:5} {:5}  {:5} ", processes.0, processes.1, processes.2)?;
        write!(out, "{:5} {:5} {:5} {:5} ", owner.0, owner.1, creator.0, creator.1)?;
        write!(out, "{:10} {:10} {:10} ", times[0], times[1], times[2])?;
        writeln!(out, "{resident:21} {swapped:21}")?;
    }
    Ok(())
}
