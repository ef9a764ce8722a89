//! Methods of the core outside of the layers of their types, longer than a forward.

/// A module and a type, and the number of the type's methods in that module. The number may fall.
pub(crate) const OF_THE_CORE: &[(&str, usize)] = &[
    ("folio::fresh: frame::Frames", 1),
    ("folio::mapping: frame::Frames", 1),
    ("folio::reference: frame::Frames", 1),
    ("space::call::mprotect: vma::Vma", 1),
];
