// The paths of an update, each in a file of its own name. See make_update().
#pragma once

#include <memory>

#include "engine/update/update.h"

namespace ds::engine {

// The program's optimizer, on whole float32 parameters.
std::unique_ptr<Update> make_client_update(const UpdateParts& parts);
// An optimizer of ours; masters and states of all buckets are on the device.
std::unique_ptr<Update> make_device_update(const UpdateParts& parts);
// Those of some buckets, or all, are on the host, which updates them while the step waits.
std::unique_ptr<Update> make_host_update(const UpdateParts& parts);
// Beside the next forward and backward (delayed_update).
std::unique_ptr<Update> make_delayed_update(const UpdateParts& parts);
// Inside the last backward, before the gradient is judged (super_offload).
std::unique_ptr<Update> make_speculative_update(const UpdateParts& parts);

}  // namespace ds::engine
