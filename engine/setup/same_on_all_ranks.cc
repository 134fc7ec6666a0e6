#include "engine/setup/same_on_all_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "core/check.h"
#include "core/tensor_check.h"
#include "core/text_hash.h"

namespace ds::engine {
namespace {

constexpr int64_t kNotGiven = -1;

std::string signature(const zero::Parameter& parameter) {
  return cat(parameter.name, ' ', parameter.tensor.scalar_type(), ' ', parameter.tensor.sizes(), '\n');
}

std::string samples_text(int64_t samples) { return samples == kNotGiven ? "none" : cat(samples, " samples"); }

std::string schedule_text(int64_t given) { return given == 0 ? "none" : "one"; }

}  // namespace

void require_same_on_all_ranks(const ModelParameters& parameters, const std::string& settings,
                               const GivenInputs& inputs, c10::Device device, comm::Communicator& ranks) {
  if (ranks.size() == 1) return;
  std::string text;
  for (const zero::Parameter& parameter : parameters.trainable) text += signature(parameter);
  text += "frozen\n";
  for (const zero::Parameter& parameter : parameters.frozen) text += signature(parameter);
  const at::Tensor own = at::tensor({static_cast<int64_t>(fnv1a(settings)), static_cast<int64_t>(fnv1a(text)),
                                     static_cast<int64_t>(parameters.trainable.size()),
                                     inputs.samples.value_or(kNotGiven), int64_t{inputs.has_schedule}},
                                    at::kLong)
                             .to(device);
  const int64_t count = own.numel();
  at::Tensor all = at::empty({count * ranks.size()}, own.options());
  ranks.all_gather(all, own, "hash of config and parameters").wait();
  all = all.to(at::kCPU);
  const auto* const first = all.const_data_ptr<int64_t>();
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const auto* const other = first + count * rank;
    require<CommError>(other[0] == first[0], "ranks disagree: the ds_config of rank ", rank,
                       " differs from that of rank 0, or its parameter groups do; start all ranks with the same file ",
                       "and options (this is rank ", ranks.rank(), ")");
    require<CommError>(other[1] == first[1], "ranks disagree: the parameters (names, shapes, dtypes) of rank ", rank,
                       " differ from those of rank 0: ", other[2], " trainable against ", first[2],
                       "; build the same model on every rank (this is rank ", ranks.rank(), ")");
    require<CommError>(other[3] == first[3], "initialize: .training_data: ranks disagree: expected the same data set ",
                       "on each data-parallel rank, of which the engine gives each its part; found ",
                       samples_text(first[3]), " on rank 0 and ", samples_text(other[3]), " on rank ", rank,
                       " (this is rank ", ranks.rank(), ")");
    require<CommError>(other[4] == first[4], "initialize: .lr_scheduler: ranks disagree: expected one on each ",
                       "data-parallel rank or on none; found ", schedule_text(first[4]), " on rank 0 and ",
                       schedule_text(other[4]), " on rank ", rank, " (this is rank ", ranks.rank(), ")");
  }
}

}  // namespace ds::engine
