// Which known name did the writer mean? Torch-free.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ds {

// The known name nearest to `word`, when the two are so near that a slip is likely: at most one edit (insertion,
// deletion, substitution, swap of neighbours) for each four letters of the shorter one and at most two in all, case,
// '-' and '_' aside. Of equally near ones, one with the same first letter.
std::optional<std::string> near_miss(std::string_view word, std::span<const std::string> known);

// Number of edits between the two.
size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace ds
