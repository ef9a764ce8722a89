//! The core's public functions, compiled for the machines of this crate.
//!
//! A generic function is compiled in the crate that instantiates it. Up to `opt-level` 1 the
//! compiler reuses an existing instance from an upstream crate instead ("share generics"). So the
//! program and the tests reuse the compiled core and compile only their own code. A function that
//! is missing here is compiled by each program that calls it, which costs only time.

use std::hint::black_box;

use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Platform;
use bindery::{
    AddressSpace, KernelMap, Memory, Object, Pinned, Userfault, UserfaultHandler, check,
};

use crate::Machine;

/// Refers to functions of types. The macro must take their addresses, or nothing is compiled.
macro_rules! functions {
    ($($owner:ty { $($function:ident)* })*) => {
        $($(black_box(<$owner>::$function as *const ());)*)*
    };
}

/// Refers to functions of modules, for the platform `$platform`.
macro_rules! free_functions {
    ($platform:ty: $($($name:ident)::+),* $(,)?) => {
        $(black_box($($name)::+::<$platform> as *const ());)*
    };
}

/// Compiles the core for a platform. Called by the crate that defines the platform.
pub fn core_for<P: Platform + 'static>() {
    functions! {
        Memory<P> {
            set_large_folio_effort collect set_huge_zero_page shared_memory secret_memory
            drain_deferred swap_in_objects begin_swap_in_objects discard_free_slots complete_swap_request
            finish_swap_writes wait_for_swap_writes swap_usage swap_on swap_on_device
            set_compressed_limit compressed_usage swap_off drop_clean_pages reclaim new
            set_fault_reserve frame_kind frame_view frame_span frame_usage events allocate_frames
            free_frames trim
        }
        AddressSpace<'static, P> {
            set_merging merging protection_keys pkey_alloc pkey_free set_break_start set_break
            madvise madvise_with_keys discard inspect collapse_range collapse_some resident
            mprotect mprotect_from pkey_mprotect msync set_limits limits usage copy_from copy_to
            split_folio join_leaves mlock munlock mlockall munlockall swap_in_area begin_swap_in_area mseal munmap
            set_large_folios inherit_settings remap_file_pages reap
            register_userfault unregister_userfault close_userfault
            fork mmap mmap_object new with_reach enter leave counts memory pin fault
            fault_with_keys fault_for_kernel userfault
            wake_userfaults owns_userfault mremap
        }
        UserfaultHandler<'static, 'static, P> {
            fill_copy fill_zeroes fill_poison fill_present move_pages write_protect
        }
        KernelMap<'static, P> {
            vrealloc purge vmalloc vfree physical explain resolve protect vmap vunmap ioremap iounmap
            new with_reach with_root counts
        }
        Object<'static, P> {
            next_data next_hole seals add_seals read write set_size punch_hole allocate sync
            resident_pages swapped_pages
        }
        Pinned<'static, P> { first }
        Userfault<'static, P> { try_read try_read_but_fork read }
    }
    free_functions! { P:
        bindery_linux::prctl, bindery_linux::pread, bindery_linux::pwrite, bindery_linux::ftruncate, bindery_linux::fallocate,
        check::check, check::check_with_kernel, check::scratch_words,
    }
}

/// Compiles the core for all machines with real architectures. Calling this function has no effect.
pub fn all() {
    core_for::<Machine<X86_64<4>>>();
    core_for::<Machine<X86_64<5>>>();
    core_for::<Machine<AArch64>>();
    core_for::<Machine<Riscv64<3>>>();
    core_for::<Machine<Riscv64<4>>>();
}
