#include "launcher/protocol/node_protocol.h"

#include <charconv>

#include "core/check.h"

namespace ds::launcher {
namespace {

// Reads or writes the fields of a message in one order, so that one describe() of a struct serves both ways.
class MessageFields {
 public:
  // Reads the fields of `message`, which outlives the reader.
  explicit MessageFields(const Message& message) : read_(&message) {}
  // Writes a message of that kind.
  explicit MessageFields(MessageKind kind) { written_.kind = kind; }

  void field(std::string& value) {
    if (!reading()) {
      written_.fields.push_back(value);
      return;
    }
    require<CommError>(at_ < read_->fields.size(), "a message of ds-launch is too short; are both of one version?");
    value = read_->fields[at_++];
  }
  void field(int64_t& value) {
    std::string text = reading() ? "" : cat(value);
    field(text);
    if (reading()) value = number_field(*read_, at_ - 1);
  }
  void field(int& value) {
    int64_t number = value;
    field(number);
    value = static_cast<int>(number);
  }
  void field(bool& value) {
    int64_t number = value ? 1 : 0;
    field(number);
    value = number != 0;
  }
  // A list is its length and its elements.
  template <class T>
  void field(std::vector<T>& values) {
    auto left = static_cast<int64_t>(values.size());
    field(left);
    if (!reading()) {
      for (T& value : values) field(value);
      return;
    }
    for (values.clear(); left > 0; --left) field(values.emplace_back());
  }
  // Seconds travel as whole milliseconds.
  void seconds(double& value) {
    auto milliseconds = static_cast<int64_t>(value * 1e3);
    field(milliseconds);
    if (reading()) value = static_cast<double>(milliseconds) / 1e3;
  }

  Message take() { return std::move(written_); }

 private:
  bool reading() const { return read_ != nullptr; }

  const Message* read_ = nullptr;
  size_t at_ = 0;
  Message written_;
};

void describe(MessageFields& message, CheckRequest& request) {
  message.field(request.folder);
  message.field(request.host);
  message.field(request.first);
  message.field(request.slots);
  message.field(request.master_addr);
  message.seconds(request.link_timeout);
  message.field(request.pid_file);
  message.field(request.words);
  message.field(request.environment);
}

void describe(MessageFields& message, CheckReply& reply) {
  message.field(reply.launcher_hash);
  message.field(reply.program_hash);
  message.field(reply.program);
  message.field(reply.address);
  message.field(reply.port);
  message.field(reply.exit_code);
  message.field(reply.problems);
  message.field(reply.notes);
}

void describe(MessageFields& message, StartRequest& request) {
  message.field(request.node);
  message.field(request.nodes);
  message.field(request.first_rank);
  message.field(request.world_size);
  message.field(request.master_addr);
  message.field(request.master_port);
}

void describe(MessageFields& message, FailureMessage& failure) {
  message.field(failure.exit_code);
  message.field(failure.when);
  message.field(failure.lines);
}

template <class Content>
Message write_message(MessageKind kind, Content content) {
  MessageFields fields(kind);
  describe(fields, content);
  return fields.take();
}

template <class Content>
Content read_message(const Message& message) {
  Content content;
  MessageFields fields(message);
  describe(fields, content);
  return content;
}

}  // namespace

int64_t number_field(const Message& message, size_t index) {
  int64_t value = 0;
  const std::string text = index < message.fields.size() ? message.fields[index] : "";
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require<CommError>(error == std::errc() && end == text.data() + text.size(), "a message of ds-launch has '", text,
                     "' for a number; are both of one version?");
  return value;
}

Message to_message(const CheckRequest& request) { return write_message(MessageKind::kCheck, request); }
Message to_message(const CheckReply& reply) { return write_message(MessageKind::kChecked, reply); }
Message to_message(const StartRequest& request) { return write_message(MessageKind::kStart, request); }
Message to_message(const FailureMessage& failure) { return write_message(MessageKind::kFailure, failure); }

CheckRequest check_request(const Message& message) { return read_message<CheckRequest>(message); }
CheckReply check_reply(const Message& message) { return read_message<CheckReply>(message); }
StartRequest start_request(const Message& message) { return read_message<StartRequest>(message); }
FailureMessage failure_message(const Message& message) { return read_message<FailureMessage>(message); }

}  // namespace ds::launcher
