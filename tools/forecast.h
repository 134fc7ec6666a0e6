// The output of `ds-tool simulate`: a simulation and its inputs, as text or JSON. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "dsengine/config.h"
#include "tools/machine.h"
#include "tools/simulation.h"

namespace ds::tool {

inline constexpr double kGibibyte = 1024.0 * 1024.0 * 1024.0;

struct Forecast {
  engine::config::DsConfig config;
  Machine machine;
  int64_t parameters = 0;  // of the model
  size_t layers = 0;
  Simulation simulation;
  std::optional<double> limit;             // bytes of memory of a rank; empty: not given
  std::optional<double> tokens_of_sample;  // empty: not known
  bool update_known = false;

  double samples_per_second() const;
  bool fits(const PipeRank& rank) const;
  bool fits() const;  // whether all ranks fit
};

// `per_rank`: every rank of a pipeline, not the fullest alone.
nlohmann::ordered_json to_json(const Forecast& forecast, bool per_rank);
void print(const Forecast& forecast, bool per_rank, std::ostream& out);

}  // namespace ds::tool
