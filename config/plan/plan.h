// Makes a Plan, whose fields are declared in include/dsengine/plan.h: pure functions of config, ranks and model, which
// open no file. Torch-free.
//
// plan.cc decides what a ZeRO stage does; precision.cc, offload.cc and feature_rows.cc beside it decide the rest, and
// plan_rows.cc makes the rows that are printed. Later code reads the plan's fields and does not ask for the stage.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/config.h"
#include "dsengine/plan.h"
#include "zero/memory_model.h"

namespace ds::engine {

// Parameters that the model brings in bfloat16 or float16.
struct GivenDtype {
  DType dtype = DType::kBFloat16;
  int64_t count = 0;
  std::string first;  // the name of the first one
};

// How parameters are split over the tensor axis: one row for all whose names differ in numbers alone.
struct SplitRow {
  std::string names;  // "h.*.attn.qkv.weight"
  std::string what;   // "split along dimension 0 in 3 blocks"
  std::string reason;
};

// The facts about program and model that the config does not have.
struct PlanFacts {
  // The trainable elements that a rank works on: of its stage, with its parts of split parameters. Sets Plan::bytes.
  std::optional<int64_t> parameters;
  std::optional<int64_t> split_parameters;  // how many of these are elements of parts
  bool client_optimizer = false;            // the program's optimizer replaces the config's
  bool client_on_slices = false;            // it works on slices; false: on full parameters
  std::string client_name;                  // its class
  std::string given_schedule;               // the option of initialize() that gives a schedule: ".lr_scheduler"
  bool trains = true;                       // false: there is no optimizer at all
  int64_t activation_bytes = 0;            // activations of a micro-batch on one rank, as memory_breakdown reports them
  bool accelerator = false;                // the device is not the CPU
  bool pipeline_module = false;            // the model is a pipeline::PipelineModule
  bool seeds_generators = true;            // InitializeOptions::seed_generators
  std::optional<bool> tensor_inside_host;  // every tensor axis lies inside a host; empty: not known
  std::optional<bool> pipe_inside_host;    // every pipeline lies inside a host; empty: not known
  // Neighbours on a tensor axis that are on different hosts, "ranks 1 (host a) and 2 (host b)"; empty: not known, or
  // there are none.
  std::string tensor_leaves_host;
  std::vector<SplitRow> splits;    // over the tensor axis; empty: not known yet, or there is none
  int64_t tensors = 0;             // the number of parameters of the model, frozen ones included
  std::string first_float64;       // the first parameter where all are float64; empty: none is
  std::vector<GivenDtype> halves;  // one for each dtype of 16 bits
};

// The time that a gradient's hook waits for a reduction, where the other ranks may wait for a gather or a sum of this
// rank meanwhile.
inline constexpr std::chrono::milliseconds kReductionPatience{200};

// Makes the plan: draft_plan(), then complete_plan(). Throws ConfigError, naming both keys, for combinations that
// exclude each other, and for features this build lacks.
Plan make_plan(const config::DsConfig& config, const Topology& topology, const PlanFacts& facts = {});

// Decides all that needs no look at the model's parameters, as if these had the dtype of the config. Throws as
// make_plan().
Plan draft_plan(const config::DsConfig& config, const Topology& topology, const PlanFacts& facts);
// Adds what follows from the model's parameters: float64 throughout if they are float64, predicted bytes, and the rows.
// Throws ConfigError where the config excludes a float64 model.
void complete_plan(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// The question that predicts the memory of `plan` for a model of so many trainable elements. Whoever knows the buckets
// fills them in for an exact answer.
zero::MemoryQuestion memory_question(const config::DsConfig& config, const Plan& plan, int64_t parameters);

}  // namespace ds::engine
