// The text of a LibTorch exception without its stack, for a message of ours. Torch-free.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace ds {

// Returns the text before "Exception raised from ..." and the frames after it.
inline std::string without_stack(std::string_view text) {
  for (const std::string_view begin : {"\nException raised from ", "\nframe #"}) {
    text = text.substr(0, std::min(text.find(begin), text.size()));
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '.')) text.remove_suffix(1);
  return std::string(text);
}

}  // namespace ds
