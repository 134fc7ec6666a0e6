#include "tools/simulation.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "config/plan/plan_choices.h"
#include "core/check.h"
#include "pipeline/schedule/schedule.h"
#include "tools/checked_count.h"
#include "tools/collective_cost.h"
#include "tools/model_cost.h"

namespace ds::tool {
namespace {

using engine::Plan;
using pipeline::ActionKind;
using pipeline::MessageTimes;
using pipeline::Schedule;
using pipeline::StageTimes;
using pipeline::TimedAction;
using pipeline::Timetable;

// Weights that two ranks of a pipeline have.
struct TiedRanks {
  int first = 0;
  int second = 0;
  int64_t parameters = 0;
};

void add_bytes(int64_t& sum, int64_t bytes) { sum = checked_sum(sum, bytes, "what is sent in a step"); }

// The bytes that leave each node in a step along one axis.
using NodeBytes = std::vector<int64_t>;

void add_bytes(NodeBytes& sums, const NodeBytes& bytes) {
  for (size_t n = 0; n < sums.size(); ++n) add_bytes(sums[n], bytes[n]);
}

int64_t most(const NodeBytes& bytes) { return *std::max_element(bytes.begin(), bytes.end()); }

// A message from a rank of a stage to the rank of the next one that has the same place on its data and tensor axes.
struct StageMessage {
  double sent = 0;      // bytes of the message
  double gathered = 0;  // bytes that its receiver then sends to the other ranks of its tensor axis
};

// `output`: bytes of the activation or gradient. `is_cut`: each rank of a tensor axis has a part of it, along the
// sequence. `in_parts`: of what all of them have, each sends a part.
StageMessage message_of(double output, int64_t tensor, bool is_cut, bool in_parts) {
  const double part = output / static_cast<double>(tensor);
  if (is_cut) return {.sent = part, .gathered = 0};
  return in_parts ? StageMessage{.sent = part, .gathered = output - part} : StageMessage{.sent = output, .gathered = 0};
}

// Without pipeline, forward and backward take turns.
Schedule schedule_of(const Plan& plan, int64_t micro_batches) {
  if (plan.pipeline && plan.pipeline->own) return *plan.pipeline->own;
  const pipeline::ScheduleKind kind =
      plan.pipeline ? pipeline::parse_schedule_kind(plan.pipeline->schedule) : pipeline::ScheduleKind::k1F1B;
  return pipeline::make_schedule(kind, {.ranks = static_cast<int>(plan.topology.pipe),
                                        .chunks = static_cast<int>(plan.pipeline ? plan.pipeline->chunks : 1),
                                        .micro_batches = static_cast<int>(micro_batches)});
}

bool splits_backward(const Schedule& schedule) {
  return std::any_of(schedule.actions.begin(), schedule.actions.end(), [](const std::vector<pipeline::Action>& list) {
    return std::any_of(list.begin(), list.end(),
                       [](const pipeline::Action& action) { return action.kind == ActionKind::kBackwardWeight; });
  });
}

class Simulator {
 public:
  explicit Simulator(const SimulationQuestion& question)
      : question_(question),
        config_(question.config),
        machine_(question.machine),
        leaves_node_(crossing_text(machine_, config_.tensor_parallel.size())) {}

  Simulation run() {
    require_known();
    const Plan plan = make_plan({});
    dp_ = plan.topology.dp;
    tensor_ = plan.topology.tensor;
    pipe_ = static_cast<int>(plan.topology.pipe);
    schedule_ = schedule_of(plan, config_.gradient_accumulation_steps);
    in_parts_ = splits_backward(schedule_);
    result_.schedule = schedule_.name;
    result_.chunks = schedule_.shape.chunks;
    cut_layers();
    place_parameters();
    time_messages();
    time_sums();
    cost_collectives();
    cost_tied();
    add_times();
    add_memory();
    result_.node_sent_along = {
        .pipeline = most(pipeline_bytes_), .tensor = most(tensor_bytes_), .data_parallel = most(data_bytes_)};
    add_bytes(pipeline_bytes_, tensor_bytes_);
    add_bytes(pipeline_bytes_, data_bytes_);
    result_.node_sent = most(pipeline_bytes_);
    return std::move(result_);
  }

 private:
  void require_known() const;
  Plan make_plan(std::optional<int64_t> parameters) const;
  const Plan& plan_of(int64_t parameters);
  void cut_layers();
  void place_parameters();
  void time_messages();
  void time_sums();
  void cost_collectives();
  void cost_tied();
  std::vector<StageTimes> times_with_sums() const;
  std::vector<StageTimes> times_with_collectives() const;
  double after_passes(const Timetable& passes) const;
  double before_passes(const Timetable& passes) const;
  void add_times();
  void add_memory();
  std::vector<LayerCost>::const_iterator layer(int index) const { return question_.layers.begin() + index; }
  // The ranks of a stage: of each data-parallel one those that share its layers.
  int64_t stage_ranks() const { return dp_ * tensor_; }
  int64_t rank_at(int pipe_rank, int64_t stage_rank) const { return pipe_rank * stage_ranks() + stage_rank; }

  const SimulationQuestion& question_;
  const engine::config::DsConfig& config_;
  const Machine& machine_;
  const std::string leaves_node_;  // neighbours on a tensor axis that are on different nodes; empty: there are none
  int64_t dp_ = 1;
  int64_t tensor_ = 1;
  int pipe_ = 1;
  bool in_parts_ = false;  // backward of the input and of the weights apart
  Schedule schedule_;
  std::vector<StageLayout> stages_;
  std::vector<StageTimes> times_;       // of each stage
  std::vector<StageTimes> sums_;        // of each stage: seconds of sums over the ranks that share its layers
  std::vector<MessageTimes> messages_;  // between each stage and the next
  std::vector<DataParallelCost> collectives_;
  std::vector<TiedRanks> tied_;
  std::vector<double> tied_seconds_;  // of each rank
  NodeBytes pipeline_bytes_, tensor_bytes_, data_bytes_;
  std::map<int64_t, Plan> plans_;  // by parameters of a rank
  Simulation result_;
};

void Simulator::require_known() const {
  require(!question_.layers.empty(), "simulate_step: expected layers, found none");
  require<ConfigError>(config_.sequence_ranks() == 1, "ds-tool simulate: sequence_parallel_size: expected 1, found ",
                       config_.sequence_ranks(), ": what its ranks send of a layer is not counted here; ds-tool check ",
                       "shows the rest");
  require<ConfigError>(!config_.gradient_compression.compresses(), "ds-tool simulate: gradient_compression.method ",
                       "makes messages of a size that is not known here; remove the section to simulate without it");
  require<ConfigError>(!config_.optimizer.compresses(), "ds-tool simulate: optimizer.type: ", config_.optimizer.type,
                       " sends messages of a size that is not known here; use one that does not compress, such as ",
                       "AdamW, to simulate without it");
}

Plan Simulator::make_plan(std::optional<int64_t> parameters) const {
  const int64_t stages = config_.pipeline.stages.value_or(1);
  const int64_t dp = config_.dp_world_size;
  const int64_t tensor = config_.tensor_parallel.size();
  engine::PlanFacts facts{.parameters = parameters, .pipeline_module = stages > 1};
  facts.tensor_inside_host = leaves_node_.empty();
  facts.tensor_leaves_host = leaves_node_;
  facts.pipe_inside_host = pipelines_inside_nodes(machine_, stages);
  return engine::make_plan(config_,
                           {.world_size = machine_.ranks,
                            .dp = dp,
                            .pipe = stages,
                            .ranks_per_host = data_ranks_per_node(machine_, dp, tensor),
                            .tensor = tensor},
                           facts);
}

// Ranks with equally many parameters, most of them, have one.
const Plan& Simulator::plan_of(int64_t parameters) {
  const auto found = plans_.find(parameters);
  return found != plans_.end() ? found->second : plans_.emplace(parameters, make_plan(parameters)).first->second;
}

void Simulator::cut_layers() {
  const bool recomputed = question_.activation_checkpoint_interval > 0;
  stages_ = cut_into_stages(question_.layers, schedule_, config_.pipeline.partition,
                            question_.activation_checkpoint_interval);
  times_ = question_.stage_times;
  require<ConfigError>(times_.size() <= 1 || times_.size() == stages_.size(),
                       "measured times: expected one number, for all stages, or one for each of ", stages_.size(),
                       " stages, found ", times_.size());
  if (times_.size() == 1) times_.assign(stages_.size(), question_.stage_times.front());
  if (!times_.empty()) return;
  for (const StageLayout& stage : stages_) {
    const double forward = stage.forward_flops / machine_.flops;
    // An activation checkpoint makes the weights' gradients when it makes its input's.
    const bool at_once = recomputed && in_parts_;
    times_.push_back({forward, forward * (1 + (recomputed ? 1 : 0) + (at_once ? 1 : 0)), at_once ? 0 : forward});
  }
}

void Simulator::place_parameters() {
  std::map<std::string, std::set<int>> ranks_of_key;
  std::map<std::string, int64_t> size_of_key;
  for (int rank = 0; rank < pipe_; ++rank) {
    PipeRank entry;
    entry.first_rank = rank_at(rank, 0);
    entry.stages = schedule_.stages_of(rank);
    for (const int s : entry.stages) {
      const StageLayout& stage = stages_[static_cast<size_t>(s)];
      entry.layers += cat(entry.layers.empty() ? "" : ", ", layer(stage.begin)->name);
      if (stage.end - stage.begin > 1) entry.layers += cat(" to ", layer(stage.end - 1)->name);
      for (auto at = layer(stage.begin); at != layer(stage.end); ++at) {
        const bool here_already = !at->tied.empty() && !ranks_of_key[at->tied].insert(rank).second;
        if (!here_already) entry.parameters += at->parameters;
        if (!at->tied.empty()) size_of_key[at->tied] = at->parameters;
      }
    }
    result_.pipe_ranks.push_back(std::move(entry));
  }
  for (const auto& [key, ranks] : ranks_of_key) {
    ensure(ranks.size() <= 2, "at most two layers share weights");
    if (ranks.size() == 2) tied_.push_back({*ranks.begin(), *ranks.rbegin(), size_of_key[key]});
  }
  int64_t most = 0;
  for (const PipeRank& rank : result_.pipe_ranks) most = std::max(most, rank.parameters);
  result_.plan = plan_of(most);
  for (NodeBytes* bytes : {&pipeline_bytes_, &tensor_bytes_, &data_bytes_}) {
    bytes->assign(static_cast<size_t>(machine_.nodes()), 0);
  }
}

void Simulator::time_messages() {
  const auto micro_batches = static_cast<double>(schedule_.shape.micro_batches);
  const bool is_cut = config_.tensor_parallel.sequence_parallel;
  const engine::MessageCuts cuts =
      engine::choose_message_cuts(config_, result_.plan, pipelines_inside_nodes(machine_, pipe_));
  for (size_t s = 0; s + 1 < stages_.size(); ++s) {
    messages_.emplace_back();
    const int a = stages_[s].rank;
    const int b = stages_[s + 1].rank;
    if (a == b) continue;
    double slowest = 0;
    double gather = 0;
    for (const auto& [from, to, in_parts] : {std::tuple{a, b, cuts.activations}, std::tuple{b, a, cuts.gradients}}) {
      const StageMessage message = message_of(stages_[s].output_bytes, tensor_, is_cut, in_parts);
      const int64_t in_step = whole_bytes(message.sent * micro_batches, "messages of a step");
      const int64_t gathered = whole_bytes(message.gathered * micro_batches, "messages of a step");
      Traffic traffic(machine_);
      for (int64_t d = 0; d < stage_ranks(); ++d) traffic.add(rank_at(from, d), rank_at(to, d), in_step);
      for (int64_t d = 0; d < stage_ranks(); ++d) {
        slowest = std::max(slowest, message.sent / traffic.rate(rank_at(from, d), rank_at(to, d)));
      }
      add_bytes(pipeline_bytes_, traffic.bytes());
      PipeRank& receiver = result_.pipe_ranks[static_cast<size_t>(to)];
      add_bytes(result_.pipe_ranks[static_cast<size_t>(from)].pipeline_sent, in_step);
      add_bytes(receiver.tensor_sent, gathered);
      const double kept = message.sent + (gathered > 0 ? stages_[s].output_bytes : 0);
      add_bytes(receiver.message_bytes, whole_bytes(kept, "a message"));
      if (gathered > 0) gather = std::max(gather, seconds_of_gather(message.gathered, machine_, tensor_));
    }
    messages_.back() =
        question_.message.value_or(MessageTimes{.transfer = slowest, .latency = machine_.latency + gather});
  }
}

// Measured times have them inside.
void Simulator::time_sums() {
  sums_.assign(stages_.size(), StageTimes{0, 0, 0});
  if (tensor_ == 1) return;
  const bool recomputed = question_.activation_checkpoint_interval > 0;
  const auto micro_batches = static_cast<double>(schedule_.shape.micro_batches);
  for (size_t s = 0; s < stages_.size(); ++s) {
    const StageSums sums = sums_of(layer(stages_[s].begin), layer(stages_[s].end), tensor_, recomputed);
    const double beside = config_.tensor_parallel.tp_overlap_comm ? times_[s].backward_weight : 0;
    if (question_.stage_times.empty()) sums_[s] = seconds_of(sums, machine_, tensor_, beside);
    const double in_step = (sums.forward_bytes + sums.backward_bytes) * micro_batches;
    add_bytes(result_.pipe_ranks[static_cast<size_t>(stages_[s].rank)].tensor_sent,
              whole_bytes(in_step, "sums of a step"));
  }
  Traffic traffic(machine_);
  for (int rank = 0; rank < pipe_; ++rank) {
    for (int64_t first = 0; first < stage_ranks(); first += tensor_) {
      traffic.add(Ring{.first = rank_at(rank, first), .members = tensor_},
                  result_.pipe_ranks[static_cast<size_t>(rank)].tensor_sent);
    }
  }
  add_bytes(tensor_bytes_, traffic.bytes());
}

std::vector<StageTimes> Simulator::times_with_sums() const {
  std::vector<StageTimes> times = times_;
  for (size_t s = 0; s < times.size(); ++s) {
    times[s].forward += sums_[s].forward;
    times[s].backward_input += sums_[s].backward_input;
  }
  return times;
}

void Simulator::cost_collectives() {
  std::vector<zero::MemoryQuestion> questions;
  for (const PipeRank& rank : result_.pipe_ranks) {
    questions.push_back(engine::memory_question(config_, plan_of(rank.parameters), rank.parameters));
  }
  collectives_ = time_collectives(machine_, dp_, tensor_, questions, data_bytes_);
  for (size_t r = 0; r < collectives_.size(); ++r) {
    result_.pipe_ranks[r].data_parallel_sent = collectives_[r].bytes.total();
  }
}

// Gradients of tied weights, whole or a slice, go to the other rank and back.
void Simulator::cost_tied() {
  tied_seconds_.resize(result_.pipe_ranks.size());
  const int64_t slices = result_.plan.partition_optimizer ? result_.plan.shard_ranks : 1;
  for (const TiedRanks& tied : tied_) {
    const int64_t bytes = tied.parameters / slices * bytes_of(result_.plan.gradient_dtype);
    Traffic traffic(machine_);
    std::vector<Ring> pairs;
    for (int64_t d = 0; d < stage_ranks(); ++d) {
      pairs.push_back(
          {.first = rank_at(tied.first, d), .members = 2, .stride = stage_ranks() * (tied.second - tied.first)});
      traffic.add(pairs.back(), bytes);
    }
    double slowest = 0;
    for (const Ring& pair : pairs) slowest = std::max(slowest, static_cast<double>(bytes) / traffic.rate(pair));
    add_bytes(pipeline_bytes_, traffic.bytes());
    for (const int rank : {tied.first, tied.second}) {
      tied_seconds_[static_cast<size_t>(rank)] += slowest + 2 * machine_.latency;
      result_.pipe_ranks[static_cast<size_t>(rank)].pipeline_sent += bytes;
    }
  }
}

// With what collectives of stages 2 and 3 add to each pass.
std::vector<StageTimes> Simulator::times_with_collectives() const {
  const std::vector<StageTimes> without = times_with_sums();
  std::vector<StageTimes> times;
  for (size_t s = 0; s < stages_.size(); ++s) {
    const StageLayout& stage = stages_[s];
    const StageTimes& alone = without[s];
    StageTimes own = alone;
    const DataParallelCost& rank = collectives_[static_cast<size_t>(stage.rank)];
    const int64_t of_rank = result_.pipe_ranks[static_cast<size_t>(stage.rank)].parameters;
    if (question_.stage_times.empty() && of_rank > 0) {
      const double share = std::min(1.0, static_cast<double>(stage.parameters) / static_cast<double>(of_rank));
      const int64_t buckets = std::max<int64_t>(1, std::llround(share * static_cast<double>(rank.buckets)));
      const double gather = rank.bytes.gathers > 1 ? share * rank.mean_gather() : 0;
      const double reduction = rank.bytes.in_passes ? share * rank.reduction : 0;
      const auto added = [&](double seconds, double window) { return exposed_seconds(seconds, window, buckets); };
      const bool beside = result_.plan.overlap_reduction;
      own.forward += added(gather, alone.forward);
      const double whole = alone.backward_input + alone.backward_weight;
      if (in_parts_) {
        own.backward_input += added(gather, alone.backward_input);
        own.backward_weight += beside ? added(reduction, alone.backward_weight) : reduction;
      } else {
        own.backward_weight += beside ? added(gather + reduction, whole) : added(gather, whole) + reduction;
      }
    }
    times.push_back(own);
  }
  return times;
}

// Seconds from the first pass until the last rank has its reduced gradients.
double Simulator::after_passes(const Timetable& passes) const {
  double end = passes.makespan;
  for (int rank = 0; rank < pipe_; ++rank) {
    const DataParallelCost& own = collectives_[static_cast<size_t>(rank)];
    const std::vector<TimedAction>& list = passes.ranks[static_cast<size_t>(rank)];
    const TimedAction& last = list.back();
    // Buckets leave in one order: those of another stage wait for this one's.
    const bool beside = result_.plan.overlap_reduction && schedule_.shape.chunks == 1;
    const double window = beside ? last.end - last.start : 0;
    const double reduction = own.bytes.in_passes ? 0 : exposed_seconds(own.reduction, window, own.buckets);
    end = std::max(end, last.end + reduction + own.join + tied_seconds_[static_cast<size_t>(rank)]);
  }
  return end;
}

// Seconds by which the first pass of some rank is late, for parameters arrive.
double Simulator::before_passes(const Timetable& passes) const {
  if (result_.plan.gather) return 0;  // in the passes
  double late = 0;
  for (int rank = 0; rank < pipe_; ++rank) {
    const DataParallelCost& own = collectives_[static_cast<size_t>(rank)];
    const TimedAction& first = passes.ranks[static_cast<size_t>(rank)].front();
    late = std::max(late, exposed_seconds(own.gather, first.end - first.start, own.buckets) - first.start);
  }
  return late;
}

void Simulator::add_times() {
  const Timetable alone = pipeline::simulate(schedule_, times_);
  const Timetable with_sums = pipeline::simulate(schedule_, times_with_sums());
  const Timetable with_messages = pipeline::simulate(schedule_, times_with_sums(), messages_);
  const Timetable with_all = pipeline::simulate(schedule_, times_with_collectives(), messages_);
  StepSeconds& step = result_.step;
  for (int rank = 0; rank < pipe_; ++rank) {
    const double busy = alone.busy(rank);
    result_.pipe_ranks[static_cast<size_t>(rank)].busy_seconds = busy;
    step.compute += busy / pipe_;
  }
  step.bubble = std::max(0.0, alone.makespan - step.compute);
  step.tensor = with_sums.makespan - alone.makespan;
  step.messages = with_messages.makespan - with_sums.makespan;
  step.data_parallel = before_passes(with_all) + after_passes(with_all) - with_messages.makespan;
  step.update = question_.update_seconds;
  result_.makespan = with_messages.makespan;
  result_.idle = with_messages.idle();
}

void Simulator::add_memory() {
  std::vector<double> sizes;
  for (const StageLayout& stage : stages_) sizes.push_back(stage.kept_bytes);
  const std::vector<double> peaks = pipeline::peak_activations(schedule_, sizes);
  for (size_t rank = 0; rank < result_.pipe_ranks.size(); ++rank) {
    PipeRank& entry = result_.pipe_ranks[rank];
    const Plan& plan = plan_of(entry.parameters);
    entry.state_bytes = plan.bytes->total() + plan.compression_bytes;
    entry.gathered_bytes = plan.step_bytes.gathered + plan.step_bytes.secondary;
    entry.host_bytes = plan.offloaded_bytes.host_total();
    double recomputed = 0;
    for (const int s : entry.stages)
      recomputed = std::max(recomputed, stages_[static_cast<size_t>(s)].recomputed_bytes);
    entry.activation_bytes = whole_bytes(peaks[rank] + recomputed, "activations");
  }
}

}  // namespace

const PipeRank& Simulation::fullest() const {
  return *std::max_element(pipe_ranks.begin(), pipe_ranks.end(),
                           [](const PipeRank& a, const PipeRank& b) { return a.memory() < b.memory(); });
}

Simulation simulate_step(const SimulationQuestion& question) { return Simulator(question).run(); }

}  // namespace ds::tool
