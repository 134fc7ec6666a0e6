// The commands of `ds-tool checkpoint`, apart from their command line.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"
#include "tools/checkpoint/location.h"

namespace ds::checkpoint::tool {

struct InspectOptions {
  bool json = false;     // one JSON object instead of text
  bool tensors = false;  // a line for each tensor
};

// Prints what a checkpoint holds, without reading its tensors: counters, optimizer, bytes by kind, files and the
// program's own state. Throws IoError.
void inspect(const Source& source, const Location& location, const InspectOptions& options, std::ostream& out);

// Prints what a .pt2 of torch.export holds: inputs and their dynamic sizes, outputs, tensors by kind and dtype, tied
// parameters, operators with their calls and whether LibTorch has them, and why load_exported() refuses it, if so.
// Throws IoError.
void inspect_exported(const std::string& path, const InspectOptions& options, std::ostream& out);

// Checks whether a checkpoint is complete and whole, prints each damage and returns whether there was none. In
// dsengine's format every byte is compared with the checksums of the index. Other formats have no checksums: their
// structure is checked and every tensor is read. Throws IoError for a path that holds no checkpoint.
bool verify_and_print(const Location& location, std::ostream& out);

struct DiffOptions {
  double tolerance = 0;       // the largest absolute difference of two values that count as equal
  bool weights_only = false;  // weights and buffers alone; no counters, no optimizer
};

// Prints what differs between two checkpoints, whatever their formats and numbers of ranks: names that one side lacks,
// other shapes and dtypes, and for each tensor whose values differ the largest absolute difference and the largest
// relative one (to the larger magnitude of the two); then counters, optimizer settings and client_state. World size,
// stage and config are printed, not counted. Returns whether both are equal within the tolerance; dtypes may differ
// when values do not. Reads both in parts. Throws IoError.
bool diff(Source& a, Source& b, const DiffOptions& options, std::ostream& out);

struct ConvertOptions {
  std::string output;  // a folder; a file with "torch"
  // "huggingface": weights alone; "torch": weights as a file for torch::load(model, path) of LibTorch; "dsengine": with
  // optimizer and counters, as far as the source has them; "universal": DeepSpeed's layout of that name.
  std::string format = "huggingface";
  std::string dtype = "keep";  // keep, fp32, bf16, fp16; with "torch", keep writes 16-bit tensors as float32
  std::string max_shard_size = "5GB";
  std::vector<std::string> rename;  // OLD=NEW: std::regex (ECMAScript) and its replacement, applied in order
  std::string rename_map;           // a JSON file {"old": "new"}, whole names; "" as new name: left out
  bool ema = false;                 // moving averages in place of trained weights
  bool exclude_frozen = false;
  bool exclude_buffers = false;
  bool keep_aliases = false;  // tied parameters under each of their names
  // "torch": names of the modules without tensors, for a source that does not say them.
  std::vector<std::string> empty_modules;
  int ranks = 1;  // dsengine's format: number of ranks it is split for
};

// Writes the weights of any checkpoint as files that other programs load, and prints what was written. Throws
// ConfigError for wrong options, and what export_weights() throws.
void convert(Source& source, const ConvertOptions& options, std::ostream& out);

// The renaming that the options `rename` and `rename_map` describe: the map first, by whole names, then the patterns.
// Throws ConfigError, IoError.
std::function<std::string(const std::string&)> renaming(const std::vector<std::string>& patterns,
                                                        const std::string& map_file);

}  // namespace ds::checkpoint::tool
