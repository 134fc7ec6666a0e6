#include "model/state/part_exchange.h"

#include <utility>

#include "core/split/split_tensor.h"

namespace ds::engine {
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
