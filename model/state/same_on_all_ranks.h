// Checks that data-parallel ranks bring the same to initialize().
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "model/state/model_layout.h"

namespace ds::engine {

// The inputs of initialize() beside the model and the config.
struct GivenInputs {
  std::optional<int64_t> samples;   // samples of .training_data; none: it was not given
  bool has_schedule = false;        // .lr_scheduler or .torch_scheduler
  const char* call = "initialize";  // the call that takes these options, for messages
};

// Returns a line "ds_config KEY<TAB>VALUE" for each key that the file has, sorted: the order of keys is nobody's
// concern.
std::string config_lines(const config::DsConfig& config);

// The settings of a rank.
struct RankSettings {
  std::string_view rank;   // "rank 0"
  std::string_view lines;  // lines "what<TAB>value"
};

// Returns the first setting, by name, that two ranks have not alike: "zero_optimization.stage: 1 on rank 0, 2 on rank
// 3".
std::string differing_setting(const RankSettings& first, const RankSettings& other);

// Throws CommError, on all ranks of the group, naming the first rank whose parameters (names, shapes, dtypes), settings
// or inputs differ from rank 0's, and what differs first, by name and with both values: training would hang at the
// latest at the end of an epoch, or step with other learning rates. `settings`: lines "what<TAB>value", of the config
// and of what else must agree. Collective.
void require_same_on_all_ranks(const ModelParameters& parameters, const std::string& settings,
                               const GivenInputs& inputs, c10::Device device, comm::Communicator& ranks);

}  // namespace ds::engine
