#include "launcher/parity/parity_command.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/number_text.h"
#include "core/parity/parity_judge.h"
#include "core/parity/parity_names.h"
#include "core/parity/recorded_run.h"

namespace ds::launcher {
namespace {

constexpr const char* kUsage =
    "ds-launch parity [flags of ds-launch] [--against CONFIG2] [--steps N] [--folder DIR] [--replay | "
    "--global_batches] "
    "[--one_order] CONFIG -- PROGRAM ARGS";
constexpr const char* kFlags =
    "  --against CONFIG2  another config for the run on one rank, for instance float32 against bf16\n"
    "  --steps N          optimizer steps that are compared (5)\n"
    "  --folder DIR       an empty folder that keeps the records; else they are removed at the end\n"
    "  --replay           later runs take the batches that the engine has seen in the first one\n"
    "  --global_batches   one rank takes what all ranks take side by side as one micro-batch: for a program that cuts "
    "a\n"
    "                     global batch by the number of ranks, and for BatchNorm over all ranks\n"
    "  --one_order        no second run of the layout: bounds are constants of the dtype\n"
    "All other flags go before CONFIG; without --num_procs they start the default number of ranks.";
// The exit codes have the meaning that diff and cmp give to them.
constexpr const char* kExitCodes =
    "Exit codes: 0 both train the same; 1 they do not; 2 nothing is compared, because a run has failed (the message "
    "has its exit code), the command line is wrong, or a record is missing or damaged.";

struct ParityOptions {
  std::string config;
  std::string against;  // the config of the run on one rank; empty: `config`
  std::string folder;   // where the records stay; empty: nowhere
  int64_t steps = 5;
  bool replays = false;               // the batches that the engine sees are those of the first run
  bool takes_global_batches = false;  // one rank takes what all ranks take side by side as one micro-batch
  bool has_other_order = true;        // the layout runs twice
  Options launch;                     // program, arguments and ranks
};

// Takes a flag of this command and its value out of `words`, which end before the program. Returns "" where it is not
// there.
std::string take_flag(std::vector<std::string>& words, const std::string& flag) {
  for (size_t i = 0; i < words.size(); ++i) {
    const bool is_joined = words[i].starts_with(flag + "=");
    if (!is_joined && words[i] != flag) continue;
    require<ConfigError>(is_joined || i + 1 < words.size(), flag, ": expected a value; ", kUsage);
    std::string value = is_joined ? words[i].substr(flag.size() + 1) : words[i + 1];
    const auto at = words.begin() + static_cast<std::ptrdiff_t>(i);
    words.erase(at, at + (is_joined ? 1 : 2));
    return value;
  }
  return {};
}

// Takes a flag without a value. Returns whether it was there.
bool take_switch(std::vector<std::string>& words, const std::string& flag) {
  const auto at = std::find(words.begin(), words.end(), flag);
  if (at == words.end()) return false;
  words.erase(at);
  return true;
}

int64_t steps_of(const std::string& text) {
  const int64_t steps = parse_whole_number(text).value_or(0);
  require<ConfigError>(steps > 0, "--steps: expected a number of at least 1, found ", text);
  return steps;
}

void require_one_machine(const Options& options) {
  const bool hosts = !options.hostfile.empty() || !options.include.empty() || !options.exclude.empty() ||
                     options.num_nodes || options.node_rank || options.meets_at_endpoint ||
                     options.launcher != Launcher::kSsh;
  require<ConfigError>(!hosts,
                       "ds-launch parity: expected ranks of this machine alone, found flags that name hosts or ",
                       "another launcher; compare on one machine, with as many ranks by --num_procs");
}

// `launch`: the line as that of a job whose program is the config.
void require_config_and_program(const std::vector<std::string>& words, const Options& launch) {
  const std::vector<std::string>& rest = launch.arguments;
  if (rest.size() >= 2 && rest.front() == "--") return;
  const auto marker = std::find(words.begin(), words.end(), "--");
  std::string found;
  if (marker == words.end()) {
    found = cat("no -- behind ", launch.program);
  } else if (std::find(words.begin(), marker, launch.program) == marker) {
    found = "nothing but flags before --: the CONFIG is missing";
  } else if (marker + 1 == words.end()) {
    found = "no program behind --";
  } else {
    found = cat(rest.empty() ? "a word" : rest.front(), " between ", launch.program,
                " and --: flags of ds-launch go before CONFIG");
  }
  throw ConfigError(cat("ds-launch parity: expected CONFIG -- PROGRAM, found ", found, "; ", kUsage,
                        " (a program that is called parity starts as ./parity)"));
}

// Parses a line as that of a job whose program is the config, and whose arguments are -- and the program.
ParityOptions parse_parity(const std::vector<std::string>& words, const std::vector<std::string>& environment) {
  ParityOptions options;
  const auto marker = std::find(words.begin(), words.end(), "--");
  std::vector<std::string> own(words.begin(), marker);
  options.against = take_flag(own, "--against");
  options.folder = take_flag(own, "--folder");
  options.replays = take_switch(own, "--replay");
  options.takes_global_batches = take_switch(own, "--global_batches");
  require<ConfigError>(!options.replays || !options.takes_global_batches, "ds-launch parity: expected one of --replay ",
                       "and --global_batches, found both: what is replayed are the batches of single ranks");
  options.has_other_order = !take_switch(own, "--one_order");
  const std::string steps = take_flag(own, "--steps");
  if (!steps.empty()) options.steps = steps_of(steps);
  own.insert(own.end(), marker, words.end());
  options.launch = parse_options(own, environment);
  if (options.launch.answer) return options;
  std::vector<std::string>& rest = options.launch.arguments;
  require_config_and_program(words, options.launch);
  options.config = options.launch.program;
  options.launch.program = rest[1];
  rest.erase(rest.begin(), rest.begin() + 2);
  require_one_machine(options.launch);
  for (const std::string& config : {options.config, options.against}) {
    std::error_code none;
    require<ConfigError>(config.empty() || std::filesystem::is_regular_file(config, none),
                         "ds-launch parity: expected a ds_config, found no file ", config);
  }
  options.launch.standalone = true;
  options.launch.max_restarts = 0;
  return options;
}

std::vector<std::string> with_variables(const std::vector<std::string>& environment,
                                        const std::vector<std::pair<const char*, std::string>>& variables) {
  std::vector<std::string> result;
  for (const std::string& entry : environment) {
    if (!entry.starts_with("DS_PARITY_")) result.push_back(entry);
  }
  for (const auto& [name, value] : variables) result.push_back(cat(name, '=', value));
  return result;
}

Options on_one_rank(Options options) {
  options.num_procs = 1;
  options.count_kind = CountKind::kNumber;
  options.count_is_gpus = false;
  options.total_procs.reset();
  return options;
}

constexpr const char* kNoBatches =
    "ds-launch parity --replay: expected that the engine sees the batches of the program, found none: it calls its "
    "module directly. Let it call engine->forward(model, input, target), or train_batch(source) in a pipeline; or give "
    "its data as .training_data, whose batches need no --replay";

// Says in words what the comparison of equal runs leaves open; empty: nothing.
std::string note_of(const ParityOptions& options, const RecordedRun& layout, const RecordedRun& reference) {
  std::string note;
  const size_t steps = std::min(layout.steps.size(), reference.steps.size());
  if (static_cast<int64_t>(steps) < options.steps) {
    note = cat("only ", steps, " of ", options.steps, " steps are compared, because the program has ended before");
    if (layout.steps.size() > steps) {
      note += cat(": on one rank a step takes ", layout.layout.data_ranks, " times as many micro-batches");
    }
    note += ". Let it train longer for the comparison";
  }
  if (layout.layout.ranks() == 1) {
    note += cat(note.empty() ? "" : ". ", "The layout is one rank, too, so that nothing that ranks do together is ",
                "compared: give --num_procs");
  }
  return note;
}

// Starts the runs. Each of them throws UsageError where the program has not ended well.
struct Starter {
  const ParityOptions& options;
  const std::vector<std::string>& environment;
  const RunJob& run;

  // The wanted layout, which writes to `to`. `like`: the folder of the first run, for one with batches in `order`.
  void layout(const std::string& to, const std::string& like = {}, const std::string& order = {}) const {
    start(like.empty() ? "the run of the layout" : "the second run of the layout", options.launch, options.config,
          {{kParityFolderVariable, to}, {kParityLikeVariable, like}, {kParityOrderVariable, order}});
  }
  void one_rank(const std::string& to, const std::string& like) const {
    start("the run on one rank", on_one_rank(options.launch),
          options.against.empty() ? options.config : options.against,
          {{kParityFolderVariable, to}, {kParityLikeVariable, like}});
  }
  void start(const char* what, const Options& launch, const std::string& config,
             std::vector<std::pair<const char*, std::string>> variables) const {
    variables.emplace_back(kParityConfigVariable, std::filesystem::absolute(config).string());
    variables.emplace_back(kParityStepsVariable, cat(options.steps));
    if (options.replays) variables.emplace_back(kParityBatchesVariable, "1");
    if (options.takes_global_batches) variables.emplace_back(kParityGlobalBatchesVariable, "1");
    std::erase_if(variables, [](const auto& variable) { return variable.second.empty(); });
    const int code = run(launch, with_variables(environment, variables));
    require<UsageError>(code == 0, "ds-launch parity: expected ", what, " to end with exit code 0, found ", code,
                        "; nothing is compared. What it has said is above");
  }
};

}  // namespace

int run_parity(const std::vector<std::string>& words, const std::vector<std::string>& environment, Console& console,
               const RunJob& run) {
  const ParityOptions options = parse_parity(words, environment);
  if (options.launch.answer) {
    console.raw(Console::kOut, cat(kUsage, "\n", kFlags, "\n\n", kExitCodes, "\n\n", *options.launch.answer));
    return kParityEqual;
  }
  const RecordFolder folder(options.folder);
  const Starter start{options, environment, run};
  start.layout(folder.of_run());
  const RecordedRun layout = read_run(folder.of_run());
  require<ConfigError>(!options.replays || layout.has_batches(), kNoBatches);
  std::optional<RecordedRun> other_order;
  if (options.has_other_order) {
    const char* const order = layout.draws() ? kParityOrderBatches : kParityOrderSamples;
    start.layout(folder.of_other_order(), folder.of_run(), order);
    other_order = read_run(folder.of_other_order());
  }
  start.one_rank(folder.of_reference(), folder.of_run());
  const RecordedRun reference = read_run(folder.of_reference(), layout.layout);
  ChosenBounds bounds = other_order ? choose_bounds(layout, reference, &*other_order)
                                    : choose_bounds(layout, reference, nullptr, "--one_order asks for no second run");
  const ParityVerdict verdict = judge_parity(layout, reference, std::move(bounds));
  console.line(Console::kOut, verdict.text);
  const std::string note = note_of(options, layout, reference);
  if (!note.empty()) console.line(Console::kOut, cat("parity: note: ", note));
  return verdict.equal ? kParityEqual : kParityDifferent;
}

}  // namespace ds::launcher
