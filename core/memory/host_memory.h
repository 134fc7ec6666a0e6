// Sets how the C library's allocator treats large blocks. Torch-free.
//
// glibc returns every block above 128 KiB to the kernel when it is freed. A training step frees and allocates the same
// activations again and again, and each time the kernel clears and maps their pages anew.
//
// Both are process-wide, the last call counts, and do nothing when the user has set one of glibc's own variables
// (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES), preloads another allocator (LD_PRELOAD), or wants
// it so (DS_MALLOC_THRESHOLDS=0).
#pragma once

namespace ds {

// Keeps freed blocks of up to 32 MiB in the process for the next allocation.
void keep_freed_host_memory();
// Gives blocks from 256 KiB on pages of their own, which go back to the kernel when they are freed. For a model that is
// sliced while it is built: full parameters between slices that stay would leave holes that fit nothing.
void return_freed_host_memory();

}  // namespace ds
