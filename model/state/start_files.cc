#include "model/state/start_files.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "checkpoint/module_weights.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/listed.h"
#include "core/log.h"
#include "core/name_pattern.h"
#include "core/random_streams.h"
#include "core/tensor_check.h"
#include "core/text_lines.h"
#include "dsengine/pipeline.h"
#include "layers/compressed/compressed_model.h"
#include "model/state/tensor_parts.h"
#include "optim/chunked_update.h"

namespace ds::engine {
namespace {

constexpr size_t kMostListed = 8;  // names in a message

// The first word of each line that a first rank tells the others.
constexpr const char* kMade = "made";      // "made ROWS NAME"
constexpr const char* kOther = "other";    // "other ROWS NAME": a further name of the tensor before
constexpr const char* kUnused = "unused";  // "unused 0 NAME"
constexpr const char* kUsed = "used";      // "used 0 NAME": a name in a file that a stage takes
constexpr const char* kHit = "hit";        // "hit FILE -": the file has a tensor of the model
constexpr const char* kMeant = "meant";    // "meant 0 PATTERN": .grow has one that means a tensor

// A parameter or buffer of the module, with all its names.
struct StartTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  bool needed = false;  // with strict, a file has to have it
};

std::vector<StartTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<StartTensor> tensors;
  std::map<const void*, size_t> places;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool needed) {
    const auto [place, is_new] = places.emplace(trained_tensor(tensor).unsafeGetTensorImpl(), tensors.size());
    if (is_new) tensors.push_back({{}, tensor, needed});
    tensors[place->second].names.push_back(name);
  };
  // Scores that a method has registered are in no file of weights; they start as they were drawn.
  const auto compressed = model_compression::find_model(module);
  for (const auto& item : module.named_parameters()) {
    const bool drawn = compressed && compressed->has_scores(item.value()) && !item.value().is_meta();
    add(item.key(), item.value(), /*needed=*/!drawn);
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) add(item.key(), item.value(), item.value().is_meta());
  }
  return tensors;
}

// "\"a\"", or "\"a\", nor the 3 more \"b\", \"c\" and 1 more".
std::string first_and_others(const std::vector<std::string>& names) {
  std::vector<std::string> others;
  for (size_t i = 1; i < names.size(); ++i) others.push_back(cat('"', names[i], '"'));
  if (others.empty()) return cat('"', names.front(), '"');
  return cat('"', names.front(), "\", nor the ", others.size(), " more ", listed(others, kMostListed));
}

}  // namespace

// Matches the files with a module, on a first rank of a part.
class StartFiles::Matching {
 public:
  Matching(StartFiles& files, const torch::nn::Module& module) : files_(files), module_(module) {
    const WeightsOptions& match = files_.options_.match;
    for (const std::string& pattern : match.grow) grow_.push_back(NamePattern::stars(pattern));
    meant_.resize(grow_.size());
  }

  // Returns the lines for the other ranks.
  std::string run() {
    files_.files_.push_back(checkpoint::open_weights(files_.options_.weights));
    for (const std::string& path : files_.options_.match.over) {
      files_.files_.push_back(checkpoint::open_weights(path));
    }
    hits_.resize(files_.files_.size());
    for (const StartTensor& one : tensors_of(module_)) match(one);
    require_all();
    add_unused();
    for (size_t i = 0; i < grow_.size(); ++i) {
      if (meant_[i]) text_ += cat(kMeant, " 0 ", files_.options_.match.grow[i], '\n');
    }
    for (size_t f = 0; f < hits_.size(); ++f) {
      if (hits_[f]) text_ += cat(kHit, ' ', f, " -\n");
    }
    return std::move(text_);
  }

 private:
  const std::string& weights() const { return files_.options_.weights; }
  std::string prefix() const { return cat(files_.options_.call, ": .weights: "); }
  // Returns `text`, or what helps a call that has no .weights_options.
  std::string advice(const std::string& text) const {
    return files_.options_.has_match ? text : ". Load what the file has into the module before the call";
  }

  // The tensor's names in the files; none where the program leaves it out.
  std::vector<std::string> names_in_file(const StartTensor& one) const {
    const auto& rename = files_.options_.match.rename;
    if (!rename) return one.names;
    std::vector<std::string> names;
    for (const std::string& name : one.names) {
      if (std::string renamed = rename(name); !renamed.empty()) names.push_back(std::move(renamed));
    }
    return names;
  }

  bool may_grow(const StartTensor& one) {
    bool grows = false;
    for (size_t i = 0; i < grow_.size(); ++i) {
      const bool means = std::any_of(one.names.begin(), one.names.end(),
                                     [&](const std::string& name) { return grow_[i].matches(name); });
      meant_[i] = meant_[i] || means;
      grows = grows || means;
    }
    return grows;
  }

  void match(const StartTensor& one) {
    const std::vector<std::string> names = names_in_file(one);
    used_.insert(names.begin(), names.end());
    const bool grows = may_grow(one);
    Found last;
    for (size_t f = 0; f < files_.files_.size(); ++f) {
      std::string path = checkpoint::weight_for(*files_.files_[f], names);
      if (path.empty()) continue;
      hits_[f] = true;
      last = {f, std::move(path)};
    }
    if (!last.path.empty()) {
      const int64_t rows = rows_in_file(one, files_.files_[last.file]->info(last.path).sizes, grows, last);
      for (const std::string& name : one.names) files_.found_[name] = last;
      if (one.tensor.dim() > 0 && rows < one.tensor.size(0)) add_made(one, rows);
      return;
    }
    if (one.needed && !names.empty()) missing_.push_back(one.names.front());
    if (one.tensor.is_meta()) {
      if (!one.tensor.is_floating_point()) numbers_.push_back(cat(one.names.front(), ", ", describe(one.tensor)));
      unmade_.push_back(one.names.front());
    }
    add_made(one, 0);
  }

  // `fewer`: the file has the first rows alone.
  std::string advice_on_shape(const std::string& name, bool fewer) const {
    const std::string rows = cat(". To take these rows, and start the others as the program does, pass ",
                                 ".weights_options.grow = {\"", name, "\"}");
    return advice(cat(fewer ? rows : std::string(), ". To leave the file's tensor out, have .weights_options.rename ",
                      "return \"\" for \"", name, "\", which then starts as the program makes it"));
  }

  // Throws where the shapes are neither the same nor those of a tensor that grows.
  int64_t rows_in_file(const StartTensor& one, at::IntArrayRef found, bool grows, const Found& where) {
    const at::IntArrayRef sizes = one.tensor.sizes();
    const bool fewer =
        !found.empty() && found.size() == sizes.size() && found.slice(1) == sizes.slice(1) && found[0] < sizes[0];
    const std::string& name = one.names.front();
    require(found == sizes || (fewer && grows), prefix(), files_.files_[where.file]->location(), ": tensor \"",
            checkpoint::name_in("weights/", where.path), "\": expected shape ", sizes, ", found ", found,
            lazy([&] { return advice_on_shape(name, fewer); }));
    if (found != sizes && one.tensor.is_meta()) unmade_.push_back(name);
    return sizes.empty() ? 0 : found[0];
  }

  void add_made(const StartTensor& one, int64_t rows) {
    const char* word = kMade;
    for (const std::string& name : one.names) text_ += cat(std::exchange(word, kOther), ' ', rows, ' ', name, '\n');
  }

  void require_all() const {
    const WeightsOptions& options = files_.options_.match;
    const auto& first = files_.files_.front()->tensors();
    require(!options.strict || missing_.empty(), prefix(), weights(),
            options.over.empty() ? "" : cat(" with .weights_options.over ", listed(options.over, kMostListed)),
            " has no tensor ", lazy([&] { return first_and_others(missing_); }), "; it has ", first.size(),
            " tensors, the first is \"",
            lazy([&] { return first.empty() ? "" : checkpoint::name_in("weights/", first.begin()->first); }), '"',
            advice(". To start what it lacks (adapters, a new head) as the program makes it, pass "
                   ".weights_options = {.strict = false}"));
    require(numbers_.empty(), prefix(), weights(), " does not have ", listed(numbers_, kMostListed),
            ", on the meta device: of integers none says that it is missing; register the buffer on the CPU");
    require(unmade_.empty() || options.fill, prefix(), weights(), " does not have all of ",
            lazy([&] { return cat(unmade_.size(), " tensors"); }),
            " on the meta device, which have no values: ", listed(unmade_, kMostListed),
            advice(". Pass .weights_options.fill, a function that makes them, or make these tensors on the CPU"));
  }

  void add_unused() {
    const auto* stages = dynamic_cast<const pipeline::PipelineModule*>(&module_);
    std::set<std::string> unused;
    for (const auto& file : files_.files_) {
      for (const auto& [path, info] : file->tensors()) {
        const std::string name = checkpoint::name_in("weights/", path);
        if (used_.contains(name)) {
          if (stages) text_ += cat(kUsed, " 0 ", name, '\n');
        } else if (!(stages && stages->is_elsewhere(name))) {
          unused.insert(name);
        }
      }
    }
    for (const std::string& name : unused) text_ += cat(kUnused, " 0 ", name, '\n');
  }

  StartFiles& files_;
  const torch::nn::Module& module_;
  std::vector<NamePattern> grow_;
  std::vector<bool> meant_;           // by pattern of .grow
  std::vector<bool> hits_;            // by file: it has a tensor of the model
  std::set<std::string> used_;        // names in files that the model asks for
  std::vector<std::string> missing_;  // that a file has to have
  std::vector<std::string> unmade_;   // on the meta device, and not, or not whole, in the files
  std::vector<std::string> numbers_;  // of these, what is no floating point
  std::string text_;
};

StartFiles::StartFiles(StartFilesOptions options) : options_(std::move(options)) {
  const WeightsOptions& match = options_.match;
  const bool chosen = !match.strict || !match.over.empty() || !match.grow.empty() || match.rename || match.fill;
  require(given() || !chosen, options_.call, ": .weights_options: expected .weights, the file that they are about, ",
          "found none; pass .weights = \"model.safetensors\", or remove them");
}

StartFiles::~StartFiles() = default;

std::string StartFiles::settings() const {
  const WeightsOptions& match = options_.match;
  std::string text = cat(".weights\t", given() ? "given" : "none", '\n');
  text += cat(".weights_options.strict\t", match.strict, '\n');
  text += cat("files in .weights_options.over\t", match.over.size(), '\n');
  text += cat(".weights_options.grow\t", listed(match.grow, match.grow.size()), '\n');
  text += cat(".weights_options.rename\t", match.rename ? "given" : "none", '\n');
  return text + cat(".weights_options.fill\t", match.fill ? "given" : "none", '\n');
}

void StartFiles::open(const torch::nn::Module& module, const Ranks& ranks) {
  if (!given() || std::exchange(opened_, true)) return;
  // The outcome of reading is shared with all ranks, before anybody waits for values.
  std::exception_ptr failure;
  std::string own;
  if (ranks.part->rank() == 0) {
    try {
      own = Matching(*this, module).run();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  const auto failed = comm::failure_of_ranks(failure, ranks.device, *ranks.world);
  require<IoError>(!failed, options_.call, ": .weights: rank ", failed ? failed->rank : 0, " could not use ",
                   options_.weights, ": ", failed ? failed->message : "");
  share(own, ranks);
  if (ranks.world->rank() == 0) log_report();
}

// Every rank takes over what the first rank of its part has found, and joins the reports of all stages.
void StartFiles::share(const std::string& own, const Ranks& ranks) {
  const std::vector<std::string> texts =
      comm::texts_of_ranks(own, ranks.device, *ranks.world, "tensors that .weights lacks");
  std::set<std::string> told;  // lines
  std::set<std::string> meant;
  std::set<std::string> used;
  std::set<int64_t> hits;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const bool is_own = static_cast<int>(rank) == ranks.first_of_part();
    for (const std::string& line : text_lines(texts[rank])) {
      const size_t after_word = line.find(' ');
      const size_t after_rows = line.find(' ', after_word + 1);
      const std::string word = line.substr(0, after_word);
      const int64_t rows = std::stoll(line.substr(after_word + 1, after_rows - after_word - 1));
      const std::string name = line.substr(after_rows + 1);
      if (word == kMeant) {
        meant.insert(name);
      } else if (word == kUsed) {
        used.insert(name);
      } else if (word == kHit) {
        hits.insert(rows);
      } else {
        if (is_own && word != kUnused) made_[name] = rows;
        if (word == kOther || !told.insert(line).second) continue;
        (word == kUnused ? report_.unused : rows > 0 ? report_.grown : report_.missing).push_back(name);
      }
    }
  }
  // With .rename a stage does not know what another one takes.
  std::erase_if(report_.unused, [&](const std::string& name) { return used.contains(name); });
  for (size_t f = 0; f <= options_.match.over.size(); ++f) {
    require(hits.contains(static_cast<int64_t>(f)), options_.call,
            f == 0 ? ": .weights: " : ": .weights_options.over: ",
            f == 0 ? options_.weights : options_.match.over[f - 1], " has no tensor of the model; it has ",
            lazy([&] { return report_.unused.empty() ? std::string("none") : first_and_others(report_.unused); }),
            ". Where names differ alone, map them with .weights_options.rename");
  }
  for (const std::string& pattern : options_.match.grow) {
    require(meant.contains(pattern), options_.call, ": .weights_options.grow: \"", pattern, "\": expected the name of ",
            "a parameter, or a pattern of some (\"*\" stands for any text), found none of that name in the model");
  }
}

void StartFiles::log_report() const {
  if (!options_.match.strict && !report_.missing.empty()) {
    log::warning(options_.call, ": .weights: ", report_.missing.size(), " tensors of the model are not in ",
                 options_.weights, ": ", listed(report_.missing, kMostListed),
                 ". They start with the module's own values, those of rank 0",
                 options_.match.fill ? ", and on the meta device with those that .weights_options.fill makes" : "",
                 " (.weights_options.strict is false)");
  }
  if (!report_.grown.empty()) {
    log::info(options_.call, ": .weights: ", options_.weights, " has the first rows of ",
              listed(report_.grown, kMostListed), "; the others are the program's (.weights_options.grow)");
  }
  if (!report_.unused.empty()) {
    const size_t count = report_.unused.size();
    log::warning(options_.weights, ": ", count == 1 ? std::string("a tensor is") : cat(count, " tensors are"),
                 " not in the model: ", listed(report_.unused, kMostListed));
  }
}

at::Tensor StartFiles::file_values(const Found& found) const { return files_[found.file]->tensor(found.path); }

// Random numbers are those of the seed and the name, whoever asks and in which order: all first ranks make the same.
at::Tensor StartFiles::filled(const std::string& name, const std::vector<int64_t>& sizes, at::ScalarType dtype) const {
  static std::mutex one_at_a_time;  // the default generator is the process's
  const std::lock_guard lock(one_at_a_time);
  const KeptGenerator kept;
  default_generators(at::kCPU).front().set_current_seed(key_of({.seed = options_.seed, .purpose = name}));
  const at::Tensor values =
      at::full(sizes, std::numeric_limits<double>::quiet_NaN(), at::TensorOptions(optimizers::state_type(dtype)));
  options_.match.fill(name, values);
  require(!values.isnan().any().item<bool>(), options_.call, ": .weights_options.fill: ", name,
          ": expected values for all elements of ", describe(values),
          ", found NaN afterwards; make them in place, as values.normal_(0, 0.02) does");
  return values;
}

at::Tensor StartFiles::values(const std::string& name, const at::Tensor& tensor) const {
  const at::NoGradGuard no_grad;
  const bool first = !files_.empty();
  const auto made = made_.find(name);
  if (made == made_.end()) return first ? file_values(found_.at(name)) : at::Tensor();
  const int64_t rows = made->second;
  const bool fills = tensor.is_meta();
  if (fills && !first) return {};
  if (rows == 0) return fills ? filled(name, tensor.sizes().vec(), tensor.scalar_type()) : tensor.detach();
  at::Tensor whole;
  if (fills) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    whole = at::empty(sizes, at::TensorOptions(optimizers::state_type(tensor.scalar_type())));
    sizes[0] -= rows;
    whole.narrow(0, rows, sizes[0]).copy_(filled(name, sizes, tensor.scalar_type()));
  } else {
    whole = tensor.detach().clone();  // on all ranks, which gather it together
  }
  if (first) whole.narrow(0, 0, rows).copy_(file_values(found_.at(name)));
  return whole;
}

}  // namespace ds::engine
