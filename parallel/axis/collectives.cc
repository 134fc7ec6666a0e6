#include "parallel/axis/collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "parallel/axis/axis.h"

namespace ds::parallel {
namespace {

comm::Communicator& communicator_of(const SplitAxis& axis) { return static_cast<const Axis&>(axis).communicator(); }

// Placement of another rank, to slice for it.
class RankOfAxis : public SplitAxis {
 public:
  RankOfAxis(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  at::Tensor joined_values(const at::Tensor& split) override { return split; }

 private:
  int rank_;
  int size_;
};

at::Tensor slice_for(const at::Tensor& whole, const Cut& cut, int rank, int count) {
  return slice_of(whole, {.axis = std::make_shared<RankOfAxis>(rank, count), .cut = cut});
}

std::vector<int64_t> sizes_for(c10::IntArrayRef sizes, const Cut& cut, int rank, int count) {
  std::vector<int64_t> result = sizes.vec();
  result[cut.dim] = part_extent(cut, sizes[cut.dim], rank, count);
  return result;
}

int64_t elements_for(c10::IntArrayRef sizes, const Cut& cut, int rank, int count) {
  return c10::multiply_integers(sizes_for(sizes, cut, rank, count));
}

// Elements that each rank sends: those of the largest part, which rank 0 has under either order, or rank 1.
int64_t most_elements(c10::IntArrayRef sizes, const Cut& cut, int count) {
  int64_t most = 0;
  for (int rank = 0; rank < count; ++rank) most = std::max(most, elements_for(sizes, cut, rank, count));
  return most;
}

at::Tensor padded_flat(const at::Tensor& tensor, int64_t elements) {
  at::Tensor flat = tensor.contiguous().view({-1});
  if (flat.numel() == elements) return flat;
  return at::cat({flat, at::zeros({elements - flat.numel()}, flat.options())});
}

bool lies_in_order(const Cut& cut, c10::IntArrayRef sizes, int count) {
  return cut.order == PartOrder::kInOrder && cut.repeats == 1 && cut.blocks.size() <= 1 &&
         is_even(cut, sizes[cut.dim], count) && c10::multiply_integers(sizes.slice(0, cut.dim)) == 1;
}

}  // namespace

at::Tensor all_gather_parts(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  const at::NoGradGuard no_grad;
  const Cut& cut = *placement.cut;
  const int count = placement.axis->size();
  const int64_t most = most_elements(sizes, cut, count);
  const at::Tensor whole = at::empty(sizes, part.options());
  if (whole.numel() == 0) return whole;
  comm::Communicator& communicator = communicator_of(*placement.axis);
  if (lies_in_order(cut, sizes, count)) {
    communicator.all_gather(whole.view({-1}), padded_flat(part, most)).wait();
    return whole;
  }
  const at::Tensor all = at::empty({count * most}, part.options());
  communicator.all_gather(all, padded_flat(part, most)).wait();
  for (int rank = 0; rank < count; ++rank) {
    const std::vector<int64_t> own = sizes_for(sizes, cut, rank, count);
    const at::Tensor flat = all.narrow(0, rank * most, c10::multiply_integers(own));
    copy_part_into(whole, flat.view(own), cut, rank, count);
  }
  return whole;
}

at::Tensor reduce_scatter_parts(const at::Tensor& whole, const Placement& placement) {
  const BegunCollective begun = begin_reduce_scatter_parts(whole, placement);
  begun.work.wait();
  return begun.result;
}

BegunCollective begin_reduce_scatter_parts(const at::Tensor& whole, const Placement& placement) {
  const at::NoGradGuard no_grad;
  const Cut& cut = *placement.cut;
  const int count = placement.axis->size();
  const int64_t most = most_elements(whole.sizes(), cut, count);
  if (most == 0) return {.result = slice_of(whole, placement).clone(), .work = {}, .input = {}};
  at::Tensor all;
  if (lies_in_order(cut, whole.sizes(), count)) {
    all = whole.contiguous().view({-1});
  } else {
    std::vector<at::Tensor> slices;
    for (int rank = 0; rank < count; ++rank) {
      slices.push_back(padded_flat(slice_for(whole, cut, rank, count), most));
    }
    all = at::cat(slices);
  }
  // No view: programs change results in place.
  const at::Tensor own = at::empty(sizes_for(whole.sizes(), cut, placement.axis->rank(), count), whole.options());
  const at::Tensor received = own.numel() == most ? own.view({-1}) : at::empty({most}, whole.options());
  const comm::Work work = communicator_of(*placement.axis).reduce_scatter(received, all);
  if (is_even(cut, whole.size(cut.dim), count)) return {.result = own, .work = work, .input = all};
  work.wait();
  if (own.numel() != most) own.copy_(received.narrow(0, 0, own.numel()).view(own.sizes()));
  return {.result = own, .work = {}, .input = {}};
}

at::Tensor all_to_all_parts(const at::Tensor& part, const Placement& from, const Cut& to, c10::IntArrayRef sizes) {
  const at::NoGradGuard no_grad;
  const int own = from.axis->rank();
  const int count = from.axis->size();
  std::vector<at::Tensor> sent;
  std::vector<int64_t> sent_elements;
  std::vector<int64_t> received_elements;
  std::vector<std::vector<int64_t>> received_sizes;
  const std::vector<int64_t> own_sizes = sizes_for(sizes, to, own, count);
  for (int rank = 0; rank < count; ++rank) {
    sent.push_back(slice_for(part, to, rank, count).contiguous().view({-1}));
    sent_elements.push_back(sent.back().numel());
    received_sizes.push_back(sizes_for(own_sizes, *from.cut, rank, count));
    received_elements.push_back(c10::multiply_integers(received_sizes.back()));
  }
  const at::Tensor result = at::empty(own_sizes, part.options());
  const at::Tensor received = at::empty({result.numel()}, part.options());
  communicator_of(*from.axis).all_to_all(received, at::cat(sent), received_elements, sent_elements).wait();
  int64_t begin = 0;
  for (int rank = 0; rank < count; ++rank) {
    const at::Tensor flat = received.narrow(0, begin, received_elements[rank]);
    copy_part_into(result, flat.view(received_sizes[rank]), *from.cut, rank, count);
    begin += received_elements[rank];
  }
  return result;
}

at::Tensor all_to_all_rows(const at::Tensor& rows, SplitAxis& axis, const std::vector<int64_t>& sent,
                           const std::vector<int64_t>& received) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> sizes = rows.sizes().vec();
  if (!received.empty()) sizes[0] = std::accumulate(received.begin(), received.end(), int64_t{0});
  const at::Tensor result = at::empty(sizes, rows.options());
  communicator_of(axis).all_to_all(result, rows.contiguous(), received, sent).wait();
  return result;
}

BegunCollective begin_all_reduce_sum(const at::Tensor& tensor, SplitAxis& axis) {
  const at::NoGradGuard no_grad;
  const at::Tensor result = tensor.detach().clone(at::MemoryFormat::Contiguous);
  return {.result = result, .work = communicator_of(axis).all_reduce(result), .input = {}};
}

at::Tensor all_reduce_sum(const at::Tensor& tensor, SplitAxis& axis) {
  const BegunCollective begun = begin_all_reduce_sum(tensor, axis);
  begun.work.wait();
  return begun.result;
}

at::Tensor all_reduce_max(const at::Tensor& tensor, SplitAxis& axis) {
  const at::NoGradGuard no_grad;
  const at::Tensor result = tensor.detach().clone(at::MemoryFormat::Contiguous);
  communicator_of(axis).all_reduce(result, comm::ReduceOp::kMax).wait();
  return result;
}

}  // namespace ds::parallel
