// The work and time of each part of a module, from the operators that run: forward and backward, of any unmodified
// module.
//
// LibTorch modules have no hooks. An operator that reads a parameter is work of the module that owns it; one that reads
// none, as an activation or attention between two projections, is work of the smallest module around its neighbours
// that do. In backward it belongs to where the operator of forward did whose gradient it computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/op_interceptor.h"
#include "dsengine/profiling.h"
#include "profiling/operator_work.h"

namespace ds::profiling {

// Watches the thread that starts it, and what autograd runs for it on others, until it is stopped. Between that it
// costs some microseconds an operator, else nothing. Not thread safe but for that.
class ModuleWork final : private OperatorWatcher {
 public:
  // The module outlives the watch.
  explicit ModuleWork(const torch::nn::Module& module);
  ~ModuleWork() override;
  ModuleWork(const ModuleWork&) = delete;
  ModuleWork& operator=(const ModuleWork&) = delete;

  void start();
  void stop();
  bool running() const { return interceptor_.enabled(); }
  // Operators outside of backward's graph do not count while it is true: an engine's own, around a backward pass.
  void pause_forward(bool paused) { paused_ = paused; }

  // The work of everything that ran between start() and stop(), divided by `times`: in the module's order, the module
  // itself first. Times are those of the host, of operators of forward, in seconds.
  std::vector<ModuleFlops> rows(int64_t times = 1) const;
  // The operations of the model's products, convolutions and attention that training needs, forward and backward,
  // divided by `times`: without what checkpoints and attention's backward compute again.
  struct UsefulFlops {
    double full = 0;    // with all pairs of attention
    double causal = 0;  // with those that a causal mask leaves, in calls of attention that say so
  };
  UsefulFlops useful_flops(int64_t times = 1) const;
  // Names of operators that are not LibTorch's and have no rule, which count as nothing.
  std::vector<std::string> unknown_operators() const;

 private:
  // An operator that ran, in order.
  struct Event {
    int module = -1;    // the module that owns a parameter it reads; -1: none
    int parent = -1;    // the event that called it
    int64_t node = -1;  // in backward: of the graph; see key_of()
    OperatorWork work;
    double seconds = 0;  // the time of an outermost one in forward
    bool recomputed = false;
  };
  struct Running {
    int event = -1;  // -1: none is kept
    bool counted = false;
    bool is_operator = false;  // not a node of backward's graph
    std::string unknown;       // its name, as long as nothing that it calls counts either; empty: it need not
    double began = 0;
  };
  // A module of the tree.
  struct Part {
    std::string name, type;
    int parent = -1;
    int64_t parameters = 0;  // the elements of its own ones, of tied ones where they come first
    bool looks_up = false;   // an Embedding
  };

  void begins(const at::RecordFunction& function) override;
  void ends() override;
  int owner_of(const at::RecordFunction& function) const;
  // For each event of forward its module; for one of backward -1.
  std::vector<int> resolved() const;
  int common_part(int a, int b) const;

  std::vector<Part> parts_;
  std::unordered_map<const void*, std::vector<int>> owners_;  // the owners of parameters, by identity
  std::vector<Event> events_;
  std::vector<Running> under_way_;
  std::map<std::pair<uint64_t, int64_t>, int> node_of_;  // by thread and number: the last event that may have made it
  std::vector<std::pair<uint64_t, int64_t>> nodes_;      // the nodes of events of backward
  std::map<std::string, int64_t> unknown_;
  bool paused_ = false;
  OpInterceptor interceptor_;
};

}  // namespace ds::profiling
