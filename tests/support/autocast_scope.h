// torch.autocast as a context manager, which LibTorch has no class for.
#pragma once

#include <ATen/autocast_mode.h>

#include <optional>

namespace ds::test {

// Autocast of this thread on `device`, in `dtype`; without one nothing changes. Restores what it found.
class AutocastScope {
 public:
  explicit AutocastScope(std::optional<at::ScalarType> dtype = at::kBFloat16, at::DeviceType device = at::kCPU)
      : on_(dtype.has_value()),
        device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(device, *dtype);
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::increment_nesting();
  }
  ~AutocastScope() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  bool on_;
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType dtype_before_;
};

}  // namespace ds::test
