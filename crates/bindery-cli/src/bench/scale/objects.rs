//! Many mappings of one object.

use bindery::addr::PAGE_SIZE;
use bindery::{
    Access, Accounting, AddressSpace, Error, FileAccess, MapObject, MapRequest, Object, Place,
    Sealing, Sharing,
};
use bindery_hosted::{Machine, MemoryFiles, Walk};

use super::fixture::{self, Fixture, READ_WRITE, Sample, at, numbers};

/// Maps the first page of an object `count` times and makes each kind of call. Then maps every
/// second page of a file and syncs the file.
pub fn measure<A: Walk>(count: u64, bytes: u64) -> Result<Vec<(&'static str, Sample)>, String> {
    let memory = fixture::memory::<A>(bytes)?;
    let failed = |error: Error| format!("among {count} mappings: {error}");
    let object = memory
        .shared_memory(2 * PAGE_SIZE, Sealing::Allowed, Accounting::PerPage)
        .map_err(failed)?;
    let space = fixture::space(&memory, 2 * count)?;
    let fixture = Fixture { space: &space, object: Some(&object), mappings: count };
    let each = |call: &dyn Fn(u64) -> Result<(), Error>| {
        fixture.measure(count, || numbers(count).try_for_each(call))
    };
    let map = each(&|number| map(&space, &object, number, 0))?;
    let fault = each(&|number| write(&space, number))?;
    let fork = fixture.measure_fork(count)?;
    // One more, of the other page.
    self::map(&space, &object, count, 1).and_then(|()| write(&space, count)).map_err(failed)?;
    let punch = fixture.measure(1, || object.punch_hole(PAGE_SIZE, PAGE_SIZE))?;
    let truncate = fixture.measure(count, || object.set_size(0))?;
    let unmap = each(&|number| space.munmap(at(number), PAGE_SIZE))?;

    let files = MemoryFiles::new();
    let space = fixture::space(&memory, count)?;
    let file = memory.file(&files, 1, 2 * count * PAGE_SIZE).map_err(failed)?;
    let fixture = Fixture { space: &space, object: Some(&file), mappings: count };
    for number in numbers(count) {
        self::map(&space, &file, number, 2 * number)
            .and_then(|()| write(&space, number))
            .map_err(failed)?;
    }
    let sync = fixture.measure(count, || file.sync(0, u64::MAX))?;
    Ok(vec![
        ("mmap", map),
        ("fault", fault),
        ("fork", fork),
        ("punch a page", punch),
        ("truncate", truncate),
        ("munmap", unmap),
        ("sync", sync),
    ])
}

fn map<'m, A: Walk>(
    space: &AddressSpace<'m, Machine<A>>,
    object: &Object<'m, Machine<A>>,
    number: u64,
    page: u64,
) -> Result<(), Error> {
    let request = MapRequest {
        length: PAGE_SIZE,
        protection: READ_WRITE,
        place: Place::Fixed(at(number)),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let access = FileAccess::READ.union(FileAccess::WRITE);
    let source = MapObject { object, offset: page * PAGE_SIZE, access };
    space.mmap_object(&request, &source).map(|_| ())
}

fn write<A: Walk>(space: &AddressSpace<'_, Machine<A>>, number: u64) -> Result<(), Error> {
    // The only possible error is a lack of memory.
    space.fault(at(number), Access::Write).map_err(|_| Error::OutOfMemory).map(|_| ())
}
