#include "recompute/outside_tensors.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "core/check.h"

namespace ds::recompute {

namespace autograd = torch::autograd;

namespace {

// The recorders of a thread share one callback.
struct Recording {
  static thread_local std::vector<OutsideRecorder*> active;
  static thread_local at::CallbackHandle handle;

  static void visit(const c10::IValue& value) {
    if (value.isTensor()) {
      for (OutsideRecorder* recorder : active) recorder->see(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) visit(element);
    }
  }
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
    for (const c10::IValue& input : function.inputs()) visit(input);
    return nullptr;
  }
};

thread_local std::vector<OutsideRecorder*> Recording::active;
thread_local at::CallbackHandle Recording::handle = 0;

// Takes gradients for the outside tensors.
struct OutsideGradients : autograd::Node {
  autograd::variable_list apply(autograd::variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "OutsideGradients"; }
};

}  // namespace

OutsideRecorder::OutsideRecorder() : begin_(at::sequence_number::peek()) {
  require(at::isRecordFunctionEnabled(), "checkpoint: expected at::RecordFunction enabled, which shows the parameters ",
          "that a region reads, found it disabled; end the at::DisableRecordFunctionGuard");
  Recording::active.push_back(this);
  if (Recording::active.size() > 1) return;
  Recording::handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&Recording::on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

OutsideRecorder::~OutsideRecorder() {
  std::erase(Recording::active, this);
  if (Recording::active.empty()) at::removeCallback(Recording::handle);
}

void OutsideRecorder::see(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return;
  if (known_.insert(tensor.unsafeGetTensorImpl()).second) tensors_.push_back({tensor, version_of(tensor), {}});
}

std::vector<OutsideTensor> OutsideRecorder::take() {
  const uint64_t thread = at::RecordFunction::currentThreadId();
  std::vector<OutsideTensor> result;
  for (OutsideTensor& seen : tensors_) {
    const auto& node = seen.tensor.grad_fn();
    // Made inside, by a function that turns gradients on itself.
    const bool inside =
        node ? node->sequence_nr() >= begin_ && node->thread_id() == thread : seen.tensor.use_count() == 1;
    if (inside) continue;
    seen.edge = autograd::impl::gradient_edge(seen.tensor);
    result.push_back(std::move(seen));
  }
  tensors_.clear();
  known_.clear();
  return result;
}

OutsideCut::OutsideCut(const std::vector<OutsideTensor>& tensors)
    : tensors_(tensors), node_(make_node<OutsideGradients>()) {
  before_.reserve(tensors.size());
  try {
    for (const OutsideTensor& outside : tensors) {
      const auto* meta = autograd::impl::get_autograd_meta(outside.tensor);
      autograd::Edge before(meta->grad_fn_, meta->output_nr_);
      autograd::impl::set_gradient_edge(outside.tensor, {node_, node_->add_input_metadata(outside.tensor)});
      before_.push_back(std::move(before));
    }
  } catch (...) {
    put_back();
    throw;
  }
}

OutsideCut::~OutsideCut() { put_back(); }

void OutsideCut::put_back() {
  for (size_t i = 0; i < before_.size(); ++i) {
    autograd::impl::set_gradient_edge(tensors_[i].tensor, std::move(before_[i]));
  }
}

}  // namespace ds::recompute
