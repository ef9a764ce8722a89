//! A fixture for scenarios about objects and their mappings.

use bindery::addr::VirtAddr;
use bindery::check::Report;
use bindery::{
    AddressSpace, Error, FileAccess, MapObject, MapRequest, Memory, Object, Place, Sharing,
};
use bindery_hosted::{Machine, Walk};

use crate::objects::use_object_order;
use crate::{GIB, MIB, READ_WRITE, audit, options, strict};

/// The address of most mappings.
pub const AT: u64 = GIB;

/// A machine, and its memory, managed by the core.
pub struct Fixture<'m, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
}

impl<'m, A: Walk> Fixture<'m, A> {
    pub fn space(&self) -> AddressSpace<'m, Machine<A>> {
        AddressSpace::new(self.memory, options()).unwrap()
    }

    pub fn audit(&self, spaces: &[&AddressSpace<'_, Machine<A>>]) -> Report {
        audit(self.machine, self.memory, spaces)
    }
}

/// Runs `scenario` on a machine with folios of 2^`order` pages for objects; verifies afterwards
/// that no object is left.
#[track_caller]
pub fn with_fixture<A: Walk>(order: u8, scenario: impl FnOnce(&Fixture<'_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_object_order(&memory, order);
    let free = memory.free_frame_count();
    scenario(&Fixture { machine: &machine, memory: &memory });
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    assert_eq!(memory.commitment().committed(), 0);
}

pub fn map<'m, A: Walk>(
    space: &AddressSpace<'m, Machine<A>>,
    object: &Object<'m, Machine<A>>,
    at: u64,
    length: u64,
    sharing: Sharing,
) -> Result<(), Error> {
    let request = MapRequest {
        length,
        protection: READ_WRITE,
        place: Place::Fixed(VirtAddr(at)),
        sharing,
        ..MapRequest::default()
    };
    let source = MapObject { object, offset: 0, access: FileAccess::READ | FileAccess::WRITE };
    space.mmap_object(&request, &source).map(|_| ())
}
