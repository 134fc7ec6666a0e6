#include "loops/gather_control.h"

#include <algorithm>
#include <utility>

namespace ds::loops {

GatherControl::GatherControl(zero::ParameterGatherer& gatherer, size_t buckets, BackwardPrefetch prefetch)
    : gatherer_(gatherer), reshards_after_backward_(buckets, 1), held_(buckets, 0) {
  prefetch_.in_backward = prefetch == BackwardPrefetch::kBackwardPre;
  gatherer_.prefetch_by(prefetch_);
}

void GatherControl::unshard(const std::vector<size_t>& buckets) {
  for (const size_t bucket : buckets) {
    if (!std::exchange(held_[bucket], 1)) gatherer_.held().gather(bucket);
  }
}

void GatherControl::reshard_one(size_t bucket) {
  if (std::exchange(held_[bucket], 0)) gatherer_.held().drop(bucket);
  gatherer_.reshard(bucket);
}

void GatherControl::reshard(const std::vector<size_t>& buckets) {
  for (const size_t bucket : buckets) reshard_one(bucket);
}

void GatherControl::reshard_all() {
  for (size_t b = 0; b < held_.size(); ++b) reshard_one(b);
}

void GatherControl::reshard_if_whole(size_t bucket) {
  if (!gatherer_.buckets()[bucket].released()) reshard_one(bucket);
}

void GatherControl::set_reshard_after_forward(const std::vector<size_t>& buckets, bool on) {
  for (const size_t bucket : buckets) gatherer_.keep_in_pass(bucket, !on);
}

void GatherControl::set_reshard_after_backward(const std::vector<size_t>& buckets, bool on) {
  for (const size_t bucket : buckets) reshards_after_backward_[bucket] = on ? 1 : 0;
}

void GatherControl::prefetch(const std::vector<size_t>& when, const std::vector<size_t>& buckets, bool in_backward) {
  for (const size_t bucket : when) (in_backward ? prefetch_.backward : prefetch_.forward)[bucket] = buckets;
  gatherer_.prefetch_by(prefetch_);
}

void GatherControl::begin_backward(bool update_follows) {
  gatherer_.begin_backward(update_follows);
  for (size_t b = 0; b < reshards_after_backward_.size(); ++b) {
    if (!reshards_after_backward_[b]) gatherer_.keep_after_backward(b);
  }
}

void GatherControl::end_pass() {
  const auto stays = std::find(reshards_after_backward_.begin(), reshards_after_backward_.end(), 0);
  for (size_t b = 0; b < reshards_after_backward_.size(); ++b) {
    if (reshards_after_backward_[b]) reshard_one(b);
  }
  if (stays == reshards_after_backward_.end()) gatherer_.end_update();
  gatherer_.take_changed();
  gatherer_.end_pass();
}

}  // namespace ds::loops
