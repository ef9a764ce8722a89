//! The guarantees of a call, as a third CPU observes them.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::platform::Cpu;
use bindery::{Inspection, Pager, ReadBuffer};
use bindery_hosted::{Violation, Walk};

use super::operations::{Denied, Holds, Move, Operation, Revoked};
use super::world::{
    ANON, BEFORE, FILE, FILE_PAGES, NUMBER, PRIVATE, PROBES, Probe, Which, World, is_shared, value,
};

/// The observing CPU.
pub const WATCHER: Cpu = Cpu(2);

/// Rounds of stores by the watcher.
pub const WHILE_HELD: u64 = 2;
const AFTER_RETURN: u64 = 3;

/// Two calls that meet, and the problems found.
pub struct Audit<'a, 'm, A: Walk> {
    pub world: &'a World<'m, A>,
    pub held: &'a Operation<A>,
    pub stepped_in: &'a Operation<A>,
    pub problems: Vec<String>,
}

/// Places to which a copy must not write after a move has returned: addresses and contents.
pub type Late = Vec<(u64, u64)>;

impl<A: Walk> Audit<'_, '_, A> {
    fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Whether one of the two has this name.
    pub fn involves(&self, name: &str) -> bool {
        self.held.name == name || self.stepped_in.name == name
    }

    /// Checks the guarantees of the call that stepped in, after it has returned and while the other
    /// call is still held. `stored` holds the values that the watcher previously stored at the
    /// probes.
    pub fn on_return(&mut self, stored: &[Option<u64>]) -> Late {
        self.machine_saw_nothing();
        self.revoked(self.stepped_in, "returned");
        self.contents(stored);
        self.child_is_apart();
        self.new_child(stored);
        self.breaks_were_made();
        self.moved_for_good()
    }

    /// Checks the guarantees after both calls have returned; `done` holds which of them succeeded.
    pub fn at_the_end(&mut self, done: [bool; 2], late: &Late) {
        // Audits before any access, because on x86-64 a fault removes a stale translation.
        self.world.machine.audit();
        self.machine_saw_nothing();
        let pairs = [(self.held, self.stepped_in), (self.stepped_in, self.held)];
        for ((operation, other), done) in pairs.into_iter().zip(done) {
            let undone = match operation.holds {
                Holds::OnReturn => true,
                Holds::Until(ends) => ends.iter().any(|end| other.name.starts_with(end)),
            };
            if undone || !done {
                continue;
            }
            self.revoked(operation, "was undone by nobody");
            if operation.name.starts_with("guard install") {
                self.guards(operation);
            }
        }
        for (at, content) in late {
            let now = self.world.load_at(self.world.space.root(), *at);
            if now.is_some_and(|now| now != *content) {
                let held = self.held.name;
                self.problem(format!("{held} has written to {at:#x}, after the move had returned"));
            }
        }
    }

    /// The machine itself reports states that no order of calls permits.
    fn machine_saw_nothing(&mut self) {
        for violation in self.world.machine.take_violations() {
            self.problem(violation.to_string());
        }
    }

    fn revoked(&mut self, operation: &Operation<A>, when: &str) {
        for revoked in &operation.revokes {
            for probe in self.probes_in(operation, revoked) {
                let name = operation.name;
                let Probe { which, at } = probe;
                if revoked.what == Denied::Everything
                    && let Some(seen) = self.world.load(probe)
                {
                    self.problem(format!("{name} {when}: {which:?} {at:#x} is loaded: {seen:#x}"));
                }
                if self.world.store(probe, value(probe, AFTER_RETURN)) {
                    self.problem(format!("{name} {when}: {which:?} {at:#x} is stored to"));
                }
            }
        }
    }

    /// The probes in the revoked range, and their new addresses if the other call has moved them.
    fn probes_in(&self, operation: &Operation<A>, revoked: &Revoked) -> Vec<Probe> {
        let inside = |at: u64| revoked.start <= at && at < revoked.end;
        let mut probes = Vec::new();
        if operation.name == "fork" && self.involves("pin") {
            // The parent retains a pinned page, also for writes, since the child has a copy.
            return probes;
        }
        for probe in PROBES.into_iter().filter(|p| p.which == revoked.which && inside(p.at)) {
            if probe.which != Which::Child || self.child_stays() {
                probes.push(probe);
            }
            let moved = operation.of_the_file && probe.which == Which::Space;
            for moves in [self.held.moves, self.stepped_in.moves].into_iter().flatten() {
                if let Some(at) = moves.image(probe.at).filter(|_| moved) {
                    probes.push(Probe { at, ..probe });
                }
            }
        }
        probes
    }

    fn child_stays(&self) -> bool {
        !self.involves("drop child")
    }

    /// Checks that the watcher's values are present, at the old place or the new one.
    fn contents(&mut self, stored: &[Option<u64>]) {
        for (probe, stored) in PROBES.into_iter().zip(stored) {
            if probe.which == Which::Child {
                continue;
            }
            let Some(stored) = stored.filter(|_| !self.loses(probe)) else { continue };
            let own =
                |operation: &Operation<A>| operation.moves.filter(|_| probe.which == Which::Space);
            let image = |moves: Move| moves.image(probe.at);
            let places = [
                Some(probe.at),
                own(self.held).and_then(image),
                own(self.stepped_in).and_then(image),
            ];
            for at in places.into_iter().flatten() {
                let found = self.world.load(Probe { at, ..probe });
                if found.is_some_and(|found| found != stored) {
                    let which = probe.which;
                    self.problem(format!(
                        "{which:?} {at:#x}: stored {stored:#x}, found {found:x?}"
                    ));
                }
            }
        }
    }

    /// Checks that anonymous and shared memory have the same content as before the two calls, in
    /// memory or in swap. `seen` holds the values that the watcher stored or loaded, in
    /// chronological order.
    pub fn swapped_contents(&mut self, seen: &[Vec<Option<u64>>]) {
        for (number, probe) in PROBES.into_iter().enumerate() {
            let mut stored = seen.iter().rev().find_map(|round| round[number]);
            if probe.at < ANON && !is_shared(probe.at) || self.loses(probe) {
                continue;
            }
            if is_shared(probe.at) {
                // The watcher may have stored to the page in the other space. Values grow.
                let same = |(other, _): &(&Probe, _)| other.at == probe.at;
                let rounds = seen.iter().flat_map(|round| PROBES.iter().zip(round).filter(same));
                stored = rounds.filter_map(|(_, stored)| *stored).max();
            }
            let children = self.world.children.lock().unwrap();
            let (space, expected) = match probe.which {
                Which::Other => (&self.world.other, stored.unwrap_or(value(probe, BEFORE))),
                Which::Space => (&self.world.space, stored.unwrap_or(value(probe, BEFORE))),
                Which::Child if self.child_stays() => (&children[0], value(probe, BEFORE)),
                _ => continue,
            };
            let moves = [self.held.moves, self.stepped_in.moves].into_iter().flatten();
            let images = moves.filter(|_| probe.which == Which::Space);
            let places = images.filter_map(|moves| moves.image(probe.at)).chain([probe.at]);
            let mut wrong = Vec::new();
            for at in places {
                let mut bytes = [0; 8];
                if space.read_user(VirtAddr(at), &mut bytes).is_ok() {
                    let found = u64::from_ne_bytes(bytes);
                    if found != expected {
                        let which = probe.which;
                        wrong.push(format!("{which:?} {at:#x}: {found:#x}, not {expected:#x}"));
                    }
                }
            }
            drop(children);
            self.problems.append(&mut wrong);
        }
    }

    /// Checks that the child does not see its parent's later stores.
    pub fn child_is_apart(&mut self) {
        for probe in PROBES.into_iter().filter(|probe| probe.which == Which::Child) {
            if probe.at < PRIVATE || !self.child_stays() {
                continue;
            }
            let found = self.world.load(probe);
            if found.is_some_and(|found| found != value(probe, BEFORE)) {
                self.problem(format!("the child at {:#x} finds {found:x?}", probe.at));
            }
        }
    }

    /// Whether one of the two calls may change the contents there.
    fn loses(&self, probe: Probe) -> bool {
        let mut lost = self.held.loses.iter().chain(&self.stepped_in.loses);
        lost.any(|(start, end)| *start <= probe.at && probe.at < *end)
    }

    /// A newly forked child has its parent's content, whatever the parent stores afterwards.
    fn new_child(&mut self, stored: &[Option<u64>]) {
        if self.stepped_in.name != "fork" {
            return;
        }
        let children = self.world.children.lock().unwrap();
        let Some(child) = children.last() else { return };
        child.enter();
        let root = child.root();
        drop(children);
        for (probe, stored) in PROBES.into_iter().zip(stored) {
            let private =
                probe.which == Which::Space && probe.at >= PRIVATE && !is_shared(probe.at);
            let Some(stored) = stored.filter(|_| private && !self.loses(probe)) else { continue };
            self.world.store(probe, value(probe, AFTER_RETURN));
            let found = self.world.load_at(root, probe.at);
            if found.is_some_and(|found| found != stored) {
                let at = probe.at;
                self.problem(format!("the new child at {at:#x}: {found:x?} for {stored:#x}"));
            }
        }
    }

    /// On architectures that demand break-before-make, no entry may refer to a different table or
    /// page than a TLB still holds for that entry, even while a call is in progress.
    fn breaks_were_made(&mut self) {
        self.world.machine.audit();
        for violation in self.world.machine.take_violations() {
            let replaced = match &violation {
                Violation::StaleTable { now: Some(now), cached, .. } => now != cached,
                Violation::StaleLeaf { place, now: Some(now), cached, .. } => {
                    now.translate(place.addr) != cached.translate(place.addr)
                }
                _ => false,
            };
            if replaced && A::NAME.starts_with("aarch64") {
                self.problem(format!("replaced without a break: {violation}"));
            }
        }
    }

    /// The content at the new place of a move that has returned: calls that began before the move,
    /// at the old place, must no longer write there.
    fn moved_for_good(&self) -> Late {
        let Some(moves) = self.stepped_in.moves else { return Late::new() };
        if !self.held.name.starts_with("write_") {
            return Late::new();
        }
        let root = self.world.space.root();
        let places = [(ANON, 0), (FILE, 1), (PRIVATE, 0)].map(|(base, page)| {
            let at = base + page * PAGE_SIZE;
            [at + 104, at + PAGE_SIZE]
        });
        let written = places.into_iter().flatten();
        let images = written.filter_map(|at| moves.image(at));
        images.filter_map(|at| Some((at, self.world.load_at(root, at)?))).collect()
    }

    /// Checks that installed guards stay.
    fn guards(&mut self, operation: &Operation<A>) {
        for revoked in &operation.revokes {
            let found = self.world.space.inspect(VirtAddr(revoked.start));
            if !matches!(found, Inspection::Absent(_)) {
                self.problem(format!("the guard at {:#x} is gone: {found:?}", revoked.start));
            }
        }
    }

    /// Checks that the content in memory is in the file after a sync.
    pub fn saved(&mut self, when: &str) {
        let (world, size) = (self.world, self.world.file.size());
        if let Err(error) = world.file.sync(0, u64::MAX) {
            self.problem(format!("sync at the end: {error:?}"));
        }
        for page in FILE_PAGES.into_iter().filter(|page| (page + 1) * PAGE_SIZE <= size) {
            let (mut ours, mut theirs) = (vec![0; 4096], vec![0; 4096]);
            let read =
                world.file.read(page * PAGE_SIZE, &mut ours).map_err(|error| format!("{error:?}"));
            let load = |into: &mut ReadBuffer<'_>| world.files.read(NUMBER, page, into);
            let stored = ReadBuffer::over(&mut theirs, load);
            if read.is_err() || stored.is_err() || ours != theirs {
                self.problem(format!("page {page} of the file was not saved, {when}"));
            }
        }
    }
}
