//! The proof that the build supports userfaultfds; each handle contains one.
//!
//! Without the feature `userfault`, the proof has no value. So no handle exists, and the compiler
//! drops the code that would use a handle.

#[cfg(feature = "userfault")]
#[derive(Clone, Copy)]
pub(crate) struct Built(());

#[cfg(feature = "userfault")]
impl Built {
    #[inline]
    pub(crate) fn new() -> Option<Self> {
        Some(Self(()))
    }

    #[inline]
    pub(crate) fn assure(self) {}
}

#[cfg(not(feature = "userfault"))]
#[derive(Clone, Copy)]
pub(crate) enum Built {}

#[cfg(not(feature = "userfault"))]
impl Built {
    #[inline]
    pub(crate) fn new() -> Option<Self> {
        None
    }

    #[inline]
    pub(crate) fn assure(self) {
        match self {}
    }
}
