#include "comm/operation_name.h"

#include <ostream>

namespace ds::comm {
namespace {

std::ostream& write_title(std::ostream& out, CollectiveKind kind, const std::string& label) {
  out << name_of(kind);
  return label.empty() ? out : out << " '" << label << "'";
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const OperationTitle& title) {
  return write_title(out, title.kind_, title.label_);
}

OperationName::OperationName(const Collective& collective) : kind_(collective.kind), label_(collective.label) {
  const at::Tensor& tensor = collective.input.defined() ? collective.input : collective.output;
  if (tensor.defined()) tensor_.emplace(tensor);
}

std::ostream& operator<<(std::ostream& out, const OperationName& name) {
  write_title(out, name.kind_, name.label_);
  return name.tensor_ ? out << " (" << *name.tensor_ << ")" : out;
}

}  // namespace ds::comm
