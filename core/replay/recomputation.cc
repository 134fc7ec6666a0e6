#include "core/replay/recomputation.h"

namespace ds {
namespace {

thread_local int recomputations = 0;

}  // namespace

Recomputation::Scope::Scope() { ++recomputations; }
Recomputation::Scope::~Scope() { --recomputations; }
bool Recomputation::is_running() { return recomputations > 0; }

}  // namespace ds
