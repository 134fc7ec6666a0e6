// What both feeds keep of themselves: the time that was waited, and the reading of a saved position.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace ds::data {

// Adds up the time that a function takes.
class WaitedTime {
 public:
  template <class Body>
  decltype(auto) take(const Body& body) {
    struct Clock {
      std::chrono::nanoseconds& total;
      std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
      ~Clock() { total += std::chrono::steady_clock::now() - begin; }
    } const clock{total_};
    return body();
  }
  std::chrono::nanoseconds total() const { return total_; }

 private:
  std::chrono::nanoseconds total_{0};
};

// Returns a number of a saved position. Throws UsageError where there is none, or one below 0.
inline int64_t number_of_state(const nlohmann::json& state, const char* key) {
  require(state.is_object() && state.contains(key) && state.at(key).is_number_integer() &&
              (state.at(key).is_number_unsigned() || state.at(key).get<int64_t>() >= 0),
          "data loader: expected a position as state_dict() gives it, with a number \"", key, "\" from 0 up, found ",
          state.dump());
  return static_cast<int64_t>(state.at(key).get<uint64_t>());
}

}  // namespace ds::data
