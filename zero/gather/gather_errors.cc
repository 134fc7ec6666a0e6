#include "zero/gather/gather_errors.h"

#include <utility>

#include "dsengine/errors.h"

namespace ds::zero {
namespace {

constexpr const char* kForwardsTogether =
    ". At stage 3 all ranks run the same forwards together, also under NoGradGuard; where they cannot, run them in a "
    "scope of engine->gathered_parameters(model->parameters())";

}  // namespace

void GatherErrors::keep_no_memory(const std::string& text) { no_memory_ = std::make_exception_ptr(ConfigError(text)); }

void GatherErrors::rethrow() {
  if (no_memory_) std::rethrow_exception(no_memory_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

std::exception_ptr add_advice(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError& parted) {
    const std::string text = parted.what();
    if (text.find("issued different collectives") == std::string::npos) return error;
    if (text.find(kForwardsTogether) != std::string::npos) return error;
    return std::make_exception_ptr(CommError(text + kForwardsTogether));
  } catch (...) {
    return error;
  }
}

std::string text_with_advice(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return std::string(caught.what()) + kForwardsTogether;
  } catch (...) {
    return std::string("unknown") + kForwardsTogether;
  }
}

}  // namespace ds::zero
