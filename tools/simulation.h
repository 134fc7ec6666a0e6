// Predicts a training step of many ranks from the ranks' lists of actions, which are those that a run executes, and
// from the cost of layers, messages and collectives. Pure arithmetic, torch-free; time grows with the actions of one
// pipeline, not with its copies.
//
// Modelled:
// - Ranks: rank = (pipe_rank x data_parallel + data_rank) x tensor + tensor_rank: ranks that share layers are
//   neighbours. Layers are dealt to stages as pipeline::PipelineModule deals them.
// - Computing: a stage takes its operations over the machine's, or what was measured; every micro-batch alike. Backward
//   takes twice as long as forward, each half as long; what is checkpointed is computed again with the gradients of the
//   inputs, and then those of the weights are made with them.
// - Messages between stages: bytes over the rate of the worst of the pipelines, and latency. They run beside the
//   computation; one waits for the one before it from the same rank to the same rank. Each rank of a tensor axis sends
//   to the one with its place on the next stage's axis: its part of a sequence that is cut, else all of the activation
//   (of the gradient), or 1/T of it, which the receivers gather, as engine::choose_message_cuts() says.
// - Tensor parallelism: a rank has its part of the weights and operations of a layer; sums over the ranks that share it
//   are rings, of 2 n (T - 1) / T bytes each, for which computing waits (with tp_overlap_comm those of backward run
//   beside the products of the weights).
// - Data parallelism: rings, whose slowest member decides; ranks of a node share its link. Bytes are those of
//   zero::predict_sent_bytes. Reductions at the end of a step (stages 0 and 1) run beside the last backward of their
//   rank where overlap_comm is on and a rank has one stage; those of stages 2 and 3 beside each backward. Parameters
//   are gathered beside the first forward (stages 1 and 2) or beside every pass (stage 3). Gradients of tied weights
//   and joins of copies (MiCS) wait for the reductions, and nothing runs beside them.
// - Memory: the model state of zero::predict_model_state for the rank's own parameters, what is gathered in a step, the
//   activations that its schedule holds at once, the largest region that is computed again, and messages that arrive.
//
// Not modelled: kernels of different speed for different layers, other users of links and nodes, stragglers, reading
// the data, the norm and the update (but as a number that is given), copies and updates of offloaded state, the two
// levels of quantized gradients (timed as one ring), stage3_max_reuse_distance, workspaces and the holes of an
// allocator. Compressed gradients are refused, because the bytes that they send are not known here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "dsengine/config.h"
#include "pipeline/schedule/schedule_timing.h"
#include "tools/machine.h"
#include "tools/model_cost.h"

namespace ds::tool {

struct SimulationQuestion {
  engine::config::DsConfig config;  // parsed for all ranks
  Machine machine;
  std::vector<LayerCost> layers;
  int64_t activation_checkpoint_interval = 0;     // so many layers are computed again together; 0: none
  std::vector<pipeline::StageTimes> stage_times;  // seconds, of each stage or one for all; empty: from operations.
                                                  // With all communication inside the passes: none is added to them
  std::optional<pipeline::MessageTimes> message;  // in place of bytes over rates
  double update_seconds = 0;                      // norm and optimizer
};

// The prediction for every rank that has this place in its pipeline.
struct PipeRank {
  int64_t first_rank = 0;   // its data-parallel and tensor ranks follow it
  std::vector<int> stages;  // the stages that it runs
  std::string layers;       // "h.0 to h.3, head"
  int64_t parameters = 0;
  double busy_seconds = 0;  // seconds in which it computes
  int64_t state_bytes = 0;  // model state, and the state of gradient compression
  int64_t gathered_bytes = 0;
  int64_t activation_bytes = 0;  // with activations that are recomputed
  int64_t message_bytes = 0;     // buffers of messages that arrive
  int64_t host_bytes = 0;        // of offloaded state; not part of memory()
  int64_t pipeline_sent = 0;     // bytes in a step
  int64_t data_parallel_sent = 0;
  int64_t tensor_sent = 0;

  int64_t memory() const { return state_bytes + gathered_bytes + activation_bytes + message_bytes; }
};

// The seconds of a step by cause; their sum is the step.
struct StepSeconds {
  double compute = 0;        // the mean over the ranks
  double bubble = 0;         // ranks wait for one another, as if communication took no time
  double tensor = 0;         // what all-reduces along the tensor axis add
  double messages = 0;       // what messages between stages add
  double data_parallel = 0;  // what data-parallel collectives add
  double update = 0;
  double total() const { return compute + bubble + tensor + messages + data_parallel + update; }
};

struct Simulation {
  engine::Plan plan;     // the plan of the rank with most parameters
  std::string schedule;  // "1f1b"
  int64_t chunks = 1;    // stages a rank
  StepSeconds step;
  double makespan = 0;  // seconds of the passes, with messages
  double idle = 0;      // the share of the makespan in which ranks do not compute
  std::vector<PipeRank> pipe_ranks;
  int64_t node_sent = 0;  // bytes in a step from the node that sends most to others; 0: all is on one node
  // The bytes from the node that sends most along each axis alone; the nodes may be different ones.
  struct AxisBytes {
    int64_t pipeline = 0;  // with the gradients of tied weights
    int64_t tensor = 0;
    int64_t data_parallel = 0;
  } node_sent_along;

  const PipeRank& fullest() const;
};

// Predicts a step. Throws ConfigError for what the plan, the schedule or the partition refuses, and for what is not
// modelled.
Simulation simulate_step(const SimulationQuestion& question);

}  // namespace ds::tool
