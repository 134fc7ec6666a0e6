// The operator batch_norm for converted layers: statistics over ranks, forward and backward.
#pragma once

namespace ds::norm {

// Puts our kernel in front of LibTorch's, for the rest of the process. Layers that are not converted are computed by
// LibTorch as before. Idempotent; any thread.
void register_sync_batch_norm();

}  // namespace ds::norm
