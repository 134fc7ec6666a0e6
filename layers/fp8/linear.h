// The operators of FP8 layers: output and the input's gradient on FP8, the weight's on what the layer was given, or on
// FP8 too. LibTorch's own Linear calls addmm and matmul with its weight transposed, others call linear.
#pragma once

namespace ds::fp8 {

// Puts our kernels in front of those that are there, for the rest of the process. Other layers are computed by these as
// before. Idempotent; any thread.
void register_fp8_linear();

}  // namespace ds::fp8
