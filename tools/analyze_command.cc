#include "tools/analyze_command.h"

#include <algorithm>

#include "core/check.h"
#include "data/sample_metrics.h"

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

}  // namespace ds::tool
