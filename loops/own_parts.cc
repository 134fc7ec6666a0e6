#include "loops/own_parts.h"

#include <algorithm>

#include "core/check.h"

namespace ds::loops {
namespace {

const std::vector<const ShardedTensor*>& parts_of(const OwnPart& own, const GivenParts& given) {
  static const std::vector<const ShardedTensor*> kNone;
  const auto found = given.find(own.name);
  return found == given.end() ? kNone : found->second;
}

// Elements of `own` that others have, copied where `copy` says so.
int64_t covered(const OwnPart& own, const std::vector<const ShardedTensor*>& given, bool copy) {
  int64_t elements = 0;
  for (const ShardedTensor* one : given) {
    const int64_t from = std::max(own.offset, one->offset);
    const int64_t to = std::min(own.offset + own.values.numel(), one->offset + one->values.numel());
    if (from >= to) continue;
    elements += to - from;
    if (!copy) continue;
    own.values.narrow(0, from - own.offset, to - from)
        .copy_(one->values.reshape({-1}).narrow(0, from - one->offset, to - from));
  }
  return elements;
}

}  // namespace

GivenParts given_parts(const std::vector<ShardedTensor>& parts) {
  GivenParts given;
  for (const ShardedTensor& part : parts) given[part.name].push_back(&part);
  return given;
}

void require_covered(const char* call, const OwnPart& own, const GivenParts& given) {
  const auto& parts = parts_of(own, given);
  for (const ShardedTensor* one : parts) {
    require(one->sizes == own.sizes, call, ": ", own.name, ": expected parts of a tensor of shape ",
            at::IntArrayRef(own.sizes), ", found ", at::IntArrayRef(one->sizes));
  }
  const int64_t found = covered(own, parts, /*copy=*/false);
  require(found == own.values.numel(), call, ": ", own.name, ": expected parts with all of its elements ", own.offset,
          " to ", own.offset + own.values.numel(), ", which are this rank's, found ", found,
          " of them; give it the parts of all ranks that wrote them");
}

void copy_parts(const OwnPart& own, const GivenParts& given) { covered(own, parts_of(own, given), /*copy=*/true); }

}  // namespace ds::loops
