#include "engine/same_inputs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <string>

#include "core/check.h"

namespace ds::engine {
namespace {

constexpr int64_t kNotGiven = -1;

std::string samples_text(int64_t samples) { return samples == kNotGiven ? "none" : cat(samples, " samples"); }

std::string schedule_text(int64_t given) { return given == 0 ? "none" : "one"; }

}  // namespace

void require_same_inputs(const GivenInputs& inputs, c10::Device device, comm::Communicator& ranks) {
  if (ranks.size() == 1) return;
  const at::Tensor own =
      at::tensor({inputs.samples.value_or(kNotGiven), int64_t{inputs.has_schedule}}, at::kLong).to(device);
  at::Tensor all = at::empty({2 * ranks.size()}, own.options());
  ranks.all_gather(all, own, "what initialize was given").wait();
  all = all.to(at::kCPU);
  const auto* values = all.const_data_ptr<int64_t>();
  for (int rank = 1; rank < ranks.size(); ++rank) {
    require<CommError>(values[2 * rank] == values[0], "initialize: .training_data: ranks disagree: expected the same ",
                       "data set on each data-parallel rank, of which the engine gives each its part; found ",
                       samples_text(values[0]), " on rank 0 and ", samples_text(values[2 * rank]), " on rank ", rank,
                       " (this is rank ", ranks.rank(), ")");
    require<CommError>(
        values[2 * rank + 1] == values[1],
        "initialize: .lr_scheduler: ranks disagree: expected one on each data-parallel rank or on none; ", "found ",
        schedule_text(values[1]), " on rank 0 and ", schedule_text(values[2 * rank + 1]), " on rank ", rank,
        " (this is rank ", ranks.rank(), ")");
  }
}

}  // namespace ds::engine
