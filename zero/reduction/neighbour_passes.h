// The backward passes of several engines on one thread, whose losses run through each other's models: the generator's
// of a GAN through the discriminator, say.
//
// A pass is one engine's. Gradients that it makes on parameters of another are dropped: torch would leave them in their
// .grad, and every such program drops them there with zero_grad() before that model's own pass. So has it to do here,
// on the engine or the module: gradients that are left are a UsageError at that engine's next backward() or step(),
// never added and never lost in silence.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "zero/parameter_bucket.h"

namespace ds::zero {

// The passes of one engine beside those of others on its thread. Used on that thread, but for another_runs() and
// drop(), which autograd's threads call too.
class NeighbourPasses {
 public:
  // `parameters` outlive it. `model`: what messages call the engine's model. `alone`: passes of others do not concern
  // this one, nor its passes others: the methods do nothing.
  NeighbourPasses(const std::vector<Parameter>& parameters, std::string model, bool alone = false);
  ~NeighbourPasses();
  NeighbourPasses(const NeighbourPasses&) = delete;
  NeighbourPasses& operator=(const NeighbourPasses&) = delete;

  // Begin and end a pass of this engine. Parameters of the others have no gradients meanwhile, so that nothing is added
  // to what those collect; passes of several engines may run at once, for one loss.
  void begin();
  void end();
  // Gives the parameters back the gradients that the pass of another engine has taken away, and this engine's goes on
  // with. To be called before begin().
  void come_back();

  // Whether a pass of another engine of the thread runs.
  bool another_runs() const;
  // Drops the gradient that such a pass has made for a parameter of this engine, and remembers that.
  void drop(size_t parameter);
  // Throws UsageError where other passes have made gradients, and the program has not dropped them.
  void require_no_gradients(const char* call);
  // Forgets such gradients: called by the engine's zero_grad().
  void clear();
  // Makes the calling thread the one that begins and ends the passes from now on.
  void use_from_this_thread();
  // The model's name in messages; where several engines on the thread have models of one name, with its number among
  // them.
  std::string model() const;
  // "the engine of MODEL"; empty where it is the only one on its thread.
  std::string engine_if_several() const;

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
  std::vector<std::atomic<char>> had_foreign_;  // for each parameter: it had a gradient of another engine
};

}  // namespace ds::zero
