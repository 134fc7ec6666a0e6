// Lists of ranks as short text, and back, and what the program does on each. Torch-free.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace ds::comm {

// Writes runs of equal distance: "0-3,8", "0-4088/8" (every eighth). `ranks` in any order, which is kept.
std::string rank_list_text(const std::vector<int>& ranks);

// Reads such a list; a text that was cut gives the ranks before the cut.
std::vector<int> parse_rank_list(const std::string& text);

// Writes ranks for sentences: "rank 3", "ranks 0, 1 and 5", "ranks 0-6 and 9". Ascending.
std::string ranks_in_words(std::vector<int> ranks);

// Writes " of backward()" for an operation of this phase, and nothing where the program itself runs or no phase is
// known.
std::string of_phase(const std::string& phase);
// Writes "rank 0 is in save_checkpoint(), ranks 1-3 in backward(); ", from the ranks of each phase. Nothing where all
// are in one phase, or nothing is known of some.
std::string phases_in_words(const std::map<std::string, std::vector<int>>& ranks_of_phase);

}  // namespace ds::comm
