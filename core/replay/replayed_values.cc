#include "core/replay/replayed_values.h"

#include "core/check.h"

namespace ds {

// One of a thread's scopes, of either kind.
struct ReplayScope {
  std::vector<int64_t>* recorded = nullptr;  // null: played
  const std::vector<int64_t>* played = nullptr;
  size_t next = 0;
  ReplayScope* outer = nullptr;
};

namespace {

thread_local ReplayScope* innermost = nullptr;

int64_t value_of(ReplayScope* scope, const std::function<int64_t()>& decide) {
  if (scope == nullptr) return decide();
  if (scope->recorded) {
    const int64_t value = value_of(scope->outer, decide);
    scope->recorded->push_back(value);
    return value;
  }
  require(scope->next < scope->played->size(), "a region that is computed again asks for more decisions than its ",
          "first run: expected ", scope->played->size(),
          "; layers that may be dropped must be asked for alike in both runs");
  return (*scope->played)[scope->next++];
}

}  // namespace

ReplayTape::Recording::Recording(ReplayTape& tape)
    : scope_(std::make_unique<ReplayScope>(ReplayScope{.recorded = &tape.values_, .outer = innermost})) {
  innermost = scope_.get();
}

ReplayTape::Recording::~Recording() { innermost = scope_->outer; }

ReplayTape::Playing::Playing(const ReplayTape& tape)
    : scope_(std::make_unique<ReplayScope>(ReplayScope{.played = &tape.values_, .outer = innermost})) {
  innermost = scope_.get();
}

ReplayTape::Playing::~Playing() { innermost = scope_->outer; }

bool ReplayTape::Playing::finished() const { return scope_->next == scope_->played->size(); }

bool ReplayTape::recording() { return innermost != nullptr && innermost->recorded != nullptr; }

int64_t ReplayTape::replayed(const std::function<int64_t()>& decide) { return value_of(innermost, decide); }

}  // namespace ds
