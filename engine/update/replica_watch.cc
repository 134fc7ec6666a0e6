#include "engine/update/replica_watch.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/check_time.h"
#include "core/log.h"
#include "core/text.h"
#include "zero/square_sum.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

// The checksum of what a rank has not compared.
constexpr int64_t kNotCompared = std::numeric_limits<int64_t>::min();

// "model name" of the first processor; empty where the system does not say it.
std::string read_processor_name() {
  auto file = classic_stream<std::ifstream>("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return {};
}

// Other in each process, so that ranks know which of them are threads of one.
int64_t process_token() {
  static const uint64_t kToken = uint64_t{std::random_device()()} << 32U | std::random_device()();
  return static_cast<int64_t>(kToken);
}

bool share_a_process(comm::Communicator& ranks, c10::Device device) {
  const std::vector<int64_t> tokens = comm::numbers_of_ranks(ranks, device, {process_token()}, "processes of ranks");
  return std::set<int64_t>(tokens.begin(), tokens.end()).size() < tokens.size();
}

at::Tensor checksums_of(const ReplicatedValues& group, c10::Device device) {
  std::vector<at::Tensor> sums;
  for (const ReplicatedValue& value : group.values) {
    const at::Tensor sum = value.counts ? zero::device_checksum_of(value.values)
                                        : at::full({}, kNotCompared, at::TensorOptions(at::kCPU).dtype(at::kLong));
    sums.push_back(sum.is_cpu() ? sent_to(device, sum) : sum);
  }
  return at::stack(sums);
}

// Whether a group has found something: int64 [1] on the device. Collective over its ranks.
at::Tensor problem_in(comm::Communicator& ranks, const at::Tensor& own) {
  // The largest number of all ranks and, by its complement, the smallest. What a rank has not compared is below all.
  const at::Tensor complement = at::where(own.eq(kNotCompared), own, own.bitwise_not());
  const at::Tensor both = at::cat({own, complement});
  ranks.all_reduce(both, comm::ReduceOp::kMax, "checksums of replicas").wait();
  const at::Tensor largest = both.narrow(0, 0, own.numel());
  const at::Tensor smallest = both.narrow(0, own.numel(), own.numel()).bitwise_not();
  return largest.ne(smallest).logical_and_(largest.ne(kNotCompared)).any().to(at::kLong).view({1});
}

using NumberOfRank = std::vector<std::pair<int64_t, int64_t>>;

// Says which rank is alone with its number, "is on rank 3 another one than on the 3 ranks like rank 0", or, where most
// ranks have no number in common, two ranks that differ.
std::string odd_ranks(const NumberOfRank& number_of_rank) {
  std::map<int64_t, std::vector<int64_t>> ranks_with;
  for (const auto& [rank, number] : number_of_rank) ranks_with[number].push_back(rank);
  const auto most = std::max_element(ranks_with.begin(), ranks_with.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most->second.size() * 2 <= number_of_rank.size()) {
    const auto& [first_rank, first] = number_of_rank.front();
    const auto other =
        std::find_if(number_of_rank.begin(), number_of_rank.end(), [&](const auto& of) { return of.second != first; });
    return cat("is not the same on ranks ", first_rank, " and ", other->first);
  }
  const auto odd = std::find_if(number_of_rank.begin(), number_of_rank.end(),
                                [&](const auto& of) { return of.second != most->first; });
  return cat("is on rank ", odd->first, " another one than on the ", most->second.size(), " ranks like rank ",
             most->second.front());
}

std::string with_more(size_t count) { return count == 1 ? std::string() : cat(" (and ", count - 1, " more)"); }

// How far tensors of several ranks are apart.
struct Distance {
  double largest = 0;  // of an element; infinity: it is no number on one rank alone
  double size = 0;     // the root mean square of this rank's elements

  double relative() const { return largest == 0 ? 0 : size > 0 ? largest / size : largest; }
};

// Returns the distance from the first rank's values, the same on all ranks of the group. Collective over them.
Distance distance_of(const at::Tensor& own, c10::Device device, comm::Communicator& ranks) {
  constexpr int64_t kMost = int64_t{1} << 22U;
  const at::Tensor flat = own.detach().to(device).contiguous().view({-1});
  Distance distance;
  double squares = 0;
  for (int64_t begin = 0; begin < flat.numel(); begin += kMost) {
    const at::Tensor mine = flat.narrow(0, begin, std::min(kMost, flat.numel() - begin));
    const at::Tensor first = mine.clone();
    ranks.broadcast(first, /*root=*/0, "replicas that differ").wait();
    const at::Tensor same = mine.eq(first).logical_or_(mine.isnan().logical_and_(first.isnan()));
    const at::Tensor apart = (mine.to(at::kDouble) - first.to(at::kDouble)).abs_().masked_fill_(same, 0);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    distance.largest = std::max(distance.largest, apart.nan_to_num(kInfinity, kInfinity).max().item<double>());
    squares += mine.to(at::kDouble).square_().sum().item<double>();
  }
  distance.size = std::sqrt(squares / static_cast<double>(std::max<int64_t>(flat.numel(), 1)));
  const auto largest_of = [&](double value) {  // of numbers that are not negative, in the order of their bits
    return std::bit_cast<double>(
        comm::largest_of_ranks(std::bit_cast<int64_t>(value), device, ranks, "how far replicas are apart"));
  };
  distance.largest = largest_of(distance.largest);
  distance.size = largest_of(std::isfinite(distance.size) ? distance.size : 0.0);
  return distance;
}

constexpr const char* kGeneralCauses =
    "Something has changed on one rank alone: a program that changes parameters or buffers outside of "
    "engine->gathered_parameters(parameters, /*modifier_rank=*/0), a hook or an optimizer that draws random numbers, "
    "or memory that has lost a bit";
constexpr const char* kAxisRounds =
    "Each rank of the axis computes them by itself, from gradients of its own: where kernels add in another order, or "
    "processors are of several kinds, they part by rounding (\"deterministic\": true chooses kernels that do not); "
    "else a bit of memory is lost, or a program has changed them on one rank";
constexpr const char* kProcessorsRound =
    "Each rank computes them by itself, and the processors of the ranks round in different ways (the plan has their "
    "kinds): run on processors of one kind, or at zero_optimization.stage 1, where each update is computed once; "
    "else a bit of memory is lost, or a program has changed them on one rank";

}  // namespace

std::string arithmetic_of(c10::Device device) {
  const at::NoGradGuard no_grad;
  auto text = classic_stream<std::ostringstream>();
  if (device.is_cpu()) {
    static const std::string kProcessor = read_processor_name();
    text << kProcessor << ", " << at::get_cpu_capability() << ", " << at::get_num_threads() << " threads, ";
  }
  const int64_t elements = device.is_cpu() ? 10000 : 200000;  // a GPU adds few in one block, on any kind
  const at::Tensor values = at::arange(elements, at::TensorOptions(device).dtype(at::kFloat)).mul_(0.37).sin_();
  text << "a sum is " << std::hexfloat << zero::sum_of_squares(values);
  return std::move(text).str();
}

ReplicaWatch::ReplicaWatch(const ModelState& state, ModelConsistency& consistency, int64_t every,
                           std::string arithmetic)
    : state_(state), consistency_(consistency), every_(every) {
  // Ranks of ZeroOneAdam have weights of their own between its meetings.
  if (state.optimizer.own && state.optimizer.own->name() == "ZeroOneAdam") every_ = 0;
  comm::Communicator& world = *state.ranks.world;
  if (every_ == 0 || world.size() == 1 || !state.plan.trains) return;  // without an optimizer nothing is computed
  if (state.tensor && state.tensor->ranks->size() > 1) {
    watches_generators_ = !share_a_process(*state.tensor->ranks, state.ranks.device);
  }
  if (arithmetic.empty()) arithmetic = arithmetic_of(state.ranks.device);
  if (comm::same_text_on_all_ranks(arithmetic, state.ranks.device, world)) return;
  std::set<std::string> seen;
  const auto texts = comm::texts_of_ranks(arithmetic, state.ranks.device, world, "arithmetic of ranks");
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (seen.insert(texts[rank]).second) kinds_.push_back(cat("rank ", rank, ": ", texts[rank]));
  }
}

void ReplicaWatch::add_row(Plan& plan) const {
  if (kinds_.empty()) return;
  std::erase_if(plan.rows, [](const PlanRow& row) { return row.what == "replicas"; });
  std::string kinds;
  for (const std::string& kind : kinds_) kinds += cat(kinds.empty() ? "" : "; ", kind);
  plan.rows.push_back({"replicas",
                       cat("compared after every ", every_, " steps; ranks round in ", kinds_.size(),
                           " ways, so that differences in what each computes are warnings"),
                       cat("check_replicas: ", every_, "; ", kinds)});
}

void ReplicaWatch::forget() {
  begun_.reset();
  generators_.forget();
}

void ReplicaWatch::step_made(int64_t step) {
  if (every_ == 0) return;
  if (watches_generators_ && !generators_.begun()) generators_.look(state_.ranks.device);
  if (step % every_ != 0) return;
  begin(step);
  if (state_.ranks.device.is_cpu()) judge();
}

void ReplicaWatch::begin(int64_t step) {
  const CheckTime::Scope time;
  const at::NoGradGuard no_grad;
  const c10::Device device = state_.ranks.device;
  state_.access->wait_all();
  Round round{.step = step,
              .groups = replicated_values(state_, buffers_shared_),
              .checksums = {},
              .roundings = compared_with_masters(state_),
              .problem = {}};
  if (watches_generators_) {
    round.groups.push_back({.ranks = state_.tensor->ranks.get(),
                            .among = "ranks of one tensor axis",
                            .same_batches = true,
                            .values = generators_.look(device)});
  }
  at::Tensor problem = at::zeros({1}, at::TensorOptions(device).dtype(at::kLong));
  for (const auto& [name, differs] : round.roundings) problem = at::maximum(problem, differs);
  for (const ReplicatedValues& group : round.groups) round.checksums.push_back(checksums_of(group, device));
  const CheckTime::Scope waiting(/*waits=*/true);
  for (size_t i = 0; i < round.groups.size(); ++i) {
    problem = at::maximum(problem, problem_in(*round.groups[i].ranks, round.checksums[i]));
  }
  comm::Communicator& world = *state_.ranks.world;
  if (world.size() > 1) world.all_reduce(problem, comm::ReduceOp::kMax, "whether replicas differ").wait();
  round.problem = Readback(problem);
  begun_ = std::move(round);
}

void ReplicaWatch::judge() {
  if (!begun_) return;
  const at::NoGradGuard no_grad;
  const Round round = *std::exchange(begun_, std::nullopt);
  if (round.problem.numbers().item<int64_t>() == 0) {
    told_.reset();
    return;
  }
  Finding own = difference_from_masters(round);
  for (size_t i = 0; i < round.groups.size(); ++i) {
    Finding found = difference_in(round.groups[i], round.checksums[i]);
    const bool is_worse = own.rounding && (!found.rounding || *found.rounding > *own.rounding);
    if (!found.text.empty() && (own.text.empty() || is_worse)) own = std::move(found);
  }
  // In front of a text: how far rounding has come, as a number's bits; -1 is no rounding.
  comm::Communicator& world = *state_.ranks.world;
  const int64_t size = own.rounding ? std::bit_cast<int64_t>(*own.rounding) : -1;
  const std::vector<int64_t> sizes = comm::numbers_of_ranks(
      world, state_.ranks.device, {own.text.empty() ? kNotCompared : size}, "kinds of replicas that differ");
  const std::vector<std::string> texts =
      comm::texts_of_ranks(own.text, state_.ranks.device, world, "replicas that differ");
  const auto error = std::find(sizes.begin(), sizes.end(), -1);
  if (error == sizes.end()) {
    const auto largest = std::max_element(sizes.begin(), sizes.end());
    return warn(round.step, texts[static_cast<size_t>(largest - sizes.begin())], std::bit_cast<double>(*largest));
  }
  consistency_.slice_updated();  // what ranks have is no longer one model
  throw UsageError(cat("check_replicas: after step ", round.step, ", ",
                       texts[static_cast<size_t>(error - sizes.begin())],
                       ". Load a checkpoint of an earlier step to go on; a smaller check_replicas finds the step, 0 ",
                       "compares nothing (this is rank ", world.rank(), ")"));
}

void ReplicaWatch::warn(int64_t step, const std::string& text, double rounding) {
  constexpr double kGrown = 10;
  if (told_ && rounding <= kGrown * *told_) return;
  told_ = rounding;
  if (state_.ranks.world->rank() != 0) return;
  log::warning("check_replicas: after step ", step, ", ", text,
               ". Training goes on (said again when the difference has grown tenfold)");
}

ReplicaWatch::Finding ReplicaWatch::difference_from_masters(const Round& round) const {
  std::string first;
  size_t wrong = 0;
  for (const auto& [name, differs] : round.roundings) {
    if (differs.item<int64_t>() != 0 && ++wrong == 1) first = name;
  }
  if (wrong == 0) return {};
  return {.text = cat("parameter ", first, with_more(wrong), " of rank ", state_.ranks.world->rank(),
                      " is not its master, rounded. ", kGeneralCauses),
          .rounding = {}};
}

ReplicaWatch::Finding ReplicaWatch::difference_in(const ReplicatedValues& group, const at::Tensor& checksums) const {
  const at::Tensor host = checksums.cpu();
  std::vector<int64_t> own = {state_.ranks.world->rank()};
  own.insert(own.end(), host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel());
  const std::vector<int64_t> all =
      comm::numbers_of_ranks(*group.ranks, state_.ranks.device, own, "checksums of replicas that differ");
  std::vector<size_t> differing;
  std::optional<size_t> error;  // the first one that is no rounding
  std::map<size_t, std::string> ranks;
  for (size_t i = 0; i < group.values.size(); ++i) {
    NumberOfRank number_of_rank;
    for (size_t at = 0; at < all.size(); at += own.size()) {
      if (all[at + 1 + i] != kNotCompared) number_of_rank.emplace_back(all[at], all[at + 1 + i]);
    }
    const auto same = [&](const auto& of) { return of.second == number_of_rank.front().second; };
    if (std::all_of(number_of_rank.begin(), number_of_rank.end(), same)) continue;
    differing.push_back(i);
    ranks[i] = odd_ranks(number_of_rank);
    const ReplicatedValue& value = group.values[i];
    const bool may_round =
        value.computed && value.values.is_floating_point() && (group.same_batches || !kinds_.empty());
    if (!may_round && !error) error = i;
  }
  if (differing.empty()) return {};
  Finding found = error ? Finding() : rounding_in(group, differing);
  const size_t named = error.value_or(differing.front());
  const ReplicatedValue& value = group.values[named];
  std::string text = cat("of the ", group.among, ", ", value.name, " ", ranks[named], with_more(differing.size()));
  text += found.text;
  const char* const causes = !found.rounding ? kGeneralCauses : group.same_batches ? kAxisRounds : kProcessorsRound;
  found.text = cat(text, ". ", value.advice != nullptr ? value.advice : causes);
  return found;
}

ReplicaWatch::Finding ReplicaWatch::rounding_in(const ReplicatedValues& group,
                                                const std::vector<size_t>& differing) const {
  Distance worst;
  size_t at = differing.front();
  for (const size_t i : differing) {
    const Distance distance = distance_of(group.values[i].values, state_.ranks.device, *group.ranks);
    if (distance.relative() <= worst.relative()) continue;
    worst = distance;
    at = i;
  }
  if (!std::isfinite(worst.largest)) {
    return {.text = cat(", and an element of ", group.values[at].name, " is a number on some of the ranks alone"),
            .rounding = {}};
  }
  return {.text = cat("; the largest difference of an element is ", worst.largest, ", of ", group.values[at].name,
                      ", the root mean square of which is ", worst.size),
          .rounding = worst.relative()};
}

}  // namespace ds::engine
