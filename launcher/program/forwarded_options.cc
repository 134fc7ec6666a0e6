#include "launcher/program/forwarded_options.h"

#include "core/text.h"

namespace ds::launcher {
namespace {

std::string level_name(Verbosity verbosity) {
  switch (verbosity) {
    case Verbosity::kError:
      return "error";
    case Verbosity::kWarning:
      return "warning";
    case Verbosity::kInfo:
      return "info";
    case Verbosity::kDebug:
      return "debug";
  }
  return "info";
}

}  // namespace

std::vector<std::string> words_for_ranks(const Options& options) {
  std::vector<std::string> words = {"--log_level",     level_name(options.verbosity),
                                    "--failure_grace", cat(options.failure_grace_seconds),
                                    "--signal_grace",  cat(options.signal_grace_seconds)};
  const auto add = [&](const std::string& flag, const std::string& value) {
    words.push_back(flag);
    words.push_back(value);
  };
  if (options.master_port) add("--master_port", cat(*options.master_port));
  if (!options.rank_log_dir.empty()) add("--enable_each_rank_log", options.rank_log_dir);
  if (!options.bind_to_gpu_node) words.emplace_back("--no_gpu_binding");
  if (!options.bind_core_list.empty()) {
    std::string list;
    for (int core : options.bind_core_list) list += (list.empty() ? "" : ",") + cat(core);
    add("--bind_core_list", list);
  } else if (options.bind_cores) {
    words.emplace_back("--bind_cores_to_rank");
  }
  words.emplace_back("--");
  words.push_back(options.program);
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  return words;
}

}  // namespace ds::launcher
