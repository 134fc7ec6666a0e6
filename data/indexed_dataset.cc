#include "data/indexed_dataset.h"

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace ds::efficiency {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian and read as they lie");

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr size_t kHeaderBytes = kMagic.size() + 8 + 1 + 8 + 8;
constexpr size_t kRowBytes = 4 + 8;  // of a row in the index
constexpr size_t kDocumentBytes = 8;

// Codes of DeepSpeed's indexed_dataset.py: uint8, int8, int16, int32, int64, uint16, uint32, uint64. Megatron-LM has
// float64, float32 and uint16 under 6 to 8; the bytes of an element tell them apart.
constexpr int kUint16 = 6;
constexpr int kMegatronUint16 = 8;
constexpr std::array<int64_t, 9> kElementBytes = {0, 1, 1, 2, 4, 8, 2, 4, 8};

template <class T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

IndexedDataset::IndexedDataset(std::string path)
    : path_(std::move(path)), index_(path_ + ".idx"), data_(path_ + ".bin") {
  read_header();
  recognise_megatron();
  check_rows();
}

void IndexedDataset::wrong(const char* file, const std::string& what) const {
  throw IoError(cat(path_, file, ": ", what,
                    "; expected a file that DeepSpeed's DataAnalyzer or Megatron-LM wrote, of integers"));
}

void IndexedDataset::read_header() {
  const size_t bytes = index_.bytes().size();
  const uint8_t* const header = index_.bytes().data();
  if (bytes < kHeaderBytes) wrong(".idx", cat("found ", bytes, " bytes, less than the header's ", kHeaderBytes));
  if (std::memcmp(header, kMagic.data(), kMagic.size()) != 0) wrong(".idx", "does not begin with MMIDIDX");
  const auto version = read<uint64_t>(header + kMagic.size());
  if (version != 1) wrong(".idx", cat("found version ", version, ", expected 1"));
  dtype_ = header[kMagic.size() + 8];
  if (dtype_ < 1 || dtype_ >= static_cast<int>(kElementBytes.size())) {
    wrong(".idx", cat("found dtype code ", dtype_, ", expected 1 to ", kElementBytes.size() - 1));
  }
  element_bytes_ = kElementBytes.at(static_cast<size_t>(dtype_));
  const auto rows = read<uint64_t>(header + kHeaderBytes - 16);
  const auto documents = read<uint64_t>(header + kHeaderBytes - 8);
  const size_t rest = bytes - kHeaderBytes;
  // Each by itself first, so that no product is too large for a number.
  if (rows > rest / kRowBytes || documents > rest / kDocumentBytes ||
      rows * kRowBytes + documents * kDocumentBytes != rest) {
    wrong(".idx", cat("found ", bytes, " bytes, which are not those of ", rows, " rows and ", documents, " documents"));
  }
  rows_ = static_cast<int64_t>(rows);
}

void IndexedDataset::recognise_megatron() {
  if (dtype_ != kMegatronUint16) return;
  const uint8_t* const sizes = index_.bytes().data() + kHeaderBytes;
  uint64_t elements = 0;
  for (int64_t row = 0; row < rows_; ++row) elements += static_cast<uint32_t>(read<int32_t>(sizes + 4 * row));
  if (elements == 0 || elements * 2 != data_.bytes().size()) return;
  dtype_ = kUint16;
  element_bytes_ = 2;
}

void IndexedDataset::check_rows() {
  const auto bytes = static_cast<int64_t>(data_.bytes().size());
  const uint8_t* const sizes = index_.bytes().data() + kHeaderBytes;
  const uint8_t* const begins = sizes + 4 * rows_;
  const auto check_begin = [&](int64_t row, int64_t expected) {
    const auto found = read<int64_t>(begins + 8 * row);
    if (found == expected) return;
    wrong(".idx",
          cat("row ", row, " begins at byte ", found, " of the .bin, expected ", expected,
              ", behind the rows before it of ", element_bytes_, " bytes an element (dtype code ", dtype_, ")"));
  };
  int64_t begin = 0;
  if (rows_ > 0) check_begin(0, 0);
  for (int64_t row = 0; row < rows_; ++row) {
    const auto size = read<int32_t>(sizes + 4 * row);
    if (size < 0) wrong(".idx", cat("row ", row, " has ", size, " elements"));
    begin += size * element_bytes_;
    if (row + 1 < rows_) check_begin(row + 1, begin);
    if (begin > bytes) wrong(".bin", cat("found ", bytes, " bytes, row ", row, " of the .idx ends at ", begin));
  }
  if (begin != bytes) wrong(".bin", cat("found ", bytes, " bytes, the rows of the .idx are ", begin));
  elements_ = begin / element_bytes_;
}

int64_t IndexedDataset::begin_of(int64_t row) const {
  if (row == rows_) return elements_;
  return read<int64_t>(index_.bytes().data() + kHeaderBytes + 4 * rows_ + 8 * row) / element_bytes_;
}

int64_t IndexedDataset::element(int64_t place) const {
  const uint8_t* const from = data_.bytes().data() + place * element_bytes_;
  switch (dtype_) {
    case 1:
      return read<uint8_t>(from);
    case 2:
      return read<int8_t>(from);
    case 3:
      return read<int16_t>(from);
    case 4:
      return read<int32_t>(from);
    case 5:
      return read<int64_t>(from);
    case 6:
      return read<uint16_t>(from);
    case 7:
      return read<uint32_t>(from);
    default:
      break;
  }
  const auto value = read<uint64_t>(from);
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    wrong(".bin", cat("element ", place, " is ", value, ", more than an int64 holds"));
  }
  return static_cast<int64_t>(value);
}

}  // namespace ds::efficiency
