#include "launcher/hosts/node.h"

#include <unistd.h>

#include <filesystem>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/flight_job.h"
#include "core/restart_request.h"
#include "core/system_call.h"
#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/command_line/pid_file.h"
#include "launcher/hosts/lost_link_text.h"
#include "launcher/machine/rendezvous_port.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/own_program.h"
#include "launcher/program/program_path.h"
#include "launcher/program/rank_environment.h"
#include "launcher/protocol/node_link.h"
#include "launcher/protocol/node_protocol.h"
#include "launcher/ranks/first_launcher.h"
#include "launcher/ranks/job.h"
#include "launcher/ranks/job_plan.h"

namespace ds::launcher {
namespace {

constexpr int kCannotStart = 2;
constexpr double kFarewellSeconds = 5;

// The order in a message; none for messages that are no orders to a job that runs.
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

// Orders to the job of this host that come over its link to the first ds-launch.
class NodeOrders : public FirstLauncher {
 public:
  // `link` outlives this. `silence_limit_seconds`: until the link counts as lost, once the ranks run; 0: no limit.
  NodeOrders(NodeLink& link, double silence_limit_seconds)
      : link_(link), silence_limit_seconds_(silence_limit_seconds) {}

  void on_ranks_started() override { link_.limit_silence(silence_limit_seconds_); }
  Wait next_orders() const override { return {.fd = link_.fd(), .until = link_.silence_deadline()}; }
  // Throws CommError for bytes that no ds-launch sends.
  std::vector<JobOrder> take_orders() override {
    std::vector<JobOrder> orders;
    for (const Message& message : link_.read()) {
      if (std::optional<JobOrder> order = order_of(message)) orders.push_back(std::move(*order));
    }
    if (link_.lost() && !std::exchange(loss_said_, true)) orders.push_back({.kind = JobOrder::Kind::kLost, .why = {}});
    return orders;
  }
  void tell_failure(int exit_code, std::vector<std::string> lines) override {
    link_.send(
        to_message(FailureMessage{.exit_code = exit_code, .when = steady_nanoseconds(), .lines = std::move(lines)}));
  }

 private:
  NodeLink& link_;
  double silence_limit_seconds_;
  bool loss_said_ = false;
};

// Runs a step of the check; what it throws is a problem.
template <class Step>
void check_step(CheckReply& reply, const Step& step) {
  try {
    step();
  } catch (const ProgramError& error) {
    reply.exit_code = error.exit_code();
    reply.problems.emplace_back(error.what());
  } catch (const Error& error) {
    if (reply.exit_code == 0) reply.exit_code = kCannotStart;
    reply.problems.emplace_back(error.what());
  }
}

void enter_folder(const std::string& folder) {
  require_system(chdir(folder.c_str()) == 0, "the folder ", folder, " cannot be entered; every host needs it, for ",
                 "instance through a shared file system");
}

void find_meeting_place(const CheckRequest& request, const Options& options,
                        const std::vector<std::string>& environment, CheckReply& reply) {
  reply.address = request.master_addr.empty() ? outward_address(environment) : request.master_addr;
  require<ConfigError>(!reply.address.empty(), "this host has no address but loopback ones; name one with ",
                       "--master_addr");
  if (!request.master_addr.empty()) require_own_address(request.master_addr);
  const MasterPort port = choose_master_port(options.master_port);
  reply.port = port.port;
  if (port.replaced_default) {
    reply.notes.push_back(cat("port ", kDefaultMasterPort, " is in use: rank 0 listens on the free port ", port.port,
                              " instead (--master_port chooses one)"));
  }
}

CheckReply check_host(const CheckRequest& request, const Options& options,
                      const std::vector<std::string>& environment) {
  CheckReply reply;
  check_step(reply, [&] { reply.launcher_hash = find_own_program().hash; });
  check_step(reply, [&] {
    enter_folder(request.folder);
    reply.program = std::filesystem::absolute(find_program_in(options, environment)).lexically_normal();
    reply.program_hash = file_hash(reply.program);
  });
  check_step(reply, [&] {
    if (const std::string note = check_slots(request.slots, environment); !note.empty()) reply.notes.push_back(note);
  });
  if (request.first) check_step(reply, [&] { find_meeting_place(request, options, environment, reply); });
  return reply;
}

void tell_error(NodeLink& link, const std::string& host, const Error& error, int exit_code) {
  link.send(to_message(FailureMessage{.exit_code = exit_code,
                                      .when = steady_nanoseconds(),
                                      .lines = {cat("ranks on ", host, " did not start: ", error.what())}}));
}

// Runs the ranks and returns the exit code; none when they were ended because the first ds-launch was lost.
std::optional<int> run_ranks(const CheckRequest& request, const StartRequest& start, const Options& options,
                             const std::vector<std::string>& environment, NodeConsole& console, NodeLink& link) {
  Notices notices(console, options.verbosity, request.host);
  const NodePlace place{.host = request.host,
                        .node = start.node,
                        .nodes = start.nodes,
                        .first_rank = start.first_rank,
                        .world_size = start.world_size,
                        .master_addr = start.master_addr,
                        .master_port = start.master_port,
                        .flight_job = environment_value(environment, kFlightJobVariable).value_or("")};
  try {
    const PidFile pid_file(request.pid_file);
    JobPlan plan = plan_job(options, environment, request.slots, place, notices);
    NodeOrders orders(link, request.link_timeout);
    plan.first = &orders;
    std::error_code none;  // a TMPDIR that does not exist
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(none);
    plan.restart_file = (none ? "/tmp" : temporary) / cat("ds-launch.", plan.launch_id, ".restart");
    for (std::vector<std::string>& of_rank : plan.environments) {
      of_rank = with_entries(std::move(of_rank), {cat(kRestartFileVariable, '=', plan.restart_file)});
    }
    Job job(std::move(plan), console, notices);
    const int code = job.run();
    return job.ended_without_first() ? std::nullopt : std::optional(code);
  } catch (const ProgramError& error) {
    tell_error(link, request.host, error, error.exit_code());
    return error.exit_code();
  } catch (const Error& error) {
    tell_error(link, request.host, error, kCannotStart);
    return kCannotStart;
  }
}

int serve(const std::vector<std::string>& inherited, NodeConsole& console, NodeLink& link) {
  const std::optional<Message> asked = link.wait();
  if (!asked) return 0;
  const CheckRequest request = check_request(*asked);
  const Options options = parse_options(request.words);
  const std::vector<std::string> environment =
      with_entries(with_entries(inherited, {cat("PWD=", request.folder)}), request.environment);
  link.send(to_message(check_host(request, options, environment)));
  const std::optional<Message> order = link.wait();
  if (!order || order->kind != MessageKind::kStart) return 0;  // another host is not ready, or Ctrl-C
  const std::optional<int> result = run_ranks(request, start_request(*order), options, environment, console, link);
  // Without kEnded the first ds-launch, should it still be there, counts this host as lost.
  if (!result) return kLinkLostCode;
  link.send({.kind = MessageKind::kEnded, .fields = {cat(*result)}});
  return *result;
}

}  // namespace

int serve_node(const std::vector<std::string>& environment) {
  NodeConsole console;
  NodeLink link(STDIN_FILENO, console);
  int result = kCannotStart;
  try {
    result = serve(environment, console, link);
  } catch (const Error& error) {  // the first ds-launch shows standard error when the connection ends
    Notices(console, Verbosity::kError).error(error.what());
  }
  console.finish(link.lost() ? 0 : kFarewellSeconds);
  return result;
}

}  // namespace ds::launcher
