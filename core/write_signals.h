// The signals that the kernel sends with a write that fails: SIGXFSZ, where a file has come to its limit (ulimit -f),
// and SIGPIPE, where nobody reads from a pipe or a connection any more. Torch-free.
#pragma once

#include <initializer_list>

namespace ds {

// Keeps signals from ending the process, so that the write itself fails (EFBIG, EPIPE), and an error can name the file
// or the rank. A signal that the program handles or ignores is left alone. The signal gets a handler that does nothing:
// unlike one that is ignored, it has its default meaning again in programs that this one starts. With
// DS_WRITE_SIGNALS=0 in the environment does nothing.
void let_writes_fail(std::initializer_list<int> signals);

}  // namespace ds
