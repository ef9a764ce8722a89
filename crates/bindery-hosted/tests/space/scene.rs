//! A machine with a program, a file and shared memory, on which calls are interrupted.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{Level, X86_64};
use bindery::{
    Accounting, AddressSpace, Error, FileAccess, Inspection, MapObject, MapRequest, Memory, Object,
    Place, Sealing, Sharing,
};
use bindery_hosted::{Machine, MemoryFiles, Program};
use bindery_linux as linux;

use crate::support::{GIB, MIB, READ_WRITE, audit, options, strict};

type Hosted = Machine<X86_64<4>>;

/// An address where a huge leaf fits.
pub const AT: u64 = GIB;
/// The number of the file.
const FILE: u64 = 1;
/// The size of the file, in pages.
const FILE_PAGES: u64 = 256;

/// The objects of a call.
pub struct Scene<'m> {
    pub machine: &'m Hosted,
    pub memory: &'m Memory<Hosted>,
    pub files: &'m MemoryFiles,
    pub space: AddressSpace<'m, Hosted>,
    /// A file of 256 pages.
    pub file: Object<'m, Hosted>,
    /// Shared memory, empty at first.
    pub shared: Object<'m, Hosted>,
}

/// A long call.
pub struct Case<'a> {
    pub prepare: fn(&Scene<'_>),
    pub call: &'a dyn Fn(&Scene<'_>) -> Result<(), Error>,
    /// The state after it was stopped, given the number of earlier checks.
    pub stopped: fn(&Scene<'_>, u64),
    /// The state after it has completed.
    pub done: fn(&Scene<'_>),
}

/// Runs `scenario` on a scene and verifies that nothing of the scene is left afterwards.
pub fn on_scene(scenario: impl FnOnce(&Scene<'_>)) {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<X86_64<4>>(64 * MIB);
    let free = memory.free_frame_count();
    {
        let shared = memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage).unwrap();
        let scene = Scene {
            machine: &machine,
            memory: &memory,
            files: &files,
            space: AddressSpace::new(&memory, options()).unwrap(),
            file: memory.file(&files, FILE, FILE_PAGES * PAGE_SIZE).unwrap(),
            shared,
        };
        scenario(&scene);
        scene.audit_with(&[]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

/// Delivers the signal at the first check of the call, then at the second, and so on until the call
/// completes. Returns the number of checks.
pub fn at_every_question(case: &Case<'_>) -> u64 {
    let mut questions = 0;
    loop {
        let mut stops = false;
        on_scene(|scene| {
            (case.prepare)(scene);
            scene.machine.fatal_signal_after(Some(questions));
            let result = (case.call)(scene);
            scene.machine.fatal_signal_after(None);
            scene.audit_with(&[]);
            if let Err(error) = result {
                assert_eq!(error, Error::Interrupted, "after {questions} questions");
                stops = true;
                (case.stopped)(scene, questions);
                assert_eq!((case.call)(scene), Ok(()), "made again");
            }
            (case.done)(scene);
        });
        if !stops {
            return questions;
        }
        questions += 1;
    }
}

impl<'m> Scene<'m> {
    /// Audits the scene's address space and others.
    pub fn audit_with(&self, others: &[&AddressSpace<'m, Hosted>]) {
        let spaces: Vec<_> = core::iter::once(&self.space).chain(others.iter().copied()).collect();
        audit(self.machine, self.memory, &spaces);
    }

    fn program(&self) -> Program<'_, 'm, X86_64<4>> {
        Program::new(self.machine, &self.space)
    }

    /// Writes to each page its address.
    pub fn fill(&self, at: u64, pages: u64) {
        let program = self.program();
        for at in (at..at + pages * PAGE_SIZE).step_by(PAGE_SIZE as usize) {
            program.store(VirtAddr(at), at).unwrap();
        }
    }

    /// Whether each page holds what [`Scene::fill`] wrote.
    pub fn assert_filled(&self, at: u64, pages: u64) {
        let program = self.program();
        for at in (at..at + pages * PAGE_SIZE).step_by(PAGE_SIZE as usize) {
            assert_eq!(program.load(VirtAddr(at)), Ok(at));
        }
    }

    /// The number of huge leaves among the 2 MiB spans from `at` on.
    pub fn huge_leaves(&self, at: u64, spans: u64) -> u64 {
        let is_huge = |span: &u64| {
            let at = VirtAddr(at + span * 2 * MIB);
            matches!(self.space.inspect(at), Inspection::Page { level, .. } if level == Level::PMD)
        };
        (0..spans).filter(is_huge).count() as u64
    }

    /// Maps the first pages of the file.
    pub fn map_file(&self, at: u64, pages: u64) {
        let request = MapRequest {
            length: pages * PAGE_SIZE,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(at)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: &self.file, offset: 0, access };
        self.space.mmap_object(&request, &source).unwrap();
    }

    /// Writes a byte to every second page of the file, `pages` times.
    pub fn write_scattered(&self, pages: u64) {
        for page in 0..pages {
            self.file.write(2 * page * PAGE_SIZE, &[page as u8 + 1]).unwrap();
        }
    }

    /// The file contains the written data, in memory or in the storage.
    pub fn assert_nothing_lost(&self) {
        for page in 0..100 {
            let mut byte = [0];
            self.file.read(2 * page * PAGE_SIZE, &mut byte).unwrap();
            assert_eq!(byte, [page as u8 + 1]);
        }
    }

    /// The bytes of [`Scene::write_scattered`] were stored.
    pub fn assert_saved(&self, pages: u64) {
        let content = self.files.content(FILE);
        for page in 0..pages {
            assert_eq!(content[(2 * page * PAGE_SIZE) as usize], page as u8 + 1, "page {page}");
        }
    }
}

impl<'m> linux::Process<'m, Hosted> for Scene<'m> {
    fn space(&self) -> &AddressSpace<'m, Hosted> {
        &self.space
    }

    fn file(&self, _descriptor: i32) -> Option<linux::OpenFile<'m, Hosted>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&AddressSpace<'m, Hosted>> {
        None
    }
}
