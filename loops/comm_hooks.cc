#include "loops/comm_hooks.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <type_traits>
#include <utility>

#include "comm/collective.h"
#include "comm/subgroups.h"
#include "compression/block_quantized_reduction.h"
#include "compression/dense_first.h"
#include "compression/power_sgd_reduction.h"
#include "compression/top_k_reduction.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::loops {
namespace {

// The program's own way from a bucket to the reduced one.
class OwnReduction final : public comm::BucketReduction {
 public:
  OwnReduction(comm_hooks::Own hook, comm::Communicator& group, const std::vector<zero::ParameterBucket>& buckets)
      : hook_(std::move(hook)), group_(group), buckets_(buckets) {}

  comm::Work start(size_t index, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp /*op*/,
                   std::string label) override {
    comm_hooks::GradBucket bucket{
        .index = index, .is_last = index == 0, .buffer = gradient, .gradients = {}, .parameters = {}, .group = group_};
    const zero::ParameterBucket& of = buckets_.at(index);
    for (size_t i = 0; i < of.parameters().size(); ++i) {
      const zero::Parameter& parameter = of.parameters()[i];
      bucket.gradients.push_back(zero::view_of(gradient, of.layout().segments[i], parameter.tensor));
      bucket.parameters.push_back(parameter.name);
    }
    std::function<at::Tensor()> finish = hook_(bucket);
    require(finish != nullptr, "communication hook (", label, "): expected a function that waits for the reduced ",
            "bucket, found none");
    return comm::Work(std::make_shared<Finishing>(std::move(finish), output, std::move(label)));
  }

 private:
  class Finishing final : public comm::WorkState {
   public:
    Finishing(std::function<at::Tensor()> finish, at::Tensor output, std::string label)
        : finish_(std::move(finish)), output_(std::move(output)), label_(std::move(label)) {}
    bool is_completed() override { return finish_ == nullptr; }
    void wait() override {
      if (!finish_) return;
      const at::NoGradGuard no_grad;
      const at::Tensor reduced = std::exchange(finish_, nullptr)();
      require(reduced.defined() && reduced.numel() == output_.numel() && reduced.scalar_type() == output_.scalar_type(),
              "communication hook (", label_, "): expected the reduced bucket, ", describe(output_), ", found ",
              describe(reduced));
      if (reduced.data_ptr() != output_.data_ptr()) output_.copy_(reduced.view(output_.sizes()));
    }

   private:
    std::function<at::Tensor()> finish_;
    at::Tensor output_;
    std::string label_;
  };

  comm_hooks::Own hook_;
  comm::Communicator& group_;
  const std::vector<zero::ParameterBucket>& buckets_;
};

// Makes the reductions that compress and remember what they did not send.
class Compressing {
 public:
  Compressing(std::shared_ptr<comm::Communicator> group, const std::vector<zero::ParameterBucket>& buckets,
              const std::vector<ParameterInfo>& infos)
      : group_(std::move(group)), buckets_(buckets), infos_(infos), device_(buckets.front().options().device()) {
    for (const zero::ParameterBucket& bucket : buckets_) {
      const zero::Parameter& first = bucket.parameters().front();
      const at::ScalarType dtype = first.tensor.scalar_type();
      require(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "communication hook: parameter ",
              first.name, ": expected float32, float16 or bfloat16 gradients for Int8, PowerSgd and TopK, found ",
              describe(first.tensor));
      require(first.tensor.device() == device_, "communication hook: parameter ", first.name, ": expected all ",
              "parameters on one device for Int8, PowerSgd and TopK, found ", first.tensor.device(), " and ", device_);
    }
  }

  std::unique_ptr<comm::BucketReduction> int8(const comm_hooks::Int8& hook) const {
    return std::make_unique<compression::BlockQuantizedReduction>(groups(), errors(hook.use_error_feedback));
  }

  std::unique_ptr<comm::BucketReduction> top_k(const comm_hooks::TopK& hook) const {
    require(hook.share > 0 && hook.share <= 1, "communication hook TopK: expected a share above 0 and up to 1, found ",
            hook.share);
    return std::make_unique<compression::TopKReduction>(group_, errors(hook.use_error_feedback), hook.share);
  }

  std::unique_ptr<comm::BucketReduction> power_sgd(const comm_hooks::PowerSgd& hook) const {
    require(hook.matrix_approximation_rank > 0, "communication hook PowerSgd: expected a matrix_approximation_rank ",
            "above 0, found ", hook.matrix_approximation_rank);
    require(hook.start_iter >= 0, "communication hook PowerSgd: expected a start_iter of 0 or more, found ",
            hook.start_iter);
    std::vector<compression::MatrixBucket> matrices;
    for (const zero::ParameterBucket& bucket : buckets_) {
      const zero::BucketLayout& layout = bucket.layout();
      matrices.push_back(
          compression::matrices_of(layout.segments, infos_, layout.numel, hook.matrix_approximation_rank));
    }
    auto reduction = std::make_unique<compression::PowerSgdReduction>(groups(), errors(hook.use_error_feedback),
                                                                      std::move(matrices), device_);
    if (hook.start_iter == 0) return reduction;
    return std::make_unique<compression::DenseFirst>(group_, std::move(reduction), hook.start_iter);
  }

 private:
  compression::ExchangeGroups groups() const {
    const int size = group_->size();
    return {group_, comm::own_group(*group_, comm::consecutive_ranks(size, size), "compressed")};
  }

  compression::ErrorMemory errors(bool feedback) const {
    std::vector<int64_t> numels;
    for (const zero::ParameterBucket& bucket : buckets_) numels.push_back(bucket.layout().numel);
    return {std::move(numels), device_, feedback};
  }

  std::shared_ptr<comm::Communicator> group_;
  const std::vector<zero::ParameterBucket>& buckets_;
  const std::vector<ParameterInfo>& infos_;
  at::Device device_;
};

}  // namespace

HookedReduction make_hooked_reduction(const CommHook& hook, const std::shared_ptr<comm::Communicator>& group,
                                      const std::vector<zero::ParameterBucket>& buckets,
                                      const std::vector<ParameterInfo>& infos) {
  const auto compressing = [&] { return Compressing(group, buckets, infos); };
  return std::visit(
      [&](const auto& of) -> HookedReduction {
        using Hook = std::decay_t<decltype(of)>;
        if constexpr (std::is_same_v<Hook, comm_hooks::Float16>) {
          return {.reduction = nullptr, .wire = at::kHalf, .prescale = true};
        } else if constexpr (std::is_same_v<Hook, comm_hooks::BFloat16>) {
          return {.reduction = nullptr, .wire = at::kBFloat16, .prescale = true};
        } else if constexpr (std::is_same_v<Hook, comm_hooks::Int8>) {
          return {.reduction = compressing().int8(of)};
        } else if constexpr (std::is_same_v<Hook, comm_hooks::TopK>) {
          return {.reduction = compressing().top_k(of)};
        } else if constexpr (std::is_same_v<Hook, comm_hooks::PowerSgd>) {
          return {.reduction = compressing().power_sgd(of)};
        } else if constexpr (std::is_same_v<Hook, comm_hooks::Own>) {
          require(of != nullptr, "communication hook: expected a function, found an empty one");
          return {.reduction = std::make_unique<OwnReduction>(of, *group, buckets)};
        } else {
          return {};
        }
      },
      hook);
}

}  // namespace ds::loops
