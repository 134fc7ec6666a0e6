#include "launcher/hosts/node_orders.h"

#include <optional>
#include <utility>

#include "launcher/protocol/node_protocol.h"

namespace ds::launcher {
namespace {

// None for messages that are no orders to a job that runs.
std::optional<JobOrder> order_of(const Message& message) {
  using Kind = JobOrder::Kind;
  switch (message.kind) {
    case MessageKind::kSignal:
      return JobOrder{.kind = Kind::kSignal, .signal = static_cast<int>(number_field(message, 0)), .why = {}};
    case MessageKind::kEnd:
      return JobOrder{.kind = Kind::kEnd, .why = {}};
    case MessageKind::kKill:
      return JobOrder{.kind = Kind::kKill, .why = message.fields.at(0)};
    case MessageKind::kRestart:
      return JobOrder{.kind = Kind::kRestart, .why = {}};
    default:
      return std::nullopt;
  }
}

}  // namespace

std::vector<JobOrder> NodeOrders::take_orders() {
  std::vector<JobOrder> orders;
  for (const Message& message : link_.read()) {
    if (std::optional<JobOrder> order = order_of(message)) orders.push_back(std::move(*order));
  }
  if (link_.lost() && !std::exchange(loss_said_, true)) orders.push_back({.kind = JobOrder::Kind::kLost, .why = {}});
  return orders;
}

void NodeOrders::tell_failure(int exit_code, std::vector<std::string> lines) {
  link_.send(
      to_message(FailureMessage{.exit_code = exit_code, .when = steady_nanoseconds(), .lines = std::move(lines)}));
}

}  // namespace ds::launcher
