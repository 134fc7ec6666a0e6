#include "tools/report/warnings.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/text.h"
#include "offload/host_budget.h"

namespace ds::tool::report {
namespace {

using offload::size_text;
using Lines = std::vector<std::string>;

// A group of ranks on a host exchanges through some 33 MiB, and a training has several groups.
constexpr int64_t kEnoughSharedMemory = int64_t{256} << 20;
constexpr int64_t kEnoughStack = int64_t{8} << 20;
constexpr int64_t kEnoughLocked = int64_t{8} << 20;
constexpr int64_t kLeastMemory = int64_t{1} << 30;
constexpr int64_t kOwnFiles = 256;  // of LibTorch, logs, checkpoints

std::optional<int64_t> number_in(const Machine& machine, const char* name) {
  const auto text = machine.variables(name);
  int64_t value = 0;
  if (!text) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  return error == std::errc() ? std::optional(value) : std::nullopt;
}

bool below(const ProcessLimit& limit, int64_t bytes) { return limit.soft && *limit.soft < bytes; }

void warn_of_shared_memory(const Limits& limits, Lines& lines) {
  if (!limits.shm.there) {
    lines.emplace_back(
        "/dev/shm is not there: ranks of one host cannot use shared memory; mount a tmpfs on it, or set "
        "communication_backend to gloo");
    return;
  }
  if (limits.shm.free_bytes >= kEnoughSharedMemory) return;
  lines.push_back(cat("/dev/shm has ", size_text(limits.shm.free_bytes), " free of ", size_text(limits.shm.bytes),
                      ", and ranks of one host exchange through it: give it at least ", size_text(kEnoughSharedMemory),
                      " (docker run --shm-size=1g, or --ipc=host; Kubernetes: an emptyDir with medium Memory; else "
                      "mount -o remount,size=1G /dev/shm), or set communication_backend to gloo"));
}

void warn_of_process_limits(const Machine& machine, Lines& lines) {
  const Limits& limits = machine.limits;
  if (limits.infiniband && limits.locked_memory.soft) {
    lines.push_back(cat("memlock is ", size_text(*limits.locked_memory.soft),
                        ", and RDMA devices need it unlimited: ulimit -l unlimited (docker run --ulimit memlock=-1)"));
  } else if (below(limits.locked_memory, kEnoughLocked)) {
    lines.push_back(cat("memlock is ", size_text(*limits.locked_memory.soft), ": queues of io_uring may not fit; ",
                        "ulimit -l unlimited (docker run --ulimit memlock=-1)"));
  }
  const int64_t ranks = number_in(machine, "WORLD_SIZE").value_or(1);
  const int64_t files = kOwnFiles + 2 * ranks;  // gloo joins every rank with every other
  if (below(limits.open_files, std::max<int64_t>(files, 1024))) {
    lines.push_back(cat("open files are limited to ", *limits.open_files.soft, ", ", ranks, " ranks need about ", files,
                        ": ulimit -n 65536"));
  }
  if (below(limits.stack, kEnoughStack)) {
    lines.push_back(cat("the stack is limited to ", size_text(*limits.stack.soft), ": ulimit -s 8192"));
  }
}

void warn_of_memory(const Limits& limits, Lines& lines) {
  if (!limits.memory.takeable_limit.empty() && limits.memory.takeable < kLeastMemory) {
    lines.push_back(cat("only ", size_text(limits.memory.takeable), " of memory can be taken, by ",
                        limits.memory.takeable_limit, ": end other programs or raise that limit"));
  }
  if (limits.overcommit == 2) {
    lines.emplace_back(
        "vm.overcommit_memory is 2: reserving memory fails at CommitLimit although pages are free; "
        "sysctl vm.overcommit_memory=0");
  }
  if (limits.huge_pages == "never") {
    lines.emplace_back(
        "transparent huge pages are off, which slows updates of offloaded state: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  }
}

void warn_of_kernel_settings(const Limits& limits, Lines& lines) {
  if (!limits.uring_refusal.empty()) lines.push_back(cat("offload to files will not start: ", limits.uring_refusal));
  if (limits.ptrace_scope.value_or(0) >= 2) {
    lines.push_back(cat("kernel.yama.ptrace_scope is ", *limits.ptrace_scope,
                        ": a rank that hangs cannot be looked "
                        "into with gdb -p; sysctl kernel.yama.ptrace_scope=1"));
  }
}

void warn_of_threads(const Machine& machine, Lines& lines) {
  const Processor& cpu = machine.processor;
  const int usable = cpu.quota > 0 ? std::min(cpu.quota, cpu.allowed_count) : cpu.allowed_count;
  const auto threads = number_in(machine, "OMP_NUM_THREADS");
  if (threads && *threads > usable) {
    lines.push_back(cat("OMP_NUM_THREADS is ", *threads, ", but this process may use ", usable,
                        " CPUs: unset it, and ds-launch shares them out"));
  }
  if (!threads && cpu.quota > 0 && cpu.quota < cpu.allowed_count) {
    lines.push_back(cat("the control group allows ", cpu.quota, " CPUs' worth of time on ", cpu.allowed_count,
                        " CPUs: a program that ds-launch does not start takes ", cpu.allowed_count,
                        " threads; export OMP_NUM_THREADS=", cpu.quota, " for it"));
  }
}

void warn_of_network(const Machine& machine, Lines& lines) {
  for (const std::string& name : machine.gloo.names) {
    const auto found = std::find_if(machine.interfaces.begin(), machine.interfaces.end(),
                                    [&](const Interface& one) { return one.name == name; });
    if (found == machine.interfaces.end()) {
      lines.push_back(
          cat("gloo will fail: there is no interface ", name, " (", machine.gloo.reason, "); name one of those above"));
    } else if (found->state == "down" || found->addresses.empty()) {
      lines.push_back(cat("gloo will fail: interface ", name, " is ", found->state, " or has no address (",
                          machine.gloo.reason, ")"));
    }
  }
  if (machine.gloo.names.empty()) {
    lines.push_back(cat("gloo finds no interface between hosts: ", machine.gloo.reason, "; set GLOO_SOCKET_IFNAME"));
  }
  if (machine.nccl.names.empty() && machine.variables("NCCL_SOCKET_IFNAME")) {
    lines.push_back(cat("NCCL will fail: no interface with an address matches ", machine.nccl.reason));
  }
}

void warn_of_libraries(const Machine& machine, Lines& lines) {
  const auto& libraries = machine.libraries;
  if (libraries.contains("error")) {
    lines.push_back(cat("LibTorch cannot be asked, and no training will start: ", libraries.value("error", "")));
    return;
  }
  for (const char* name : {"gloo", "shm"}) {
    const auto backend =
        libraries.value("backends", nlohmann::ordered_json::object()).value(name, nlohmann::ordered_json());
    if (backend.is_object() && !backend.value("works", true)) {
      lines.push_back(cat("backend ", name, " does not work: ", backend.value("refusal", "")));
    }
  }
  const bool gpus = machine.devices.contains("devices") && !machine.devices["devices"].empty();
  const auto cuda = libraries.value("cuda", nlohmann::ordered_json::object());
  if (gpus && !cuda.value("loads", false)) {
    lines.push_back(cat("there are GPUs, but dsengine cannot use them: ", cuda.value("refusal", "")));
  } else if (gpus && cuda.value("usable_devices", 0) == 0) {
    lines.emplace_back(
        "the driver knows GPUs, but CUDA finds none usable: look at CUDA_VISIBLE_DEVICES, and whether "
        "the driver is as new as LibTorch's CUDA");
  }
}

}  // namespace

Lines warnings_of(const Machine& machine) {
  Lines lines;
  warn_of_libraries(machine, lines);
  warn_of_shared_memory(machine.limits, lines);
  warn_of_process_limits(machine, lines);
  warn_of_memory(machine.limits, lines);
  warn_of_kernel_settings(machine.limits, lines);
  warn_of_threads(machine, lines);
  warn_of_network(machine, lines);
  return lines;
}

}  // namespace ds::tool::report
