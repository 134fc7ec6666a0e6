// A program that starts its own ranks: what its first argument says.
#include <dsengine/comm.h>
#include <dsengine/init_distributed.h>
#include <dsengine/spawn.h>
#include <torch/torch.h>

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
    if (what == "killed") ds::spawn(be_killed, 2);
    if (what == "nested") ds::spawn([](int) { ds::spawn([](int) {}, 1); }, 1);
    if (what == "lost" && std::getenv("RANK") == nullptr) ds::spawn([](int) {}, 2);
    if (what == "backend") std::printf("%s\n", ds::engine::get_backend().c_str());
    if (what == "none") ds::spawn([](int) {}, 0);
    std::printf("the end\n");
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
