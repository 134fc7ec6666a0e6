#include "model/checkpoint/load_checkpoint.h"

#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/format.h"
#include "checkpoint/index.h"
#include "checkpoint/stored_file.h"
#include "checkpoint/tag_folder.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/files/dangling_link.h"
#include "core/log.h"
#include "core/text_lines.h"
#include "dsengine/checkpoint.h"
#include "model/checkpoint/checkpoint_fit.h"
#include "model/checkpoint/host_folders.h"
#include "model/checkpoint/state_reader.h"
#include "model/state/finished_gradients.h"

namespace ds::engine {
namespace {

using checkpoint::Source;

// The outcome of reading on a rank, worst last.
enum class Outcome : int64_t { kGood, kDamaged, kUnfit };

// Calls `action`, collects what it throws, and returns what is worst on any rank.
template <class Action>
Outcome on_all_ranks(const Ranks& ranks, std::exception_ptr& failure, const Action& action) {
  Outcome own = Outcome::kGood;
  try {
    action();
  } catch (const IoError&) {
    own = Outcome::kDamaged;
    failure = std::current_exception();
  } catch (const std::filesystem::filesystem_error& error) {
    own = Outcome::kDamaged;
    failure = std::make_exception_ptr(IoError(error.what()));
  } catch (...) {
    own = Outcome::kUnfit;
    failure = std::current_exception();
  }
  return static_cast<Outcome>(
      comm::largest_of_ranks(static_cast<int64_t>(own), ranks.device, *ranks.world, "outcome of reading a checkpoint"));
}

[[noreturn]] void throw_failure(const std::exception_ptr& failure, const std::string& path,
                                const char* call = "load_checkpoint") {
  if (failure) std::rethrow_exception(failure);
  throw IoError(cat(call, ": ", path, ": another rank could not load it, its message says why"));
}

// Whether a path is what save_checkpoint() of dsengine or of DeepSpeed makes for a tag.
bool is_tag(const std::string& path) {
  if (checkpoint::format_of(path) == checkpoint::Format::kDeepSpeed) return true;
  try {
    const std::string index = checkpoint::tag_path(path, checkpoint::kIndexName);
    checkpoint::index_from(checkpoint::read_text(index), index);
    return true;
  } catch (const IoError&) {
    return false;
  }
}

// Rank 0, for a folder without checkpoints, which is what the first start of a job finds. Throws where it is a mistake.
void require_first_start(const std::string& load_dir) {
  const std::string dangling = dangling_link(load_dir);
  require<IoError>(dangling.empty(), "load_checkpoint: ", load_dir, ": ", dangling);
  if (!is_tag(load_dir)) return;
  const std::filesystem::path tag = std::filesystem::canonical(load_dir);
  throw UsageError(cat("load_checkpoint: ", load_dir, " is a checkpoint itself, expected the folder above it; pass ",
                       "load_dir ", tag.parent_path(), " and tag ", tag.filename()));
}

// Rank 0: tags to try, the preferred one first.
std::vector<std::string> tags_to_try(const std::string& load_dir, const std::string& tag) {
  checkpoint::put_back_replaced(load_dir);
  if (!tag.empty()) return {tag};
  std::vector<std::string> tags;
  std::optional<std::string> latest;
  try {
    latest = checkpoint::read_latest(load_dir);
    if (latest) checkpoint::require_tag(*latest);
  } catch (const Error& error) {
    log::error("load_checkpoint: the file `latest` cannot be used: ", error.what());
    latest.reset();
  }
  if (latest) tags.push_back(*latest);
  for (const checkpoint::TagInfo& whole : checkpoint::whole_tags(load_dir)) {
    if (whole.tag != latest) tags.push_back(whole.tag);
  }
  if (tags.empty()) require_first_start(load_dir);
  return tags;
}

// Returns, on all ranks, the tags that rank 0 finds.
std::vector<std::string> shared_tags(const Ranks& ranks, const HostFolders& folders, const std::string& folder,
                                     const std::string& tag) {
  std::string joined;
  std::exception_ptr failure;
  const Outcome listed = on_all_ranks(ranks, failure, [&] {
    if (!folders.leads()) return;
    for (const std::string& candidate : tags_to_try(folder, tag)) joined += candidate + '\n';
  });
  if (listed != Outcome::kGood) throw_failure(failure, folder);
  return text_lines(comm::text_of_first_rank(joined, ranks.device, *ranks.world));
}

// One folder. Its failure is this rank's; the outcome is that of all.
class Attempt {
 public:
  Attempt(const ModelState& model, ModelConsistency& consistency, const LoadRequest& request)
      : model_(model), consistency_(consistency), request_(request) {}

  Outcome read(const std::string& path) {
    const Ranks& ranks = model_.ranks;
    const ReadOptions options = {
        .with_states = request_.with_states(), .module_only = request_.options.load_module_only, .over = request_.over};
    Outcome outcome = on_all_ranks(ranks, failure_, [&] {
      source_ = checkpoint::open(path);
      fit_.emplace(model_, *source_,
                   FitOptions{.strict = request_.options.load_module_strict,
                              .with_states = options.with_states,
                              .all_weights = consistency_.is_mixture(),
                              .over = request_.over,
                              .hints = request_.hints});
      if (request_.options.load_rank_state && !request_.options.load_module_only) {
        rank_state_ = read_rank_state(model_, *source_, fit_->same_ranks());
      }
    });
    if (outcome != Outcome::kGood) return outcome;
    consistency_.load_begins(options.with_states);
    StateReader& reader = reader_.emplace(model_, *source_, *fit_, options);
    outcome = on_all_ranks(ranks, failure_, [&] { reader.read(); });
    if (outcome != Outcome::kGood) return outcome;
    const std::exception_ptr encoded = reader.read_encoded();
    return on_all_ranks(ranks, failure_, [&] {
      if (encoded) std::rethrow_exception(encoded);
    });
  }

  // After a good one.
  void finish(const RunState* run) {
    reader_->publish();
    take_average();
    if (run != nullptr && !request_.options.load_module_only) {
      take_run_state(model_, *run, *source_,
                     {.with_optimizer = request_.with_states(),
                      .with_schedule = request_.options.load_lr_scheduler_states,
                      .with_rank_states = reader_->has_rank_states()});
    }
    consistency_.load_done();
    forget_gradients(model_);
    model_.choose_gradients();
  }

  // Counts the updates of the average that was read, or from 0. Says where a run and its checkpoint differ in that.
  void take_average() const {
    if (request_.over) return;  // averages of what was read are its values, all others stay
    const std::optional<int64_t> saved = source_->state().ema_updates;
    const bool says = model_.ranks.world->rank() == 0 && !request_.options.load_module_only;
    if (model_.average) {
      model_.average->set_updates(reader_->has_average() ? *saved : 0);
      if (says && !saved) {
        log::warning("load_checkpoint: ", source_->location(), ": has no moving average of the weights: that of this ",
                     "run (.ema) begins with the weights that were loaded");
      }
    } else if (says && saved) {
      log::warning("load_checkpoint: ", source_->location(), ": the moving average of the weights that it has is not ",
                   "loaded; pass .ema to initialize() to go on with it");
    }
  }

  const std::exception_ptr& failure() const { return failure_; }
  const WeightsReport& report() const { return fit_->report(); }
  const nlohmann::json& client_state() const { return source_->state().client_state; }
  RankState& rank_state() { return rank_state_; }

 private:
  const ModelState& model_;
  ModelConsistency& consistency_;
  const LoadRequest& request_;
  std::unique_ptr<Source> source_;
  std::optional<CheckpointFit> fit_;
  std::optional<StateReader> reader_;
  RankState rank_state_;
  std::exception_ptr failure_;
};

}  // namespace

WeightsReport load_weights(const ModelState& model, ModelConsistency& consistency, const WeightsRequest& request) {
  const LoadRequest module_only{
      .load_dir = {},
      .tag = {},
      .options = {.load_module_strict = request.strict, .load_optimizer_states = false, .load_module_only = true},
      .over = true};
  Attempt attempt(model, consistency, module_only);
  if (attempt.read(request.path) != Outcome::kGood) throw_failure(attempt.failure(), request.path, "load_weights");
  attempt.finish(nullptr);
  return attempt.report();
}

LoadedCheckpoint load_checkpoint(const ModelState& model, const RunState& run, ModelConsistency& consistency,
                                 const LoadRequest& request) {
  const bool first = model.ranks.world->rank() == 0;
  const HostFolders folders =
      run.config.checkpoint.use_node_local_storage ? host_folders(model.ranks) : one_folder(model.ranks);
  const std::string folder = text_of_leader(request.load_dir, folders, model.ranks);
  checkpoint::require_folder_name(folder, "load_checkpoint");
  const std::vector<std::string> tags = shared_tags(model.ranks, folders, folder, request.tag);
  if (tags.empty()) {
    if (first) {
      log::warning("load_checkpoint: no checkpoint in ", folder, ": no file `latest` and no whole tag; ",
                   "nothing is loaded");
    }
    return {};
  }
  for (size_t i = 0; i < tags.size(); ++i) {
    const std::string path = checkpoint::tag_path(folder, tags[i]);
    Attempt attempt(model, consistency, request);
    const Outcome outcome = attempt.read(path);
    if (outcome == Outcome::kGood) {
      attempt.finish(&run);
      return {.path = path,
              .tag = tags[i],
              .client_state = attempt.client_state(),
              .rank_state = std::move(attempt.rank_state())};
    }
    if (outcome == Outcome::kUnfit || i + 1 == tags.size()) throw_failure(attempt.failure(), path);
    if (first) {
      const auto& failure = attempt.failure();
      log::error(
          "load_checkpoint: ", path, " cannot be used: ",
          failure ? comm::message_of(failure) : std::string("another rank could not read it, its message says why"),
          ". Falling back to ", tags[i + 1]);
    }
  }
  throw InternalError("load_checkpoint: no outcome");
}

}  // namespace ds::engine
