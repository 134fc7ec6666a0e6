// Symbolic links that lead nowhere, which the system reports as "File exists" or as a folder that is not there.
// Torch-free.
#pragma once

#include <filesystem>
#include <string>

namespace ds {

// Names the link, where `path` or a folder above it is a symbolic link to what does not exist: "LINK is a symbolic link
// to TARGET, which does not exist". Empty where none is.
std::string dangling_link(const std::filesystem::path& path);

}  // namespace ds
