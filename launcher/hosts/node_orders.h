// Orders to the job of this host that come over its link to the first ds-launch.
#pragma once

#include <string>
#include <vector>

#include "launcher/protocol/node_link.h"
#include "launcher/ranks/first_launcher.h"

namespace ds::launcher {

class NodeOrders : public FirstLauncher {
 public:
  // `link` outlives this. `silence_limit_seconds`: until the link counts as lost, once the ranks run; 0: no limit.
  NodeOrders(NodeLink& link, double silence_limit_seconds)
      : link_(link), silence_limit_seconds_(silence_limit_seconds) {}

  void on_ranks_started() override { link_.limit_silence(silence_limit_seconds_); }
  Wait next_orders() const override { return {.fd = link_.fd(), .until = link_.silence_deadline()}; }
  // Throws CommError for bytes that no ds-launch sends.
  std::vector<JobOrder> take_orders() override;
  void tell_failure(int exit_code, std::vector<std::string> lines) override;

 private:
  NodeLink& link_;
  double silence_limit_seconds_;
  bool loss_said_ = false;
};

}  // namespace ds::launcher
