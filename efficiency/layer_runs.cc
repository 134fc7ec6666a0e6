#include <utility>

#include "dsengine/layer_drop.h"

namespace ds::efficiency {

int64_t LayerRuns::next(int64_t layer, int64_t step) {
  if (std::exchange(step_, step) != step) runs_.clear();
  return runs_[layer]++;
}

}  // namespace ds::efficiency
