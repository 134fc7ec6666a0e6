// Whether a job of gpt trains as plain LibTorch does.
#pragma once

#include "tests/parity/gpt_job.h"
#include "tests/parity/torch_curve.h"

namespace ds::test {

// The steps that a job of float32 is compared over, unless a test says otherwise: 50 of the whole grid. A sample has
// twelve, for what trains otherwise than torch differs in the first steps, and 50 in a test of each stage.
int compared_steps();

// Runs the job as run_gpt() does, and compares its steps with those of torch_curve(), which is computed meanwhile. In
// float32 every loss may differ by 5e-6, every gradient norm by 2e-5 of itself. In 16 bits norms may differ by 4 %:
// they depend on where gradients are rounded, and that is what DeepSpeed's bf16 stages show. Losses may by 2e-3 in the
// mean of the steps, but 1.5e-2 in one: the sixth is steep, and shows up to ten times as much as those around it.
GptResult expect_curve(const GptJob& job, const Curve& curve);

}  // namespace ds::test
