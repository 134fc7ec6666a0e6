// All ranks learn where a gradient that is not finite came from. Only then does it cost anything.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/agreement/shared_failure.h"
#include "engine/engine_impl.h"
#include "engine/report/non_finite.h"
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
int64_t stage_of(const PipelineParts* pipeline, size_t bucket) {
  if (!pipeline) return 0;
  const auto& in_pass = pipeline->bucket_in_pass;
  for (size_t stage = 0; stage < in_pass.size(); ++stage) {
    if (in_pass[stage].at(bucket)) return static_cast<int64_t>(stage);
  }
  return static_cast<int64_t>(in_pass.size());
}

// What this rank's slices of reduced gradients tell.
std::optional<NonFiniteFacts::Element> first_bad_element(const Engine::Impl& impl) {
  const bool sliced = impl.plan.partition_optimizer && !impl.reducer->keeps_local();
  const int rank = sliced ? impl.groups.shards->rank() : 0;
  std::optional<NonFiniteFacts::Element> first;
  for (size_t b = 0; b < impl.buckets.size(); ++b) {
    const int64_t stage = stage_of(impl.pipeline.get(), b);
    const zero::BucketLayout& layout = impl.buckets[b].layout();
    const auto segments = sliced ? zero::slice_segments(layout, rank) : layout.segments;
    if (segments.empty()) continue;
    if (first && std::pair(first->stage, first->parameter) <= std::pair(stage, segments.front().parameter)) continue;
    const at::Tensor gradient = impl.reducer->gradient(b);
    const int64_t position = zero::first_non_finite(gradient);
    for (const Segment& segment : segments) {
      if (position < segment.slice_offset || position >= segment.slice_offset + segment.length) continue;
      first = {stage, segment.parameter, segment.parameter_offset + position - segment.slice_offset,
               impl.parameters[static_cast<size_t>(segment.parameter)].name,
               name_of_non_finite(gradient[position].to(at::kDouble).item<double>())};
    }
  }
  return first;
}

NonFiniteFacts own_facts(const Engine::Impl& impl) {
  NonFiniteFacts facts;
  facts.element = first_bad_element(impl);
  if (const auto bad = impl.batches.first_bad_loss()) {
    facts.loss = {bad->micro_batch, impl.batches.name_of(bad->micro_batch), name_of_non_finite(bad->loss), bad->others};
  }
  if (!impl.gradient_check) return facts;
  if (const auto found = impl.gradient_check->first()) {
    const int64_t before = impl.pipeline ? impl.pipeline->ranks->size() - 1 - impl.pipeline->ranks->rank() : 0;
    facts.local = {found->micro_batch, impl.batches.name_of(found->micro_batch),
                   impl.parameters[static_cast<size_t>(found->parameter)].name, before};
  }
  return facts;
}

}  // namespace

std::string Engine::Impl::explain_non_finite(double norm) {
  std::vector<NonFiniteFacts> ranks;
  for (const std::string& text : texts_of_all_ranks(to_text(own_facts(*this)), device, *world)) {
    ranks.push_back(non_finite_facts(text));
  }
  const NonFiniteQuestion question = {.norm = norm,
                                      .own_gradients = reducer->keeps_local() && groups.shards->size() > 1,
                                      .located = gradient_check != nullptr,
                                      .expected = dynamic_loss_scale()};
  const std::string facts = describe_non_finite(question, ranks);
  const std::string scale = loss_scaler ? cat("; loss scale ", loss_scaler->scale()) : "";
  switch (plan.non_finite) {
    case config::NonFiniteGradients::kSkip:
      return cat("step ", global_steps, " is skipped: ", facts, scale);
    case config::NonFiniteGradients::kError:
      return cat(
          "step ", global_steps, ": ", facts, scale, ". Nothing is lost: parameters and optimizer states are ",
          "those before the step, its gradients are dropped. Change the data, the loss or the learning rate, or ",
          "set \"non_finite_gradients\" to \"skip\", which goes on without such steps");
    case config::NonFiniteGradients::kAuto:
    case config::NonFiniteGradients::kContinue:
      break;
  }
  return cat("step ", global_steps, ": ", facts, scale, ". It is applied all the same, because ",
             config.non_finite_gradients == config::NonFiniteGradients::kAuto ? "bf16.check_grad_overflow is false"
                                                                              : "non_finite_gradients is \"continue\"");
}

}  // namespace ds::engine
