#include "tests/simulated_gpu/pinned_reads.h"

#include <string_view>
#include <utility>

namespace ds::simulated_gpu {
namespace {

size_t hash_of(const PinnedReads::Read& read) {
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(read.begin), read.end - read.begin});
}

}  // namespace

void PinnedReads::add(Read read) {
  const size_t hash = hash_of(read);
  reads_.push_back({std::move(read), hash});
}

std::vector<PinnedReads::Read> PinnedReads::end(const std::function<bool(const Read&)>& over) {
  std::vector<Read> changed;
  std::erase_if(reads_, [&](const Kept& kept) {
    if (!over(kept.read)) return false;
    if (hash_of(kept.read) != kept.hash) changed.push_back(kept.read);
    return true;
  });
  return changed;
}

}  // namespace ds::simulated_gpu
