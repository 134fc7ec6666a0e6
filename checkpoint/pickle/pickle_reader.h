// Reads pickles (protocols 2 to 5: docs.python.org/3/library/pickletools.html) as torch.save writes them, without
// Python, and without running anything: classes and functions stay names, except the few that only say how a plain
// value or a tensor is put together (collections.OrderedDict, torch.Size, torch._utils._rebuild_tensor_v2, ...).
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>

#include "checkpoint/pickle/pickle_value.h"

namespace ds::checkpoint {

// Owns its values. Safe for concurrent readers. Memory and time are linear in the number of bytes, whatever is in them.
class Pickle {
 public:
  // Reads one pickle; bytes behind its end are ignored. Throws IoError that begins with `where` and names the position:
  // truncated, not a pickle, a tensor that does not fit its storage, what torch.save never writes.
  Pickle(std::span<const uint8_t> bytes, const std::string& where);
  Pickle(const Pickle&) = delete;
  Pickle& operator=(const Pickle&) = delete;

  const PickleValue& root() const { return *root_; }

 private:
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace ds::checkpoint
