#include "engine/setup/head_rows.h"

#include <algorithm>
#include <exception>

#include "comm/agreement.h"
#include "config/split/layer_names.h"
#include "core/check.h"

namespace ds::engine {
namespace {

std::vector<int64_t> rows_by_name(const std::vector<zero::Parameter>& parameters, int64_t head_dim) {
  std::vector<int64_t> rows;
  for (const zero::Parameter& parameter : parameters) {
    const std::vector<int64_t> sizes = parameter.whole_sizes();
    const bool heads = sizes.size() == 2 && makes_heads(parameter.name);
    require<ConfigError>(!heads || sizes[0] % head_dim == 0, "optimizer.params.per_head_muon: ", parameter.name,
                         ": expected whole heads of optimizer.params.head_dim ", head_dim, " rows, found ", sizes[0],
                         " rows; correct head_dim, or set per_head_muon to false");
    rows.push_back(heads ? head_dim : 0);
  }
  return rows;
}

}  // namespace

std::vector<int64_t> head_rows(const std::vector<zero::Parameter>& parameters, int64_t head_dim, const Ranks& ranks) {
  std::vector<int64_t> rows;
  std::exception_ptr failure;
  try {
    rows = rows_by_name(parameters, head_dim);
  } catch (const ConfigError&) {
    failure = std::current_exception();
  }
  const int failed = failed_rank(failure, ranks.device, *ranks.world);
  require<ConfigError>(failed < 0, "optimizer.params.per_head_muon: rank ", failed, " has a weight whose rows ",
                       "optimizer.params.head_dim ", head_dim, " does not divide, which it names");
  const auto found = static_cast<int64_t>(rows.size()) - std::count(rows.begin(), rows.end(), 0);
  require<ConfigError>(largest_of_ranks(found, ranks.device, *ranks.world, "weights of heads") > 0,
                       "optimizer.params.per_head_muon: expected weights of queries, keys or values in layers named ",
                       "q_proj, k_proj, v_proj, query, key, value, wq, wk, wv, qkv, qkv_proj, query_key_value or ",
                       "Wqkv, or torch::nn::MultiheadAttention's, found none; rename the layers, or set it to false");
  return rows;
}

}  // namespace ds::engine
