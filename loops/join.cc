// DistributedDataParallel::join(): a rank without batches takes part in what the others' backward passes exchange.
//
// Of each pass that reduces, in this order: which ranks have a pass, the buckets, which parameters were used (where
// that is exchanged), the buffers. A rank without batches does the same with zeros.
#include <ATen/ops/zeros.h>

#include <numeric>
#include <string>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "layers/batch_norm/converted_layers.h"
#include "loops/replicated_model_impl.h"

namespace ds::loops {
namespace {

// Keeps the parameters' gradients as they are before the others' passes, which use the buckets that they are views of,
// and restores them afterwards.
class KeptGradients {
 public:
  explicit KeptGradients(const std::vector<zero::Parameter>& parameters) : parameters_(parameters) {
    for (const zero::Parameter& parameter : parameters_) {
      at::Tensor& gradient = parameter.tensor.mutable_grad();
      kept_.push_back(gradient.defined() ? gradient.detach().clone() : at::Tensor());
      gradient.reset();
    }
  }
  ~KeptGradients() {
    for (size_t i = 0; i < kept_.size(); ++i) parameters_[i].tensor.mutable_grad() = kept_[i];
  }
  KeptGradients(const KeptGradients&) = delete;
  KeptGradients& operator=(const KeptGradients&) = delete;

 private:
  const std::vector<zero::Parameter>& parameters_;
  std::vector<at::Tensor> kept_;
};

// Passes inside it are joined ones.
class Joining {
 public:
  explicit Joining(bool& joining) : joining_(joining) { joining_ = true; }
  ~Joining() { joining_ = false; }
  Joining(const Joining&) = delete;
  Joining& operator=(const Joining&) = delete;

 private:
  bool& joining_;
};

// Such a layer exchanges in forward, which a rank without batches does not run.
void require_no_exchange_in_forward(torch::nn::Module& module) {
  for (const norm::NamedLayer& layer : norm::batch_norms_of(module)) {
    const norm::LayerTensors tensors = norm::tensors_of(*layer.module);
    require(norm::find_converted(tensors.weight, tensors.running_mean) == nullptr, "join(): layer ", layer.name,
            " computes over all ranks in forward (convert_sync_batchnorm), where a rank without batches cannot take ",
            "part: expected none such; give all ranks equally many batches, and run the loop without join()");
  }
}

}  // namespace

void ReplicatedModel::Impl::agree_on_passes(bool own) {
  at::Tensor flags = at::zeros({group->size()}, at::kLong);
  flags.mutable_data_ptr<int64_t>()[group->rank()] = own ? 1 : 0;
  flags = flags.to(parameters.trainable.front().tensor.device());
  group->all_reduce(flags, comm::ReduceOp::kSum, "ranks with batches").wait();
  flags = flags.to(at::kCPU);
  const auto* const first = flags.const_data_ptr<int64_t>();
  with_pass.assign(first, first + flags.numel());
  if (!join_options.throw_on_early_termination) return;
  std::string without;
  for (size_t rank = 0; rank < with_pass.size(); ++rank) {
    if (with_pass[rank] == 0) without += cat(without.empty() ? "" : ", ", rank);
  }
  require(without.empty() || last_rank_with_pass() < 0, "join(): expected as many batches on every rank, found none ",
          "more on rank ", without, ", and some on others; give the ranks equal parts of the data, or leave ",
          ".throw_on_early_termination false, so that the others go on (this is rank ", group->rank(), ")");
}

int ReplicatedModel::Impl::last_rank_with_pass() const {
  for (size_t rank = with_pass.size(); rank-- > 0;) {
    if (with_pass[rank] != 0) return static_cast<int>(rank);
  }
  return -1;
}

bool ReplicatedModel::Impl::shadow_passes() {
  const KeptGradients kept(parameters.trainable);
  for (bool none = true;; none = false) {
    agree_on_passes(/*own=*/false);
    if (last_rank_with_pass() < 0) return none;
    shadow_pass();
  }
}

void ReplicatedModel::Impl::shadow_pass() {
  group->note_phase("join (no more batches)", reductions + 1);
  if (hooked.reduction) hooked.reduction->begin_pass(reductions, /*scale=*/1.0);
  reducer->begin_backward(/*synchronize=*/true, /*boundary=*/true);
  reducer->end_backward();
  used.take_part(*group);
  reducer->finish();
  share_rows(/*has_pass=*/false);
  ++reductions;
  if (options.broadcast_buffers) follow_buffers(last_rank_with_pass());
}

void ReplicatedModel::join(const std::function<void()>& loop, const JoinOptions& options) {
  Impl& impl = *impl_;
  require(!impl.joining, "join(): expected no join() inside another one of the same wrapper");
  require(impl.no_sync_scopes == 0, "join(): expected it outside of no_sync()");
  require_no_exchange_in_forward(*impl.module);
  const Joining joining(impl.joining);
  impl.join_options = options;
  // The buffers of forward passes before it, which only the wrapper's calls would have brought in line.
  if (impl.options.broadcast_buffers) impl.follow_buffers(0);
  loop();
  const bool among_the_last = impl.shadow_passes();
  const at::Device device = impl.parameters.trainable.front().tensor.device();
  const auto root = static_cast<int>(
      comm::largest_of_ranks(among_the_last ? impl.group->rank() : -1, device, *impl.group, "ranks that ended last"));
  impl.take_values(impl.parameters.trainable, root, "parameters");
  impl.follow_buffers(root);
}

}  // namespace ds::loops
