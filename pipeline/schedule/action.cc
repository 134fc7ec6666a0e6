#include "pipeline/schedule/action.h"

#include <array>
#include <charconv>
#include <string_view>

#include "core/check.h"
#include "core/shown_text.h"

namespace ds::pipeline {
namespace {

struct Spelling {
  ActionKind kind;
  const char* text;
};

constexpr std::array<Spelling, 8> kLetters = {{
    {ActionKind::kForward, "F"},
    {ActionKind::kBackward, "B"},
    {ActionKind::kBackwardInput, "I"},
    {ActionKind::kBackwardWeight, "W"},
    {ActionKind::kSendActivation, "SF"},
    {ActionKind::kRecvActivation, "RF"},
    {ActionKind::kSendGradient, "SB"},
    {ActionKind::kRecvGradient, "RB"},
}};

constexpr std::array<Spelling, 3> kWords = {{
    {ActionKind::kReduceTied, "REDUCE_TIED"},
    {ActionKind::kReduce, "REDUCE"},
    {ActionKind::kStep, "STEP"},
}};

const char* spelling_of(ActionKind kind) {
  for (const Spelling& letter : kLetters) {
    if (letter.kind == kind) return letter.text;
  }
  for (const Spelling& word : kWords) {
    if (word.kind == kind) return word.text;
  }
  return "?";
}

// Takes the digits off the front of `text`; false when there are none, or too many for an int.
bool take_number(std::string_view& text, int& value) {
  if (text.empty() || text.front() < '0' || text.front() > '9') return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

}  // namespace

bool is_compute(ActionKind kind) {
  return kind == ActionKind::kForward || kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput ||
         kind == ActionKind::kBackwardWeight;
}

bool is_send(ActionKind kind) { return kind == ActionKind::kSendActivation || kind == ActionKind::kSendGradient; }

bool is_recv(ActionKind kind) { return kind == ActionKind::kRecvActivation || kind == ActionKind::kRecvGradient; }

std::string to_text(const Action& action) {
  std::string spelling = spelling_of(action.kind);
  if (!is_compute(action.kind) && !is_send(action.kind) && !is_recv(action.kind)) return spelling;
  return std::to_string(action.stage) + spelling + std::to_string(action.micro_batch);
}

std::ostream& operator<<(std::ostream& out, const Action& action) { return out << to_text(action); }

Action parse_action(const std::string& text) {
  for (const Spelling& word : kWords) {
    if (text == word.text) return {.kind = word.kind};
  }
  Action action;
  std::string_view rest = text;
  const bool starts = take_number(rest, action.stage);
  const size_t length = rest.find_first_of("0123456789");
  const std::string_view letters = rest.substr(0, length);
  rest.remove_prefix(letters.size());
  const bool ends = take_number(rest, action.micro_batch) && rest.empty();
  for (const Spelling& letter : kLetters) {
    if (!starts || !ends || letters != letter.text) continue;
    action.kind = letter.kind;
    return action;
  }
  throw ConfigError(
      cat("schedule: expected a stage, one of F, B, I, W, SF, RF, SB, RB and a micro-batch, as in \"0F3\", or "
          "REDUCE, REDUCE_TIED or STEP, found \"",
          shown_text(text), "\""));
}

}  // namespace ds::pipeline
