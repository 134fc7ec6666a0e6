#include "comm/meeting/strangers.h"

#include <nlohmann/json.hpp>
#include <thread>

#include "core/shown_text.h"
#include "core/text.h"

namespace ds::comm {
namespace {

constexpr const char* kHasSecret = "rendezvous/has_secret";
constexpr const char* kWithout = "rendezvous/without_secret";

std::string text_at(const nlohmann::json& arrival, const char* key) {
  const auto found = arrival.find(key);
  return found != arrival.end() && found->is_string() ? shown_text(found->get<std::string>()) : "unknown";
}

}  // namespace

void say_whether_there_is_a_secret(c10d::Store& outside, bool there_is) {
  outside.set(kHasSecret, std::string(there_is ? "1" : "0"));
}

bool come_without_secret(c10d::Store& outside, const std::string& arrival, std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kPause{2};
  const auto end = std::chrono::steady_clock::now() + limit;
  bool said = outside.check({kHasSecret});
  for (; !said && std::chrono::steady_clock::now() < end; said = outside.check({kHasSecret})) {
    std::this_thread::sleep_for(kPause);
  }
  if (!said || outside.get_to_str(kHasSecret) != "1") return false;
  outside.set(kWithout, arrival);
  return true;
}

std::string take_stranger(c10d::Store& outside) {
  if (!outside.check({kWithout})) return "";
  const std::string text = outside.get_to_str(kWithout);
  outside.deleteKey(kWithout);
  constexpr size_t kLongest = 10000;  // whoever wrote it need not be one of our ranks
  const auto arrival = text.size() > kLongest ? nlohmann::json() : nlohmann::json::parse(text, nullptr, false);
  if (!arrival.is_object()) return "an unknown address";
  const auto pid = arrival.value("pid", nlohmann::json());
  return cat(text_at(arrival, "address"), " (", text_at(arrival, "host"), ", pid ",
             pid.is_number_integer() ? cat(pid.get<int64_t>()) : "unknown", ")");
}

}  // namespace ds::comm
