#include "profiling/module_work.h"

#include <ATen/record_function.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <typeinfo>

#include "core/replay/recomputation.h"
#include "core/split/split_tensor.h"
#include "core/transposed.h"
#include "profiling/flops_report.h"
#include "profiling/meters.h"

namespace ds::profiling {
namespace {

std::string type_of(const torch::nn::Module& module) {
  std::string name = module.name();
  const size_t colons = name.rfind("::");
  if (colons != std::string::npos) name = name.substr(colons + 2);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

// The place of the module that holds this one, whose name is a prefix.
int parent_of(const std::string& name, const std::unordered_map<std::string, int>& places) {
  for (size_t dot = name.rfind('.'); dot != std::string::npos; dot = name.rfind('.', dot - 1)) {
    const auto found = places.find(name.substr(0, dot));
    if (found != places.end()) return found->second;
    if (dot == 0) break;
  }
  return 0;
}

// The elements of a parameter; of one in parts, those of this rank.
int64_t elements_here(const at::Tensor& parameter) {
  return (is_split(parameter) ? part_of(parameter) : parameter).numel();
}

// Operators between ranks move numbers; LibTorch's own ones are made of others that count.
bool should_have_rule(std::string_view name) {
  constexpr std::array<std::string_view, 4> kOthers = {"aten::", "c10d::", "prim::", "profiler::"};
  return name.find("::") != std::string_view::npos &&
         std::none_of(kOthers.begin(), kOthers.end(), [&](std::string_view other) { return name.starts_with(other); });
}

}  // namespace

ModuleWork::ModuleWork(const torch::nn::Module& module) : interceptor_([](const at::Tensor&) {}, this) {
  std::unordered_map<std::string, int> places;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const auto place = static_cast<int>(parts_.size());
    Part part{.name = item.key(), .type = type_of(*item.value())};
    part.parent = place == 0 ? -1 : parent_of(part.name, places);
    part.looks_up = dynamic_cast<const torch::nn::EmbeddingImpl*>(item.value().get()) != nullptr;
    for (const auto& parameter : item.value()->named_parameters(/*recurse=*/false)) {
      std::vector<int>& owners = owners_[parameter.value().unsafeGetTensorImpl()];
      if (owners.empty()) part.parameters += elements_here(parameter.value());
      owners.push_back(place);
    }
    places.emplace(part.name, place);
    parts_.push_back(std::move(part));
  }
}

ModuleWork::~ModuleWork() { stop(); }

void ModuleWork::start() {
  events_.clear();
  under_way_.clear();
  node_of_.clear();
  nodes_.clear();
  unknown_.clear();
  paused_ = false;
  interceptor_.enable();
}

void ModuleWork::stop() { interceptor_.disable(); }

// A weight that several modules have is the Embedding's where it is looked up, else another's.
int ModuleWork::owner_of(const at::RecordFunction& function) const {
  for (const c10::IValue& input : function.inputs()) {
    if (!input.isTensor() || !input.toTensor().defined()) continue;
    const at::Tensor tensor = input.toTensor();
    auto found = owners_.find(tensor.unsafeGetTensorImpl());
    if (found == owners_.end()) {
      const at::Tensor base = base_of_transposed(tensor);
      if (base.defined()) found = owners_.find(base.unsafeGetTensorImpl());
    }
    if (found == owners_.end()) continue;
    const bool lookup = std::string_view(function.name()) == "aten::embedding";
    for (const int owner : found->second) {
      if (parts_[static_cast<size_t>(owner)].looks_up == lookup) return owner;
    }
    return found->second.front();
  }
  return -1;
}

void ModuleWork::begins(const at::RecordFunction& function) {
  Running running;
  const Running* const around = under_way_.empty() ? nullptr : &under_way_.back();
  running.counted = around != nullptr && around->counted;
  running.is_operator = function.operator_name().has_value();
  const auto node = torch::autograd::get_current_node();
  const bool recomputed = Recomputation::is_running();
  const bool backward = node != nullptr && !recomputed;
  // The sums of gradients, and what an engine does with them, belong to no module.
  const bool ignored = (backward && node->sequence_nr() == std::numeric_limits<uint64_t>::max()) ||
                       (node == nullptr && !recomputed && paused_);
  if (!ignored) {
    Event event{.parent = around != nullptr ? around->event : -1, .recomputed = recomputed};
    // A node of backward that computes a region again does not call it.
    if (event.parent >= 0 && !backward && events_[static_cast<size_t>(event.parent)].node >= 0) event.parent = -1;
    if (!running.counted) {
      if (const auto work = work_of(function.name(), function.inputs())) {
        event.work = *work;
        running.counted = true;
        for (Running& caller : under_way_) caller.unknown.clear();
      } else if (running.is_operator && (around == nullptr || !around->is_operator)) {
        if (should_have_rule(function.name())) running.unknown = function.name();
      }
    }
    const auto place = static_cast<int>(events_.size());
    if (backward) {
      event.node = static_cast<int64_t>(nodes_.size());
      nodes_.emplace_back(node->thread_id(), static_cast<int64_t>(node->sequence_nr()));
    } else {
      event.module = owner_of(function);
      if (function.seqNr() >= 0) {
        node_of_.insert_or_assign({at::RecordFunction::currentThreadId(), function.seqNr()}, place);
      }
    }
    events_.push_back(event);
    running.event = place;
  }
  if (around == nullptr) running.began = monotonic_seconds();
  under_way_.push_back(std::move(running));
}

void ModuleWork::ends() {
  if (under_way_.empty()) return;  // it began before the watch
  const Running running = std::move(under_way_.back());
  under_way_.pop_back();
  if (!running.unknown.empty()) ++unknown_[running.unknown];
  if (running.event < 0 || !under_way_.empty()) return;
  Event& event = events_[static_cast<size_t>(running.event)];
  if (event.node < 0 && !event.recomputed) event.seconds = monotonic_seconds() - running.began;
}

int ModuleWork::common_part(int a, int b) const {
  if (a < 0) return b;
  if (b < 0) return a;
  std::vector<char> around(parts_.size(), 0);
  for (int part = a; part >= 0; part = parts_[static_cast<size_t>(part)].parent) around[static_cast<size_t>(part)] = 1;
  for (int part = b; part >= 0; part = parts_[static_cast<size_t>(part)].parent) {
    if (around[static_cast<size_t>(part)]) return part;
  }
  return 0;
}

std::vector<int> ModuleWork::resolved() const {
  const size_t count = events_.size();
  std::vector<int> result(count, -1);
  // Tensors that an operator's own calls read count as its own.
  std::vector<int> reads(count, -1);
  for (size_t i = count; i-- > 0;) {
    if (events_[i].node >= 0) continue;
    if (events_[i].module >= 0) reads[i] = events_[i].module;
    if (reads[i] >= 0 && events_[i].parent >= 0) {
      int& of_caller = reads[static_cast<size_t>(events_[i].parent)];
      of_caller = events_[static_cast<size_t>(events_[i].parent)].module >= 0 ? of_caller : reads[i];
    }
  }
  // Outermost operators between two that read parameters; the last of all are the model's own, as a loss is.
  int before = -1;
  std::vector<size_t> waiting;
  const auto settle = [&](int next) {
    for (const size_t i : waiting) result[i] = next < 0 || before < 0 ? 0 : common_part(before, next);
    waiting.clear();
  };
  for (size_t i = 0; i < count; ++i) {
    if (events_[i].node >= 0 || events_[i].parent >= 0) continue;
    if (reads[i] < 0) {
      waiting.push_back(i);
      continue;
    }
    settle(reads[i]);
    result[i] = before = reads[i];
  }
  settle(-1);
  for (size_t i = 0; i < count; ++i) {
    if (events_[i].node >= 0 || events_[i].parent < 0) continue;
    const int of_caller = result[static_cast<size_t>(events_[i].parent)];
    result[i] = reads[i] >= 0 ? reads[i] : of_caller;
  }
  return result;
}

std::vector<ModuleFlops> ModuleWork::rows(int64_t times) const {
  const std::vector<int> modules = resolved();
  std::vector<ModuleFlops> rows;
  for (const Part& part : parts_) {
    const int depth = part.parent < 0 ? 0 : rows[static_cast<size_t>(part.parent)].depth + 1;
    rows.push_back(
        {.name = part.name, .type = part.type, .parent = part.parent, .depth = depth, .parameters = part.parameters});
  }
  for (size_t i = 0; i < events_.size(); ++i) {
    const Event& event = events_[i];
    int module = modules[i];
    if (event.node >= 0) {
      const auto made = node_of_.find(nodes_[static_cast<size_t>(event.node)]);
      module = made == node_of_.end() ? 0 : modules[static_cast<size_t>(made->second)];
    }
    ModuleFlops& row = rows[static_cast<size_t>(module < 0 ? 0 : module)];
    if (event.node >= 0) {
      row.backward_macs += event.work.macs;
      row.backward_flops += event.work.flops;
    } else if (event.recomputed) {
      row.recomputed_flops += event.work.flops;
    } else {
      row.macs += event.work.macs;
      row.flops += event.work.flops;
      row.seconds += event.seconds;
    }
  }
  // Children before what they are part of.
  for (size_t i = rows.size(); i-- > 1;) add_part(rows[static_cast<size_t>(rows[i].parent)], rows[i]);
  for (ModuleFlops& row : rows) divide_by(row, times);
  return rows;
}

ModuleWork::UsefulFlops ModuleWork::useful_flops(int64_t times) const {
  OperatorWork sum;
  for (const Event& event : events_) {
    if (!event.recomputed) sum += event.work;
  }
  constexpr double kFlopsOfMac = 2;
  const auto macs = static_cast<double>(sum.macs - sum.repeated_macs);
  const double unit = kFlopsOfMac / static_cast<double>(times);
  return {.full = macs * unit, .causal = (macs - static_cast<double>(sum.masked_macs)) * unit};
}

std::vector<std::string> ModuleWork::unknown_operators() const {
  std::vector<std::string> names;
  for (const auto& [name, calls] : unknown_) names.push_back(name);
  return names;
}

}  // namespace ds::profiling
