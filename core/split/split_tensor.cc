#include "core/split/split_tensor.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/split/whole_in_place.h"
#include "core/torch_version/node.h"

namespace ds {
namespace {

namespace autograd = torch::autograd;

// Note [Bridges]
// A split tensor made by an operator has a part with a history, and needs one itself: a program may hand it to an
// autograd function of its own. Its edge is a Bridge, which takes the part of a gradient and passes it on to the part's
// edge. The other way round, a split tensor that such a function returns has a history and a part without one. Whoever
// takes that part gets it with a PartGradient, which makes the gradient of the part one of the split tensor.
//
// Which of the two histories counts: the part's, where the split tensor has a Bridge or nothing; else the split
// tensor's. A shallow copy (Tensor::data(), variables that autograd saved) is told by BackendMeta::clone; without a
// history of its own it is detached.

struct SplitMeta;
const SplitMeta& meta_of(const at::Tensor& split);

class Bridge : public autograd::Node {
 public:
  Bridge(Placement placement, const at::Tensor& part, autograd::Edge edge)
      : placement_(std::move(placement)), part_(part.getIntrusivePtr()), edge_(edge.function.get()) {
    add_next_edge(std::move(edge));
  }

  std::string name() const override { return "SplitTensorBridge"; }
  void superseded() { superseded_ = true; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    require_current();
    const at::Tensor& gradient = gradients[0];
    if (!is_split(gradient)) return {own_part_of(gradient)};
    const Placement& placed = placement_of(gradient);
    if (placed.addend ? placement_.summed : placed.cut && placed.cut == placement_.cut) return {part_of(gradient)};
    return {own_part_of(placement_.axis->joined_values(gradient))};
  }

 private:
  // This rank's part of a gradient that every rank has.
  at::Tensor own_part_of(const at::Tensor& gradient) const {
    const at::Tensor part = slice_of(gradient, placement_).contiguous();
    return placement_.summed ? part / static_cast<double>(placement_.axis->size()) : part;
  }

  // A view of the part was changed in place after an autograd function had taken this edge, or before it: which of the
  // two cannot be known.
  void require_current() const {
    if (superseded_) return;
    const auto part = part_.lock();
    if (!part) return;
    const at::Tensor current(part);
    if (!current.requires_grad()) return;  // a leaf that was frozen since
    require(autograd::impl::gradient_edge(current).function.get() == edge_,
            "a split tensor that an autograd function of the program reads was changed in place through a view of it; "
            "hand the function a clone()");
  }

  Placement placement_;
  c10::weak_intrusive_ptr<c10::TensorImpl> part_;
  const autograd::Node* edge_;
  bool superseded_ = false;
};

class PartGradient : public autograd::Node {
 public:
  PartGradient(Placement placement, std::vector<int64_t> sizes)
      : placement_(std::move(placement)), sizes_(std::move(sizes)) {}
  std::string name() const override { return "SplitTensorPart"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {make_split(gradients[0],
                       placement_.summed ? Placement{.axis = placement_.axis, .addend = true} : placement_, sizes_)};
  }

 private:
  Placement placement_;
  std::vector<int64_t> sizes_;
};

// The gradient edge of a parameter that is shown full (core/split/whole_in_place.h).
class ShownWhole : public autograd::Node {
 public:
  explicit ShownWhole(std::string parameter) : parameter_(std::move(parameter)) {}
  std::string name() const override { return "SplitTensorShownWhole"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& /*gradients*/) override {
    throw UsageError(cat("parameter ", parameter_,
                         " was read whole, in a scope of gathered_parameters(), and now gets a ",
                         "gradient of it, which would not reach the part that is trained. Run forward passes that are ",
                         "trained outside of the scope, others under torch::NoGradGuard"));
  }

 private:
  std::string parameter_;
};

// The data that make a tensor a split one.
struct SplitMeta : c10::BackendMeta {
  at::Tensor part;
  Placement placement;
  std::string name;            // the name of a split parameter
  std::vector<int64_t> sizes;  // the sizes of the full tensor
  bool copied = false;
  bool joins_output = false;
  bool trained = false;  // a parameter, see Note [Flags of split parameters]
  WeakNodePointer<Bridge> bridge;

  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& /*own*/) const override {
    auto copy = c10::make_intrusive<SplitMeta>(*this);
    copy->copied = true;
    return copy;
  }
};

SplitMeta& mutable_meta_of(const at::Tensor& split) {
  return *static_cast<SplitMeta*>(split.unsafeGetTensorImpl()->get_backend_meta());
}
const SplitMeta& meta_of(const at::Tensor& split) { return mutable_meta_of(split); }

// Members of TensorImpl that only those who derive from it reach.
struct ImplAccess : c10::TensorImpl {
  static void set_keys(c10::TensorImpl& impl, c10::DispatchKeySet keys) {
    auto member = &ImplAccess::key_set_;
    impl.*member = keys;
  }
  static void set_type_and_device(c10::TensorImpl& impl, const at::Tensor& like) {
    impl.*(&ImplAccess::data_type_) = like.dtype();
    impl.*(&ImplAccess::device_opt_) = like.device();
  }
};

// Gives a tensor the keys of one that an operator made: the split key in the place of its backend's.
void take_keys(c10::TensorImpl& impl, const at::Tensor& like) {
  ImplAccess::set_keys(
      impl,
      at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(kSplitKey), like.dtype(), like.device()).key_set());
  ImplAccess::set_type_and_device(impl, like);
}

// The strides of the full tensor in the order of the part's, so that what is contiguous stays so.
std::vector<int64_t> whole_strides(const at::Tensor& part, int64_t dim, c10::IntArrayRef sizes) {
  const c10::IntArrayRef strides = part.strides();
  const int64_t end = strides[dim] * part.size(dim);
  std::vector<int64_t> result(sizes.size());
  for (int64_t i = 0; i < part.dim(); ++i) {
    const bool outer = i != dim && end > 0 && strides[i] >= end;
    result[i] = outer ? strides[i] / part.size(dim) * sizes[dim] : strides[i];
  }
  return result;
}

void show_whole(c10::TensorImpl& impl, const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  if (!placement.cut) return impl.set_sizes_and_strides(sizes, part.strides());
  if (part.is_contiguous() || part.numel() == 0) return impl.set_sizes_contiguous(sizes);
  impl.set_sizes_and_strides(sizes, whole_strides(part, placement.cut->dim, sizes));
}

// Gives the split tensor an edge to its part's.
void build_bridge(const at::Tensor& split, SplitMeta& meta) {
  auto bridge = make_node<Bridge>(meta.placement, meta.part, autograd::impl::gradient_edge(meta.part));
  bridge->add_input_metadata(split);
  autograd::impl::set_gradient_edge(split, {bridge, 0});
  meta.bridge = bridge;
}

// Note [Flags of split parameters]
// A split parameter that is trained has a bridge, so that requires_grad() is true whatever set_requires_grad() has
// said. The flag below it still tells what the program wants: it is set with the bridge. When the parameter is next
// used, leaf and flag follow whichever of flag and leaf the program has changed.
bool wants_gradient(const at::Tensor& parameter) {
  const auto* const own = autograd::impl::get_autograd_meta(parameter);
  return own != nullptr && own->requires_grad_;
}

void build_parameter_bridge(const at::Tensor& parameter, SplitMeta& meta) {
  const at::AutoGradMode with_grad(true);
  build_bridge(parameter, meta);
  parameter.set_requires_grad(true);
}

void follow_flag_of(const at::Tensor& split, SplitMeta& meta) {
  if (meta.name.empty() || meta.copied) return;  // copies have flags of their own, which say nothing
  if (wants_gradient(split) == meta.trained && meta.part.requires_grad() == meta.trained) return;
  meta.trained = !meta.trained;
  meta.part.set_requires_grad(meta.trained);
  split.set_requires_grad(meta.trained);
  // A bridge stays: an autograd function that reads the parameter first after it was thawed finds it.
  if (meta.trained && meta.bridge.expired()) build_parameter_bridge(split, meta);
}

// Whoever asks for the memory gets a c10::Error with a text that names the tensor and the call that gathers it.
void hide_memory_of(c10::TensorImpl& impl, const std::string& name) {
  impl.release_storage_and_set_meta_custom_data_ptr_error_msg_(cat(
      "parameter ", name,
      " is split over ranks: its memory is not here. ds::parallel::whole(parameter) gathers the full values, to be ",
      "called on all ranks of the axis, ds::parallel::local_part(parameter) is this rank's part; to save a model, ",
      "engine->save_16bit_model() or module_state_dict()"));
}

// Does so for the result of an operator. Each operator on parts pays for it: without a stream.
void hide_memory_of_result(c10::TensorImpl& impl, c10::IntArrayRef sizes) {
  std::string text;
  text.reserve(256);
  text += "a tensor of sizes [";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  text +=
      "] is split over ranks: its memory is not here. ds::parallel::whole(tensor) gathers the full values, to be "
      "called on all ranks of the axis, ds::parallel::local_part(tensor) is this rank's part";
  impl.release_storage_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

at::Tensor part_with_history(const at::Tensor& split, const SplitMeta& meta) {
  at::Tensor result = meta.part.detach();
  if (!at::GradMode::is_enabled()) return result;
  auto node = make_node<PartGradient>(meta.placement, split.sizes().vec());
  node->set_next_edges({autograd::impl::gradient_edge(split)});
  node->add_input_metadata(result);
  autograd::impl::set_gradient_edge(result, {node, 0});
  return result;
}

void require_part(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  require(!is_split(part), "the part of a split tensor is a plain tensor: two axes at once are not there yet");
  std::vector<int64_t> expected = sizes.vec();
  if (placement.cut) {
    expected = TensorPart(expected, *placement.cut, placement.axis->rank(), placement.axis->size()).sizes();
  }
  require(part.sizes() == c10::IntArrayRef(expected), "the part of a split tensor of sizes ", sizes, " on rank ",
          placement.axis->rank(), " of ", placement.axis->size(), " has sizes ", c10::IntArrayRef(expected), ", found ",
          part.sizes());
}

}  // namespace

bool is_split(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kSplitKey); }

const Placement& placement_of(const at::Tensor& split) {
  require(is_split(split), "this is no split tensor");
  return meta_of(split).placement;
}

at::Tensor part_of(const at::Tensor& split) {
  require(is_split(split), "this is no split tensor");
  SplitMeta& meta = mutable_meta_of(split);
  follow_flag_of(split, meta);
  if (!split.requires_grad()) {
    return meta.copied && meta.part.requires_grad() ? meta.part.detach() : meta.part;
  }
  // See Note [Bridges].
  const bool own_history = dynamic_cast<Bridge*>(split.grad_fn().get()) == nullptr;
  if (!own_history && !meta.name.empty()) return meta.part;
  return own_history || !meta.part.requires_grad() ? part_with_history(split, meta) : meta.part;
}

at::Tensor make_split(at::Tensor part, Placement placement, c10::IntArrayRef sizes) {
  if (placement.cut) {
    require(placement.cut->dim >= 0 && placement.cut->dim < static_cast<int64_t>(sizes.size()), "a tensor of sizes ",
            sizes, " has no dimension ", placement.cut->dim, " to be cut along");
    placement.cut = normalized(*std::move(placement.cut), sizes[placement.cut->dim], placement.axis->size());
  }
  require_part(part, placement, sizes);
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(kSplitKey), part.dtype(), part.device());
  c10::TensorImpl& impl = *result.unsafeGetTensorImpl();
  show_whole(impl, part, placement, sizes);
  hide_memory_of_result(impl, sizes);
  auto meta = c10::make_intrusive<SplitMeta>();
  meta->part = std::move(part);
  meta->placement = std::move(placement);
  if (meta->part.requires_grad() && at::GradMode::is_enabled()) build_bridge(result, *meta);
  impl.set_backend_meta(std::move(meta));
  return result;
}

void copy_part_into(const at::Tensor& whole, const at::Tensor& part, const Cut& cut, int index, int count) {
  const int64_t dim = cut.dim;
  const int64_t own = part.size(dim) / cut.repeats;
  const at::Tensor to = whole.unflatten(dim, {cut.repeats, whole.size(dim) / cut.repeats});
  const at::Tensor from = part.unflatten(dim, {cut.repeats, own});
  int64_t block_begin = 0;
  int64_t part_begin = 0;
  for (const int64_t block : blocks_of(cut, whole.size(dim))) {
    for (const DimRange& range : ranges_in_block(cut, block, index, count)) {
      to.narrow(dim + 1, block_begin + range.begin, range.length).copy_(from.narrow(dim + 1, part_begin, range.length));
      part_begin += range.length;
    }
    block_begin += block;
  }
}

at::Tensor slice_of(const at::Tensor& whole, const Placement& placement) {
  if (!placement.cut) return whole.detach();
  return slice_of(whole,
                  TensorPart(whole.sizes().vec(), *placement.cut, placement.axis->rank(), placement.axis->size()));
}

at::Tensor slice_of(const at::Tensor& whole, const TensorPart& part) {
  const at::NoGradGuard no_grad;
  const Cut& cut = part.cut();
  const int64_t dim = cut.dim;
  std::vector<at::Tensor> pieces;
  const at::Tensor blocks = whole.unflatten(dim, {cut.repeats, whole.size(dim) / cut.repeats});
  int64_t begin = 0;
  for (const int64_t block : blocks_of(cut, whole.size(dim))) {
    for (const DimRange& range : ranges_in_block(cut, block, part.index(), part.count())) {
      pieces.push_back(blocks.narrow(dim + 1, begin + range.begin, range.length));
    }
    begin += block;
  }
  const at::Tensor joined = pieces.size() == 1 ? pieces[0] : at::cat(pieces, dim + 1);
  return cut.repeats == 1 ? joined.squeeze(dim) : joined.flatten(dim, dim + 1);
}

at::Tensor split_parameter(const at::Tensor& parameter, const Placement& placement, const at::Tensor& part,
                           std::string name) {
  require(!is_split(parameter), "parameter ", name, " is split already");
  require(parameter.is_leaf(), "only a leaf can be split as a parameter, ", name, " has a history");
  const at::NoGradGuard no_grad;
  Placement own = placement;
  require(placement.cut || placement.summed, "parameter ", name, " is to be split without a cut");
  if (placement.cut) own.cut = normalized(*placement.cut, parameter.size(placement.cut->dim), placement.axis->size());
  require_part(part, own, parameter.sizes());
  const bool trained = parameter.requires_grad();
  const std::vector<int64_t> sizes = parameter.sizes().vec();
  at::Tensor leaf = part.detach().contiguous().set_requires_grad(trained);

  c10::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  parameter.set_requires_grad(false);
  if (parameter.mutable_grad().defined()) parameter.mutable_grad().reset();
  take_keys(impl, leaf);
  hide_memory_of(impl, name);
  show_whole(impl, leaf, own, sizes);
  auto meta = c10::make_intrusive<SplitMeta>();
  meta->part = leaf;
  meta->sizes = sizes;
  meta->placement = std::move(own);
  meta->name = std::move(name);
  meta->trained = trained;
  if (trained) build_parameter_bridge(parameter, *meta);
  impl.set_backend_meta(std::move(meta));
  return leaf;
}

std::string split_name(const at::Tensor& split) { return is_split(split) ? meta_of(split).name : std::string(); }

at::Tensor leaf_of(const at::Tensor& split) {
  if (!is_split(split) || meta_of(split).name.empty()) return {};
  return meta_of(split).part;
}

void follow_leaf(const at::Tensor& parameter) {
  require(!split_name(parameter).empty(), "follow_leaf: expected a split parameter");
  SplitMeta& meta = mutable_meta_of(parameter);
  take_keys(*parameter.unsafeGetTensorImpl(), meta.part);
  follow_flag_of(parameter, meta);
  if (meta.part.requires_grad()) build_parameter_bridge(parameter, meta);
}

void follow_flag(const at::Tensor& parameter) {
  require(!split_name(parameter).empty(), "follow_flag: expected a split parameter");
  follow_flag_of(parameter, mutable_meta_of(parameter));
}

SplitState make_whole(const at::Tensor& parameter, const at::Tensor& whole) {
  require(!split_name(parameter).empty() && !is_split(whole) && whole.sizes() == parameter.sizes(),
          "make_whole: expected a split parameter, and the whole of it");
  c10::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  SplitState state = impl.get_backend_meta_intrusive_ptr();
  SplitMeta& meta = *static_cast<SplitMeta*>(state.get());
  follow_flag_of(parameter, meta);
  impl.set_autograd_meta(nullptr);
  impl.shallow_copy_from(whole.detach().getIntrusivePtr());  // all but history and version
  if (!meta.part.requires_grad()) return state;
  auto node = make_node<ShownWhole>(meta.name);
  node->add_input_metadata(parameter);
  autograd::impl::set_gradient_edge(parameter, {node, 0});
  parameter.set_requires_grad(true);
  return state;
}

void split_again(const at::Tensor& parameter, SplitState state) {
  require(!is_split(parameter) && state, "split_again: expected a parameter that make_whole() had, and what it gave");
  const at::NoGradGuard no_grad;
  SplitMeta& meta = *static_cast<SplitMeta*>(state.get());
  c10::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  meta.trained = wants_gradient(parameter);  // it may have been frozen meanwhile
  meta.part.set_requires_grad(meta.trained);
  impl.set_autograd_meta(nullptr);
  take_keys(impl, meta.part);
  hide_memory_of(impl, meta.name);
  show_whole(impl, meta.part, meta.placement, meta.sizes);
  impl.set_backend_meta(std::move(state));
  if (meta.part.requires_grad()) build_parameter_bridge(parameter, meta);
}

bool joins_output(const at::Tensor& tensor) { return is_split(tensor) && meta_of(tensor).joins_output; }
void mark_joins_output(const at::Tensor& split) {
  require(is_split(split), "this is no split tensor");
  mutable_meta_of(split).joins_output = true;
}

void note_changed_part(const at::Tensor& split, const at::Tensor& part) {
  SplitMeta& meta = mutable_meta_of(split);
  split.unsafeGetTensorImpl()->bump_version();
  if (const auto bridge = meta.bridge.lock()) bridge->superseded();
  meta.part = part;
  meta.copied = false;
  if (at::GradMode::is_enabled() && part.requires_grad()) build_bridge(split, meta);
}

}  // namespace ds
