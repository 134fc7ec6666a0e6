#include "config/elastic_batch.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <set>

#include "core/check.h"

namespace ds::engine::config {
namespace {

// DeepSpeed's list: the highly composite numbers up to 720720.
constexpr std::array<int64_t, 38> kHighlyComposite = {
    1,     2,     4,     6,      12,     24,     36,     48,     60,     120,    180,    240,   360,
    720,   840,   1260,  1680,   2520,   5040,   7560,   10080,  15120,  20160,  25200,  27720, 45360,
    50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720};

// The search of both versions: sizes are ranks (0.1) or nodes (0.2).
struct Search {
  std::vector<int64_t> micro_batches;
  int64_t max_batch = 0;
  int64_t min_size = 1, max_size = 1;
  bool prefer_larger = true;
};

struct Found {
  int64_t batch = 0;
  std::vector<int64_t> sizes;
};

int64_t common_multiple(const std::vector<int64_t>& numbers) {
  int64_t multiple = 1;
  for (const int64_t number : numbers) {
    const int64_t factor = number / std::gcd(multiple, number);
    require<ConfigError>(!__builtin_mul_overflow(multiple, factor, &multiple),
                         "micro_batch_sizes have no common multiple below 2^63; use fewer, or smaller ones");
  }
  return multiple;
}

int64_t scaled(int64_t base, int64_t max_batch) {
  const auto above = std::upper_bound(kHighlyComposite.begin(), kHighlyComposite.end(), max_batch / base);
  return *(above - 1) * base;
}

// Sizes that split the batch into micro-batches of one of the given sizes.
std::vector<int64_t> valid_sizes(int64_t batch, const Search& search) {
  std::set<int64_t> sizes;
  const auto add = [&](int64_t size) {
    if (search.min_size <= size && size <= search.max_size) sizes.insert(size);
  };
  for (const int64_t micro : search.micro_batches) {
    if (batch % micro != 0) continue;
    const int64_t count = batch / micro;
    // The other divisor of a pair is beyond max_size when this one is.
    for (int64_t divisor = 1; divisor <= std::min(count / divisor, search.max_size); ++divisor) {
      if (count % divisor != 0) continue;
      add(divisor);
      add(count / divisor);
    }
  }
  return {sizes.begin(), sizes.end()};
}

Found best_batch(const Search& search) {
  const int64_t largest = *std::max_element(search.micro_batches.begin(), search.micro_batches.end());
  require<ConfigError>(largest <= search.max_batch, "micro_batch_sizes has ", largest, ", above the ", search.max_batch,
                       " samples of max_train_batch_size for one rank of each node; raise the one or lower the other");
  std::vector<int64_t> bases = search.micro_batches;
  bases.push_back(common_multiple(search.micro_batches));
  Found best{.batch = *std::min_element(search.micro_batches.begin(), search.micro_batches.end()), .sizes = {}};
  for (const int64_t base : bases) {
    if (base > search.max_batch) continue;  // the common multiple
    Found candidate{.batch = scaled(base, search.max_batch), .sizes = {}};
    candidate.sizes = valid_sizes(candidate.batch, search);
    const bool preferred = search.prefer_larger ? candidate.batch > best.batch : candidate.batch < best.batch;
    const size_t count = candidate.sizes.size();
    if (count > best.sizes.size() || (count == best.sizes.size() && preferred)) best = std::move(candidate);
  }
  return best;
}

bool is_version(double given, double version) { return given == version; }

void check_section(const ElasticitySection& s) {
  require<ConfigError>(is_version(s.version, 0.1) || is_version(s.version, 0.2), "version: expected 0.1 or 0.2, found ",
                       s.version);
  require<ConfigError>(s.min_gpus <= s.max_gpus, "min_gpus: expected at most max_gpus, found ", s.min_gpus, " and ",
                       s.max_gpus);
  require<ConfigError>(!s.micro_batch_sizes->empty(), "micro_batch_sizes: expected integers > 0, found none");
  for (const int64_t micro : *s.micro_batch_sizes) {
    require<ConfigError>(micro > 0, "micro_batch_sizes: expected integers > 0, found ", micro);
  }
  require<ConfigError>(s.model_parallel_size == 1 || is_version(s.version, 0.2),
                       "model_parallel_size: version 0.1 knows 1 only, found ", s.model_parallel_size,
                       "; use version 0.2");
  require<ConfigError>(is_version(s.version, 0.1) || s.num_gpus_per_node % s.model_parallel_size == 0,
                       "num_gpus_per_node: expected a multiple of model_parallel_size ", s.model_parallel_size,
                       ", found ", s.num_gpus_per_node);
}

Found search_ranks(const ElasticitySection& s) {
  return best_batch({.micro_batches = *s.micro_batch_sizes,
                     .max_batch = *s.max_train_batch_size,
                     .min_size = s.min_gpus,
                     .max_size = s.max_gpus,
                     .prefer_larger = s.prefer_larger_batch});
}

// Whole nodes. Limits below one node mean none, as in DeepSpeed.
Found search_nodes(const ElasticitySection& s) {
  const int64_t ranks_of_node = s.num_gpus_per_node / s.model_parallel_size;
  const int64_t max_batch = *s.max_train_batch_size / ranks_of_node;
  const int64_t smallest = *std::min_element(s.micro_batch_sizes->begin(), s.micro_batch_sizes->end());
  const int64_t max_nodes = s.max_gpus / s.num_gpus_per_node;
  Found found = best_batch({.micro_batches = *s.micro_batch_sizes,
                            .max_batch = max_batch,
                            .min_size = std::max<int64_t>(1, s.min_gpus / s.num_gpus_per_node),
                            .max_size = max_nodes > 0 ? max_nodes : max_batch / smallest,
                            .prefer_larger = s.prefer_larger_batch});
  require<ConfigError>(!__builtin_mul_overflow(found.batch, ranks_of_node, &found.batch),
                       "the batch does not fit 64 bits; use smaller sizes");
  for (int64_t& size : found.sizes) size *= ranks_of_node;
  return found;
}

// Version 0.2 does this with a size that is not valid: it takes the largest (or smallest) batch that some micro-batch
// size gives within the limit. 0: there is none.
int64_t batch_for_any(const ElasticitySection& s, int64_t size) {
  int64_t best = s.prefer_larger_batch ? 0 : std::numeric_limits<int64_t>::max();
  for (const int64_t micro : *s.micro_batch_sizes) {
    int64_t unit = 0;
    const bool fits = !__builtin_mul_overflow(micro, size, &unit);
    const int64_t batch = fits ? *s.max_train_batch_size / unit * unit : 0;
    best = s.prefer_larger_batch ? std::max(best, batch) : std::min(best, batch);
  }
  return best;
}

}  // namespace

std::string nearest_sizes(const std::vector<int64_t>& valid, int64_t size) {
  if (valid.empty()) return "none";
  const auto above = std::upper_bound(valid.begin(), valid.end(), size);
  if (above == valid.begin()) return cat(*above);
  if (above == valid.end()) return cat(*(above - 1));
  return cat(*(above - 1), " or ", *above);
}

ElasticBatch elastic_batch(const ElasticitySection& section, int64_t data_parallel_size) {
  check_section(section);
  const bool by_nodes = is_version(section.version, 0.2);
  const Found found = by_nodes ? search_nodes(section) : search_ranks(section);
  ElasticBatch result{.train = found.batch, .valid = found.sizes, .train_of_valid = found.batch};
  if (!std::binary_search(found.sizes.begin(), found.sizes.end(), data_parallel_size)) {
    if (by_nodes) result.train = batch_for_any(section, data_parallel_size);
    require<ConfigError>(by_nodes && result.train > 0, data_parallel_size, " data-parallel ",
                         data_parallel_size == 1 ? "rank is" : "ranks are", " no valid world size for the batch of ",
                         found.batch, " that max_train_batch_size ", *section.max_train_batch_size,
                         " and micro_batch_sizes give; nearest valid: ",
                         lazy([&] { return nearest_sizes(found.sizes, data_parallel_size); }));
  }
  const int64_t of_rank = result.train / data_parallel_size;
  for (const int64_t micro : *section.micro_batch_sizes) {
    if (of_rank % micro == 0) result.micro = std::max(result.micro, micro);
  }
  result.accumulation = of_rank / result.micro;
  return result;
}

}  // namespace ds::engine::config
