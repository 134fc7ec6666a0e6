// Which processes can share memory. Torch-free.
#pragma once

#include <string>

namespace ds::comm {

// Returns a text that is equal in two processes exactly when both see the same POSIX shared memory and each other's
// process ids: the boot id of the kernel, the file system of /dev/shm and the process namespace. Host names do not tell
// (containers share a kernel with different names, and cloned machines share a name).
std::string shared_memory_domain();

// Returns, for people, the name of this host, or "unknown-host".
std::string host_name();

// Returns the address from which this host reaches `host`, as text, or empty where it cannot be told (nothing is sent).
// An interface that reaches the meeting place is one that the other ranks can reach.
std::string address_towards(const std::string& host);

// Whether `host` is this machine alone, for everybody who reads it: "localhost", 127.0.0.0/8, ::1.
bool is_loopback(const std::string& host);

}  // namespace ds::comm
