#include "tools/analyze_command.h"

#include <algorithm>
#include <iostream>
#include <limits>
#include <memory>

#include "core/check.h"
#include "data/sample_metrics.h"
#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

std::vector<int64_t> values_of(const efficiency::TokenFile& tokens, const std::string& metric) {
  if (metric == "seqlen") return tokens.lengths();
  require<ConfigError>(metric == "vocab_rarity", "--metric: expected vocab_rarity or seqlen, found ", metric);
  return tokens.vocabulary_rarity();
}

void print_percentiles(const std::string& metric, std::vector<int64_t> values, std::ostream& out) {
  std::sort(values.begin(), values.end());
  out << metric << ": " << values.size() << " samples; values at percentiles";
  for (const size_t percentile : {0, 10, 25, 50, 75, 90, 100}) {
    out << ' ' << percentile << ": " << values[(values.size() - 1) * percentile / 100];
    out << (percentile < 100 ? "," : "\n");
  }
}

void write_metrics(const AnalyzeOptions& options, std::ostream& out) {
  require<ConfigError>(options.seq_len.has_value() != options.separator.has_value(),
                       "expected --seq_len, for samples of one length, or --separator, for those between such tokens");
  efficiency::TokenFile tokens(options.tokens, options.token_bytes);
  if (options.seq_len) {
    tokens.cut_by_length(*options.seq_len);
  } else {
    tokens.cut_at(static_cast<uint32_t>(*options.separator));
  }
  for (const std::string& metric : options.metrics) {
    const std::vector<int64_t> values = values_of(tokens, metric);
    efficiency::write_metric(options.output, metric, values);
    print_percentiles(metric, values, out);
  }
}

}  // namespace

int analyze(const AnalyzeOptions& options, std::ostream& out, std::ostream& err) {
  try {
    write_metrics(options, out);
    return 0;
  } catch (const Error& error) {
    err << "ds-tool analyze: " << error.what() << '\n';
    return 2;
  }
}

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
