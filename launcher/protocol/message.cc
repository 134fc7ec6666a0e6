#include "launcher/protocol/message.h"

#include <algorithm>

#include "core/check.h"

namespace ds::launcher {
namespace {

constexpr size_t kLongestMessage = 256 << 20;
constexpr size_t kNumberSize = 4;

void append_number(std::string& to, size_t value) {
  for (size_t i = 0; i < kNumberSize; ++i) to += static_cast<char>((value >> (8 * i)) & 0xff);
}

size_t number_at(std::string_view bytes) {
  size_t value = 0;
  for (size_t i = 0; i < kNumberSize; ++i)
    value |= static_cast<size_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

void require_whole(bool whole) {
  require<CommError>(whole, "bytes that are no message of ds-launch came over ssh; are both of the same version?");
}

Message decode(std::string_view body) {
  require_whole(!body.empty() && static_cast<uint8_t>(body[0]) <= static_cast<uint8_t>(MessageKind::kRefused));
  Message message{.kind = static_cast<MessageKind>(body[0]), .fields = {}};
  for (body.remove_prefix(1); !body.empty();) {
    require_whole(body.size() >= kNumberSize && number_at(body) <= body.size() - kNumberSize);
    const size_t size = number_at(body);
    message.fields.emplace_back(body.substr(kNumberSize, size));
    body.remove_prefix(kNumberSize + size);
  }
  return message;
}

}  // namespace

std::string encode(const Message& message) {
  std::string body(1, static_cast<char>(message.kind));
  for (const std::string& field : message.fields) {
    append_number(body, field.size());
    body += field;
  }
  std::string bytes;
  append_number(bytes, body.size());
  return bytes + body;
}

void MessageReader::feed(std::string_view bytes) {
  bytes_.append(bytes);
  if (greeted_) return;
  if (const size_t at = bytes_.find(kGreeting); at != std::string::npos) {
    bytes_.erase(0, at + kGreeting.size());
    greeted_ = true;
  } else if (bytes_.size() > kGreeting.size()) {
    bytes_.erase(0, bytes_.size() - kGreeting.size());
  }
}

std::optional<Message> MessageReader::next() {
  const std::string_view rest = std::string_view(bytes_).substr(begin_);
  const bool sized = greeted_ && rest.size() >= kNumberSize;
  const size_t size = sized ? number_at(rest) : 0;
  require_whole(!sized || (size > 0 && size <= kLongestMessage));
  if (!sized || rest.size() < kNumberSize + size) {
    bytes_.erase(0, begin_);
    begin_ = 0;
    return std::nullopt;
  }
  Message message = decode(rest.substr(kNumberSize, size));
  begin_ += kNumberSize + size;
  return message;
}

}  // namespace ds::launcher
