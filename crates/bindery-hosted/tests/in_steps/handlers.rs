//! Handlers of userfaultfds: they serve missing pages of registered memory late, in another order, not
//! at all, or without being asked.

use bindery::{
    Error, FillMode, MappingFlags, Userfault, UserfaultFeatures, UserfaultMessage, UserfaultModes,
    UserfaultScope,
};

use super::action::Span;
use super::model::{CELLS, Source, filled};
use super::world::{AT, P, PAGE, World, address};

/// The userfaultfd of a process.
pub struct Handler<'m> {
    by: usize,
    userfault: Userfault<'m, P>,
    /// The pages that were asked for, and that it has not answered.
    asked: Vec<u64>,
}

/// A page that a handler has filled with a value.
pub struct Filling {
    by: usize,
    page: u64,
    value: u8,
}

/// The way in which a handler serves a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    Copy(u8),
    Zero,
    /// The fault asks again.
    Wake,
}

impl<'m> World<'_, 'm> {
    /// Runs `work`, whose thread answers in place of its sleeps.
    pub fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        self.server.with(|| self.serve(), work)
    }

    /// Gives one answer. Returns whether there was a request.
    pub fn serve(&self) -> bool {
        match self.server.below(4) {
            0 => self.handle() || self.server.serve(),
            _ => self.server.serve() || self.handle(),
        }
    }

    /// A handler answers one fault. Returns whether one has asked.
    pub fn handle(&self) -> bool {
        // A fill that sleeps is not served by handlers.
        let Ok(mut handlers) = self.handlers.try_borrow_mut() else { return false };
        for handler in handlers.iter_mut() {
            while let Some(message) = handler.userfault.try_read() {
                let UserfaultMessage::Fault(fault) = message else { panic!("{message:?}") };
                handler.asked.push((fault.address.0 - AT) / PAGE);
            }
        }
        let count = handlers.iter().filter(|handler| !handler.asked.is_empty()).count() as u64;
        if count == 0 {
            return false;
        }
        let chosen = self.server.below(count) as usize;
        let mut asked = handlers.iter_mut().filter(|handler| !handler.asked.is_empty());
        let handler = asked.nth(chosen).expect("a handler");
        let which = self.server.below(handler.asked.len() as u64) as usize;
        let service = match self.server.below(8) {
            0 => Service::Wake,
            1..=3 => Service::Zero,
            value => Service::Copy(value as u8),
        };
        let page = handler.asked.swap_remove(which);
        self.fill(handler, page, service);
        true
    }

    /// Serves a page. The page may be gone, or filled.
    fn fill(&self, handler: &Handler<'m>, page: u64, service: Service) {
        let (space, userfault, at) = (self.space(handler.by), &handler.userfault, address(page));
        let filled_by = match service {
            Service::Wake => return space.wake_userfaults(userfault, at, PAGE).unwrap(),
            Service::Zero => {
                space.handler(userfault).fill_zeroes(at, PAGE, FillMode::empty()).map(|()| None)
            }
            Service::Copy(value) => {
                let mut source = |_, piece: &mut [u8]| {
                    piece.fill(filled(value, 0));
                    Ok(())
                };
                let copied =
                    space.handler(userfault).fill_copy(at, PAGE, FillMode::empty(), &mut source);
                copied.map(|()| Some(filled(value, 0)))
            }
        };
        match filled_by {
            Ok(None) => {}
            Ok(Some(value)) => {
                self.fillings.borrow_mut().push(Filling { by: handler.by, page, value });
            }
            // Another answer has filled the page, a signal has come, or this userfaultfd does not serve
            // the page. The fault waits until it is woken, also if its memory is gone, as on Linux.
            Err(partial) => {
                let may_fail = matches!(
                    partial.error,
                    Error::Exists(_) | Error::Interrupted | Error::NotMapped(_)
                );
                assert!(may_fail, "page {page} of {}: {partial:?}", handler.by);
                space.wake_userfaults(userfault, at, PAGE).unwrap();
            }
        }
    }

    /// Whether a userfaultfd serves the page.
    pub fn is_served(&self, by: usize, page: u64) -> bool {
        let at = address(page);
        let found = self.space(by).view_mapping(at, |view| {
            view.range().contains(at) && view.flags().contains(MappingFlags::USERFAULT_MISSING)
        });
        found.unwrap_or_default()
    }

    /// Applies what the handlers have filled.
    pub fn apply_fillings(&mut self) {
        for Filling { by, page, value } in self.fillings.take() {
            if let Some(page) = self.model.spaces[by].get_mut(&page) {
                assert_eq!(page.source, Source::Anonymous);
                page.own = Some([Some(value); CELLS as usize]);
            }
        }
    }

    /// Registers memory of a process, if all of it is anonymous.
    pub fn register(&mut self, by: usize, span: Span) {
        if !self.is_anonymous(by, span) {
            return;
        }
        let space = self.space(by);
        let mut handlers = self.handlers.borrow_mut();
        let found = handlers.iter().position(|handler| handler.by == by);
        let found = found.unwrap_or_else(|| {
            let userfault = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All);
            handlers.push(Handler { by, userfault: userfault.unwrap(), asked: Vec::new() });
            handlers.len() - 1
        });
        let (at, length) = (address(span.first), span.pages * PAGE);
        let userfault = &handlers[found].userfault;
        space.register_userfault(userfault, at, length, UserfaultModes::MISSING).unwrap();
    }

    /// Unregisters memory, which wakes its faults.
    pub fn unregister(&mut self, by: usize, span: Span) {
        if !self.is_anonymous(by, span) {
            return;
        }
        let handlers = self.handlers.borrow();
        if let Some(handler) = handlers.iter().find(|handler| handler.by == by) {
            let (at, length) = (address(span.first), span.pages * PAGE);
            self.space(by).unregister_userfault(&handler.userfault, at, length).unwrap();
        }
    }

    /// A handler serves a page that may not have been asked for.
    pub fn fill_early(&mut self, by: usize, page: u64, service: Service) {
        let handlers = self.handlers.borrow();
        if let Some(handler) = handlers.iter().find(|handler| handler.by == by) {
            self.with(|| self.fill(handler, page, service));
        }
    }

    /// The handler of a process is closed, or dies.
    pub fn close_handler(&mut self, by: usize, dies: bool) {
        let mut handlers = self.handlers.borrow_mut();
        let Some(found) = handlers.iter().position(|handler| handler.by == by) else { return };
        let handler = handlers.swap_remove(found);
        if dies {
            drop(handler);
        } else {
            self.space(by).close_userfault(handler.userfault);
        }
    }

    pub fn close_handlers(&mut self) {
        (0..self.model.spaces.len()).for_each(|by| self.close_handler(by, false));
    }

    fn is_anonymous(&self, by: usize, span: Span) -> bool {
        let pages = &self.model.spaces[by];
        span.all().all(|page| pages.get(&page).is_some_and(|page| page.source == Source::Anonymous))
    }
}
