// Parameters that are split over the tensor axis, in a scope of gathered_parameters().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/split/tensor_part.h"
#include "core/split/whole_in_place.h"
#include "model/state/model_state.h"
#include "zero/gather/split_wholes.h"

namespace ds::engine {

// Of those of `parameters` that are split, in the order of the module, whatever the order of `parameters` is.
class SplitScope final : public zero::SplitWholes {
 public:
  // `state` outlives it.
  SplitScope(ModelState& state, const std::vector<at::Tensor>& parameters, bool modifies);

  void show() override;
  std::optional<std::string> changed() const override;
  void share_wholes() override;
  void share_bucket(size_t bucket, const at::Tensor& flat) override;
  void share_other(const at::Tensor& values) override;
  void hide() noexcept override;

 private:
  struct Shown {
    std::string name;
    at::Tensor parameter, leaf;
    std::shared_ptr<const TensorPart> part;  // null: whole, with a gradient that is a sum over the axis
    SplitState split = {};                   // while it is shown whole
    uint64_t digest = 0;                     // for reading
    uint32_t version = 0;
  };
  static at::IntArrayRef sizes_of(const Shown& one);
  // The program has given none of them another shape, on no rank. Collective over all ranks.
  void require_shapes() const;

  ModelState& state_;
  bool modifies_;
  std::vector<Shown> all_;
  size_t shown_ = 0;  // of them, so far
};

}  // namespace ds::engine
