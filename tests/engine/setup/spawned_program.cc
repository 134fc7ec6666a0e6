// A program that starts its own ranks: what its first argument says.
#include <dsengine/comm.h>
#include <dsengine/init_distributed.h>
#include <dsengine/launch.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

void add_up(int rank) {
  if (ds::engine::is_initialized()) throw std::runtime_error("joined before init_distributed()");
  const auto job = ds::engine::init_distributed();
  if (!ds::engine::is_initialized()) throw std::runtime_error("not joined");
  at::Tensor sum = torch::full({1}, rank + 1.0);
  job.ranks->all_reduce(sum).wait();
  std::printf("rank %d of %d: %g over %s\n", rank, job.ranks->size(), sum.item<double>(),
              ds::engine::get_backend().c_str());
}

void fail(int rank) {
  if (rank == 1) throw std::runtime_error("no luck");
  std::this_thread::sleep_for(std::chrono::seconds(60));
}

void be_killed(int rank) {
  if (rank == 0) std::raise(SIGKILL);
  std::this_thread::sleep_for(std::chrono::seconds(60));
}

// A rank that does not listen to SIGTERM.
void stay(int rank) {
  if (rank == 1) throw std::runtime_error("no luck");
  std::signal(SIGTERM, SIG_IGN);
  std::this_thread::sleep_for(std::chrono::seconds(60));
}

// Rank 1 is killed, and rank 0 fails for want of it at once.
void fail_together(int rank) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT"))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* where = reinterpret_cast<const sockaddr*>(&address);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (rank == 1) {
    const bool met = bind(fd, where, sizeof(address)) == 0 && listen(fd, 1) == 0 && accept(fd, nullptr, nullptr) >= 0;
    if (!met) throw std::runtime_error("rank 0 did not come");
    std::raise(SIGKILL);
  }
  while (connect(fd, where, sizeof(address)) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  char byte = 0;
  static_cast<void>(recv(fd, &byte, 1, 0));  // until it is gone
  _exit(3);
}

// Takes the status of all children of this process, as a supervisor would.
void take_all_children(int) {
  const int before = errno;
  while (waitpid(-1, nullptr, WNOHANG) > 0) {
  }
  errno = before;
}

bool is_ignored(int number) {
  struct sigaction action = {};
  sigaction(number, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    if (what == "sum") ds::spawn(add_up, 3);
    if (what == "twice") {
      ds::spawn([](int rank) { std::printf("first %d\n", rank); }, 2);
      std::printf("between\n");
      ds::spawn([](int rank) { std::printf("second %d\n", rank); }, 2);
    }
    if (what == "fail") ds::spawn(fail, 3);
    if (what == "stay") ds::spawn(stay, 3);
    if (what == "together") ds::spawn(fail_together, 2);
    if (what == "reaped") {
      std::signal(SIGCHLD, take_all_children);
      ds::spawn(fail, 3);
    }
    if (what == "well") ds::spawn([](int) {}, 2);
    if (is_ignored(SIGCHLD)) std::printf("SIGCHLD is ignored\n");
    if (what == "killed") ds::spawn(be_killed, 2);
    if (what == "nested") ds::spawn([](int) { ds::spawn([](int) {}, 1); }, 1);
    if (what == "lost" && std::getenv("RANK") == nullptr) ds::spawn([](int) {}, 2);
    if (what == "backend") std::printf("%s\n", ds::engine::get_backend().c_str());
    if (what == "launched") std::printf("%d ranks\n", ds::launched_ranks());
    if (what == "none") ds::spawn([](int) {}, 0);
    std::printf("the end\n");
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    if (waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD) std::printf("no process is left\n");
    return EXIT_FAILURE;
  }
}
