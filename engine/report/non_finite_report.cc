// All ranks learn where a gradient that is not finite came from. Only then does it cost anything.
#include "engine/report/non_finite_report.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/report/non_finite.h"
#include "model/agreement/shared_failure.h"
#include "zero/gradient_norm.h"

namespace ds::engine {
namespace {

// In the order of ranks. Collective. No text is empty or has a NUL in it.
std::vector<std::string> texts_of_all_ranks(const std::string& text, at::Device device, comm::Communicator& world) {
  if (world.size() == 1) return {text};
  const int64_t length = largest_of_ranks(static_cast<int64_t>(text.size()), device, world, "length of what is bad");
  at::Tensor own = at::zeros({length}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), text.data(), text.size());
  own = own.to(device);
  at::Tensor all = at::empty({length * world.size()}, own.options());
  world.all_gather(all, own, "what is bad").wait();
  all = all.to(at::kCPU);
  const auto* bytes = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    const char* begin = bytes + rank * length;
    texts.emplace_back(begin, strnlen(begin, static_cast<size_t>(length)));
  }
  return texts;
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

// What this rank's slices of reduced gradients tell.
std::optional<NonFiniteFacts::Element> first_bad_element(const ModelState& state) {
  const bool sliced = state.plan.partition_optimizer && !state.gradients.reducer->keeps_local();
  std::optional<NonFiniteFacts::Element> first;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const int64_t stage = stage_of(state.pipeline.get(), b);
    const zero::BucketLayout& layout = state.buckets[b].layout();
    const auto segments = sliced ? zero::slice_segments(layout, state.groups_of(b).shards.rank()) : layout.segments;
    if (segments.empty()) continue;
    if (first && std::pair(first->stage, first->parameter) <= std::pair(stage, segments.front().parameter)) continue;
    const at::Tensor gradient = state.gradients.reducer->gradient(b);
    const int64_t position = zero::first_non_finite(gradient);
    for (const Segment& segment : segments) {
      if (position < segment.slice_offset || position >= segment.slice_offset + segment.length) continue;
      first = {stage, segment.parameter, segment.parameter_offset + position - segment.slice_offset,
               state.parameters[static_cast<size_t>(segment.parameter)].name,
               name_of_non_finite(gradient[position].to(at::kDouble).item<double>())};
    }
  }
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
    const int64_t before = state.pipeline ? state.pipeline->ranks->size() - 1 - state.pipeline->ranks->rank() : 0;
    facts.local = {found->micro_batch, batches.name_of(found->micro_batch),
                   state.parameters[static_cast<size_t>(found->parameter)].name, before};
  }
  return facts;
}

}  // namespace

std::string explain_non_finite(const ModelState& state, const BatchNotes& batches, const NonFiniteStep& step) {
  std::vector<NonFiniteFacts> ranks;
  const std::string own = to_text(own_facts(state, batches, step.late));
  for (const std::string& text : texts_of_all_ranks(own, state.ranks.device, *state.ranks.world)) {
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
