#include <iostream>
#include <limits>
#include <memory>

#include "launcher/command_line/number_flags.h"
#include "tools/analyze_command.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"

namespace ds::tool {

void add_analyze(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<AnalyzeOptions>();
  CLI::App* flags = app.add_subcommand(
      "analyze",
      "Writes how hard the samples of a token file are, in the files that data_efficiency.data_sampling reads. Exit "
      "code 0: all is written; 2: it is not.");
  flags->add_option("--tokens", options->tokens, "File of tokens, unsigned integers one behind the other")
      ->required()
      ->type_name("FILE");
  flags->add_option("--token_bytes", options->token_bytes, "Bytes of a token: 1 (a text), 2 or 4")
      ->check(CLI::IsMember({1, 2, 4}))
      ->type_name("N");
  flags->add_option("--seq_len", options->seq_len, "Samples of so many tokens, each with the one that follows")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N");
  flags->add_option("--separator", options->separator, "Samples between tokens of this number: 10 for lines of a text")
      ->transform(whole_number(0, std::numeric_limits<uint32_t>::max()))
      ->type_name("TOKEN");
  flags->add_option("--metric", options->metrics, "vocab_rarity (the default), seqlen, or both")
      ->check(CLI::IsMember({"vocab_rarity", "seqlen"}))
      ->type_name("NAME");
  flags->add_option("--output", options->output, "Folder that gets NAME/NAME_index_to_sample and others")
      ->required()
      ->type_name("FOLDER");
  flags->callback([options, &chosen] { chosen = [options] { return analyze(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
