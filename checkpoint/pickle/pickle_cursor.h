// The bytes of a pickle, taken from front to back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "core/check.h"

namespace ds::checkpoint {

// Every error is an IoError that names the file and the opcode's position.
class PickleCursor {
 public:
  // `where` outlives it.
  PickleCursor(std::span<const uint8_t> bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  size_t size() const { return bytes_.size(); }
  // The next opcode, which errors refer to from now on.
  uint8_t next_code() {
    code_at_ = position_;
    return take(1)[0];
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw IoError(cat(where_, ": byte ", code_at_, " of its pickle: ", what));
  }
  void check(bool condition, const char* what) const {
    if (!condition) fail(what);
  }
  std::span<const uint8_t> take(uint64_t count) {
    if (count > bytes_.size() - position_) {
      fail(cat("it ends ", count - (bytes_.size() - position_), " bytes too early: truncated or damaged"));
    }
    const auto taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }
  uint64_t take_number(size_t count) {
    uint64_t number = 0;
    const auto taken = take(count);
    for (size_t i = count; i-- > 0;) number = number << 8 | taken[i];
    return number;
  }
  std::string take_text(uint64_t count) {
    const auto taken = take(count);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::string take_line() {
    const auto rest = bytes_.subspan(position_);
    const auto end = std::find(rest.begin(), rest.end(), '\n');
    check(end != rest.end(), "it ends inside a line: truncated or damaged");
    std::string line = take_text(static_cast<uint64_t>(end - rest.begin()));
    take(1);
    return line;
  }

 private:
  std::span<const uint8_t> bytes_;
  const std::string& where_;
  size_t position_ = 0;
  size_t code_at_ = 0;
};

}  // namespace ds::checkpoint
