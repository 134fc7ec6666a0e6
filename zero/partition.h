// The layout of parameters in buckets and of buckets in slices. config/plan limits buckets by reduce_bucket_size. Pure
// arithmetic, torch-free.
//
// A bucket is a flat buffer of parameters that share group, dtype and trainability, cut at module boundaries. It is
// split into W equal slices; slice r belongs to rank r (the partitioning of ZeRO, Rajbhandari et al., arXiv:1910.02054,
// with buckets in place of one flat buffer so that reduction and gathering overlap with compute).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/slices/segment.h"

namespace ds::zero {

// Parameters start at multiples of this inside a bucket (64 bytes of float32), and so do slices.
inline constexpr int64_t kAlignment = 16;

struct LayoutParameter {
  std::string name;  // dotted; the dots are the module tree
  int64_t numel = 0;
  int group = 0;            // hyper-parameter group; groups never share a bucket
  int dtype = 0;            // opaque; dtypes never share a bucket
  bool persistent = false;  // stays full at stage 3; does not share a bucket with those that do not
  // Opaque: a dtype of its own in which ranks send it; never shares a bucket with others. Empty: that of all.
  std::optional<int> sent_as = std::nullopt;
  // Above 0: a row-wise table of rows of so many elements. It is laid out alone, in slices of whole rows.
  int64_t row_width = 0;
};

struct LayoutOptions {
  int world_size = 1;                       // slices per bucket
  int64_t max_bucket_elements = 500000000;  // a larger parameter has a bucket of its own
  // Buckets grow to about this size by joining neighbouring modules; 0 = an eighth of the model, at least 1 Mi
  // elements.
  int64_t target_bucket_elements = 0;
  int64_t most_target_elements = 0;  // the limit of that eighth; 0: none
};

struct BucketLayout {
  std::vector<Segment> segments;  // ascending; slice_offset counts from the start of the bucket; gaps are padding
  int64_t numel = 0;              // elements with padding; a multiple of world_size * kAlignment
  int64_t slice_numel = 0;        // numel / world_size
  int group = 0;
  int dtype = 0;
  bool persistent = false;
  std::optional<int> sent_as;
  // Above 0: the bucket is one row-wise table, whose gradients, updates and new weights are rows of so many elements.
  int64_t row_width = 0;
};

// The target size of buckets for a model of so many elements when LayoutOptions names none.
int64_t default_target_elements(int64_t parameters);

// Lays `parameters` (in module order) into buckets, in the order of their first parameter. Every parameter is in
// exactly one bucket. A row-wise table has to come alone. Throws UsageError for a non-positive limit or world size.
std::vector<BucketLayout> lay_out(const std::vector<LayoutParameter>& parameters, const LayoutOptions& options);

// The slice of `bucket` that rank `rank` owns: segments with slice_offset counted from the start of the slice.
std::vector<Segment> slice_segments(const BucketLayout& bucket, int rank);

// Runs of elements in [0, bucket.numel) that no parameter covers, as {offset, length}.
std::vector<std::pair<int64_t, int64_t>> padding_of(const BucketLayout& bucket);

}  // namespace ds::zero
