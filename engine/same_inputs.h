// What initialize() is given beside the model and the config, and that all data-parallel ranks have to be given alike.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "comm/communicator.h"

namespace ds::engine {

struct GivenInputs {
  std::optional<int64_t> samples;  // of .training_data; none: it was not given
  bool has_schedule = false;       // .lr_scheduler
};

// Throws CommError, on all ranks of the group, where one was given something else: training would hang at the end of an
// epoch, or step with other learning rates. Collective.
void require_same_inputs(const GivenInputs& inputs, c10::Device device, comm::Communicator& ranks);

}  // namespace ds::engine
