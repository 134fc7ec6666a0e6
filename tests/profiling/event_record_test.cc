#include "profiling/tensorboard_monitor.h"

#include <gtest/gtest.h>

namespace ds::profiling {
namespace {

std::string from_hex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

// Check values of RFC 3720, B.4.
TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c(""), 0U);
}

// The bytes that tensorboard's own writer makes, see the hex below:
//   from tensorboard.compat.proto.event_pb2 import Event; from tensorboard.compat.proto.summary_pb2 import Summary
//   Event(wall_time=1700000000.5, step=300, summary=Summary(value=[Summary.Value(tag="Train/Samples/lr",
//         simple_value=0.001)])).SerializeToString().hex()
TEST(EventRecord, ScalarIsTheProtobufMessage) {
  EXPECT_EQ(encode_scalar(1700000000.5, 300, "Train/Samples/lr", 0.001F),
            from_hex("0900002040fc54d94110ac022a190a170a10547261696e2f53616d706c65732f6c72156f12833a"));
}

TEST(EventRecord, FirstRecordNamesTheVersion) {
  EXPECT_EQ(encode_file_version(1700000000.5), from_hex("0900002040fc54d9411a0d627261696e2e4576656e743a32"));
}

// tensorboard.summary.writer.record_writer.RecordWriter on b"dsengine".
TEST(EventRecord, FramingIsTfRecord) {
  EXPECT_EQ(frame_record("dsengine"), from_hex("0800000000000000ff86240f6473656e67696e65eafb41ee"));
}

}  // namespace
}  // namespace ds::profiling
