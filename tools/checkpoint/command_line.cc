#include "tools/checkpoint/command_line.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

#include "core/check.h"
#include "core/shown_text.h"
#include "dsengine/checkpoint.h"
#include "exported/archive.h"
#include "launcher/command_line/number_flags.h"
#include "tools/checkpoint/commands.h"
#include "tools/checkpoint/location.h"
#include "tools/command_line.h"

namespace ds::checkpoint::tool {
namespace {

namespace fs = std::filesystem;

constexpr int kFine = 0;
constexpr int kDiffers = 1;
constexpr int kFailed = 2;
constexpr int kMostRanks = 1 << 20;
constexpr const char* kPathHelp =
    "A save_dir (its `latest` tag), one tag in dsengine's or DeepSpeed's format, a folder of safetensors weights, or a "
    ".safetensors file; `inspect` also takes a .pt2 of torch.export";

struct Arguments {
  std::string path, other;
  InspectOptions inspect;
  DiffOptions diff;
  ConvertOptions convert;
};

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& help, Arguments& arguments) {
  CLI::App* command = app.add_subcommand(name, help);
  command->option_defaults()->always_capture_default();
  command->add_option("path", arguments.path, kPathHelp)->required()->type_name("PATH");
  return command;
}

void add_convert(CLI::App& app, Arguments& arguments) {
  ConvertOptions& options = arguments.convert;
  CLI::App* convert = add_command(
      app, "convert", "Writes a checkpoint in another format. An older export in OUT is replaced.", arguments);
  convert->add_option("output", options.output, "The folder to write; with --format torch the file")
      ->required()
      ->type_name("OUT");
  convert
      ->add_option("--format", options.format,
                   "huggingface: weights as model.safetensors; torch: weights as a file for torch::load(model, path) "
                   "of LibTorch; "
                   "dsengine: a checkpoint to train on with; universal: one that DeepSpeed trains on with")
      ->check(CLI::IsMember({"huggingface", "torch", "dsengine", "universal"}));
  convert
      ->add_option("--dtype", options.dtype,
                   "Of floating-point tensors; with --format torch, keep writes those of 16 bits as float32")
      ->check(CLI::IsMember({"keep", "fp32", "bf16", "fp16"}));
  convert->add_option("--max_shard_size", options.max_shard_size, "Data of one file: 500MB, 5GB, 4GiB");
  convert
      ->add_option("--rename", options.rename,
                   "OLD=NEW: replace what the regular expression OLD matches in names by NEW ($1: first group); may be "
                   "given several times. A name that becomes empty is left out")
      ->allow_extra_args(false);
  convert->add_option("--rename_map", options.rename_map, "A JSON file {\"old name\": \"new name\"}");
  convert->add_flag("--ema", options.ema, "Write the moving averages of trained weights in their place");
  convert->add_flag("--exclude_frozen", options.exclude_frozen, "Leave out weights that were not trained");
  convert->add_flag("--exclude_buffers", options.exclude_buffers, "Leave out buffers");
  convert->add_flag("--keep_aliases", options.keep_aliases, "Write tied parameters under each of their names");
  convert
      ->add_option("--empty_modules", options.empty_modules,
                   "With --format torch: names of modules without tensors (activations, dropout), separated by commas, "
                   "which LibTorch looks for; checkpoints of dsengine name them")
      ->delimiter(',')
      ->allow_extra_args(false);
  convert->add_option("--ranks,--world_size", options.ranks, "Ranks that --format dsengine is split for")
      ->transform(whole_number(1, kMostRanks));
}

int execute(const CLI::App& app, Arguments& arguments, std::ostream& out) {
  if (app.got_subcommand("inspect") && fs::is_regular_file(arguments.path) &&
      exported::is_exported_file(arguments.path)) {
    inspect_exported(arguments.path, arguments.inspect, out);
    return kFine;
  }
  const Location location = locate(arguments.path);
  if (app.got_subcommand("verify")) return verify_and_print(location, out) ? kFine : kDiffers;
  const std::unique_ptr<Source> source = open(location.folder);
  if (app.got_subcommand("inspect")) inspect(*source, location, arguments.inspect, out);
  if (app.got_subcommand("convert")) convert(*source, arguments.convert, out);
  if (!app.got_subcommand("diff")) return kFine;
  const std::unique_ptr<Source> other = open(locate(arguments.other).folder);
  return diff(*source, *other, arguments.diff, out) ? kFine : kDiffers;
}

}  // namespace

int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Looks at checkpoints and converts them, without starting a job.", "ds-tool checkpoint");
  app.require_subcommand(1);
  Arguments arguments;
  CLI::App* inspect = add_command(app, "inspect", "Counters, optimizer, bytes by kind, files", arguments);
  inspect->add_flag("--json", arguments.inspect.json, "Print one JSON object");
  inspect->add_flag("--tensors", arguments.inspect.tensors, "Name every tensor with dtype and shape");
  add_command(app, "verify",
              "Reads every byte and compares it with the checksums, where there are. Exit code 0: whole; 1: damaged",
              arguments);
  CLI::App* diff = add_command(app, "diff", "Compares two checkpoints. Exit code 0: equal; 1: different", arguments);
  diff->add_option("other", arguments.other, "The other one")->required()->type_name("PATH");
  diff->add_option("--tolerance", arguments.diff.tolerance,
                   "The largest absolute difference of two values that count as equal")
      ->check(real_number(0));
  diff->add_flag("--weights", arguments.diff.weights_only, "Compare weights and buffers only");
  add_convert(app, arguments);
  if (const auto code = ds::tool::parse_command_line(app, argc, argv, out, err)) return *code;
  try {
    const int code = execute(app, arguments, out);
    out.flush();
    require<IoError>(out.good(), "the report cannot be written; check the disk or the program that reads it");
    return code;
  } catch (const std::exception& error) {
    err << "ds-tool checkpoint: " << shown_message(error.what()) << '\n';
    return kFailed;
  }
}

}  // namespace ds::checkpoint::tool
