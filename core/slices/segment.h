// The map from a flat slice to parameters. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds {

// A run of elements of one parameter inside a flat slice. A slice may cut a parameter: then the parameter has segments
// in several ranks' slices. Elements of a slice that no segment covers are padding; they hold zeros and stay zero.
struct Segment {
  int64_t parameter = 0;         // index into the engine's list of parameters
  int64_t parameter_offset = 0;  // first element inside the (row-major, flattened) parameter
  int64_t slice_offset = 0;      // first element inside the slice
  int64_t length = 0;            // elements

  bool operator==(const Segment&) const = default;
};

// The facts about a parameter that optimizers need.
struct ParameterInfo {
  std::string name;            // dotted path in the module, for example "h.0.attn.qkv.weight"
  std::vector<int64_t> sizes;  // the parameter's shape
  int64_t numel = 0;
  std::vector<std::string> other_names = {};  // the further names of a tied parameter
};

}  // namespace ds
