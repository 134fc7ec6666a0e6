// An optimizer of ours with masters and states on the device.
#include "engine/update/slice_steps.h"
#include "engine/update/update_paths.h"

namespace ds::engine {
namespace {

class DeviceUpdate final : public Update {
 public:
  explicit DeviceUpdate(const UpdateParts& parts) : state_(parts.state), steps_(parts) {}

  void apply(double gradient_scale) override {
    apply_on_device({.factor = gradient_scale, .device_factor = {}, .skip = {}});
  }

  bool takes_device_scale() const override {
    if (!state_.optimizer.own || !state_.optimizer.own->takes_device_scale()) return false;
    for (size_t b = 0; b < state_.buckets.size(); ++b) {
      if (state_.updates_on_host(b) || !state_.own_part(b).is_cuda()) return false;
    }
    return true;
  }

  void apply_on_device(const optimizers::StepScale& scale) override {
    optimizers::StepScale own = scale;
    own.factor = steps_.factor(scale.factor);
    state_.optimizer.own->begin_step();
    steps_.all_on_device(own);
    state_.access->end_update();
  }

 private:
  ModelState& state_;
  SliceSteps steps_;
};

}  // namespace

std::unique_ptr<Update> make_device_update(const UpdateParts& parts) { return std::make_unique<DeviceUpdate>(parts); }

}  // namespace ds::engine
