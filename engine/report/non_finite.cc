#include "engine/report/non_finite.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/json/parse_json.h"
#include "core/text.h"
#include "dsengine/exported_model.h"
#include "dsengine/exported_pipeline.h"
#include "model/state/row_wise.h"
#include "zero/square_sum.h"

namespace ds::engine {
namespace {

using nlohmann::json;

constexpr size_t kMostRanks = 4;  // the most ranks that a report names

// " (samples 17, 99 of the training data)"
std::string in_brackets(const std::string& batch) { return batch.empty() ? "" : cat(" (", batch, ")"); }

std::string describe_element(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks) {
  const NonFiniteFacts::Element* first = nullptr;
  size_t first_rank = 0;
  const auto place = [](const NonFiniteFacts::Element& e) { return std::tuple(e.stage, e.parameter, e.offset); };
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& element = ranks[rank].element;
    if (!element || (first && place(*first) <= place(*element))) continue;
    first = &*element;
    first_rank = rank;
  }
  if (question.late) return cat("its norm is ", name_of_non_finite(question.norm));
  if (!first) return cat("its norm is ", name_of_non_finite(question.norm), " although all its elements are finite");
  return cat("first in parameter ", first->name, ", element ", first->offset,
             question.own_gradients ? cat(" of rank ", first_rank, "'s own gradient") : "", ", which is ",
             first->value);
}

std::string and_more(size_t found) {
  if (found <= kMostRanks) return {};
  return cat("; likewise on ", found - kMostRanks, " more rank", found == kMostRanks + 1 ? "" : "s");
}

std::string describe_losses(const std::vector<NonFiniteFacts>& ranks) {
  std::string text;
  size_t found = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& loss = ranks[rank].loss;
    if (!loss || ++found > kMostRanks) continue;
    text += cat("; rank ", rank, "'s loss of micro-batch ", loss->micro_batch, in_brackets(loss->batch), " is ",
                loss->value);
    if (loss->others > 0) text += cat(" (", loss->others, " more after it)");
  }
  return text.empty() ? "; all losses are finite" : text + and_more(found);
}

std::string describe_local(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks) {
  if (!question.located) {
    const bool any_loss = std::any_of(ranks.begin(), ranks.end(), [](const auto& facts) { return facts.loss; });
    if (question.late)
      return "; \"locate_non_finite\": true in the ds_config finds the parameter, the rank and the micro-batch";
    if (any_loss || question.expected) return {};
    return "; \"locate_non_finite\": true in the ds_config finds the rank and the micro-batch";
  }
  using Found = std::pair<size_t, const NonFiniteFacts::Local*>;
  std::vector<Found> found;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].local) found.emplace_back(rank, &*ranks[rank].local);
  }
  if (found.empty())
    return "; what autograd made on each rank is finite, so it overflowed when it was added or reduced";
  // Within a pipeline a bad gradient goes on to the ranks before.
  const auto place = [](const Found& f) { return std::pair(f.second->micro_batch, f.second->ranks_before); };
  std::stable_sort(found.begin(), found.end(),
                   [&place](const Found& a, const Found& b) { return place(a) < place(b); });
  std::string text;
  for (size_t i = 0; i < std::min(found.size(), kMostRanks); ++i) {
    const NonFiniteFacts::Local& local = *found[i].second;
    text += cat("; the first that rank ", found[i].first, "'s autograd made is that of parameter ", local.parameter);
    if (local.micro_batch < 0) continue;
    const auto& loss = ranks[found[i].first].loss;  // has named the batch
    const bool named = loss && loss->micro_batch == local.micro_batch;
    text += cat(" in micro-batch ", local.micro_batch, named ? "" : in_brackets(local.batch));
  }
  return text + and_more(found.size());
}

// The name of a parameter; of one of an exported model also where Python reads it.
std::string name_and_place(const ModelState& state, const std::string& parameter) {
  std::string place;
  for (const auto& item : state.module->named_modules("", /*include_self=*/true)) {
    const std::string prefix = item.key().empty() ? "" : item.key() + ".";
    if (!place.empty() || !parameter.starts_with(prefix)) continue;
    const std::string name = parameter.substr(prefix.size());
    if (const auto* const model = dynamic_cast<const ExportedModule*>(item.value().get())) {
      place = model->reader_of(name);
    } else if (const auto* const pipeline = dynamic_cast<const ExportedPipeline*>(item.value().get())) {
      place = pipeline->reader_of(name);
    }
  }
  return place.empty() ? parameter : cat(parameter, " (", place, ")");
}

// The first stage whose backward gives gradients to a bucket.
int64_t stage_of(const PipelineState* pipeline, size_t bucket) {
  if (!pipeline) return 0;
  const auto& in_pass = pipeline->bucket_in_pass;
  for (size_t stage = 0; stage < in_pass.size(); ++stage) {
    if (in_pass[stage].at(bucket)) return static_cast<int64_t>(stage);
  }
  return static_cast<int64_t>(in_pass.size());
}

// Returns the place and the value of the first element that is not finite of what this rank updates of a bucket; -1:
// all are.
std::pair<int64_t, double> first_non_finite(const ModelState& state, size_t b) {
  const auto value_at = [](const at::Tensor& flat, int64_t place) {
    return place < 0 ? 0.0 : flat[place].to(at::kDouble).item<double>();
  };
  if (!state.is_row_wise(b)) {
    const at::Tensor gradient = state.gradients.reducer->gradient(b);
    const int64_t place = zero::first_non_finite(gradient);
    return {place, value_at(gradient, place)};
  }
  const TableRows own = own_rows(state, b);
  const at::Tensor flat = own.values.reshape({-1});
  const int64_t place = zero::first_non_finite(flat);
  if (place < 0) return {-1, 0.0};
  const int64_t width = own.values.size(1);
  return {own.rows[place / width].item<int64_t>() * width + place % width, value_at(flat, place)};
}

// The facts that this rank's slices of reduced gradients tell.
std::optional<NonFiniteFacts::Element> first_bad_element(const ModelState& state) {
  const bool sliced = state.plan.partition_optimizer && !state.gradients.reducer->keeps_local();
  std::optional<NonFiniteFacts::Element> first;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const int64_t stage = stage_of(state.pipeline.get(), b);
    const zero::BucketLayout& layout = state.buckets[b].layout();
    const auto segments = sliced ? zero::slice_segments(layout, state.groups_of(b).shards.rank()) : layout.segments;
    if (segments.empty()) continue;
    if (first && std::pair(first->stage, first->parameter) <= std::pair(stage, segments.front().parameter)) continue;
    const auto [position, value] = first_non_finite(state, b);
    for (const Segment& segment : segments) {
      if (position < segment.slice_offset || position >= segment.slice_offset + segment.length) continue;
      first = {stage, segment.parameter, segment.parameter_offset + position - segment.slice_offset, std::string(),
               name_of_non_finite(value)};
    }
  }
  if (first) first->name = name_and_place(state, state.parameters[static_cast<size_t>(first->parameter)].name);
  return first;
}

NonFiniteFacts own_facts(const ModelState& state, const BatchNotes& batches, bool late) {
  NonFiniteFacts facts;
  if (!late) facts.element = first_bad_element(state);
  if (const auto bad = batches.first_bad_loss()) {
    facts.loss = {bad->micro_batch, batches.name_of(bad->micro_batch), name_of_non_finite(bad->loss), bad->others};
  }
  if (!state.gradients.check) return facts;
  if (const auto found = state.gradients.check->first()) {
    const int64_t before = state.pipeline_ranks() - 1 - state.pipeline_rank();
    facts.local = {found->micro_batch, batches.name_of(found->micro_batch),
                   name_and_place(state, state.parameters[static_cast<size_t>(found->parameter)].name), before};
  }
  return facts;
}

}  // namespace

std::string name_of_non_finite(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

std::string to_text(const NonFiniteFacts& facts) {
  json text = json::object();
  if (const auto& e = facts.element) text["element"] = {e->stage, e->parameter, e->offset, e->name, e->value};
  if (const auto& l = facts.loss) text["loss"] = {l->micro_batch, l->batch, l->value, l->others};
  if (const auto& l = facts.local) text["local"] = {l->micro_batch, l->batch, l->parameter, l->ranks_before};
  // Names are the program's: one that is no UTF-8 must not keep this rank from the others.
  return text.dump(-1, ' ', false, json::error_handler_t::replace);
}

NonFiniteFacts non_finite_facts(const std::string& text) {
  const json read = parse_json<json>(text);
  NonFiniteFacts facts;
  const auto number = [](const json& list, size_t i) { return list.at(i).get<int64_t>(); };
  const auto word = [](const json& list, size_t i) { return list.at(i).get<std::string>(); };
  if (const auto e = read.find("element"); e != read.end()) {
    facts.element = {number(*e, 0), number(*e, 1), number(*e, 2), word(*e, 3), word(*e, 4)};
  }
  if (const auto l = read.find("loss"); l != read.end()) {
    facts.loss = {number(*l, 0), word(*l, 1), word(*l, 2), number(*l, 3)};
  }
  if (const auto l = read.find("local"); l != read.end()) {
    facts.local = {number(*l, 0), word(*l, 1), word(*l, 2), number(*l, 3)};
  }
  return facts;
}

std::string describe_non_finite(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks) {
  return cat("the gradient is not finite: ", describe_element(question, ranks), describe_losses(ranks),
             describe_local(question, ranks));
}

std::string explain_non_finite(const ModelState& state, const BatchNotes& batches, const NonFiniteStep& step) {
  std::vector<NonFiniteFacts> ranks;
  const std::string own = to_text(own_facts(state, batches, step.late));
  for (const std::string& text : comm::texts_of_ranks(own, state.ranks.device, *state.ranks.world, "what is bad")) {
    ranks.push_back(non_finite_facts(text));
  }
  const bool own_gradients = state.gradients.reducer->keeps_local() && state.ranks.groups.shards->size() > 1;
  const NonFiniteQuestion question = {.norm = step.norm,
                                      .own_gradients = own_gradients,
                                      .located = state.gradients.check != nullptr,
                                      .expected = step.dynamic_scale,
                                      .late = step.late};
  const std::string facts = describe_non_finite(question, ranks);
  const std::string scale = step.loss_scale ? cat("; loss scale ", *step.loss_scale) : "";
  switch (state.plan.non_finite) {
    case config::NonFiniteGradients::kSkip:
      return cat("step ", step.number, " is skipped: ", facts, scale);
    case config::NonFiniteGradients::kError:
      return cat(
          "step ", step.number, ": ", facts, scale, ". Nothing is lost: parameters and optimizer states are ",
          "those before the step, its gradients are dropped. Change the data, the loss or the learning rate, or ",
          "set \"non_finite_gradients\" to \"skip\", which goes on without such steps");
    case config::NonFiniteGradients::kAuto:
    case config::NonFiniteGradients::kContinue:
      break;
  }
  return cat("step ", step.number, ": ", facts, scale, ". It is applied all the same, because ",
             step.judged_by_default ? "bf16.check_grad_overflow is false" : "non_finite_gradients is \"continue\"");
}

}  // namespace ds::engine
