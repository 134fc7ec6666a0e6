// Training of the GPT example by plain LibTorch, without the engine, on the machine that runs the tests: what jobs of
// gpt are compared with. It does what reference.py does; torch_curve_test compares it with what that wrote, elsewhere,
// with Python's torch.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ds::test {

// What tells the curves of reference.json apart.
struct Curve {
  int global_batch = 1;            // sequences of a step, over all ranks and micro-batches
  std::string precision = "fp32";  // "bf16", "fp16": of model and activations; masters stay in float32
  bool tied = false;               // --tie_embeddings
  bool frozen = false;             // --freeze_embeddings

  // Its name in reference.json: "fp32_tied_batch4".
  std::string name() const;
};

struct CurveValues {
  std::vector<double> loss;       // mean over the global batch, before the step
  std::vector<double> grad_norm;  // before clipping
};

// At least `steps` steps. A curve is trained once per process, and on from there when more steps are asked for; on one
// thread, as the jobs are. The result stays valid, and may grow with later calls. Not thread safe. Throws
// std::runtime_error for a precision that is none of the three.
const CurveValues& torch_curve(const Curve& curve, size_t steps);

}  // namespace ds::test
