#include "data/token_metrics.h"

#include <cmath>
#include <cstring>
#include <unordered_map>

#include "core/check.h"

namespace ds::efficiency {

TokenFile::TokenFile(const std::string& path, int bytes)
    : path_(path), file_(path), bytes_(bytes), size_(static_cast<int64_t>(file_.bytes().size()) / bytes) {
  require(bytes == 1 || bytes == 2 || bytes == 4, "tokens: expected 1, 2 or 4 bytes each, found ", bytes);
  require<IoError>(file_.bytes().size() % static_cast<size_t>(bytes) == 0, path, ": expected tokens of ", bytes,
                   " bytes, found ", file_.bytes().size(), " bytes");
}

uint32_t TokenFile::token(int64_t place) const {
  uint32_t token = 0;
  std::memcpy(&token, file_.bytes().data() + place * bytes_, static_cast<size_t>(bytes_));
  return token;
}

void TokenFile::cut_by_length(int64_t length) {
  require(length > 0, "samples: expected a length > 0, found ", length);
  require<ConfigError>(size_ > length, path_, ": expected at least ", length, " tokens and one that follows, found ",
                       size_);
  begins_.clear();
  for (int64_t begin = 0; begin < size_ - length; begin += length) begins_.push_back(begin);
  lengths_.assign(begins_.size(), length);
}

void TokenFile::cut_at(uint32_t separator) {
  begins_.clear();
  lengths_.clear();
  int64_t begin = 0;
  for (int64_t place = 0; place <= size_; ++place) {
    if (place < size_ && token(place) != separator) continue;
    if (place > begin) {
      begins_.push_back(begin);
      lengths_.push_back(place - begin);
    }
    begin = place + 1;
  }
  require<ConfigError>(!begins_.empty(), path_, ": expected tokens between those that separate samples, found none");
}

std::vector<int64_t> TokenFile::vocabulary_rarity() const {
  std::unordered_map<uint32_t, double> rarity;
  for (int64_t place = 0; place < size_; ++place) rarity[token(place)] += 1;
  for (auto& [token, value] : rarity) value = -std::log(value / static_cast<double>(size_));
  std::vector<int64_t> result;
  for (size_t i = 0; i < begins_.size(); ++i) {
    double sum = 0;
    for (int64_t place = begins_[i]; place < begins_[i] + lengths_[i]; ++place) sum += rarity.at(token(place));
    result.push_back(static_cast<int64_t>(sum));
  }
  return result;
}

}  // namespace ds::efficiency
