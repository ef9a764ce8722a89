//! Methods of the core outside of the layers of their types, longer than a forward.

/// A module and a type, and the number of the type's methods in that module. The number may fall.
pub(crate) const OF_THE_CORE: &[(&str, usize)] = &[
    ("folio::fresh: frame::Frames", 1),
    ("folio::mapping: frame::Frames", 1),
    ("folio::reference: frame::Frames", 1),
    ("object: memory::Memory", 5),
    ("object::swap_off: memory::Memory", 1),
    ("reclaim: memory::Memory", 5),
    ("reclaim::anonymous: memory::Memory", 4),
    ("reclaim::direct: memory::Memory", 3),
    ("reclaim::family: memory::Memory", 6),
    ("reclaim::files: memory::Memory", 1),
    ("reclaim::swap_on: memory::Memory", 1),
    ("reclaim::sweep: memory::Memory", 2),
    ("space::call::mprotect: vma::Vma", 1),
    ("table::out_batch: memory::Memory", 1),
];
