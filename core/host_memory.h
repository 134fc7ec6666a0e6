// How the C library's allocator treats large blocks. Torch-free.
//
// glibc returns every block above 128 KiB to the kernel when it is freed. A training step frees and allocates the same
// activations again and again, and each time the kernel clears and maps their pages anew.
#pragma once

namespace ds {

// Keeps freed blocks of up to 32 MiB in the process for the next allocation. Process-wide; the first call counts. Does nothing
// when the user has set one of glibc's own variables (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES) or
// preloads another allocator (LD_PRELOAD).
void keep_freed_host_memory();

}  // namespace ds
