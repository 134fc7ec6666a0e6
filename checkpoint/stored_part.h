// Which part of its logical tensor a piece of a checkpoint is taken from, when the writer was one of several ranks that
// have a part each (core/split/tensor_part.h).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/split/tensor_part.h"

namespace ds::checkpoint {

struct StoredPart {
  Cut cut;
  int index = 0;
  int count = 1;

  bool operator==(const StoredPart&) const = default;
};

// Returns the part as an index names it: cuts that give the same parts compare equal.
StoredPart stored_part_of(const TensorPart& part);

// {"dim", "index", "count"}, and where they are not the usual ones "blocks", "repeats", "grain", "order": "zigzag".
nlohmann::json to_json(const StoredPart& part);
// Throws IoError that begins with `where`, and passes on what the JSON library throws: numbers that are none of a part.
StoredPart stored_part_from(const nlohmann::json& value, const std::string& where);

// The part of a tensor of `sizes`. Throws IoError that begins with `where` when it fits no such tensor. Takes time for
// the listed blocks, whatever the numbers are.
TensorPart tensor_part_of(const StoredPart& part, const std::vector<int64_t>& sizes, const std::string& where);

// "part 1 of 4", for messages.
std::string name_of(const StoredPart& part);

}  // namespace ds::checkpoint
