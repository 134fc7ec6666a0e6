#include <string>

#include "config/plan/plan_choices.h"
#include "config/plan/plan_rows.h"
#include "core/text.h"

namespace ds::engine {
namespace {

// Says where the axis lies: its sums are in every layer, so it has to have the fastest links. Links inside a host are
// not looked at.
std::string hosts_of_axis(const PlanFacts& facts, int64_t ranks) {
  if (!facts.tensor_inside_host) return cat("inside a host where hosts have a multiple of ", ranks, " ranks");
  return *facts.tensor_inside_host ? "each axis lies inside a host" : "axes lie across hosts";
}

// Names the ranks of the axis that begins at rank 0, `stride` apart: "0 and 2", "0 to 3", "0 to 12 by 4".
std::string ranks_of_axis(int64_t size, int64_t stride) {
  if (size == 2) return cat("0 and ", stride);
  return cat("0 to ", (size - 1) * stride, stride > 1 ? cat(" by ", stride) : "");
}

// Says in which order the axes lie, where there are several: the order of comm::MeshLayout.
void add_mesh_row(Plan& plan) {
  const Topology& topology = plan.topology;
  const int64_t tensor = topology.tensor;
  std::string order;
  std::string ranks;
  int axes = 0;
  const auto add = [&](const char* name, int64_t size, int64_t stride, const char* share) {
    if (size == 1) return;
    ++axes;
    order += cat(order.empty() ? "" : " x ", name, " ", size);
    ranks += cat(ranks.empty() ? "" : ", ", ranks_of_axis(size, stride), " ", share);
  };
  add("pipe", topology.pipe, topology.dp * tensor, "are a pipeline");
  add("data", topology.batches(), tensor * topology.sequence, "train the same parameters on other batches");
  add("sequence", topology.sequence, tensor, "share a batch");
  add("tensor", tensor, 1, "have parts of the same layers");
  if (axes < 2) return;
  plan.rows.push_back({"mesh", cat(order, ", the last innermost: ranks ", ranks), "the order of the axes is fixed"});
}

std::string metric_text(const efficiency::SampleMetric& metric, const config::CurriculumSection& section) {
  const nlohmann::ordered_json& written = section.curriculum_metrics[metric.name];
  return cat(metric.name, metric.by_percentile ? " percentile " : " ", metric.schedule.min_difficulty, " to ",
             metric.schedule.max_difficulty, ", ", written.value("schedule_type", ""),
             metric.chooses ? "" : ", for the program");
}

// Says what a rank sends to the next stage of what is the same on all ranks of the axis. `otherwise`: what is not known
// yet.
std::string message_text(bool cut, int64_t ranks, const std::string& otherwise) {
  return cut ? cat("1/", ranks, " of the bytes from each rank, gathered inside the next stage")
             : cat("all bytes from each rank", otherwise);
}

void add_message_rows(const config::DsConfig& config, const PlanFacts& facts, Plan& plan) {
  if (!plan.pipeline || plan.topology.pipe == 1) return;
  const MessageCuts cuts = choose_message_cuts(config, plan, facts.pipe_inside_host);
  const auto add = [&](const char* key, const char* what, bool wanted, bool cut) {
    const std::string path = cat("pipeline.", key);
    const bool given = is_given(config, path);
    std::string reason = cat(path, ": ", wanted ? "true" : "false", given ? "" : " (default)");
    if (!given && facts.pipe_inside_host) {
      reason += *facts.pipe_inside_host ? ", stages lie on one host" : ", stages lie on several hosts";
    }
    const bool known = given || !wanted || facts.pipe_inside_host;
    const std::string otherwise =
        known ? std::string() : cat(", 1/", plan.topology.tensor, " where stages lie on several hosts");
    plan.rows.push_back({what, message_text(cut, plan.topology.tensor, otherwise), reason});
  };
  add("pipe_partitioned", "replicated activations", config.pipeline.pipe_partitioned, cuts.activations);
  add("grad_partitioned", "replicated gradients", config.pipeline.grad_partitioned, cuts.gradients);
  plan.rows.push_back({"split activations",
                       cat("1/", plan.topology.tensor, " of the bytes from each rank, its own part"),
                       "the next stage has the other parts where they are needed"});
}

}  // namespace

MessageCuts choose_message_cuts(const config::DsConfig& config, const Plan& plan,
                                std::optional<bool> pipe_inside_host) {
  if (plan.topology.tensor == 1 || plan.topology.pipe == 1) return {};
  const bool by_default = !pipe_inside_host.value_or(true);
  const auto cuts = [&](bool wanted, const char* key) { return wanted && (by_default || is_given(config, key)); };
  return {.activations = cuts(config.pipeline.pipe_partitioned, "pipeline.pipe_partitioned"),
          .gradients = cuts(config.pipeline.grad_partitioned, "pipeline.grad_partitioned")};
}

void add_sequence_row(const config::DsConfig& config, Plan& plan) {
  const int64_t ranks = plan.topology.sequence;
  if (ranks == 1) return;
  const config::SequenceParallelSection& section = config.sequence_parallel;
  plan.rows.push_back(
      {"sequences",
       cat("cut over ", ranks, " neighbouring ranks, ", section.order, "; attention ", section.attention,
           "; states over data and sequence together, gradients added over the sequence"),
       cat("sequence_parallel_size: ", ranks)});
}

void add_tensor_rows(const config::DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const int64_t ranks = plan.topology.tensor;
  add_mesh_row(plan);
  add_sequence_row(config, plan);
  if (ranks == 1) return;
  plan.rows.push_back({"tensor parallel",
                       cat(ranks, " neighbouring ranks have parts of the split parameters and get the same batches; ",
                           hosts_of_axis(facts, ranks)),
                       cat("tensor_parallel.autotp_size: ", ranks)});
  if (!facts.tensor_inside_host.value_or(true)) {
    plan.warnings.push_back(
        cat("tensor_parallel.autotp_size: ", ranks, ": the ", ranks, " ranks of a tensor axis are on several hosts",
            facts.tensor_leaves_host.empty() ? "" : cat(" (", facts.tensor_leaves_host, ")"),
            ", and the sums of every layer go between them; choose a size that divides the ranks of a host"));
  }
  for (const SplitRow& row : facts.splits) plan.rows.push_back({cat("  ", row.names), row.what, row.reason});
  if (plan.tensor.split_parameters && plan.parameters) {
    plan.rows.push_back({"split parameters",
                         cat(*plan.tensor.split_parameters, " of the ", *plan.parameters, " elements of a rank are 1/",
                             plan.topology.tensor, " of larger ones"),
                         "the model, and the rules"});
  }
  if (plan.tensor.sequence_parallel) {
    plan.rows.push_back({"sequence parallel", "between layers each rank has a part of the sequence",
                         "tensor_parallel.sequence_parallel: true"});
  }
  if (plan.tensor.overlap) {
    const bool staged = plan.pipeline && plan.topology.pipe > 1;
    plan.rows.push_back({"tp_overlap_comm",
                         cat("sums of input gradients run beside the products of weight gradients",
                             staged ? ", which leaves a schedule's own pass for weights those of other layers" : ""),
                         "tensor_parallel.tp_overlap_comm: true"});
  }
  if (plan.tensor.verify) {
    plan.rows.push_back({"verified", "what is computed of parts is computed of wholes too, and compared; slow",
                         "tensor_parallel.verify: true"});
  }
  add_message_rows(config, facts, plan);
}

void add_efficiency_rows(const config::DsConfig& config, Plan& plan) {
  const config::CurriculumLearningSection& curriculum = config.curriculum_learning;
  if (curriculum.enabled) {
    plan.rows.push_back({"curriculum",
                         cat(curriculum.curriculum_type, " ", curriculum.schedule.min_difficulty, " to ",
                             curriculum.schedule.max_difficulty, ", ", curriculum.schedule_type.value_or("")),
                         "curriculum_learning.enabled: true; the program cuts its batches"});
  }
  if (config.data_efficiency.chooses_samples()) {
    const config::CurriculumSection& section = config.data_efficiency.data_sampling.curriculum_learning;
    std::string text;
    for (const efficiency::SampleMetric& metric : section.metrics) {
      text += cat(text.empty() ? "" : "; ", metric_text(metric, section));
    }
    plan.rows.push_back({"data sampling", text,
                         "data_efficiency.data_sampling.enabled: true; batches are drawn of what all metrics admit"});
  }
  const config::ProgressiveLayerDropSection& layers = config.progressive_layer_drop;
  if (layers.enabled) {
    plan.rows.push_back({"layer drop", cat("theta falls from 1 to ", layers.theta, " by exp(-", layers.gamma, " t)"),
                         "progressive_layer_drop.enabled: true; the program wraps its layers"});
  }
  if (config.data_efficiency.drops_tokens()) {
    const config::RandomLtdSection& tokens = config.data_efficiency.data_routing.random_ltd;
    plan.rows.push_back({"token drop",
                         cat(tokens.random_ltd_layer_id.size(), " layers see ", tokens.kept.min_difficulty, " to ",
                             tokens.kept.max_difficulty, " tokens"),
                         "data_efficiency.data_routing.random_ltd.enabled: true; the program wraps its layers"});
  }
  if (config.sparse_attention) {
    const config::SparseAttentionSection& blocks = *config.sparse_attention;
    plan.rows.push_back({"attention", cat(blocks.mode, ", blocks of ", blocks.block, " tokens, ", blocks.attention),
                         "sparse_attention is there; the program takes it in its layers"});
  }
}

void add_comms_log_row(const config::DsConfig& config, Plan& plan) {
  const config::CommsLoggerSection& section = config.comms_logger;
  if (!section.enabled) return;
  std::string names;
  for (const std::string& name : section.prof_ops) names += cat(names.empty() ? "" : ", ", name);
  const bool nothing = !section.prof_all && names.empty();
  std::string text = section.prof_all ? "all operations" : nothing ? "no operation: prof_ops is empty" : names;
  if (!nothing) {
    text += cat(", by group", section.debug ? ", label" : "", " and size; a table at the end",
                section.verbose ? ", and a line for each one on rank 0" : "");
  }
  plan.rows.push_back({"communication log", text, "comms_logger.enabled: true"});
}

void add_flops_row(const config::DsConfig& config, Plan& plan) {
  const config::FlopsProfilerSection& section = config.flops_profiler;
  if (!section.enabled) return;
  plan.rows.push_back({"flops profile",
                       section.profile_step < 0 ? std::string("of no step")
                                                : cat("of step ", section.profile_step + 1, ", ",
                                                      section.output_file ? cat("to the file ", *section.output_file)
                                                                          : std::string("in the log")),
                       cat("flops_profiler.enabled: true, profile_step: ", section.profile_step)});
}

void add_alike_rows(const config::DsConfig& config, Plan& plan) {
  if (config.sync_batchnorm) plan.rows.push_back({"batch norm", "of all data ranks", "sync_batchnorm: true"});
  if (config.broadcast_buffers) plan.rows.push_back({"buffers", "those of rank 0", "broadcast_buffers: true"});
  if (!plan.trains || !config.given("check_replicas")) return;
  const int64_t every = config.check_replicas;
  plan.rows.push_back({"replicas",
                       every == 0 ? std::string("not compared") : cat("compared after every ", every, " steps"),
                       cat("check_replicas: ", every)});
}

}  // namespace ds::engine
