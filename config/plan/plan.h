// Making the plan: a pure function of config and ranks. Torch-free.
//
// After it nothing asks for the ZeRO stage again: the engine reads the typed fields.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/config.h"
#include "dsengine/plan.h"
#include "zero/memory_model.h"

namespace ds::engine {

// Parameters of the model that are bfloat16 or float16 when they come.
struct GivenDtype {
  DType dtype = DType::kBFloat16;
  int64_t count = 0;
  std::string first;  // its name
};

// What becomes of parameters over the tensor axis, those with names that differ in numbers together.
struct SplitRow {
  std::string names;  // "h.*.attn.qkv.weight"
  std::string what;   // "split along dimension 0 in 3 blocks"
  std::string reason;
};

// What the program adds to the config.
struct PlanFacts {
  // Trainable elements that a rank works on: of its stage, and of split parameters its parts. Sets Plan::bytes.
  std::optional<int64_t> parameters;
  std::optional<int64_t> split_parameters;  // of these, elements of parts
  bool client_optimizer = false;            // replaces the config's
  bool client_on_slices = false;            // it works on slices; false: on whole parameters
  std::string client_name;                  // what it is
  bool trains = true;                       // false: there is no optimizer at all
  int64_t activation_bytes = 0;             // of a micro-batch on one rank, as memory_breakdown reports them
  bool accelerator = false;                 // the device is not the CPU
  bool pipeline_module = false;             // the model is a pipeline::PipelineModule
  bool seeds_generators = true;             // InitializeOptions::seed_generators
  std::optional<bool> tensor_inside_host;   // every tensor axis lies inside a host; empty: not known
  std::vector<SplitRow> splits;             // over the tensor axis; empty: not known yet, or there is none
  int64_t tensors = 0;                      // parameters of the model, frozen ones too
  std::string first_float64;                // all of them are float64, and this is the first; empty: none is
  std::vector<GivenDtype> halves;           // one for each such dtype
};

// Tensors of optimizer state, each of an element for a trainable one; 0 for a type that is not known. Muon: of a
// matrix; the rest of the model has AdamW's.
int64_t optimizer_state_tensors(const std::string& type, const config::OptimizerParams& params);

// Throws ConfigError, naming both keys, for combinations that exclude each other, and for features this build lacks.
Plan make_plan(const config::DsConfig& config, const Topology& topology, const PlanFacts& facts = {});

// The question that predicts the memory of `plan` for a model of so many trainable elements. Whoever knows the buckets
// fills them in for an exact answer.
zero::MemoryQuestion memory_question(const config::DsConfig& config, const Plan& plan, int64_t parameters);

}  // namespace ds::engine
