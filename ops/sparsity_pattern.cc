#include "dsengine/sparsity_pattern.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/splitmix64.h"

namespace ds::ops {
namespace {

uint64_t next_key(uint64_t key, int64_t number) {
  return splitmix64(key + kSplitMixGamma * static_cast<uint64_t>(number));
}

// One head's blocks, as they are added.
class HeadLayout {
 public:
  HeadLayout(const SparsityPattern& pattern, int64_t head, int64_t blocks, uint64_t seed)
      : p_(pattern), n_(blocks), kept_(static_cast<size_t>(blocks * blocks)) {
    switch (p_.mode) {
      case SparsityMode::kDense:
        fill(0, n_, 0, n_);
        break;
      case SparsityMode::kFixed:
        add_windows({p_.num_local_blocks});
        add_window_columns(head);
        break;
      case SparsityMode::kVariable:
        add_random_columns(head, seed);
        add_windows(p_.local_window_blocks);
        add_global_blocks(p_.horizontal_global_attention);
        break;
      case SparsityMode::kBigBird:
        add_random_columns(head, seed);
        add_sliding_window();
        add_global_range(0, p_.num_global_blocks, true);
        break;
      case SparsityMode::kBSLongformer:
        add_sliding_window();
        add_global_blocks(true);
        break;
      case SparsityMode::kSlidingWindow:
        add_sliding_window();
        break;
    }
    if (p_.unidirectional) {
      for (int64_t row = 0; row < n_; ++row) std::fill(at(row, row + 1), at(row, n_), uint8_t{0});
    }
  }

  std::vector<uint8_t> take() { return std::move(kept_); }

 private:
  std::vector<uint8_t>::iterator at(int64_t row, int64_t column) { return kept_.begin() + row * n_ + column; }

  void fill(int64_t row, int64_t rows_end, int64_t column, int64_t columns_end) {
    for (; row < std::min(rows_end, n_); ++row) std::fill(at(row, column), at(row, std::min(columns_end, n_)), 1);
  }

  void add_windows(const std::vector<int64_t>& sizes) {
    int64_t begin = 0;
    for (size_t i = 0; begin < n_; ++i) {
      const int64_t size = sizes[std::min(i, sizes.size() - 1)];
      fill(begin, begin + size, begin, begin + size);
      begin += size;
    }
  }

  void add_sliding_window() {
    const int64_t side = p_.num_sliding_window_blocks / 2;
    for (int64_t row = 0; row < n_; ++row) fill(row, row + 1, std::max<int64_t>(0, row - side), row + side + 1);
  }

  void add_global_range(int64_t begin, int64_t end, bool horizontal) {
    if (begin >= n_) return;
    fill(0, n_, begin, end);
    if (horizontal) fill(begin, end, 0, n_);
  }

  void add_global_blocks(bool horizontal) {
    for (size_t i = 0; i < p_.global_block_indices.size(); ++i) {
      const int64_t begin = p_.global_block_indices[i];
      add_global_range(begin, p_.global_block_end_indices ? (*p_.global_block_end_indices)[i] : begin + 1, horizontal);
    }
  }

  // Of each window the columns of its last blocks, of other patterns those before them. A last window that is short
  // has as much of that as fits.
  void add_window_columns(int64_t head) {
    const int64_t local = p_.num_local_blocks;
    const int64_t global = p_.num_global_blocks;
    const int64_t first = local - (1 + head % p_.num_different_global_patterns) * global;
    const int64_t whole = n_ - n_ % local;
    for (int64_t begin = first; begin < whole; begin += local) {
      add_global_range(begin, begin + global, p_.horizontal_global_attention);
    }
    if (whole == n_) return;
    const int64_t begin = std::max<int64_t>(0, std::min(whole + first, n_ - global));
    add_global_range(begin, begin + global, p_.horizontal_global_attention);
  }

  void add_random_columns(int64_t head, uint64_t seed) {
    const uint64_t of_head = next_key(splitmix64(seed), head);
    for (int64_t row = 0; row < n_; ++row) {
      const uint64_t of_row = next_key(of_head, row);
      const int64_t columns = p_.unidirectional ? row + 1 : n_;
      std::vector<std::pair<uint64_t, int64_t>> keys;
      for (int64_t column = 0; column < columns; ++column) keys.emplace_back(next_key(of_row, column), column);
      const int64_t drawn = std::min(p_.num_random_blocks, columns);
      std::nth_element(keys.begin(), keys.begin() + drawn, keys.end());
      for (int64_t i = 0; i < drawn; ++i) *at(row, keys[static_cast<size_t>(i)].second) = 1;
    }
  }

  const SparsityPattern& p_;
  int64_t n_;
  std::vector<uint8_t> kept_;
};

std::string problem_of_global_blocks(const SparsityPattern& p) {
  for (const int64_t index : p.global_block_indices) {
    if (index < 0) return cat("global_block_indices: expected indices >= 0, found ", index);
  }
  if (!p.global_block_end_indices) return {};
  const std::vector<int64_t>& ends = *p.global_block_end_indices;
  if (ends.size() != p.global_block_indices.size()) {
    return cat("global_block_end_indices: expected as many as global_block_indices, ", p.global_block_indices.size(),
               ", found ", ends.size());
  }
  for (size_t i = 0; i < ends.size(); ++i) {
    if (ends[i] <= p.global_block_indices[i]) {
      return cat("global_block_end_indices: expected an end beyond global_block_indices[", i,
                 "] = ", p.global_block_indices[i], ", found ", ends[i]);
    }
  }
  return {};
}

using NamedNumbers = std::initializer_list<std::pair<const char*, int64_t>>;

std::string problem_of_positive(NamedNumbers numbers) {
  for (const auto& [name, value] : numbers) {
    if (value < 1) return cat(name, ": expected an integer > 0, found ", value);
  }
  return {};
}

std::string problem_of_fixed(const SparsityPattern& p) {
  std::string problem = problem_of_positive({{"num_local_blocks", p.num_local_blocks},
                                             {"num_global_blocks", p.num_global_blocks},
                                             {"num_different_global_patterns", p.num_different_global_patterns}});
  if (!problem.empty()) return problem;
  if (p.num_local_blocks % p.num_global_blocks != 0) {
    return cat("num_local_blocks: expected a multiple of num_global_blocks, ", p.num_global_blocks, ", found ",
               p.num_local_blocks);
  }
  const int64_t most = p.num_local_blocks / p.num_global_blocks;
  if (p.num_different_global_patterns > most) {
    return cat("num_different_global_patterns: expected at most num_local_blocks / num_global_blocks = ", most,
               ", found ", p.num_different_global_patterns);
  }
  if (p.num_different_global_patterns > 1 && !p.different_layout_per_head) {
    return cat("num_different_global_patterns: expected 1, since different_layout_per_head is false, found ",
               p.num_different_global_patterns);
  }
  return {};
}

// Whether heads may have different layouts.
bool heads_differ(const SparsityPattern& p) {
  const bool draws = (p.mode == SparsityMode::kVariable || p.mode == SparsityMode::kBigBird) && p.num_random_blocks > 0;
  return p.different_layout_per_head &&
         (draws || (p.mode == SparsityMode::kFixed && p.num_different_global_patterns > 1));
}

}  // namespace

std::string problem_of(const SparsityPattern& p) {
  using Mode = SparsityMode;
  if (std::string problem = problem_of_positive({{"block", p.block}}); !problem.empty()) return problem;
  if (p.mode == Mode::kBigBird || p.mode == Mode::kBSLongformer || p.mode == Mode::kSlidingWindow) {
    std::string problem = problem_of_positive({{"num_sliding_window_blocks", p.num_sliding_window_blocks}});
    if (!problem.empty()) return problem;
  }
  if (p.mode == Mode::kBigBird && p.num_global_blocks < 0) {
    return cat("num_global_blocks: expected an integer >= 0, found ", p.num_global_blocks);
  }
  if ((p.mode == Mode::kVariable || p.mode == Mode::kBigBird) && p.num_random_blocks < 0) {
    return cat("num_random_blocks: expected an integer >= 0, found ", p.num_random_blocks);
  }
  const bool windows = p.mode == Mode::kFixed || p.mode == Mode::kVariable;
  if (windows && p.unidirectional && p.horizontal_global_attention) {
    return "horizontal_global_attention: expected false, since attention is unidirectional; or set attention to "
           "bidirectional";
  }
  if (p.mode == Mode::kFixed) return problem_of_fixed(p);
  if (p.mode == Mode::kVariable) {
    if (p.local_window_blocks.empty()) return "local_window_blocks: expected at least one size, found none";
    for (const int64_t size : p.local_window_blocks) {
      if (size < 1) return cat("local_window_blocks: expected integers > 0, found ", size);
    }
  }
  const bool global = p.mode == Mode::kVariable || p.mode == Mode::kBSLongformer;
  return global ? problem_of_global_blocks(p) : std::string();
}

int64_t BlockLayout::count() const { return std::accumulate(kept.begin(), kept.end(), int64_t{0}); }

BlockLayout block_layout(const SparsityPattern& pattern, int64_t heads, int64_t length, uint64_t seed) {
  const std::string problem = problem_of(pattern);
  require(problem.empty(), "block_layout: ", problem);
  require(heads > 0 && length > 0, "block_layout: expected heads > 0 and length > 0, found ", heads, " and ", length);
  BlockLayout layout{.heads = heads_differ(pattern) ? heads : 1,
                     .blocks = (length + pattern.block - 1) / pattern.block,
                     .block = pattern.block,
                     .kept = {},
                     .causal = pattern.unidirectional};
  for (int64_t head = 0; head < layout.heads; ++head) {
    const std::vector<uint8_t> own = HeadLayout(pattern, head, layout.blocks, seed).take();
    layout.kept.insert(layout.kept.end(), own.begin(), own.end());
  }
  return layout;
}

}  // namespace ds::ops
