#include "core/tensor_check.h"

#include <ostream>

namespace ds {

std::ostream& operator<<(std::ostream& out, const TensorFacts& facts) {
  return out << facts.dtype_ << " " << at::IntArrayRef(facts.sizes_) << " on " << facts.device_;
}

std::ostream& operator<<(std::ostream& out, const TensorText& text) {
  return text.tensor_.defined() ? out << TensorFacts(text.tensor_) : out << "undefined";
}

}  // namespace ds
