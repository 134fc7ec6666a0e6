// An optimizer of ours with masters and states on the device.
#include "engine/update/slice_steps.h"
#include "engine/update/update_paths.h"

namespace ds::engine {
namespace {

class DeviceUpdate final : public Update {
 public:
  explicit DeviceUpdate(const UpdateParts& parts) : state_(parts.state), steps_(parts) {}

  void apply(double gradient_scale) override {
    const double factor = steps_.factor(gradient_scale);
    state_.optimizer.own->begin_step();
    steps_.all_on_device({.factor = factor, .device_factor = {}, .skip = {}});
    state_.access->end_update();
  }

 private:
  ModelState& state_;
  SliceSteps steps_;
};

}  // namespace

std::unique_ptr<Update> make_device_update(const UpdateParts& parts) { return std::make_unique<DeviceUpdate>(parts); }

}  // namespace ds::engine
