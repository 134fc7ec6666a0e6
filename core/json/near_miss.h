// Finds the known name that a misspelled word was meant for. Torch-free.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ds {

// Known names, prepared so that thousands of words can be asked for: what a word costs grows with its own length and
// the number of names that are about as long.
class NearMisses {
 public:
  explicit NearMisses(std::span<const std::string> known);

  // The known name nearest to `word`, when the two are so near that a slip is likely: at most one edit (insertion,
  // deletion, substitution, swap of neighbours) for each four letters of the shorter one and at most two in all, case,
  // '-' and '_' aside. Of equally near ones, one with the same first letter.
  std::optional<std::string> of(std::string_view word) const;

 private:
  struct Name {
    std::string text;
    std::string letters;  // without case, '-' and '_'
  };
  std::vector<Name> names_;
};

// The known name nearest to one word, as NearMisses::of().
std::optional<std::string> near_miss(std::string_view word, std::span<const std::string> known);

// The number of edits between the two; more than `most` may come out as any larger number.
size_t edit_distance(std::string_view a, std::string_view b, size_t most = std::string_view::npos);

}  // namespace ds
