#include "core/check_time.h"

namespace ds {
namespace {

thread_local CheckTime::Total total_of_checks;
thread_local int open_scopes_of_checks = 0;

}  // namespace

CheckTime::Total CheckTime::of_this_thread() { return total_of_checks; }

CheckTime::Scope::Scope(bool waits) : waits_(waits), begun_(std::chrono::steady_clock::now()) {
  ++open_scopes_of_checks;
}

CheckTime::Scope::~Scope() {
  const std::chrono::nanoseconds life = std::chrono::steady_clock::now() - begun_;
  const bool is_inside = --open_scopes_of_checks > 0;
  if (waits_) total_of_checks.waiting += life;
  if (!waits_ && !is_inside) total_of_checks.own += life;
  if (waits_ && is_inside) total_of_checks.own -= life;  // which the scope around it counts
}

}  // namespace ds
