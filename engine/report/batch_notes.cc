#include "engine/report/batch_notes.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/listed.h"
#include "core/text.h"

namespace ds::engine {

std::string name_of_samples(const std::vector<int64_t>& samples) {
  constexpr size_t kMost = 256;
  return cat(samples.size() == 1 ? "sample " : "samples ", listed(samples, kMost), " of the training data");
}

void BatchNotes::begin(int64_t micro_batch, const DataLoader* loader) {
  const int64_t now = loader ? loader->delivered() : 0;
  const int64_t given = now - std::exchange(delivered_, now);
  const bool dropped = std::exchange(dropped_, false);
  if (next_name_) {
    named_.push_back({micro_batch, *std::exchange(next_name_, std::nullopt), {}});
  } else if (given == 1 || (given > 1 && dropped)) {
    named_.push_back({micro_batch, {}, loader->indices()});
  }
}

void BatchNotes::keep_loss(int64_t micro_batch, const at::Tensor& loss, double weight) {
  losses_.push_back({micro_batch, loss, weight});
}

at::Tensor BatchNotes::loss_of_step() const {
  at::Tensor sum;
  if (unknown_) return sum;
  for (const Kept& kept : losses_) {
    const at::Tensor part = kept.loss.to(at::kDouble).reshape(at::IntArrayRef()) * kept.weight;
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

void BatchNotes::forget(bool dropped) {
  dropped_ = dropped;
  named_.clear();
  losses_.clear();
  unknown_ = false;
}

std::string BatchNotes::name_of(int64_t micro_batch) const {
  const auto found = std::find_if(named_.begin(), named_.end(),
                                  [micro_batch](const Named& named) { return named.micro_batch == micro_batch; });
  if (found == named_.end()) return {};
  return found->samples.empty() ? found->name : name_of_samples(found->samples);
}

std::optional<BatchNotes::BadLoss> BatchNotes::first_bad_loss() const {
  std::optional<BadLoss> first;
  for (const Kept& kept : losses_) {
    const auto loss = kept.loss.to(at::kDouble).item<double>();
    if (std::isfinite(loss)) continue;
    if (first) {
      ++first->others;
    } else {
      first = BadLoss{kept.micro_batch, loss, 0};
    }
  }
  return first;
}

}  // namespace ds::engine
