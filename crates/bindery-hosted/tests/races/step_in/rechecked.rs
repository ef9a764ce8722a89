//! Calls that decide something about a page, unlock, and act later: another call has replaced the
//! page in between, and must find its own result.

use std::sync::Arc;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::check;
use bindery::testing::{PageMove, move_pages};
use bindery::{
    Access, Accounting, AddressSpace, Errno, Error, FileAccess, FillMode, Inspection, MapObject,
    MapRequest, Sealing, Sharing, UserfaultFeatures, UserfaultModes, UserfaultScope,
    WriteProtectMode,
};
use bindery_hosted::Walk;

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Stops};
use crate::support::{GIB, MIB, fixed, options};

const AT: VirtAddr = VirtAddr(GIB);
const ELSEWHERE: VirtAddr = VirtAddr(2 * GIB);

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;

/// Runs `run` with each step of a call, until the call has fewer steps.
fn at_each_step(run: impl Fn(HoldAt) -> bool) {
    let steps = (0..).take_while(|step| run(HoldAt::Number(*step))).count();
    assert!(steps > 0, "the call was never held");
}

fn value<A: Walk>(space: &Space<'_, A>, at: VirtAddr) -> u64 {
    let mut bytes = [0; 8];
    space.read_user(at, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// 1. A first write to a page that soft-dirty watches has found an exclusive page and unlocked;
/// 2. `UFFDIO_MOVE` takes the page, and a read maps the zero page;
/// 3. the write makes the zero page of all processes writable.
fn zero_page_stays<A: Walk>() {
    at_each_step(|hold_at| {
        let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT.0, PAGE_SIZE)).unwrap();
        space.mmap(&fixed(ELSEWHERE.0, 2 * PAGE_SIZE)).unwrap();
        space.write_user(AT, &7u64.to_ne_bytes()).unwrap();
        space.clear_soft_dirty().unwrap();
        let stops = Arc::new(Stops::default());
        let write = || assert!(space.fault(AT, Access::Write).is_ok());
        let replace = || {
            let what = PageMove {
                source: AT,
                destination: ELSEWHERE,
                length: PAGE_SIZE,
                ..PageMove::default()
            };
            let (_, moved) = move_pages(&space, &what);
            // The write may have the table locked.
            assert!(moved.is_ok() || moved == Err(Errno::EAGAIN) || moved == Err(Errno::EBUSY));
            assert!(space.fault(AT, Access::Read).is_ok());
        };
        let was_held = stops.meet(&machine, hold_at, &write, &replace).is_some();
        space.write_user(AT, &8u64.to_ne_bytes()).unwrap();
        assert_eq!(
            value(&space, VirtAddr(ELSEWHERE.0 + PAGE_SIZE)),
            0,
            "{hold_at:?}: the zero page"
        );
        machine.assert_clean();
        let mut scratch = vec![0; check::scratch_words(&memory)];
        check::check(&memory, &[&space], &mut scratch).unwrap_or_else(|broken| panic!("{broken}"));
        was_held
    });
}

#[test]
fn no_first_write_reaches_the_zero_page() {
    zero_page_stays::<X86_64<4>>();
    zero_page_stays::<AArch64>();
    zero_page_stays::<Riscv64<3>>();
}

/// 1. `UFFDIO_COPY` has found a marker of write-protection;
/// 2. another one maps the page, write-protected, and returns;
/// 3. the first one lifts the protection, and fails because there is a page.
#[test]
fn no_late_fill_lifts_a_protection() {
    at_each_step(|hold_at| {
        let (machine, memory) = stepped::<X86_64<4>>(16 * MIB, Readers::Told);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT.0, PAGE_SIZE)).unwrap();
        let features = UserfaultFeatures::WP_UNPOPULATED;
        let fd = space.userfault(features, UserfaultScope::All).unwrap();
        let modes = UserfaultModes::MISSING | UserfaultModes::WRITE_PROTECT;
        space.register_userfault(&fd, AT, PAGE_SIZE, modes).unwrap();
        let handler = space.handler(&fd);
        handler.write_protect(AT, PAGE_SIZE, WriteProtectMode::PROTECT).unwrap();
        let fill = |byte: u8, mode: FillMode| {
            let mut source = |_, piece: &mut [u8]| {
                piece.fill(byte);
                Ok(())
            };
            handler.fill_copy(AT, PAGE_SIZE, mode, &mut source).map_err(|partial| partial.error)
        };
        let stops = Arc::new(Stops::default());
        let first = || {
            let filled = fill(1, FillMode::empty());
            assert!(matches!(filled, Ok(()) | Err(Error::Exists(AT))), "{filled:?}");
        };
        let second = || {
            let filled = fill(2, FillMode::WRITE_PROTECT);
            assert!(matches!(filled, Ok(()) | Err(Error::Exists(AT))), "{filled:?}");
        };
        let was_held = stops.meet(&machine, hold_at, &first, &second).is_some();
        let Inspection::Page { attributes, .. } = space.inspect(AT) else {
            panic!("{hold_at:?}: {:?}", space.inspect(AT));
        };
        let expected = value(&space, AT) & 0xff == 2;
        assert_eq!(attributes.userfault, expected, "{hold_at:?}");
        machine.assert_clean();
        space.close_userfault(fd);
        was_held
    });
}

/// 1. `UFFDIO_COPY`, `UFFDIO_ZEROPAGE` or `UFFDIO_POISON` in a private mapping of shared memory has
///    seen the end of the object;
/// 2. a truncation takes all of it, and returns;
/// 3. the call maps a page beyond the end.
#[test]
fn no_fill_is_beyond_a_truncated_end() {
    for what in 0..3 {
        at_each_step(|hold_at| {
            let (machine, memory) = stepped::<X86_64<4>>(16 * MIB, Readers::Told);
            let object =
                memory.shared_memory(PAGE_SIZE, Sealing::Forbidden, Accounting::PerPage).unwrap();
            let space = AddressSpace::new(&memory, options()).unwrap();
            let request = MapRequest { sharing: Sharing::Private, ..fixed(AT.0, PAGE_SIZE) };
            let access = FileAccess::READ;
            space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
            let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
            space.register_userfault(&fd, AT, PAGE_SIZE, UserfaultModes::MISSING).unwrap();
            let handler = space.handler(&fd);
            let mode = FillMode::empty();
            let fill = || {
                let filled = match what {
                    0 => handler.fill_copy(AT, PAGE_SIZE, mode, &mut |_, _: &mut [u8]| Ok(())),
                    1 => handler.fill_zeroes(AT, PAGE_SIZE, mode),
                    _ => handler.fill_poison(AT, PAGE_SIZE, mode),
                };
                let filled = filled.map_err(|partial| partial.error);
                assert!(matches!(filled, Ok(()) | Err(Error::Fault(AT))), "{filled:?}");
            };
            let stops = Arc::new(Stops::default());
            let truncate = || object.set_size(0).unwrap();
            let was_held = stops.meet(&machine, hold_at, &fill, &truncate).is_some();
            if was_held {
                assert_eq!(space.inspect(AT), Inspection::Empty, "{what}: {hold_at:?}");
            }
            machine.assert_clean();
            space.close_userfault(fd);
            was_held
        });
    }
}
