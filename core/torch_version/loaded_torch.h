// Whether the LibTorch that a process has loaded is the one that this library was compiled for.
#pragma once

#include <string>
#include <string_view>

namespace ds {

// The version of the loaded LibTorch, as it says itself ("2.11.0"); empty where it does not say.
std::string loaded_torch_version();

// Throws ConfigError when two versions of LibTorch differ in more than the last number: classes of its headers change
// from one minor version to the next. An empty `loaded` is unknown, and is let through.
void require_same_torch_minor(std::string_view compiled_for, std::string_view loaded);

}  // namespace ds
