// `ds-tool analyze`: writes how hard the samples of a token file are, for data_efficiency.data_sampling. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace ds::tool {

struct AnalyzeOptions {
  std::string tokens;  // the file of tokens
  int token_bytes = 1;
  std::optional<int64_t> seq_len;                       // samples of so many tokens each ...
  std::optional<int64_t> separator;                     // ... or those between tokens of this number
  std::vector<std::string> metrics = {"vocab_rarity"};  // "vocab_rarity", "seqlen"
  std::string output;                                   // the folder to write
};

// Writes a metric's files and, to `out`, its percentiles; mistakes to `err`. Returns the exit code: 0 when all was
// written, 2 when not.
int analyze(const AnalyzeOptions& options, std::ostream& out, std::ostream& err);

}  // namespace ds::tool
