// Files of a metric as DeepSpeed's DataAnalyzer leaves them (data/indexed_dataset.h). Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds::efficiency {

// `values[i]` is that of sample i. Writes FOLDER/NAME/NAME_index_to_sample, NAME_index_to_metric and
// NAME_sample_to_metric, .bin and .idx, each whole or not at all, in the smallest types that hold the numbers; makes
// folders on the way. Throws IoError for a file that cannot be written, UsageError without values and for more than
// 2^31 - 1 samples of one value, which the format cannot count.
void write_metric(const std::string& folder, const std::string& name, const std::vector<int64_t>& values);

}  // namespace ds::efficiency
