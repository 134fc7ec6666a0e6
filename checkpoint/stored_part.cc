#include "checkpoint/stored_part.h"

#include <limits>

#include "core/check.h"
#include "core/json/json_integer.h"

namespace ds::checkpoint {
namespace {

using nlohmann::json;

// More than any job has ranks and any parameter has blocks, and so few that a list of them is small.
constexpr int64_t kMostPartsOfACut = int64_t{1} << 20;
constexpr int64_t kMostBlocks = int64_t{1} << 20;

int64_t number(const json& value, const char* key, int64_t least, int64_t most, const std::string& where) {
  const json& found = value.at(key);
  const bool fits = found.is_number_integer() &&
                    !(found.is_number_unsigned() && found.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  require<IoError>(fits && found.get<int64_t>() >= least && found.get<int64_t>() <= most, where, ": a part's \"", key,
                   "\": expected an integer of ", least, " to ", most, ", found ", found);
  return found.get<int64_t>();
}

// Requires as few blocks as cut_problem() can add up without an overflow.
void require_blocks(const Cut& cut, int64_t extent, const std::string& where) {
  const auto blocks = static_cast<int64_t>(std::max<size_t>(cut.blocks.size(), 1));
  require<IoError>(blocks <= kMostBlocks && cut.repeats <= kMostBlocks / blocks, where, ": a part of ", blocks,
                   " blocks that are repeated ", cut.repeats, " times; expected up to ", kMostBlocks, " in all");
  int64_t sum = 0;
  for (const int64_t block : cut.blocks) {
    require<IoError>(block >= 0 && block <= extent - sum, where, ": a part's blocks: ", block, " after ", sum,
                     " elements, of a dimension that has ", extent);
    sum += block;
  }
  require<IoError>(sum == 0 || cut.repeats <= extent / sum, where, ": a part's blocks of ", sum, " elements, repeated ",
                   cut.repeats, " times, of a dimension that has ", extent);
}

}  // namespace

StoredPart stored_part_of(const TensorPart& part) {
  const int64_t extent = part.whole_sizes()[part.cut().dim];
  return {.cut = normalized(part.cut(), extent, part.count()), .index = part.index(), .count = part.count()};
}

json to_json(const StoredPart& part) {
  json result = {{"dim", part.cut.dim}, {"index", part.index}, {"count", part.count}};
  if (!part.cut.blocks.empty()) result["blocks"] = part.cut.blocks;
  if (part.cut.repeats != 1) result["repeats"] = part.cut.repeats;
  if (part.cut.grain != 1) result["grain"] = part.cut.grain;
  if (part.cut.order == PartOrder::kZigzag) result["order"] = "zigzag";
  return result;
}

StoredPart stored_part_from(const json& value, const std::string& where) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  require<IoError>(value.is_object(), where, ": expected the part that a piece is of, found ", value);
  StoredPart part;
  part.count = static_cast<int>(number(value, "count", 1, kMostPartsOfACut, where));
  part.index = static_cast<int>(number(value, "index", 0, part.count - 1, where));
  part.cut.dim = number(value, "dim", 0, kMost, where);
  if (value.contains("repeats")) part.cut.repeats = number(value, "repeats", 1, kMostBlocks, where);
  if (value.contains("grain")) part.cut.grain = number(value, "grain", 1, kMost, where);
  if (value.contains("blocks")) part.cut.blocks = json_integers<int64_t>(value["blocks"]);
  if (value.contains("order")) {
    require<IoError>(value["order"] == "zigzag", where, ": a part's \"order\": expected \"zigzag\", found ",
                     value["order"]);
    part.cut.order = PartOrder::kZigzag;
  }
  return part;
}

TensorPart tensor_part_of(const StoredPart& part, const std::vector<int64_t>& sizes, const std::string& where) {
  require<IoError>(part.cut.dim < static_cast<int64_t>(sizes.size()), where, ": a part along dimension ", part.cut.dim,
                   " of a tensor of ", sizes.size(), " dimensions");
  require_blocks(part.cut, sizes[part.cut.dim], where);
  const std::string problem = cut_problem(part.cut, sizes[part.cut.dim]);
  require<IoError>(problem.empty(), where, ": a part along dimension ", part.cut.dim, ": ", problem);
  return {sizes, part.cut, part.index, part.count};
}

std::string name_of(const StoredPart& part) { return cat("part ", part.index, " of ", part.count); }

}  // namespace ds::checkpoint
