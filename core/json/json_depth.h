// A limit for JSON from elsewhere: nlohmann's parser takes any depth, but its dump() and copies recurse, so that a text
// of millions of brackets would overflow the stack.
#pragma once

#include <nlohmann/json.hpp>

namespace ds {

// The callback of parse(text, std::ref(depth)) of nlohmann::json, ordered or not. Deeper values are not kept.
class JsonDepth {
 public:
  static constexpr int kDeepest = 100;

  template <class Json>
  bool operator()(int depth, nlohmann::json::parse_event_t /*event*/, const Json& /*parsed*/) {
    exceeded_ = exceeded_ || depth > kDeepest;
    return depth <= kDeepest;
  }
  bool exceeded() const { return exceeded_; }

 private:
  bool exceeded_ = false;
};

}  // namespace ds
