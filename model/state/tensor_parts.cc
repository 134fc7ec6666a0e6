#include "model/state/tensor_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "core/text.h"
#include "core/text_hash.h"
#include "parallel/axis/axis.h"
#include "parallel/axis/collectives.h"
#include "recompute/checkpoint_thread.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

const comm::Communicator* ranks_of(const at::Tensor& split) {
  return &parallel::axis_of(ds::placement_of(split))->communicator();
}

}  // namespace

RegionGroup::RegionGroup(const std::shared_ptr<comm::Communicator>& axis) : axis_(axis.get()) {
  recompute::add_split_group(axis, &ranks_of);
}

RegionGroup::~RegionGroup() { recompute::remove_split_group(axis_); }

std::shared_ptr<const TensorPart> part_of_parameter(const at::Tensor& parameter) {
  if (!is_split(parameter) || !ds::placement_of(parameter).cut) return nullptr;
  const Placement& placement = ds::placement_of(parameter);
  return std::make_shared<TensorPart>(parameter.sizes().vec(), *placement.cut, placement.axis->rank(),
                                      placement.axis->size());
}

TensorParts::~TensorParts() {
  if (!split.axis) return;
  split.axis->watch_data({});
  split.axis->tell_joins(true);
}

void TensorParts::require_leaves(const char* call) const {
  require(shown == 0, call,
          ": expected no open scope of gathered_parameters() with parameters that are split over the ",
          "tensor axis, found ", shown, " of them whole; close it first");
  for (const SplitParameter& one : parameters) {
    const bool is_there = is_split(one.parameter) && leaf_of(one.parameter).is_same(one.leaf) &&
                          one.parameter.scalar_type() == one.leaf.scalar_type();
    require(
        is_there, call, ": parameter ", one.name, ": it is split over the tensor axis, and has got other memory or ",
        "another dtype since (model->to(), torch::load(), set_data()), which its part does not follow. Move, convert ",
        "and load the model before initialize() or parallelize_module() splits it, or pass .weights there");
  }
}

void TensorParts::follow_leaves() const {
  for (const SplitParameter& one : parameters) follow_leaf(one.parameter);
}

void TensorParts::follow_flags() const {
  for (const SplitParameter& one : parameters) follow_flag(one.parameter);
}

void TensorParts::note_data(const at::Tensor& plain) {
  // Tokens and targets all; of others, among which are the tables and masks of every layer, the first ones.
  constexpr int kMostIntegers = 64;
  constexpr int kMostOthers = 8;
  if (plain.layout() != at::kStrided || plain.numel() == 0) return;
  const bool integers = at::isIntegralType(plain.scalar_type(), /*includeBool=*/false);
  int& seen = integers ? seen_integers_ : seen_others_;
  if (seen++ >= (integers ? kMostIntegers : kMostOthers)) return;
  data_digest_.of_host = data_digest_.of_host * 31 + fnv1a(cat(c10::toString(plain.scalar_type()), plain.sizes()));
  if (!integers) return note_values(plain);
  if (plain.is_cpu()) {
    data_digest_.of_host = data_digest_.of_host * 31 + zero::digest_of(plain);
    return;
  }
  const at::Tensor digest = zero::device_digest_of(plain);
  at::Tensor& before = data_digest_.of_device;
  before = before.defined() ? before * 31 + digest : digest;
}

// Numbers that an operator has made before may differ in their last bits, and cannot be told from those of the program:
// of them a projection, which ranks compare with a tolerance.
void TensorParts::note_values(const at::Tensor& plain) {
  // The last bits of a few elements of 16 bits would be too large a part of theirs.
  constexpr int64_t kLeastElements = 32;
  const at::ScalarType type = plain.scalar_type();
  if ((!at::isFloatingType(type) && type != at::kBool) || plain.numel() < kLeastElements) return;
  const at::NoGradGuard no_grad;
  // Another factor for each, so that the sum tells two tensors in another order apart.
  const double factor = 1 + 0.5 * std::sin(static_cast<double>(++data_digest_.projections));
  const at::Tensor own = zero::device_projection_of(plain) * factor;
  at::Tensor& sum = data_digest_.projection;
  sum = sum.defined() ? sum + own : own;
}

at::Tensor TensorParts::joined(const at::Tensor& part, const TensorPart& of) const {
  return parallel::all_gather_parts(part, {.axis = split.axis, .cut = of.cut()}, of.whole_sizes());
}

namespace {

class PartSums final : public optimizers::SliceExchange {
 public:
  PartSums(std::shared_ptr<optimizers::SliceExchange> slices, const TensorParts& parts)
      : slices_(std::move(slices)), parts_(parts) {}
  int rank() const override { return slices_->rank(); }
  int size() const override { return slices_->size(); }
  void sum(const at::Tensor& values) override {
    slices_->sum(values);
    parts_.ranks->all_reduce(values, comm::ReduceOp::kSum, "optimizer norms").wait();
  }
  at::Tensor all_gather(const at::Tensor& slice) override { return slices_->all_gather(slice); }

 private:
  std::shared_ptr<optimizers::SliceExchange> slices_;
  const TensorParts& parts_;
};

class PartsOfAxis final : public optimizers::PartExchange {
 public:
  PartsOfAxis(const TensorParts& parts, const std::vector<zero::Parameter>& parameters)
      : parts_(parts), parameters_(parameters) {}
  at::Tensor whole(int64_t parameter, const at::Tensor& part) override {
    return parts_.joined(part.contiguous(), part_of(parameter));
  }
  at::Tensor part(int64_t parameter, const at::Tensor& whole) const override {
    return slice_of(whole, part_of(parameter));
  }

 private:
  const TensorPart& part_of(int64_t parameter) const { return *parameters_[static_cast<size_t>(parameter)].part; }

  const TensorParts& parts_;
  const std::vector<zero::Parameter>& parameters_;
};

}  // namespace

std::shared_ptr<optimizers::SliceExchange> make_part_sums(std::shared_ptr<optimizers::SliceExchange> slices,
                                                          const TensorParts& parts) {
  return std::make_shared<PartSums>(std::move(slices), parts);
}

std::shared_ptr<optimizers::PartExchange> make_part_exchange(const TensorParts& parts,
                                                             const std::vector<zero::Parameter>& parameters) {
  return std::make_shared<PartsOfAxis>(parts, parameters);
}

}  // namespace ds::engine
