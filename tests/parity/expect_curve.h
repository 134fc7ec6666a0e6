// Whether a job of gpt trains as plain LibTorch does.
#pragma once

#include "tests/parity/gpt_job.h"
#include "tests/parity/torch_curve.h"

namespace ds::test {

// Of losses, and of gradient norms (relative).
constexpr double kLossTolerance = 5e-6;
constexpr double kNormTolerance = 2e-5;
// The same in 16 bits. The norm of a bf16 gradient depends on where it is rounded: 4 % is what DeepSpeed's bf16 stages
// show.
constexpr double kHalfTolerance = 5e-3;
constexpr double kHalfNormTolerance = 4e-2;

// Runs the job as run_gpt() does, and compares its steps with those of torch_curve(), which is computed meanwhile.
GptResult expect_curve(const GptJob& job, const Curve& curve, double loss_tolerance = kLossTolerance,
                       double norm_tolerance = kNormTolerance);

}  // namespace ds::test
