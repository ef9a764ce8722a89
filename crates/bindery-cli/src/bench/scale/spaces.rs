//! Many mappings in one address space.

use bindery::addr::PAGE_SIZE;
use bindery::{Access, Error, MapRequest, Place};
use bindery_hosted::Walk;

use super::fixture::{self, Fixture, READ_WRITE, Sample, at, numbers};

/// Maps `count` separate pages and makes each kind of call.
pub fn measure<A: Walk>(count: u64, bytes: u64) -> Result<Vec<(&'static str, Sample)>, String> {
    let memory = fixture::memory::<A>(bytes)?;
    let space = fixture::space(&memory, count)?;
    let fixture = Fixture { space: &space, object: None, mappings: count };
    let each = |call: &dyn Fn(u64) -> Result<(), Error>| {
        fixture.measure(count, || numbers(count).try_for_each(call))
    };
    let map = each(&|number| {
        let request = MapRequest {
            length: PAGE_SIZE,
            protection: READ_WRITE,
            place: Place::Fixed(at(number)),
            ..MapRequest::default()
        };
        space.mmap(&request).map(|_| ())
    })?;
    let fault = each(&|number| {
        // The only possible error is a lack of memory.
        space.fault(at(number), Access::Write).map_err(|_| Error::OutOfMemory).map(|_| ())
    })?;
    let fork = fixture.measure_fork(count)?;
    let unmap = each(&|number| space.munmap(at(number), PAGE_SIZE))?;
    Ok(vec![("mmap", map), ("fault", fault), ("fork", fork), ("munmap", unmap)])
}
