#include "tools/collective_cost.h"

#include <algorithm>
#include <limits>

#include "tools/checked_count.h"
#include "zero/partition.h"

namespace ds::tool {
namespace {

// Without what moves parameters.
int64_t gradient_bytes(zero::MemoryQuestion question) {
  question.parameter_bytes = 0;
  question.weight_bits = 0;
  return zero::predict_sent_bytes(question);
}

int64_t parameter_bytes(zero::MemoryQuestion question, int64_t accumulation_steps) {
  question.accumulation_steps = accumulation_steps;
  return zero::predict_sent_bytes(question) - gradient_bytes(question);
}

using Rings = std::vector<Ring>;

// Data-parallel ranks of one stage: `dp` of each of `tensor` neighbours, from rank `first` on.
struct StageRanks {
  int64_t first = 0;
  int64_t dp = 1;
  int64_t tensor = 1;
};

// Groups of consecutive ones.
Rings rings_of(const StageRanks& ranks, int64_t members) {
  Rings rings;
  for (int64_t d = 0; d < ranks.dp; d += members) {
    for (int64_t t = 0; t < ranks.tensor; ++t) {
      rings.push_back({.first = ranks.first + d * ranks.tensor + t, .members = members, .stride = ranks.tensor});
    }
  }
  return rings;
}

// Rings of the ranks that hold equal slices.
Rings replicas_of(const StageRanks& ranks, int64_t shards) {
  Rings rings;
  for (int64_t d = 0; d < shards; ++d) {
    for (int64_t t = 0; t < ranks.tensor; ++t) {
      rings.push_back(
          {.first = ranks.first + d * ranks.tensor + t, .members = ranks.dp / shards, .stride = shards * ranks.tensor});
    }
  }
  return rings;
}

void add_all(Traffic& traffic, const Rings& rings, int64_t bytes) {
  for (const Ring& ring : rings) traffic.add(ring, bytes);
}

// Seconds of a collective of `bytes`, whose messages pass the ring `rounds` times.
double seconds_of(int64_t bytes, const Traffic& traffic, const Rings& rings, int64_t rounds, double latency) {
  if (bytes == 0) return 0;
  double rate = traffic.rate(rings.front());
  for (const Ring& ring : rings) rate = std::min(rate, traffic.rate(ring));
  return static_cast<double>(bytes) / rate + static_cast<double>(rounds * (rings.front().members - 1)) * latency;
}

}  // namespace

DataParallelBytes split_sent_bytes(const zero::MemoryQuestion& question) {
  zero::MemoryQuestion once = question;
  once.accumulation_steps = 1;
  zero::MemoryQuestion alone = once;
  alone.copies = 1;
  DataParallelBytes bytes;
  bytes.reduction = gradient_bytes(alone);
  bytes.join = gradient_bytes(once) - bytes.reduction;
  bytes.in_passes = question.stage >= 2;
  bytes.reductions = bytes.in_passes ? question.accumulation_steps : 1;
  bytes.gather = parameter_bytes(question, 1);
  if (question.stage < 3) return bytes;
  // A micro-batch more is two gathers more.
  bytes.gather_again = (parameter_bytes(question, 2) - bytes.gather) / 2;
  bytes.gather -= bytes.gather_again;
  bytes.gathers = 2 * question.accumulation_steps;
  return bytes;
}

int64_t count_buckets(const zero::MemoryQuestion& question) {
  const int64_t size = std::min(zero::default_target_elements(question.parameters), question.bucket_limit);
  return std::max<int64_t>(1, (question.parameters + size - 1) / size);
}

double exposed_seconds(double seconds, double window, int64_t buckets) {
  const auto count = static_cast<double>(buckets);
  return std::max(seconds / count, seconds - window * (count - 1) / count);
}

double DataParallelCost::mean_gather() const {
  const auto count = static_cast<double>(bytes.gathers);
  return (gather + (count - 1) * gather_again) / count;
}

std::vector<DataParallelCost> time_collectives(const Machine& machine, int64_t dp, int64_t tensor,
                                               const std::vector<zero::MemoryQuestion>& questions,
                                               std::vector<int64_t>& node_bytes) {
  std::vector<DataParallelCost> costs;
  std::vector<Rings> shards;
  std::vector<Rings> copies;
  std::vector<Rings> nodes;
  Traffic among_shards(machine);
  Traffic among_copies(machine);
  Traffic in_nodes(machine);
  for (size_t rank = 0; rank < questions.size(); ++rank) {
    const zero::MemoryQuestion& question = questions[rank];
    const StageRanks ranks{.first = static_cast<int64_t>(rank) * dp * tensor, .dp = dp, .tensor = tensor};
    shards.push_back(rings_of(ranks, question.dp));
    copies.push_back(replicas_of(ranks, question.dp));
    nodes.push_back(rings_of(ranks, question.node_ranks > 1 ? question.node_ranks : question.dp));
    costs.push_back({.bytes = split_sent_bytes(question), .buckets = count_buckets(question)});
    const DataParallelBytes& bytes = costs.back().bytes;
    add_all(among_shards, shards[rank], bytes.reductions * bytes.reduction + bytes.gather);
    add_all(among_copies, copies[rank], bytes.join);
    add_all(in_nodes, nodes[rank], (bytes.gathers - 1) * bytes.gather_again);
  }
  for (const Traffic* traffic : {&among_shards, &among_copies, &in_nodes}) {
    for (size_t n = 0; n < node_bytes.size(); ++n) {
      node_bytes[n] = checked_sum(node_bytes[n], traffic->bytes()[n], "what a node sends in a step");
    }
  }
  for (size_t rank = 0; rank < questions.size(); ++rank) {
    DataParallelCost& own = costs[rank];
    const auto seconds = [&](int64_t bytes, const Traffic& traffic, const Rings& rings, int64_t rounds) {
      return seconds_of(bytes, traffic, rings, rounds * own.buckets, machine.latency);
    };
    own.reduction = seconds(own.bytes.reduction, among_shards, shards[rank], questions[rank].stage == 0 ? 2 : 1);
    own.gather = seconds(own.bytes.gather, among_shards, shards[rank], 1);
    own.gather_again = seconds(own.bytes.gather_again, in_nodes, nodes[rank], 1);
    own.join = seconds(own.bytes.join, among_copies, copies[rank], 2);
  }
  return costs;
}

StageSums sums_of(std::vector<LayerCost>::const_iterator begin, std::vector<LayerCost>::const_iterator end,
                  int64_t tensor, bool recomputed) {
  const double share = 2 * static_cast<double>(tensor - 1) / static_cast<double>(tensor);
  StageSums sums;
  for (auto layer = begin; layer != end; ++layer) {
    const int backward = layer->backward_sums + (recomputed ? layer->forward_sums : 0);
    sums.forward_bytes += share * layer->forward_sums * layer->summed_bytes;
    sums.backward_bytes += share * backward * layer->summed_bytes;
    sums.forward_count += layer->forward_sums;
    sums.backward_count += backward;
  }
  return sums;
}

double tensor_rate(const Machine& machine, int64_t tensor) {
  Traffic traffic(machine);
  std::vector<Ring> rings;
  for (int64_t first = 0; first < machine.ranks; first += tensor) {
    rings.push_back({.first = first, .members = tensor});
    traffic.add(rings.back());
  }
  double rate = std::numeric_limits<double>::infinity();
  for (const Ring& ring : rings) rate = std::min(rate, traffic.rate(ring));
  return rate;
}

double seconds_of_gather(double bytes, const Machine& machine, int64_t tensor) {
  return bytes / tensor_rate(machine, tensor) + static_cast<double>(tensor - 1) * machine.latency;
}

pipeline::StageTimes seconds_of(const StageSums& sums, const Machine& machine, int64_t tensor, double beside) {
  const double rate = tensor_rate(machine, tensor);
  const double latency = 2 * static_cast<double>(tensor - 1) * machine.latency;  // there and back around the ring
  pipeline::StageTimes times{};
  times.forward = sums.forward_bytes / rate + sums.forward_count * latency;
  times.backward_input = sums.backward_bytes / rate + sums.backward_count * latency;
  times.backward_weight = 0;
  if (beside > 0) {
    times.backward_input = exposed_seconds(times.backward_input, beside, std::max(1, sums.backward_count));
  }
  return times;
}

}  // namespace ds::tool
