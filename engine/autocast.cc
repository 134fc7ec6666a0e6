#include "engine/autocast.h"

#include <ATen/autocast_mode.h>

namespace ds::engine {

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype)
    : device_(device),
      dtype_before_(at::autocast::get_autocast_dtype(device)),
      enabled_before_(at::autocast::is_autocast_enabled(device)) {
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_enabled(device_, true);
}

Autocast::~Autocast() {
  at::autocast::clear_cache();
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_enabled(device_, enabled_before_);
}

Autocast::Pause::Pause(c10::DeviceType device)
    : device_(device), enabled_before_(at::autocast::is_autocast_enabled(device)) {
  if (enabled_before_) at::autocast::set_autocast_enabled(device_, false);
}

Autocast::Pause::~Pause() {
  if (!enabled_before_) return;
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, true);
}

}  // namespace ds::engine
