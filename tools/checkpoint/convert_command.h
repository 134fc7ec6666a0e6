// `ds-tool checkpoint convert`: the weights of any checkpoint as files that other programs load.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint::tool {

struct ConvertOptions {
  std::string output;  // a folder
  // "dsengine": with optimizer and counters, as far as the source has them; "universal": DeepSpeed's layout of that
  // name.
  std::string format = "huggingface";
  std::string dtype = "keep";  // keep, fp32, bf16, fp16
  std::string max_shard_size = "5GB";
  std::vector<std::string> rename;  // OLD=NEW: std::regex (ECMAScript) and its replacement, applied in order
  std::string rename_map;           // a JSON file {"old": "new"}, whole names; "" as new name: left out
  bool exclude_frozen = false;
  bool exclude_buffers = false;
  bool keep_aliases = false;  // tied parameters under each of their names
  int ranks = 1;              // dsengine's format: number of ranks it is split for
};

// Prints what was written. Throws ConfigError (options), and as export_weights().
void convert(Source& source, const ConvertOptions& options, std::ostream& out);

// The renaming of the two options: the map first, by whole names, then the patterns. Throws ConfigError, IoError.
std::function<std::string(const std::string&)> renaming(const std::vector<std::string>& patterns,
                                                        const std::string& map_file);

}  // namespace ds::checkpoint::tool
