#include "profiling/tensorboard_monitor.h"

#include <unistd.h>

#include <atomic>
#include <bit>
#include <filesystem>
#include <fstream>

#include "core/crc32.h"
#include "core/text.h"
#include "profiling/monitor.h"

namespace ds::profiling {
namespace {

template <class Unsigned>
void append_little_endian(std::string& out, Unsigned value) {
  for (size_t i = 0; i < sizeof(Unsigned); ++i) out.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>((value & 0x7f) | 0x80));
  out.push_back(static_cast<char>(value));
}

enum class Wire : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_key(std::string& out, uint64_t field, Wire wire) {
  append_varint(out, (field << 3) | static_cast<uint64_t>(wire));
}

void append_bytes(std::string& out, uint64_t field, std::string_view bytes) {
  append_key(out, field, Wire::kBytes);
  append_varint(out, bytes.size());
  out.append(bytes);
}

std::string event_at(double wall_time) {
  std::string event;
  append_key(event, 1, Wire::kFixed64);
  append_little_endian(event, std::bit_cast<uint64_t>(wall_time));
  return event;
}

constexpr const char* kTensorboardSection = "tensorboard";

// events.out.tfevents.SECONDS.HOST.PID.N: TensorBoard recognises the file by the middle of its name.
std::string file_name() {
  static std::atomic<int> files_of_process = 0;
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  return cat("events.out.tfevents.", static_cast<int64_t>(wall_seconds()), '.', host, '.', ::getpid(), '.',
             files_of_process++);
}

class TensorBoardMonitor final : public Monitor {
 public:
  TensorBoardMonitor(const std::string& output_path, const std::string& job_name)
      : path_((std::filesystem::path(make_monitor_folder(output_path, job_name, kTensorboardSection)) / file_name())
                  .string()),
        file_(classic_stream<std::ofstream>(path_, std::ios::binary)) {
    append(encode_file_version(wall_seconds()));
    flush();
  }

  void write_events(const std::vector<Event>& events) override {
    for (const Event& event : events) {
      append(encode_scalar(wall_seconds(), event.step, event.name, static_cast<float>(event.value)));
    }
    flush();
  }

 private:
  void append(const std::string& event) {
    const std::string record = frame_record(event);
    file_.write(record.data(), static_cast<std::streamsize>(record.size()));
  }
  void flush() {
    if (!file_.flush()) fail_to_write(kTensorboardSection, path_);
  }

  std::string path_;
  std::ofstream file_;
};

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  return crc32<Crc32Polynomial::kCastagnoli>({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8U; }

std::string frame_record(std::string_view bytes) {
  std::string record;
  append_little_endian(record, static_cast<uint64_t>(bytes.size()));
  append_little_endian(record, masked_crc32c(record));
  record.append(bytes);
  append_little_endian(record, masked_crc32c(bytes));
  return record;
}

std::string encode_file_version(double wall_time) {
  std::string event = event_at(wall_time);
  append_bytes(event, 3, "brain.Event:2");
  return event;
}

std::string encode_scalar(double wall_time, int64_t step, std::string_view tag, float value) {
  std::string scalar;
  append_bytes(scalar, 1, tag);
  append_key(scalar, 2, Wire::kFixed32);
  append_little_endian(scalar, std::bit_cast<uint32_t>(value));
  std::string summary;
  append_bytes(summary, 1, scalar);
  std::string event = event_at(wall_time);
  append_key(event, 2, Wire::kVarint);
  append_varint(event, static_cast<uint64_t>(step));
  append_bytes(event, 5, summary);
  return event;
}

std::unique_ptr<Monitor> make_tensorboard_monitor(const std::string& output_path, const std::string& job_name) {
  return std::make_unique<TensorBoardMonitor>(output_path, job_name);
}

}  // namespace ds::profiling
