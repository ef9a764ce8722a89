//! A handler fills memory that allows no access: the pages are present but invisible to all CPUs
//! until `mprotect` grants access.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::{Absent, Attributes, Level, Permissions};
use bindery::{
    Accounting, AddressSpace, FaultError, FileAccess, FillMode, FrameKind, Inspection, MapObject,
    MapRequest, Memory, PartialFill, Protection, Sealing, Sharing, SizeMode, Userfault,
    UserfaultFeatures, UserfaultModes, UserfaultScope,
};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::objects::use_object_order;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict};

on_every_architecture! {
    copies_of_single_pages_are_hidden => copies_of_pages;
    copies_into_large_folios_are_hidden => copies_of_folios;
    zeroes_are_hidden => zeroes;
    pages_that_an_object_has_are_hidden => continued;
    a_protected_page_is_hidden_and_stays_protected => protected;
    bytes_that_look_like_entries_stay_bytes => bytes_like_entries;
}

const PAGE: u64 = 4096;
const HUGE: u64 = 2 * MIB;
/// An address at which huge leaves fit.
const AT: VirtAddr = VirtAddr(GIB);
const NONE: Protection = Protection::empty();

/// The memory that is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Anonymous,
    Shared,
    /// A private mapping of shared memory.
    Private,
}

/// The request that fills the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    Copy,
    Zeroes,
    /// `UFFDIO_CONTINUE`.
    Present,
}

/// The memory and the request that fills it.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    by: By,
    length: u64,
    /// The largest folios.
    order: u8,
    mode: FillMode,
}

/// Each byte of a copied page.
fn byte_at(offset: u64) -> u8 {
    (offset / PAGE) as u8 | 1
}

/// A case's memory, which allows no access.
struct Filled<'f, 'm, A: Walk> {
    machine: &'f Machine<A>,
    memory: &'m Memory<Machine<A>>,
    space: &'f AddressSpace<'m, Machine<A>>,
    fd: &'f Userfault<'m, Machine<A>>,
}

/// Runs `scenario` with registered memory without access. No memory may be left in use afterwards.
#[track_caller]
fn with_case<A: Walk>(case: Case, scenario: impl FnOnce(&Filled<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_object_order(&memory, case.order);
    if case.order > 0 {
        memory.folio_policy().set(Order(case.order), SizeMode::Always);
    }
    memory.set_huge_zero_page(true);
    let free = memory.free_frame_count();
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let sharing = if case.kind == Kind::Shared { Sharing::Shared } else { Sharing::Private };
        let request = MapRequest { protection: NONE, sharing, ..fixed(AT.0, case.length) };
        let modes = match case.by {
            By::Present => UserfaultModes::MINOR,
            By::Copy | By::Zeroes => UserfaultModes::MISSING,
        };
        if case.kind == Kind::Anonymous {
            space.mmap(&request).unwrap();
        } else {
            let object = memory.shared_memory(case.length, Sealing::Allowed, Accounting::PerPage);
            let object = object.unwrap();
            for offset in (0..case.length).step_by(PAGE as usize) {
                if case.by == By::Present {
                    object.write(offset, &[byte_at(offset); PAGE as usize]).unwrap();
                }
            }
            let access = FileAccess::READ | FileAccess::WRITE;
            space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
        }
        let features = UserfaultFeatures::SIGBUS;
        let fd = space.userfault(features, UserfaultScope::All).unwrap();
        let modes = modes | UserfaultModes::WRITE_PROTECT;
        space.register_userfault(&fd, AT, case.length, modes).unwrap();
        let filled = Filled { machine: &machine, memory: &memory, space: &space, fd: &fd };
        filled.fill(case, &mut |offset, bytes| bytes.fill(byte_at(offset))).unwrap();
        audit(&machine, &memory, &[&space]);
        scenario(&filled);
        audit(&machine, &memory, &[&space]);
        space.munmap(AT, case.length).unwrap();
        assert_eq!(space.resident(), Default::default());
        space.close_userfault(fd);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    let kept = memory.events().huge_zero_pages * HUGE / PAGE;
    assert_eq!(memory.free_frame_count(), free - kept, "{case:?}: frames have leaked");
}

impl<'f, 'm, A: Walk> Filled<'f, 'm, A> {
    fn fill(&self, case: Case, bytes: &mut dyn FnMut(u64, &mut [u8])) -> Result<(), PartialFill> {
        let Case { length, mode, .. } = case;
        match case.by {
            By::Zeroes => self.space.handler(self.fd).fill_zeroes(AT, length, mode),
            By::Present => self.space.handler(self.fd).fill_present(AT, length, mode),
            By::Copy => {
                let mut source = |offset, piece: &mut [u8]| {
                    bytes(offset, piece);
                    Ok::<(), FaultError>(())
                };
                self.space.handler(self.fd).fill_copy(AT, length, mode, &mut source)
            }
        }
    }

    fn program(&self) -> Program<'f, 'm, A> {
        Program::new(self.machine, self.space)
    }

    /// Asserts that each page is present, invisible to all CPUs, and refused to the kernel too.
    #[track_caller]
    fn is_hidden(&self, case: Case) {
        for offset in (0..case.length).step_by(PAGE as usize) {
            let at = VirtAddr(AT.0 + offset);
            let found = self.space.inspect(at);
            let is_hidden = matches!(found, Inspection::Absent(Absent::ProtNone { .. }));
            assert!(is_hidden, "{case:?}: {found:?} at {at}");
        }
        for at in [AT, VirtAddr(AT.0 + case.length - PAGE)] {
            let refused = Err(FaultError::Protection);
            assert_eq!(self.program().load(at), refused.map(|()| 0), "{case:?}");
            assert_eq!(self.program().store(at, 1), refused, "{case:?}");
            assert_eq!(self.program().execute(at), refused, "{case:?}");
            assert_eq!(self.space.read_user(at, &mut [0]), refused, "{case:?}");
            assert_eq!(self.space.write_user(at, &[0]), refused, "{case:?}");
        }
    }

    /// Asserts that each page reads as `byte` specifies.
    #[track_caller]
    fn reads(&self, case: Case, byte: impl Fn(u64) -> u8) {
        for offset in (0..case.length).step_by(PAGE as usize) {
            let mut found = [0];
            self.program().read(VirtAddr(AT.0 + offset), &mut found).unwrap();
            assert_eq!(found, [byte(offset)], "{case:?} at {offset:#x}");
        }
    }

    fn mprotect(&self, case: Case, protection: Protection) {
        self.space.mprotect(AT, case.length, protection).unwrap();
    }
}

/// Fills the pages, checks that they are hidden, and grants access by `mprotect`.
#[track_caller]
fn hidden_until_shown<A: Walk>(case: Case) {
    with_case::<A>(case, |filled| {
        filled.is_hidden(case);
        filled.mprotect(case, Protection::READ);
        audit(filled.machine, filled.memory, &[filled.space]);
        let says = |offset| if case.by == By::Zeroes { 0 } else { byte_at(offset) };
        filled.reads(case, says);
        filled.mprotect(case, NONE);
        filled.is_hidden(case);
        filled.mprotect(case, READ_WRITE);
        filled.program().store(AT, 0x77).unwrap();
        filled.reads(case, |offset| if offset == 0 { 0x77 } else { says(offset) });
    });
    // The same without `mprotect`: the pages stay hidden to the end.
    with_case::<A>(case, |filled| filled.is_hidden(case));
}

const PLAIN: Case =
    Case { kind: Kind::Anonymous, by: By::Copy, length: PAGE, order: 0, mode: FillMode::empty() };

fn copies_of_pages<A: Walk>() {
    for kind in [Kind::Anonymous, Kind::Shared, Kind::Private] {
        // More pages than one batch of the copy, and pages in two tables.
        for length in [PAGE, 40 * PAGE, HUGE + 3 * PAGE] {
            hidden_until_shown::<A>(Case { kind, length, ..PLAIN });
        }
    }
}

fn copies_of_folios<A: Walk>() {
    for kind in [Kind::Anonymous, Kind::Shared] {
        // Contiguous runs and huge leaves.
        for (order, length) in [(4, 64 * PAGE), (9, HUGE), (9, 2 * HUGE)] {
            hidden_until_shown::<A>(Case { kind, length, order, ..PLAIN });
        }
    }
}

fn zeroes<A: Walk>() {
    for kind in [Kind::Anonymous, Kind::Shared] {
        for (order, length) in [(0, PAGE), (0, 40 * PAGE), (4, 16 * PAGE), (9, HUGE)] {
            hidden_until_shown::<A>(Case { kind, by: By::Zeroes, length, order, ..PLAIN });
        }
    }
}

fn continued<A: Walk>() {
    for (order, length) in [(0, PAGE), (0, 40 * PAGE), (4, 64 * PAGE), (9, HUGE)] {
        let case = Case { kind: Kind::Shared, by: By::Present, length, order, ..PLAIN };
        hidden_until_shown::<A>(case);
    }
}

fn protected<A: Walk>() {
    let mode = FillMode::WRITE_PROTECT;
    for (order, length) in [(0, 3 * PAGE), (4, 16 * PAGE), (9, HUGE)] {
        for (kind, by) in [
            (Kind::Anonymous, By::Copy),
            (Kind::Shared, By::Copy),
            (Kind::Shared, By::Zeroes),
            (Kind::Shared, By::Present),
        ] {
            let case = Case { kind, by, length, order, mode };
            with_case::<A>(case, |filled| {
                filled.is_hidden(case);
                let found = filled.space.inspect(AT);
                let Inspection::Absent(Absent::ProtNone {
                    accessed,
                    dirty,
                    soft_dirty,
                    userfault,
                    ..
                }) = found
                else {
                    panic!("{case:?}: {found:?}");
                };
                assert!(accessed && userfault, "{case:?}");
                let written = kind == Kind::Anonymous;
                assert!((dirty, soft_dirty) == (true, true) || !written, "{case:?}");
                filled.mprotect(case, READ_WRITE);
                let Inspection::Page { attributes, .. } = filled.space.inspect(AT) else {
                    panic!("{case:?}");
                };
                let writable = attributes.permissions.contains(Permissions::WRITE);
                assert!(attributes.userfault && !writable, "{case:?}: {attributes:?}");
                // The write fault belongs to the handler, which requested signals.
                assert_eq!(filled.program().store(AT, 1), Err(FaultError::Bus), "{case:?}");
                audit(filled.machine, filled.memory, &[filled.space]);
            });
        }
    }
}

/// On RISC-V, a valid entry without permissions refers to a table, so the bytes of the page would
/// be interpreted as entries.
fn bytes_like_entries<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let victim = AddressSpace::new(&memory, options()).unwrap();
    victim.mmap(&fixed(AT.0, PAGE)).unwrap();
    Program::new(&machine, &victim).store(AT, 0x5ec2e7).unwrap();
    let Inspection::Page { frame, .. } = victim.inspect(AT) else { panic!("no page") };
    memory.folio_policy().set(Order(9), SizeMode::Always);
    let permissions = Permissions::READ | Permissions::WRITE | Permissions::USER;
    let says = Attributes { permissions, accessed: true, dirty: true, ..Attributes::default() };
    let word = A::page_entry(frame, Level::PTE, says).0;

    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&MapRequest { protection: NONE, ..fixed(AT.0, HUGE) }).unwrap();
    let fd = space.userfault(UserfaultFeatures::SIGBUS, UserfaultScope::All).unwrap();
    space.register_userfault(&fd, AT, HUGE, UserfaultModes::MISSING).unwrap();
    let mut source = |_, bytes: &mut [u8]| {
        bytes.chunks_mut(8).for_each(|bytes| bytes.copy_from_slice(&word.to_le_bytes()));
        Ok::<(), FaultError>(())
    };
    space.handler(&fd).fill_copy(AT, HUGE, FillMode::empty(), &mut source).unwrap();
    let program = Program::new(&machine, &space);
    assert_eq!(program.load(AT), Err(FaultError::Protection));
    assert_eq!(space.read_user(AT, &mut [0; 8]), Err(FaultError::Protection));
    assert_eq!(space.write_user(AT, &[0; 8]), Err(FaultError::Protection));
    audit(&machine, &memory, &[&victim, &space]);
    space.mprotect(AT, HUGE, READ_WRITE).unwrap();
    assert_eq!(program.load(AT), Ok(word));
    program.store(AT, 0xbad).unwrap();
    space.munmap(AT, HUGE).unwrap();
    assert_eq!(memory.frame_kind(frame), FrameKind::Anonymous);
    assert_eq!(Program::new(&machine, &victim).load(AT), Ok(0x5ec2e7));
    space.close_userfault(fd);
    audit(&machine, &memory, &[&victim, &space]);
}
