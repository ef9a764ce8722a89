//! The root of the file system.

use alloc::sync::Arc;

use crate::sync::Mutex;

use super::node::Place;

static ROOT: Mutex<Option<Arc<Place>>> = Mutex::new(None);

/// The root. It exists from boot until the end of the machine.
///
/// # Panics
/// Before boot has created it, and after the end.
pub fn root() -> Arc<Place> {
    ROOT.lock().clone().expect("there is a root between boot and the end")
}

/// Makes a place the root.
pub fn set(place: Arc<Place>) {
    *ROOT.lock() = Some(place);
}

/// Removes the root, at the end.
pub fn take() -> Option<Arc<Place>> {
    ROOT.lock().take()
}
