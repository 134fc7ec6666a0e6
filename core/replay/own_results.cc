#include "core/replay/own_results.h"

namespace ds {
namespace {

thread_local uint64_t own_results = 0;

}  // namespace

void OwnResults::note() { ++own_results; }
uint64_t OwnResults::noted() { return own_results; }

}  // namespace ds
