// TensorBoard's event file: TFRecord framing around tensorflow.Event protobuf messages, of which scalars need four
// fields. Torch-free, no protobuf library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ds::profiling {

// CRC-32C (Castagnoli), as iSCSI and TFRecord use it: crc32c("123456789") = 0xe3069283.
uint32_t crc32c(std::string_view bytes);
// TFRecord's form of it: rotated right by 15 bits plus 0xa282ead8.
uint32_t masked_crc32c(std::string_view bytes);

// Little-endian length (8 bytes), masked CRC of the length, the bytes, masked CRC of the bytes.
std::string frame_record(std::string_view bytes);

// tensorflow.Event {wall_time = 1, file_version = 3}, the first record of a file. wall_time in seconds since 1970.
std::string encode_file_version(double wall_time);
// tensorflow.Event {wall_time = 1, step = 2, summary = 5 {value = 1 {tag = 1, simple_value = 2}}}.
std::string encode_scalar(double wall_time, int64_t step, std::string_view tag, float value);

}  // namespace ds::profiling
