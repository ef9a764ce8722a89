//! Observes a Linux process from within, without touching the observed memory or changing the
//! process's own memory, so no code here allocates.

use std::ffi::CStr;

use super::super::observation::{
    ANONYMOUS, Area, Backing, Counters, FIRST_FILE, FileState, OTHER_OBJECT, Presence, Stretch,
    digest, letter,
};
use super::super::place::{ALL_FILES, PAGE, REGION, REGION_END, ZEROES};
use super::super::words::{Shared, Sink};
use super::access;

/// Room for the text of `/proc`, reserved before the scenario begins.
const TEXT: usize = 256 << 10;

/// The maximum number of mappings in the region.
const MAPPINGS: usize = 512;

/// Ranges per read.
const REGIONS: usize = 256;

/// The argument of `PAGEMAP_SCAN` (see ioctl_pagemap_scan(2)).
#[repr(C)]
#[derive(Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_length: u64,
    maximum_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO: u64 = 1 << 5;
const IS_GUARD: u64 = 1 << 8;

/// The object of a shared mapping of `/dev/zero` that can never be written.
const READ_ONLY_ZEROES: Backing = u64::MAX;

/// The state needed to observe the calling process.
pub struct Eyes {
    mappings: i32,
    pagemap: i32,
    status: i32,
    /// The files' inode numbers in `/proc`.
    inodes: [u64; ALL_FILES.len()],
    /// The inode number of `/dev/zero`.
    zeroes: u64,
    text: Box<[u8]>,
    regions: Box<[ScanRegion]>,
    /// The usage of the process before the scenario.
    before: Counters,
}

fn open(path: &CStr) -> i32 {
    // SAFETY: the path is a string that ends in a zero.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    assert!(file >= 0, "{path:?} cannot be opened");
    file
}

/// The status of a file.
fn file_status(file: i32) -> libc::stat {
    // SAFETY: all zeroes is a valid value of this structure of numbers.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours, and as large as the kernel expects.
    let read = unsafe { libc::fstat(file, &mut status) };
    assert_eq!(read, 0, "fstat");
    status
}

impl Eyes {
    /// Allocates everything that observing needs. The files are not open yet, and the process is
    /// not yet the observed one.
    pub fn new() -> Self {
        Self {
            mappings: -1,
            pagemap: -1,
            status: -1,
            inodes: [0; ALL_FILES.len()],
            zeroes: 0,
            // Touched here, so that no page is touched for the first time later.
            text: vec![1; TEXT].into_boxed_slice(),
            regions: vec![ScanRegion::default(); REGIONS].into_boxed_slice(),
            before: Counters::default(),
        }
    }

    /// Opens the files of `/proc` in the process to observe, whose own files are already open.
    pub fn open(&mut self) {
        self.mappings = open(c"/proc/self/smaps");
        self.pagemap = open(c"/proc/self/pagemap");
        self.status = open(c"/proc/self/status");
        self.inodes = ALL_FILES.map(|file| file_status(file as i32).st_ino);
        self.zeroes = file_status(ZEROES[0] as i32).st_ino;
    }

    /// From here on, snapshots count only usage beyond the present one. Returns the present usage.
    pub fn begin_to_count(&mut self) -> Counters {
        self.before = self.usage();
        self.before
    }

    /// The total usage of the process.
    pub fn usage(&mut self) -> Counters {
        let length = read_until(self.status, &mut self.text, |_| false);
        let text = &self.text[..length];
        let pages = |name: &[u8]| {
            let line = lines(text).find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            decimal(line) / 4
        };
        Counters { mapped: pages(b"VmSize:"), data: pages(b"VmData:"), locked: pages(b"VmLck:") }
    }

    /// Writes the snapshot of the process.
    pub fn look(&mut self, shared: &mut Shared<'_>) {
        self.areas(shared);
        self.stretches(shared);
        for file in ALL_FILES {
            let status = file_status(file as i32);
            // SAFETY: `F_GET_SEALS` does not access memory.
            let seals = unsafe { libc::fcntl(file as i32, libc::F_GET_SEALS) };
            let pages = status.st_blocks as u64 * 512 / PAGE;
            let state = FileState { size: status.st_size as u64, pages, seals: seals as u64 };
            put_words(shared, &state.words());
        }
        let used = self.usage();
        let since = Counters {
            mapped: used.mapped.wrapping_sub(self.before.mapped),
            data: used.data.wrapping_sub(self.before.data),
            locked: used.locked,
        };
        put_words(shared, &since.words());
    }

    /// Calls `f` for each mapping in the region, by rising address.
    fn for_each_area(&mut self, mut f: impl FnMut(&Area)) {
        // The mappings behind the region are the program's own, and make up most of the text.
        let behind = |text: &[u8]| {
            let mut headers = lines(text).filter(|line| is_header(line));
            headers.any(|line| hexadecimal(before(line, b'-')) >= REGION_END)
        };
        let length = read_until(self.mappings, &mut self.text, behind);
        let mut area = None;
        // Objects without a descriptor are distinguished by their order.
        let mut others = [0_u64; 32];
        for line in lines(&self.text[..length]) {
            if let Some(flags) = line.strip_prefix(b"VmFlags: ") {
                if let Some(mut whole) = area.take().filter(in_region) {
                    whole.letters = flags.split(|byte| *byte == b' ').map(letter).sum();
                    if whole.backing == READ_ONLY_ZEROES {
                        // The core treats such a mapping as private memory that can never be
                        // written.
                        whole.letters &= !letter(b"ms");
                        (whole.backing, whole.offset) = (ANONYMOUS, 0);
                    }
                    f(&whole);
                }
            } else if is_header(line) {
                area = Some(header(line, &self.inodes, self.zeroes, &mut others));
            }
        }
    }

    fn areas(&mut self, shared: &mut Shared<'_>) {
        let count_at = shared.len();
        shared.put(0);
        let mut count = 0;
        self.for_each_area(|area| {
            put_words(shared, &area.words());
            count += 1;
        });
        shared.amend(count_at, count);
    }

    fn stretches(&mut self, shared: &mut Shared<'_>) {
        let count_at = shared.len();
        shared.put(0);
        let mut count = 0;
        let mut from = REGION;
        while from < REGION_END {
            let mut arguments = ScanArguments {
                size: size_of::<ScanArguments>() as u64,
                start: from,
                end: REGION_END,
                vector: self.regions.as_mut_ptr() as u64,
                vector_length: REGIONS as u64,
                category_any_of: IS_PRESENT | IS_SWAPPED | IS_GUARD,
                return_mask: IS_FILE | IS_PRESENT | IS_SWAPPED | IS_ZERO | IS_GUARD,
                ..ScanArguments::default()
            };
            // SAFETY: the arguments are laid out as the kernel expects, and their vector has that
            // number of elements.
            let filled = unsafe { libc::ioctl(self.pagemap, PAGEMAP_SCAN, &mut arguments) };
            assert!(filled >= 0, "PAGEMAP_SCAN");
            for region in &self.regions[..filled as usize] {
                let presence = presence(region.categories);
                let stretch = Stretch { start: region.start, end: region.end, presence };
                put_words(shared, &stretch.words());
                count += 1;
            }
            from = arguments.walk_end;
        }
        shared.amend(count_at, count);
    }

    /// Writes the program's view of each page in its mappings: addresses and digests.
    pub fn put_contents(&mut self, shared: &mut Shared<'_>) {
        // Collects the ranges first, because loads change the mapped pages.
        let mut ranges = [(0, 0); MAPPINGS];
        let mut count = 0;
        self.for_each_area(|area| {
            ranges[count] = (area.start, area.end);
            count += 1;
        });
        for (start, end) in &ranges[..count] {
            for at in (*start..*end).step_by(PAGE as usize) {
                shared.put(at);
                shared.put(digest(|index| access::load(at + index * 8)));
            }
        }
    }
}

fn put_words(shared: &mut Shared<'_>, words: &[u64]) {
    for word in words {
        shared.put(*word);
    }
}

fn in_region(area: &Area) -> bool {
    area.start < REGION_END && area.end > REGION
}

fn presence(categories: u64) -> Presence {
    match categories {
        // A guard is a marker in a swap entry.
        guard if guard & IS_GUARD != 0 => Presence::Guard,
        IS_PRESENT => Presence::Anonymous,
        _ if categories == IS_PRESENT | IS_ZERO => Presence::Zero,
        _ if categories == IS_PRESENT | IS_FILE => Presence::Object,
        _ => Presence::Other(categories),
    }
}

/// Whether a line is the first line of a mapping in `/proc`; the names in all other lines begin
/// with capital letters.
fn is_header(line: &[u8]) -> bool {
    line.first().is_some_and(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase())
}

/// The text before the first occurrence of a byte.
fn before(text: &[u8], byte: u8) -> &[u8] {
    text.split(|other| *other == byte).next().unwrap_or_default()
}

/// Reads a mapping from its first line in `/proc`.
fn header(line: &[u8], inodes: &[u64], zeroes: u64, others: &mut [u64; 32]) -> Area {
    let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let mut field = || fields.next().unwrap_or_default();
    let range = field();
    let mut ends = range.split(|byte| *byte == b'-').map(hexadecimal);
    let (start, end) = (ends.next().unwrap_or(0), ends.next().unwrap_or(0));
    let _protection = field();
    let offset = hexadecimal(field());
    let _device = field();
    let backing = if in_region(&Area { start, end, letters: 0, backing: 0, offset }) {
        match decimal(field()) {
            // Writable memory has its own number.
            inode if inode == zeroes => READ_ONLY_ZEROES,
            inode => backing(inode, inodes, others),
        }
    } else {
        ANONYMOUS
    };
    let offset = if backing == ANONYMOUS { 0 } else { offset };
    Area { start, end, letters: 0, backing, offset }
}

fn backing(inode: u64, inodes: &[u64], others: &mut [u64; 32]) -> Backing {
    if inode == 0 {
        return ANONYMOUS;
    }
    if let Some(file) = inodes.iter().position(|known| *known == inode) {
        return FIRST_FILE + file as u64;
    }
    let place = others.iter().position(|known| *known == inode || *known == 0);
    let place = place.unwrap_or(others.len() - 1);
    others[place] = inode;
    OTHER_OBJECT + place as u64
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n')
}

/// The first decimal number of a text.
pub fn decimal(text: &[u8]) -> u64 {
    let digits = text.iter().skip_while(|byte| !byte.is_ascii_digit());
    digits
        .take_while(|byte| byte.is_ascii_digit())
        .fold(0, |number: u64, byte| number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0')))
}

fn hexadecimal(text: &[u8]) -> u64 {
    text.iter().fold(0, |number, byte| {
        let digit = if byte.is_ascii_digit() { byte - b'0' } else { (byte | 32) - b'a' + 10 };
        number << 4 | u64::from(digit)
    })
}

/// Reads a file from its beginning until `enough` accepts the bytes read at once, or to its end.
/// Panics if the buffer is too small.
fn read_until(file: i32, into: &mut [u8], enough: impl Fn(&[u8]) -> bool) -> usize {
    let mut done = 0;
    loop {
        let rest = &mut into[done..];
        assert!(!rest.is_empty(), "/proc says more than there is room for");
        // SAFETY: the kernel writes at most `rest.len()` bytes.
        let read = unsafe { libc::pread(file, rest.as_mut_ptr().cast(), rest.len(), done as i64) };
        assert!(read >= 0, "/proc cannot be read");
        if read == 0 || enough(&rest[..read as usize]) {
            return done + read as usize;
        }
        done += read as usize;
    }
}
