// The backward passes of several engines on one thread, whose losses run through each other's models: the generator's
// of a GAN through the discriminator, say.
//
// A pass is one engine's. What it makes on parameters of another is dropped: torch would leave it in their .grad, and
// every such program drops it there with zero_grad() before that model's own pass. So has it to do here, on the engine
// or the module: gradients that are left are a UsageError at that engine's next backward() or step(), never added and
// never lost in silence.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "zero/parameter_bucket.h"

namespace ds::zero {

// Of one engine. On its thread, but for another_runs() and drop(), which are called from autograd's too.
class NeighbourPasses {
 public:
  // `parameters` outlive it. `model`: what messages call the engine's model. `alone`: passes of others do not concern
  // it, nor its own them: nothing of what follows does anything.
  NeighbourPasses(const std::vector<Parameter>& parameters, std::string model, bool alone = false);
  ~NeighbourPasses();
  NeighbourPasses(const NeighbourPasses&) = delete;
  NeighbourPasses& operator=(const NeighbourPasses&) = delete;

  // Around a pass of this engine. Parameters of the others have no gradients meanwhile, so that nothing is added to
  // what those collect; passes of several engines may run at once, for one loss.
  void begin();
  void end();
  // Before begin(), where the pass of another engine has taken the gradients away that this one's goes on with.
  void come_back();

  // Whether a pass of another engine of the thread runs.
  bool another_runs() const;
  // In such a pass: the gradient of a parameter of this engine is dropped, and remembered.
  void drop(size_t parameter);
  // Throws UsageError where some were, and the program has not dropped them.
  void require_none(const char* call);
  // The engine's zero_grad().
  void clear();
  void use_from_this_thread();
  // What messages call it; of several engines on the thread whose models have one name, with its number among them.
  std::string model() const;
  // Whether there are other engines on the thread.
  bool has_neighbours() const { return on_thread(thread_).size() > 1; }

 private:
  static std::vector<NeighbourPasses*> on_thread(std::thread::id thread);

  void step_aside();
  void step_back();
  void enlist();
  void leave();

  const std::vector<Parameter>& parameters_;
  std::string model_;
  bool alone_;
  std::thread::id thread_;
  std::atomic<bool> running_{false};
  bool aside_ = false;
  std::vector<at::Tensor> own_;                 // while aside: gradients that parameters had
  std::vector<std::atomic<char>> had_foreign_;  // of each parameter
};

}  // namespace ds::zero
