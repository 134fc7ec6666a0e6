#include "launcher/protocol/node_protocol.h"

#include <charconv>

#include "core/check.h"

namespace ds::launcher {
namespace {

class FieldWriter {
 public:
  explicit FieldWriter(MessageKind kind) { message_.kind = kind; }
  FieldWriter& text(const std::string& value) {
    message_.fields.push_back(value);
    return *this;
  }
  template <class Number>
  FieldWriter& number(Number value) {
    return text(cat(value));
  }
  FieldWriter& list(const std::vector<std::string>& values) {
    number(values.size());
    for (const std::string& value : values) text(value);
    return *this;
  }
  Message take() { return std::move(message_); }

 private:
  Message message_;
};

class FieldReader {
 public:
  explicit FieldReader(const Message& message) : message_(message) {}
  const std::string& text() {
    require<CommError>(at_ < message_.fields.size(), "a message of ds-launch is too short; are both of one version?");
    return message_.fields[at_++];
  }
  int64_t number() {
    text();
    return number_field(message_, at_ - 1);
  }
  int integer() { return static_cast<int>(number()); }
  std::vector<std::string> list() {
    std::vector<std::string> values;
    for (int64_t left = number(); left > 0; --left) values.push_back(text());
    return values;
  }

 private:
  const Message& message_;
  size_t at_ = 0;
};

}  // namespace

int64_t number_field(const Message& message, size_t index) {
  int64_t value = 0;
  const std::string text = index < message.fields.size() ? message.fields[index] : "";
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require<CommError>(error == std::errc() && end == text.data() + text.size(), "a message of ds-launch has '", text,
                     "' for a number; are both of one version?");
  return value;
}

Message to_message(const CheckRequest& request) {
  std::vector<std::string> slots;
  for (int slot : request.slots) slots.push_back(cat(slot));
  return FieldWriter(MessageKind::kCheck)
      .text(request.folder)
      .text(request.host)
      .number(request.first ? 1 : 0)
      .list(slots)
      .text(request.master_addr)
      .number(static_cast<int64_t>(request.link_timeout * 1e3))
      .text(request.pid_file)
      .list(request.words)
      .list(request.environment)
      .take();
}

CheckRequest check_request(const Message& message) {
  FieldReader fields(message);
  CheckRequest request;
  request.folder = fields.text();
  request.host = fields.text();
  request.first = fields.number() != 0;
  for (int64_t left = fields.number(); left > 0; --left) request.slots.push_back(fields.integer());
  request.master_addr = fields.text();
  request.link_timeout = static_cast<double>(fields.number()) / 1e3;
  request.pid_file = fields.text();
  request.words = fields.list();
  request.environment = fields.list();
  return request;
}

Message to_message(const CheckReply& reply) {
  return FieldWriter(MessageKind::kChecked)
      .text(reply.launcher_hash)
      .text(reply.program_hash)
      .text(reply.program)
      .text(reply.address)
      .number(reply.port)
      .number(reply.exit_code)
      .list(reply.problems)
      .list(reply.notes)
      .take();
}

CheckReply check_reply(const Message& message) {
  FieldReader fields(message);
  CheckReply reply;
  reply.launcher_hash = fields.text();
  reply.program_hash = fields.text();
  reply.program = fields.text();
  reply.address = fields.text();
  reply.port = fields.integer();
  reply.exit_code = fields.integer();
  reply.problems = fields.list();
  reply.notes = fields.list();
  return reply;
}

Message to_message(const StartRequest& request) {
  return FieldWriter(MessageKind::kStart)
      .number(request.node)
      .number(request.nodes)
      .number(request.first_rank)
      .number(request.world_size)
      .text(request.master_addr)
      .number(request.master_port)
      .take();
}

StartRequest start_request(const Message& message) {
  FieldReader fields(message);
  StartRequest request;
  request.node = fields.integer();
  request.nodes = fields.integer();
  request.first_rank = fields.integer();
  request.world_size = fields.integer();
  request.master_addr = fields.text();
  request.master_port = fields.integer();
  return request;
}

Message to_message(const FailureMessage& failure) {
  return FieldWriter(MessageKind::kFailure).number(failure.exit_code).number(failure.when).list(failure.lines).take();
}

FailureMessage failure_message(const Message& message) {
  FieldReader fields(message);
  FailureMessage failure;
  failure.exit_code = fields.integer();
  failure.when = fields.number();
  failure.lines = fields.list();
  return failure;
}

}  // namespace ds::launcher
