#include "checkpoint/deepspeed/saved_checkpoint.h"

#include <algorithm>

#include "core/check.h"

namespace ds::checkpoint {
namespace {

constexpr int64_t kMostRanks = 10'000'000;

std::vector<std::shared_ptr<TorchArchive>> opened(const std::vector<std::string>& paths) {
  std::vector<std::shared_ptr<TorchArchive>> archives;
  for (const std::string& path : paths) archives.push_back(std::make_shared<TorchArchive>(path));
  return archives;
}

void check_parts_of_models(const PickleField& model, int64_t model_ranks) {
  const int64_t parts = model.find("mp_world_size") ? model.at("mp_world_size").integer() : 1;
  if (parts != model_ranks) {
    model.fail(cat("written by ", parts, " ranks of pipeline and model parallelism, the folder has files of ",
                   model_ranks, " (mp_rank_MM); a rank's file is missing, or it holds more than one checkpoint"));
  }
  // Degrees of other kinds (experts, sequences) divide what is not told by the names of files.
  if (const auto degrees = model.find("checkpoint_parallel_dimensions")) {
    for (const auto& [name, degree] : degrees->entries()) {
      const bool known = name.starts_with("pipeline") || name.starts_with("tensor") || name.starts_with("pp") ||
                         name.starts_with("tp");
      if (!known && degree.is(PickleKind::kInt) && degree.integer() != 1)
        degree.fail("only checkpoints with a degree of 1 can be read");
    }
  }
  for (const char* key : {"ds_autoep_layers", "autoep_layers", "num_experts"}) {
    const auto experts = model.find(key);
    const bool none = !experts || (experts->is_list() && experts->size() == 0) ||
                      (experts->is(PickleKind::kInt) && experts->integer() == 0);
    if (!none) experts->fail("of a model with experts; only checkpoints without experts can be read");
  }
}

// An enumerator of DeepSpeed's ZeroStageEnum, or an int.
int64_t stage_from(const PickleField& field) {
  if (field.is(PickleKind::kInt)) return field.integer();
  const PickleValue& value = field.value();
  if (!value.is(PickleKind::kObject) || value.items.size() != 1 || !value.items[0]->is(PickleKind::kInt)) {
    field.fail(cat("expected a ZeRO stage, found ", value.in_words()));
  }
  return value.items[0]->integer;
}

// Ranks over which the optimizer is partitioned: an int, or a list of one for each group.
int64_t partitions_from(const PickleField& field) {
  if (!field.is_list()) return field.integer();
  const int64_t count = field.item(0).integer();
  for (size_t g = 1; g < field.size(); ++g) {
    if (field.item(g).integer() != count) field.fail("groups are partitioned over different numbers of ranks");
  }
  return count;
}

void check_partitioned(SavedCheckpoint& saved) {
  const std::string& folder = saved.files.folder;
  require<IoError>(!saved.optims.empty(), folder, ": written with ZeRO, but there is no optim_states.pt file; every ",
                   "rank's [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt is needed");
  for (size_t rank = 0; rank < saved.optims.size(); ++rank) {
    const PickleField optim = saved.optim(rank);
    // DeepSpeed's BF16_Optimizer, of stage 1, says nothing.
    const int64_t stage = optim.find("zero_stage") ? stage_from(optim.at("zero_stage")) : 1;
    if (rank == 0) saved.stage = stage;
    if (stage != saved.stage || stage < 1 || stage > 3) {
      optim.fail(cat("zero_stage ", stage, ", expected ", rank == 0 ? "1, 2 or 3" : "that of rank 0"));
    }
    const int64_t partitions = partitions_from(optim.at("partition_count"));
    if (partitions != saved.ranks) {
      optim.fail(cat("partitioned over ", partitions, " ranks of ", saved.ranks,
                     "; only checkpoints with one copy of the model state can be read"));
    }
  }
  require<IoError>((saved.stage == 3) == saved.files.partitioned_model, folder, ": optim_states.pt of ZeRO stage ",
                   saved.stage, " beside ", saved.files.model_states[0], "; the folder holds more than one checkpoint");
}

}  // namespace

PickleField SavedCheckpoint::model(size_t rank) const { return {models.at(rank)->root(), models.at(rank)->path()}; }

PickleField SavedCheckpoint::optim(size_t rank) const {
  return PickleField(optims.at(rank)->root(), optims.at(rank)->path()).at("optimizer_state_dict");
}

bool SavedCheckpoint::has_optimizer() const { return stage > 0 || model().find("optimizer").has_value(); }

PickleField SavedCheckpoint::torch_optimizer(size_t rank) const {
  if (stage == 3) return optim(rank).at("optimizer_state_dict");
  if (stage > 0) {
    const PickleField state = optim(rank).at("base_optimizer_state");
    if (state.is_list()) state.fail("written with zero_optimization.elastic_checkpoint, which cannot be read");
    return state;
  }
  const PickleField optimizer = model().at("optimizer");
  return optimizer.find("optimizer_state_dict").value_or(optimizer);
}

SavedCheckpoint open_saved_checkpoint(const SavedFiles& files, int64_t model_ranks) {
  const std::string& folder = files.folder;
  SavedCheckpoint saved{.files = files, .models = {}, .optims = {}};
  saved.models = opened(saved.files.model_states);
  saved.optims = opened(saved.files.optim_states);
  const PickleField model = saved.model();
  saved.ranks = model.at("dp_world_size").integer();
  if (saved.ranks < 1 || saved.ranks > kMostRanks) {
    model.at("dp_world_size").fail(cat("expected a number of ranks, found ", saved.ranks));
  }
  check_parts_of_models(model, model_ranks);
  const bool zero = model.find("param_shapes").has_value();
  const auto expected = [&](const std::vector<std::string>& paths, int64_t count, const char* kind) {
    require<IoError>(static_cast<int64_t>(paths.size()) == count, folder, ": ", paths.size(), " ", kind,
                     " files, expected ", count, " (", model.where(), ": dp_world_size ", saved.ranks,
                     "); a rank's file is missing, or the folder holds more than one checkpoint");
  };
  if (!saved.optims.empty() || zero) expected(saved.files.optim_states, zero ? saved.ranks : 0, "optim_states.pt");
  if (saved.files.partitioned_model) expected(saved.files.model_states, saved.ranks, "model_states.pt");
  if (zero) check_partitioned(saved);
  return saved;
}

}  // namespace ds::checkpoint
