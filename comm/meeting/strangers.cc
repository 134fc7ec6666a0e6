#include "comm/meeting/strangers.h"

#include <nlohmann/json.hpp>
#include <thread>

#include "core/json/parse_json.h"
#include "core/shown_text.h"
#include "core/text.h"

namespace ds::comm {
namespace {

constexpr const char* kWhichSecret = "rendezvous/which_secret";
constexpr const char* kWithout = "rendezvous/without_secret";
constexpr const char* kPurpose = "which secret";
constexpr const char* kNoSecret = "0";

// Returns the value of a key that is there; nothing where it is gone again: without a limit that would wait for the
// store's timeout.
std::optional<std::string> text_of_key(c10d::Store& outside, const char* key) {
  constexpr std::chrono::milliseconds kLimit{1000};
  const std::chrono::milliseconds before = outside.getTimeout();
  std::optional<std::string> text;
  outside.setTimeout(kLimit);
  try {
    text = outside.get_to_str(key);
  } catch (const std::exception&) {  // a store that has ended says so at the next call
    text.reset();
  }
  outside.setTimeout(before);
  return text;
}

std::string text_at(const nlohmann::json& arrival, const char* key) {
  const auto found = arrival.find(key);
  return found != arrival.end() && found->is_string() ? shown_text(found->get<std::string>()) : "unknown";
}

}  // namespace

void say_which_secret(c10d::Store& outside, const std::optional<JobSecret>& own) {
  outside.set(kWhichSecret, own ? own->proof_of(kPurpose, "") : std::string(kNoSecret));
}

SecretOfFirst secret_of_first(c10d::Store& outside, const std::optional<JobSecret>& own,
                              std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kPause{2};
  const auto end = std::chrono::steady_clock::now() + limit;
  bool said = outside.check({kWhichSecret});
  for (; !said && std::chrono::steady_clock::now() < end; said = outside.check({kWhichSecret})) {
    std::this_thread::sleep_for(kPause);
  }
  const auto text = said ? text_of_key(outside, kWhichSecret) : std::nullopt;
  if (!text) return SecretOfFirst::kUnsaid;
  if (*text == kNoSecret) return own ? SecretOfFirst::kNone : SecretOfFirst::kSame;
  return own && own->proves(*text, kPurpose, "") ? SecretOfFirst::kSame : SecretOfFirst::kAnother;
}

void leave_place(c10d::Store& outside, const std::string& arrival) { outside.set(kWithout, arrival); }

std::string take_stranger(c10d::Store& outside) {
  if (!outside.check({kWithout})) return "";
  const std::string text = text_of_key(outside, kWithout).value_or("");
  outside.deleteKey(kWithout);
  constexpr size_t kLongest = 10000;  // whoever wrote it need not be one of our ranks
  const auto arrival = text.size() > kLongest ? nlohmann::json() : parse_json<nlohmann::json>(text, nullptr, false);
  if (!arrival.is_object()) return "an unknown address";
  const auto pid = arrival.value("pid", nlohmann::json());
  return cat(text_at(arrival, "address"), " (", text_at(arrival, "host"), ", pid ",
             pid.is_number_integer() ? cat(pid.get<int64_t>()) : "unknown", ")");
}

}  // namespace ds::comm
