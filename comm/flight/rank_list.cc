#include "comm/flight/rank_list.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <utility>

#include "core/text.h"

namespace ds::comm {
namespace {

constexpr size_t kShortestRun = 3;
// More than any job has: a damaged text names no list that fills memory.
constexpr size_t kMostRanks = size_t{1} << 20;

// One past the last of the run of equal distance that begins at `begin`.
size_t end_of_run(const std::vector<int>& ranks, size_t begin) {
  if (begin + 1 >= ranks.size()) return ranks.size();
  const int distance = ranks[begin + 1] - ranks[begin];
  size_t end = begin + 2;
  while (distance > 0 && end < ranks.size() && ranks[end] - ranks[end - 1] == distance) ++end;
  return end - begin < kShortestRun ? begin + 1 : end;
}

bool read_number(const char*& at, const char* end, int& value) {
  const auto [next, error] = std::from_chars(at, end, value);
  if (error != std::errc()) return false;
  at = next;
  return true;
}

}  // namespace

std::string rank_list_text(const std::vector<int>& ranks) {
  std::string text;
  for (size_t begin = 0; begin < ranks.size();) {
    const size_t end = end_of_run(ranks, begin);
    text += cat(text.empty() ? "" : ",", ranks[begin]);
    if (end - begin >= kShortestRun) {
      const int distance = ranks[begin + 1] - ranks[begin];
      text += cat("-", ranks[end - 1], distance == 1 ? "" : cat("/", distance));
    }
    begin = end;
  }
  return text;
}

std::vector<int> parse_rank_list(const std::string& text) {
  std::vector<int> ranks;
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  while (at < end) {
    int first = 0;
    int last = 0;
    int distance = 1;
    if (!read_number(at, end, first)) break;
    last = first;
    if (at < end && *at == '-') {
      ++at;
      if (!read_number(at, end, last)) break;
      if (at < end && *at == '/') {
        ++at;
        if (!read_number(at, end, distance) || distance < 1) break;
      }
    }
    for (int64_t rank = first; rank <= last && ranks.size() < kMostRanks; rank += distance) {
      ranks.push_back(static_cast<int>(rank));
    }
    if (at < end) {
      if (*at != ',') break;
      ++at;
    }
  }
  return ranks;
}

std::string ranks_in_words(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string text = rank_list_text(ranks);
  if (ranks.size() == 1) return "rank " + text;
  if (const size_t comma = text.rfind(','); comma != std::string::npos) text.replace(comma, 1, " and ");
  for (size_t at = text.find(','); at != std::string::npos; at = text.find(',', at + 2)) text.replace(at, 1, ", ");
  return "ranks " + text;
}

// A phase of more than one word is none of the engine's calls.
std::string of_phase(const std::string& phase) {
  return phase.empty() || phase.find(' ') != std::string::npos ? "" : cat(" of ", phase, "()");
}

std::string phases_in_words(const std::map<std::string, std::vector<int>>& ranks_of_phase) {
  if (ranks_of_phase.size() < 2 || ranks_of_phase.contains("")) return "";
  std::vector<std::pair<std::vector<int>, std::string>> by_rank;
  for (const auto& [phase, ranks] : ranks_of_phase) {
    by_rank.emplace_back(ranks, of_phase(phase).empty() ? phase : phase + "()");
  }
  std::sort(by_rank.begin(), by_rank.end());
  std::string text;
  for (const auto& [ranks, phase] : by_rank) {
    const char* const verb = ranks.size() == 1 ? " is in " : " are in ";
    text += cat(text.empty() ? "" : ", ", ranks_in_words(ranks), text.empty() ? verb : " in ", phase);
  }
  return text + "; ";
}

}  // namespace ds::comm
