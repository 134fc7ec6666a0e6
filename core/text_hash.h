// A hash of a text: the same on every platform and in every build, unlike std::hash. Torch-free.
#pragma once

#include <cstdint>
#include <string_view>

namespace ds {

// FNV-1a, 64 bits. Not for anything that an adversary writes.
constexpr uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

}  // namespace ds
