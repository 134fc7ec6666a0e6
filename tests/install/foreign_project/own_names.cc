// A program with every public header, `using namespace ds`, and names of its own that dsengine uses inside: they must
// not meet. It trains a step with its own functions around; exit code 0 when the loss fell.
#include <every_public_header.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <iostream>
#include <string>

using namespace ds;

std::string cat(const std::string& a, const std::string& b) { return a + b; }
std::string fixed(double value, int digits) { return std::to_string(value).substr(0, 2 + static_cast<size_t>(digits)); }
bool require(bool condition, const std::string& /*why*/) { return condition; }
bool ensure(bool condition, const char* /*why*/) { return condition; }
void log(const std::string& line) { std::cout << line << "\n"; }
std::string describe(const at::Tensor& tensor) { return tensor.toString(); }

struct Segment {
  int first = 0;
};
struct AtomicFile {};
struct MappedFile {};
struct JsonFields {};

namespace optim {
struct Options {
  double lr = 0.05;
};
}  // namespace optim
namespace config {
nlohmann::json make(const optim::Options& options) {
  return {{"train_micro_batch_size_per_gpu", 8},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", options.lr}}}}},
          {"zero_optimization", {{"stage", 2}}}};
}
}  // namespace config
namespace core {
struct Engine {};
}  // namespace core

int main() {
  torch::nn::Linear model(4, 1);
  auto [engine, optimizer, loader, schedule] =
      engine::initialize({.model = model.ptr(), .config = config::make(optim::Options{})});
  const at::Tensor data = torch::ones({8, 4});
  const at::Tensor target = torch::full({8, 1}, 3.0);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = torch::mse_loss(model->forward(data), target);
    engine->backward(loss);
    engine->step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  log(cat("loss " + fixed(first, 3), " -> " + fixed(last, 3)) + " of " + describe(data));
  return require(last < first, "it learns") && ensure(Segment().first == 0, "own types") ? 0 : 1;
}
