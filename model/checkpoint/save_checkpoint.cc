#include "model/checkpoint/save_checkpoint.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "checkpoint/index.h"
#include "checkpoint/save_job.h"
#include "checkpoint/tag_folder.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/json/parse_json.h"
#include "core/log.h"
#include "model/checkpoint/checkpoint_pieces.h"
#include "model/checkpoint/host_folders.h"
#include "model/checkpoint/rank_state.h"
#include "model/checkpoint/saved_state.h"
#include "model/checkpoint/stage_tensors.h"

namespace ds::engine {
namespace {

using checkpoint::SaveJob;

// Tied parameters: each further name and the first one.
std::map<std::string, std::string> aliases_of(const torch::nn::Module& module) {
  std::map<const void*, std::string> first;
  std::map<std::string, std::string> aliases;
  for (const auto& item : module.named_parameters()) {
    const auto [place, is_new] = first.emplace(item.value().unsafeGetTensorImpl(), item.key());
    if (!is_new) aliases.emplace(item.key(), place->second);
  }
  return aliases;
}

// checkpoint.tag_validation. Collective.
void check_tags(const Ranks& ranks, config::TagValidation validation, const std::string& tag) {
  if (validation == config::TagValidation::kIgnore || comm::same_text_on_all_ranks(tag, ranks.device, *ranks.world))
    return;
  const std::string text = "save_checkpoint: ranks gave different tags (checkpoint.tag_validation)";
  require<ConfigError>(validation != config::TagValidation::kFail, text, ", this one \"", tag,
                       "\"; expected the same on every rank");
  log::warning(text, "; all use rank 0's");
}

// Throws UsageError where it would not come back from its text.
void require_json(const checkpoint::TrainingState& training) {
  try {
    const nlohmann::json whole = checkpoint::to_json(training);
    require(parse_json<nlohmann::json>(whole.dump()) == whole, "save_checkpoint: client_state or the ds_config ",
            "does not come back from JSON as it is: it has an infinite number or one that is none (NaN)");
  } catch (const nlohmann::json::exception& error) {
    throw UsageError(cat("save_checkpoint: client_state or the ds_config is no JSON text: ", error.what()));
  }
}

// checkpoint.writer.type "MOCK".
bool writes_nothing(const config::DsConfig& config) {
  return config.checkpoint.writer && config.checkpoint.writer->type == "MOCK";
}

// One save. Its steps are called in their order, by all ranks.
class Saving {
 public:
  Saving(const ModelState& model, const RunState& run, const SaveRequest& request)
      : model_(model),
        run_(run),
        options_(request.options),
        folders_(run.config.checkpoint.use_node_local_storage ? host_folders(model.ranks) : one_folder(model.ranks)),
        job_(make_job(request)) {}

  // `later`: the program may change what it gives before that is written.
  void take_what_is_own(bool later) {
    BufferCopies buffers;
    together("copy what is its own", [&] {
      saved_->own = rank_tensors(model_, folders_);
      const NamedTensors given = rank_state_tensors(model_, options_.rank_state, /*copies=*/later);
      saved_->own.insert(saved_->own.end(), given.begin(), given.end());
      const NamedTensors generators = run_.start ? run_.start->generators : generator_states(model_);
      saved_->own.insert(saved_->own.end(), generators.begin(), generators.end());
      buffers = copy_buffers(model_, folders_);
    });
    add_buffers(model_, folders_, buffers, saved_->own);
  }

  // An asynchronous save has no collectives, in which hosts tell each other what they have written.
  void require_one_folder() const {
    require(!folders_.apart(), "save_checkpoint: asynchronous: true excludes checkpoint.use_node_local_storage on ",
            folders_.leaders.size(), " hosts; set one of them to false");
  }

  void begin() {
    training_ = training_state(model_, run_, options_.client_state);
    training_.empty_modules = modules_without_tensors(model_);
    together("begin it", [&] {
      if (!folders_.leads()) return;
      note_run();
      require_json(training_);
      if (job_->target().mock) return;
      const checkpoint::TagSave& save = job_->target().save;
      model_.tags.claim(save.save_dir, save.tag);
      checkpoint::begin_tag(save);
    });
    together("list its part",
             [&] { saved_->pieces = state_pieces(model_, folders_, !options_.exclude_frozen_parameters); });
  }

  void write_now() {
    together("write its part", [&] { write_live(model_, *job_, *saved_); });
    if (folders_.apart() && !job_->target().mock) exchange_tables();
    together("publish it", [&] { publication()(kVisible); });
  }

  void write_later(Saves& saves) {
    together("copy its part", [&] { copy_what_cannot_wait(model_, *saved_); });
    checkpoint::BackgroundSave::Parts parts = background_parts(job_, saved_, model_.ranks.device);
    parts.publish = [publish = publication()] { publish(kPatience); };
    saves.start(job_, std::move(parts));
  }

  std::string path() const {
    if (job_->target().mock) return {};
    return checkpoint::tag_path(job_->target().save.save_dir, job_->target().save.tag);
  }

 private:
  std::shared_ptr<SaveJob> make_job(const SaveRequest& request) const {
    const Ranks& ranks = model_.ranks;
    std::string tag = request.tag.empty() ? cat("global_step", run_.progress.global_steps) : request.tag;
    check_tags(ranks, run_.config.checkpoint.tag_validation, tag);
    tag = comm::text_of_first_rank(tag, ranks.device, *ranks.world);
    checkpoint::require_folder_name(request.save_dir, "save_checkpoint");
    checkpoint::TagSave save = checkpoint::new_save(std::filesystem::absolute(request.save_dir).string(), tag);
    for (std::string* text : {&save.save_dir, &save.incomplete}) *text = text_of_leader(*text, folders_, ranks);
    // A checkpoint beside those for restarts, the best one so far, is none that the config's keep_last counts.
    const int64_t by_config = options_.save_latest ? run_.config.checkpoint.keep_last : 0;
    return std::make_shared<SaveJob>(checkpoint::SaveTarget{.save = std::move(save),
                                                            .rank = ranks.world->rank(),
                                                            .ranks = ranks.world->size(),
                                                            .save_latest = options_.save_latest,
                                                            .keep_last = options_.keep_last.value_or(by_config),
                                                            .durable = run_.config.checkpoint.durable,
                                                            .of_one_host = folders_.apart(),
                                                            .mock = writes_nothing(run_.config)});
  }

  // Marks the checkpoint as one of its run, and of those that keep_last counts.
  void note_run() {
    if (run_.progress.run.empty()) run_.progress.run = checkpoint::new_run();
    training_.run = run_.progress.run;
    if (job_->target().keep_last > 0) training_.keep_last_tag = job_->target().save.tag;
  }

  // Ranks of one host meet in its folder, hosts here: each tells what its ranks have written.
  void exchange_tables() {
    const Ranks& ranks = model_.ranks;
    checkpoint::Index here;
    together("read its host's tables", [&] {
      for (int rank = 0; folders_.leads() && rank < job_->target().ranks; ++rank) {
        if (folders_.shares(rank)) checkpoint::add_table(here, job_->table_of(rank), job_->target().save.incomplete);
      }
    });
    const std::string own = folders_.leads() ? checkpoint::table_to_json(here).dump() : std::string();
    std::vector<std::string> tables;
    for (const int leader : folders_.leaders)
      tables.push_back(comm::text_of_rank(own, leader, ranks.device, *ranks.world));
    together("note what other hosts have", [&] {
      if (folders_.leads()) put_tables(here, tables);
    });
  }

  // A host's first rank stands for all of it.
  void put_tables(checkpoint::Index& here, const std::vector<std::string>& tables) {
    for (int rank = 0; rank < job_->target().ranks; ++rank) {
      if (folders_.shares(rank)) continue;
      checkpoint::Index other;
      const auto host = static_cast<size_t>(folders_.host_of[static_cast<size_t>(rank)]);
      if (folders_.leaders[host] == rank) {
        const std::string where = cat("the table of rank ", rank);
        checkpoint::add_table(other, parse_json<nlohmann::json>(tables[host]), where);
        checkpoint::leave_out_covered(other, here);
        checkpoint::add_table(here, checkpoint::table_to_json(other), where);
      }
      job_->put_table(rank, checkpoint::table_to_json(other));
    }
  }

  // When `action` throws on one rank, all throw, and nothing is left of the save.
  template <class Action>
  void together(const char* doing, const Action& action) const {
    std::exception_ptr failure;
    try {
      action();
    } catch (...) {
      failure = std::current_exception();
    }
    const int failed = which_failed(model_.ranks, failure);
    if (failed < 0) return;
    const checkpoint::TagSave& save = job_->target().save;
    if (folders_.leads()) checkpoint::abandon_tag(save);
    if (failure) std::rethrow_exception(failure);
    throw IoError(cat("save_checkpoint: \"", save.tag, "\" in ", save.save_dir, ": rank ", failed, " could not ", doing,
                      ", its message says why"));
  }

  std::function<void(std::chrono::milliseconds patience)> publication() const {
    return [job = job_, training = training_, aliases = aliases_of(*model_.module),
            publishes = folders_.leads()](std::chrono::milliseconds patience) {
      if (publishes) job->publish(training, aliases, patience);
    };
  }

  const ModelState& model_;
  const RunState& run_;
  const SaveOptions& options_;
  const HostFolders folders_;
  const std::shared_ptr<SavedState> saved_ = std::make_shared<SavedState>();
  checkpoint::TrainingState training_;
  std::shared_ptr<SaveJob> job_;
};

}  // namespace

std::string save_checkpoint(const ModelState& model, const RunState& run, Saves& saves, const SaveRequest& request) {
  if (writes_nothing(run.config)) saves.say_that_nothing_is_written(model.ranks);
  Saving saving(model, run, request);
  const bool by_default = run.config.checkpoint.writer && run.config.checkpoint.writer->decoupled;
  const bool later = request.options.asynchronous.value_or(by_default);
  if (later) saving.require_one_folder();
  saving.take_what_is_own(later);
  saving.begin();
  if (later) {
    saving.write_later(saves);
  } else {
    saving.write_now();
  }
  return saving.path();
}

}  // namespace ds::engine
