//! The contents that each call must find: a model of the address spaces and the objects.

use std::collections::BTreeMap;

use super::action::HEAP;

/// The unit of contents, in bytes.
pub const CELL: u64 = 512;
/// The number of cells of a page.
pub const CELLS: u64 = 8;
/// The size of the largest object, in pages.
pub const MOST_PAGES: u64 = 32;
/// The size of both objects at first, in pages.
pub const FIRST_PAGES: u64 = 16;

/// The value of each byte of a cell; `None` if it is not determined.
pub type Cell = Option<u8>;

/// The kind of a new mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Anonymous,
    /// Of the file.
    Private,
    /// Of the file (0) or of the shared memory (1).
    Shared(usize),
}

/// The origin of a page that has no copy of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Anonymous,
    /// A page of the file.
    Private(u64),
    /// An object, and its page.
    Shared(usize, u64),
}

/// A mapped page.
#[derive(Clone, Debug)]
pub struct Page {
    pub source: Source,
    pub reads: bool,
    pub writes: bool,
    pub is_locked: bool,
    /// The content of the process's own copy.
    pub own: Option<[Cell; CELLS as usize]>,
}

/// The mapped pages of a process.
pub type Space = BTreeMap<u64, Page>;

/// The content of an object.
pub struct Content {
    pub cells: Vec<Cell>,
    /// The time of the last change of each cell.
    changed: Vec<u64>,
    /// In cells.
    pub size: u64,
}

impl Content {
    fn new(cells: impl Fn(u64) -> u8) -> Self {
        let size = FIRST_PAGES * CELLS;
        let all = MOST_PAGES * CELLS;
        let cell = |n| Some(if n < size { cells(n) } else { 0 });
        Self { cells: (0..all).map(cell).collect(), changed: vec![0; all as usize], size }
    }

    pub fn pages(&self) -> u64 {
        self.size.div_ceil(CELLS)
    }

    pub fn page(&self, page: u64) -> Option<[Cell; CELLS as usize]> {
        let first = (page * CELLS) as usize;
        (page < self.pages()).then(|| self.cells[first..first + CELLS as usize].try_into().unwrap())
    }

    pub fn is_unchanged_since(&self, cell: u64, time: u64) -> bool {
        self.changed[cell as usize] <= time
    }

    pub fn set(&mut self, cell: u64, value: Cell, now: u64) {
        self.cells[cell as usize] = value;
        self.changed[cell as usize] = now;
    }

    pub fn set_size(&mut self, size: u64, now: u64) {
        let old = self.size;
        self.size = size;
        for cell in size.min(old)..MOST_PAGES * CELLS {
            let kept = size > old && self.cells[cell as usize] == Some(0);
            // A program may have written behind the end, in the last page.
            let value =
                if size > old && cell < old.next_multiple_of(CELLS) { None } else { Some(0) };
            self.set(cell, if kept { Some(0) } else { value }, now);
        }
    }
}

/// The heap of a process, and the locks of its new mappings.
#[derive(Clone, Copy)]
pub struct Heap {
    /// The cell at which it ends.
    pub end: u64,
    /// Whether new mappings are locked.
    pub locks_new: bool,
}

/// All contents.
pub struct Model {
    pub spaces: Vec<Space>,
    /// By process.
    pub heaps: Vec<Heap>,
    pub objects: [Content; 2],
    /// The number of events so far.
    pub now: u64,
}

/// The content of a file at first.
pub fn first_cell(cell: u64) -> u8 {
    (cell % 250) as u8 + 1
}

/// The cell `index` of a call that fills cells.
pub fn filled(value: u8, index: u64) -> u8 {
    (value % 63 + 1) * 4 + (index % 4) as u8
}

impl Model {
    pub fn new() -> Self {
        let objects = [Content::new(first_cell), Content::new(|_| 0)];
        let heaps = vec![Heap { end: HEAP, locks_new: false }];
        Self { spaces: vec![Space::new()], heaps, objects, now: 1 }
    }

    /// The content that an access to the page finds; `None` if it fails.
    pub fn find(&self, by: usize, page: u64, writes: bool) -> Option<[Cell; CELLS as usize]> {
        let found = self.spaces[by].get(&page)?;
        if !(if writes { found.writes } else { found.reads }) {
            return None;
        }
        self.content(found)
    }

    /// The content of a page, without regard to its protection.
    pub fn content(&self, page: &Page) -> Option<[Cell; CELLS as usize]> {
        page.own.or_else(|| match page.source {
            Source::Anonymous => Some([Some(0); CELLS as usize]),
            Source::Private(of) => self.objects[0].page(of),
            Source::Shared(object, of) => self.objects[object].page(of),
        })
    }

    /// A store of the program.
    pub fn store(&mut self, by: usize, cell: u64, value: Cell) {
        let (page, inside) = (cell / CELLS, cell % CELLS);
        let Some(content) = self.find(by, page, true) else {
            panic!("page {page} is not writable")
        };
        let found = self.spaces[by].get_mut(&page).unwrap();
        if let Source::Shared(object, of) = found.source {
            let (object, cell) = (&mut self.objects[object], of * CELLS + inside);
            // The core may zero the bytes behind the end at any time.
            let value = if cell < object.size { value } else { None };
            object.set(cell, value, self.now);
        } else {
            found.own.get_or_insert(content)[inside as usize] = value;
        }
    }

    /// A write to an object.
    pub fn write(&mut self, object: usize, cell: u64, value: Cell) {
        let content = &mut self.objects[object];
        if cell >= content.size {
            content.set_size(cell + 1, self.now);
        }
        content.set(cell, value, self.now);
    }

    /// The size is in cells.
    pub fn resize(&mut self, object: usize, size: u64) {
        self.objects[object].set_size(size, self.now);
        if object > 0 {
            return;
        }
        let pages = self.objects[object].pages();
        for page in self.spaces.iter_mut().flat_map(Space::values_mut) {
            if matches!(page.source, Source::Private(of) if of >= pages) {
                page.own = None;
            }
        }
    }

    /// Zeroes cells of an object.
    pub fn punch(&mut self, object: usize, cells: std::ops::Range<u64>) {
        let content = &mut self.objects[object];
        for cell in cells.start..cells.end.min(content.size) {
            content.set(cell, Some(0), self.now);
        }
    }
}
