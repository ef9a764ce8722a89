//! The calls of a random program, with arguments that mostly succeed.

use super::{Area, FILES, Grammar, Kind, MOST, PAGE, PROCESSES, Part, Process};
use crate::compare::interpreter::step::{Class, size};
use crate::size::MIB;

impl Grammar {
    pub(super) fn map(&mut self, process: usize) {
        let Some(start) = self.new_place(process) else { return };
        let length = self.any_size(MOST);
        let kind = match self.rng.below(8) {
            0 => Kind::Shared,
            1 => Kind::File(self.rng.index(FILES)),
            2 => Kind::PrivateFile(self.rng.index(FILES)),
            _ => Kind::Private,
        };
        const SHARED: u64 = 1;
        const PRIVATE: u64 = 2;
        const FIXED: u64 = 0x10;
        const ANONYMOUS: u64 = 0x20;
        const POPULATE: u64 = 0x8000;
        let mut flags = FIXED
            | match kind {
                Kind::Private => PRIVATE | ANONYMOUS,
                Kind::Shared => SHARED | ANONYMOUS,
                Kind::File(_) => SHARED,
                Kind::PrivateFile(_) => PRIVATE,
            };
        let populate = self.rng.once_in(6);
        if populate {
            flags |= POPULATE;
        }
        let mut file = 0;
        if let Kind::File(number) | Kind::PrivateFile(number) = kind {
            file = number as u64 + 1;
            if self.files[number] < length {
                // The first process makes the files of all processes, before any fork.
                let Some(grown) = self.grow(process, number, length) else { return };
                self.files[number] = grown;
            }
        }
        let operation = if populate { "mmap with MAP_POPULATE" } else { "mmap" };
        let class = Class { operation, memory: kind.name() };
        self.push(process, 'M', &[start, length, 3, flags, file, 0], class, size(length));
        self.processes[process].areas.push(Area {
            start,
            length,
            kind,
            touched: populate,
            served: false,
        });
        if !populate && self.rng.once_in(2) {
            let area = self.processes[process].areas.len() - 1;
            self.touch(process, area);
        }
    }

    /// Creates a file, or a larger one. `None` if other processes exist, which would not have the
    /// file.
    fn grow(&mut self, process: usize, number: usize, length: u64) -> Option<u64> {
        let class = |operation| Class { operation, memory: "" };
        if self.files[number] > 0 {
            self.push(
                process,
                'T',
                &[number as u64, length],
                class("ftruncate, larger"),
                size(length),
            );
            return Some(length);
        }
        let alone = self.processes.iter().filter(|process| process.alive).count() == 1;
        if !alone {
            return None;
        }
        self.push(
            process,
            'K',
            &[number as u64, length],
            class("memfd_create, ftruncate"),
            size(length),
        );
        Some(length)
    }

    /// Writes all of an area.
    fn touch(&mut self, process: usize, area: usize) {
        let Area { start, length, kind, touched, .. } = self.processes[process].areas[area];
        let content = if length > 2 * MIB { 1 } else { 1 + self.rng.below(2) };
        let operation = if touched { "writes again" } else { "first writes" };
        let class = Class { operation, memory: kind.name() };
        let detail = format!("{}{}", size(length), if content == 2 { ", whole pages" } else { "" });
        self.push(process, 'W', &[start, length, PAGE, content], class, detail);
        self.processes[process].areas[area].touched = true;
    }

    pub(super) fn access(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        if self.rng.once_in(3) {
            return self.touch(process, area);
        }
        let Part { start, length, kind } = self.part(process, area);
        let stride = if self.rng.once_in(4) { PAGE * (2 + self.rng.below(30)) } else { PAGE };
        let sparse =
            if stride > PAGE { format!(", every {}", size(stride)) } else { String::new() };
        let detail = size(length) + &sparse;
        if self.rng.once_in(2) {
            let class = Class { operation: "writes", memory: kind.name() };
            let content = self.rng.below(2);
            self.push(process, 'W', &[start, length, stride, content], class, detail);
        } else {
            let class = Class { operation: "reads", memory: kind.name() };
            self.push(process, 'D', &[start, length, stride], class, detail);
        }
    }

    pub(super) fn protect(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let (operation, bits) = self.rng.one(&[
            ("mprotect to read", 1),
            ("mprotect to read and write", 3),
            ("mprotect to nothing", 0),
        ]);
        let class = Class { operation, memory: kind.name() };
        self.push(process, 'P', &[start, length, bits], class, size(length));
        if bits != 3 && self.rng.once_in(2) {
            let class = Class { operation: "mprotect to read and write", memory: kind.name() };
            self.push(process, 'P', &[start, length, 3], class, size(length));
        }
    }

    pub(super) fn remap(&mut self, process: usize) {
        const MAY_MOVE: u64 = 1;
        const FIXED: u64 = 2;
        let Some(area) = self.area(process) else { return };
        let Area { start, length, kind, .. } = self.processes[process].areas[area];
        if self.rng.once_in(4) {
            // Grows or shrinks in place.
            let new = self.any_size(MOST);
            let grows = matches!(kind, Kind::Private) || new < length;
            if new == length || !grows {
                return;
            }
            let operation = if new > length { "mremap, larger" } else { "mremap, smaller" };
            let class = Class { operation, memory: kind.name() };
            let detail = format!("{} to {}", size(length), size(new));
            self.push(process, 'R', &[start, length, new, 0, 0], class, detail);
            self.processes[process].areas[area].length = new;
            return;
        }
        let Some(mut to) = self.new_place(process) else { return };
        if self.rng.once_in(2) {
            // At the same offset from a multiple of 2 MiB as before, so that whole tables can move.
            to = to / (2 * MIB) * (2 * MIB) + start % (2 * MIB);
        }
        let class = Class { operation: "mremap, moved", memory: kind.name() };
        let far = if to % (2 * MIB) == start % (2 * MIB) { ", congruent" } else { "" };
        let detail = size(length) + far;
        self.push(process, 'R', &[start, length, length, MAY_MOVE | FIXED, to], class, detail);
        self.processes[process].areas[area].start = to;
    }

    pub(super) fn advise(&mut self, process: usize) {
        const ADVICE: &[(&str, u64)] = &[
            ("MADV_DONTNEED", 4),
            ("MADV_DONTNEED", 4),
            ("MADV_FREE", 8),
            ("MADV_COLD", 20),
            ("MADV_PAGEOUT", 21),
            ("MADV_PAGEOUT", 21),
            ("MADV_WILLNEED", 3),
            ("MADV_POPULATE_READ", 22),
            ("MADV_POPULATE_WRITE", 23),
            ("MADV_HUGEPAGE", 14),
            ("MADV_NOHUGEPAGE", 15),
            ("MADV_RANDOM", 1),
        ];
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let (operation, advice) = self.rng.one(ADVICE);
        let served = self.processes[process].areas[area].served;
        if served && matches!(advice, 22 | 23) {
            return;
        }
        let class = Class { operation, memory: kind.name() };
        self.push(process, 'A', &[start, length, advice], class, size(length));
    }

    pub(super) fn unmap(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let whole = length == self.processes[process].areas[area].length;
        let operation = if whole { "munmap" } else { "munmap of a part" };
        self.push(
            process,
            'U',
            &[start, length],
            Class { operation, memory: kind.name() },
            size(length),
        );
        // No call covers all of an area with a hole.
        self.processes[process].areas.remove(area);
    }

    pub(super) fn fork(&mut self, process: usize) {
        let free = (0..PROCESSES).find(|&child| !self.processes[child].alive);
        let Some(child) = free else { return self.exit() };
        let bytes: u64 = self.processes[process].areas.iter().map(|area| area.length).sum();
        let class = Class { operation: "fork", memory: "" };
        self.push(process, 'F', &[child as u64], class, format!("{} mapped", size(bytes)));
        let mut areas = self.processes[process].areas.clone();
        areas.iter_mut().for_each(|area| area.served = false);
        let slots = self.processes[process].slots;
        self.processes[child] = Process { alive: true, parent: process, areas, slots };
    }

    /// Ends a process without children, from its parent.
    pub(super) fn exit(&mut self) {
        let has_children = |parent: usize| {
            self.processes.iter().enumerate().any(|(child, process)| {
                child != parent && process.alive && process.parent == parent && child != 0
            })
        };
        let leaves: Vec<_> = (1..PROCESSES)
            .filter(|&child| self.processes[child].alive && !has_children(child))
            .collect();
        if leaves.is_empty() {
            return;
        }
        let child = self.rng.one(&leaves);
        let parent = self.processes[child].parent;
        let bytes: u64 = self.processes[child].areas.iter().map(|area| area.length).sum();
        let class = Class { operation: "exit and wait", memory: "" };
        self.push(parent, 'X', &[child as u64], class, format!("{} mapped", size(bytes)));
        self.processes[child] = Process::default();
    }

    pub(super) fn file(&mut self, process: usize) {
        let number = self.rng.index(FILES);
        let bytes = self.files[number];
        if bytes == 0 {
            return;
        }
        let length = self.any_size(bytes);
        let offset = self.rng.below((bytes - length) / PAGE + 1) * PAGE;
        let class = Class { operation: "fallocate, a hole", memory: "" };
        self.push(process, 'H', &[number as u64, offset, length], class, size(length));
    }

    pub(super) fn look(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        let (operation, letter) = self.rng.one(&[("mincore", 'I'), ("msync", 'S')]);
        const SYNC: u64 = 4;
        let class = Class { operation, memory: kind.name() };
        self.push(process, letter, &[start, length, SYNC], class, size(length));
    }

    pub(super) fn lock(&mut self, process: usize) {
        let Some(area) = self.area(process) else { return };
        let Part { start, length, kind } = self.part(process, area);
        if self.processes[process].areas[area].served {
            return;
        }
        let length = length.min(4 * MIB);
        for (operation, letter) in [("mlock", 'L'), ("munlock", 'N')] {
            let class = Class { operation, memory: kind.name() };
            self.push(process, letter, &[start, length], class, size(length));
        }
    }

    /// Applies only to the first process, so that no fork leaves a child with a userfaultfd of its
    /// parent.
    pub(super) fn userfault(&mut self, process: usize) {
        const MISSING: u64 = 1;
        const WRITE_PROTECT: u64 = 2;
        let whole = self.processes[process]
            .areas
            .iter()
            .find(|area| area.kind == Kind::Private && area.touched && !area.served);
        let Some(&Area { start: from, length, .. }) = whole else { return };
        if process != 0 {
            return;
        }
        let Some(to) = self.new_place(process) else { return };
        let class = |operation| Class { operation, memory: Kind::Private.name() };
        let private = 0x32;
        self.push(process, 'M', &[to, length, 3, private], class("mmap"), size(length));
        self.push(
            process,
            'O',
            &[to, length, MISSING | WRITE_PROTECT],
            class("UFFDIO_REGISTER"),
            size(length),
        );
        let piece = if self.rng.once_in(2) { length } else { self.any_size(length) };
        let mut at = 0;
        let mut calls = 0;
        while at < length && calls < 12 {
            let bytes = piece.min(length - at);
            let (operation, letter) = self.rng.one(&[
                ("UFFDIO_COPY", 'Y'),
                ("UFFDIO_MOVE", 'V'),
                ("UFFDIO_ZEROPAGE", 'Z'),
            ]);
            let arguments = match letter {
                'Z' => [to + at, bytes, 0],
                _ => [to + at, bytes, from + at],
            };
            self.push(process, letter, &arguments, class(operation), size(bytes));
            at += bytes;
            calls += 1;
        }
        if self.rng.once_in(2) {
            let bytes = self.any_size(length);
            self.push(process, 'E', &[to, bytes, 1], class("UFFDIO_WRITEPROTECT"), size(bytes));
            self.push(
                process,
                'E',
                &[to, bytes, 0],
                class("UFFDIO_WRITEPROTECT, removed"),
                size(bytes),
            );
        }
        self.push(process, 'Q', &[to, length], class("UFFDIO_UNREGISTER"), size(length));
        let area = Area { start: to, length, kind: Kind::Private, touched: true, served: false };
        self.processes[process].areas.push(area);
    }
}
