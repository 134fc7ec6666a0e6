#include "engine/report/non_finite.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/text.h"

namespace ds::engine {
namespace {

using nlohmann::json;

constexpr size_t kMostRanks = 4;  // that a report names

// " (samples 17, 99 of the training data)"
std::string in_brackets(const std::string& batch) { return batch.empty() ? "" : cat(" (", batch, ")"); }

std::string describe_element(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks) {
  const NonFiniteFacts::Element* first = nullptr;
  size_t first_rank = 0;
  const auto place = [](const NonFiniteFacts::Element& e) { return std::tuple(e.stage, e.parameter, e.offset); };
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& element = ranks[rank].element;
    if (!element || (first && place(*first) <= place(*element))) continue;
    first = &*element;
    first_rank = rank;
  }
  if (question.late) return cat("its norm is ", name_of_non_finite(question.norm));
  if (!first) return cat("its norm is ", name_of_non_finite(question.norm), " although all its elements are finite");
  return cat("first in parameter ", first->name, ", element ", first->offset,
             question.own_gradients ? cat(" of rank ", first_rank, "'s own gradient") : "", ", which is ",
             first->value);
}

std::string and_more(size_t found) {
  if (found <= kMostRanks) return {};
  return cat("; likewise on ", found - kMostRanks, " more rank", found == kMostRanks + 1 ? "" : "s");
}

std::string describe_losses(const std::vector<NonFiniteFacts>& ranks) {
  std::string text;
  size_t found = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& loss = ranks[rank].loss;
    if (!loss || ++found > kMostRanks) continue;
    text += cat("; rank ", rank, "'s loss of micro-batch ", loss->micro_batch, in_brackets(loss->batch), " is ",
                loss->value);
    if (loss->others > 0) text += cat(" (", loss->others, " more after it)");
  }
  return text.empty() ? "; all losses are finite" : text + and_more(found);
}

std::string describe_local(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks) {
  if (!question.located) {
    const bool any_loss = std::any_of(ranks.begin(), ranks.end(), [](const auto& facts) { return facts.loss; });
    if (question.late)
      return "; \"locate_non_finite\": true in the ds_config finds the parameter, the rank and the micro-batch";
    if (any_loss || question.expected) return {};
    return "; \"locate_non_finite\": true in the ds_config finds the rank and the micro-batch";
  }
  using Found = std::pair<size_t, const NonFiniteFacts::Local*>;
  std::vector<Found> found;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].local) found.emplace_back(rank, &*ranks[rank].local);
  }
  if (found.empty())
    return "; what autograd made on each rank is finite, so it overflowed when it was added or reduced";
  // Within a pipeline a bad gradient goes on to the ranks before.
  const auto place = [](const Found& f) { return std::pair(f.second->micro_batch, f.second->ranks_before); };
  std::stable_sort(found.begin(), found.end(),
                   [&place](const Found& a, const Found& b) { return place(a) < place(b); });
  std::string text;
  for (size_t i = 0; i < std::min(found.size(), kMostRanks); ++i) {
    const NonFiniteFacts::Local& local = *found[i].second;
    text += cat("; the first that rank ", found[i].first, "'s autograd made is that of parameter ", local.parameter);
    if (local.micro_batch < 0) continue;
    const auto& loss = ranks[found[i].first].loss;  // has named the batch
    const bool named = loss && loss->micro_batch == local.micro_batch;
    text += cat(" in micro-batch ", local.micro_batch, named ? "" : in_brackets(local.batch));
  }
  return text + and_more(found.size());
}

}  // namespace

std::string name_of_non_finite(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

std::string to_text(const NonFiniteFacts& facts) {
  json text = json::object();
  if (const auto& e = facts.element) text["element"] = {e->stage, e->parameter, e->offset, e->name, e->value};
  if (const auto& l = facts.loss) text["loss"] = {l->micro_batch, l->batch, l->value, l->others};
  if (const auto& l = facts.local) text["local"] = {l->micro_batch, l->batch, l->parameter, l->ranks_before};
  // Names are the program's: one that is no UTF-8 must not keep this rank from the others.
  return text.dump(-1, ' ', false, json::error_handler_t::replace);
}

NonFiniteFacts non_finite_facts(const std::string& text) {
  const json read = json::parse(text);
  NonFiniteFacts facts;
  const auto number = [](const json& list, size_t i) { return list.at(i).get<int64_t>(); };
  const auto word = [](const json& list, size_t i) { return list.at(i).get<std::string>(); };
  if (const auto e = read.find("element"); e != read.end()) {
    facts.element = {number(*e, 0), number(*e, 1), number(*e, 2), word(*e, 3), word(*e, 4)};
  }
  if (const auto l = read.find("loss"); l != read.end()) {
    facts.loss = {number(*l, 0), word(*l, 1), word(*l, 2), number(*l, 3)};
  }
  if (const auto l = read.find("local"); l != read.end()) {
    facts.local = {number(*l, 0), word(*l, 1), word(*l, 2), number(*l, 3)};
  }
  return facts;
}

std::string describe_non_finite(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks) {
  return cat("the gradient is not finite: ", describe_element(question, ranks), describe_losses(ranks),
             describe_local(question, ranks));
}

}  // namespace ds::engine
