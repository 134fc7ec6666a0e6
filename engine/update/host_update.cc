// The host updates what is offloaded while the step waits: one bucket, while the weights of the last one travel to the
// device and the next one is read from its file.
#include "engine/update/slice_steps.h"
#include "engine/update/update_paths.h"

namespace ds::engine {
namespace {

class HostUpdate final : public Update {
 public:
  explicit HostUpdate(const UpdateParts& parts) : state_(parts.state), steps_(parts) {}

  void apply(double gradient_scale) override {
    const double factor = steps_.factor(gradient_scale);
    state_.optimizer.own->begin_step();
    steps_.all_on_device({.factor = factor, .device_factor = {}, .skip = {}});
    steps_.all_on_host(factor);
    state_.access->end_update();
  }

 private:
  ModelState& state_;
  SliceSteps steps_;
};

}  // namespace

std::unique_ptr<Update> make_host_update(const UpdateParts& parts) { return std::make_unique<HostUpdate>(parts); }

}  // namespace ds::engine
