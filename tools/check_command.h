// `ds-tool check`: prints what a ds_config resolves to, what it would run and what it costs, without starting anything.
// Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace ds::tool {

struct CheckOptions {
  std::string config;                 // a path, or url-safe base64 of JSON
  int64_t world_size = 1;             // ranks of the job, with those of pipelines and of tensor parallelism
  std::optional<int64_t> parameters;  // trainable elements of the model; predicts bytes per rank
  // A file with the model's parameters (tools/split_parameters.h), in place of their number: shows what tensor_parallel
  // cuts of them.
  std::string split_parameters;
  // Consecutive ranks of a host; says whether a tensor axis lies inside one.
  std::optional<int64_t> ranks_per_node;
  std::optional<int64_t> tokens;  // of a micro-batch on one rank; predicts the bytes that a tensor axis sends for them
  int64_t activation_bytes = 0;   // of a micro-batch on one rank; added to what a step needs
  std::vector<std::string> auto_values = {};  // "lr=1e-4": for "auto", before what is assumed
  bool strict = false;                        // unknown keys are errors
  bool explain = false;                       // adds what each key of the file does, and what holds without it
  bool json = false;                          // one JSON object instead of text
};

// Prints to `out`, errors to `err`. Returns the exit code: 0 when the config runs, 2 when it is wrong or asks for what
// this build lacks.
int check(const CheckOptions& options, std::ostream& out, std::ostream& err);

}  // namespace ds::tool
