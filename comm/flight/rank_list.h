// Lists of ranks as short text, and back. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace ds::comm {

// Writes runs of equal distance: "0-3,8", "0-4088/8" (every eighth). `ranks` in any order, which is kept.
std::string rank_list_text(const std::vector<int>& ranks);

// Reads such a list; a text that was cut gives the ranks before the cut.
std::vector<int> parse_rank_list(const std::string& text);

// Writes ranks for sentences: "rank 3", "ranks 0, 1 and 5", "ranks 0-6 and 9". Ascending.
std::string ranks_in_words(std::vector<int> ranks);

}  // namespace ds::comm
