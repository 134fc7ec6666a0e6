#include "optim/row_update.h"

#include <ATen/core/grad_mode.h>

#include <deque>

#include "core/check.h"

namespace ds::optimizers {
namespace {

// Copies of some rows of a tensor, which stand in its place for as long as this lives.
class RowsInPlace {
 public:
  RowsInPlace(at::Tensor& place, const at::Tensor& rows, int64_t width)
      : place_(place), whole_(place), table_(place.view({-1, width})), rows_(rows) {
    place_ = table_.index_select(0, rows).reshape({-1});
  }
  ~RowsInPlace() { place_ = whole_; }
  RowsInPlace(const RowsInPlace&) = delete;
  RowsInPlace& operator=(const RowsInPlace&) = delete;

  void write_back() const { at::Tensor(table_).index_copy_(0, rows_, place_.view({rows_.numel(), table_.size(1)})); }

 private:
  at::Tensor& place_;
  at::Tensor whole_;
  at::Tensor table_;
  at::Tensor rows_;
};

}  // namespace

void require_row_wise(const std::string& optimizer, const GroupOptions& options) {
  require(options.momentum == 0 && options.weight_decay == 0, optimizer,
          ": expected momentum 0 and weight_decay 0 in a ", "group with row-wise tables, which the plan names, found ",
          options.momentum, " and ", options.weight_decay,
          ", set after initialize(): rows that no batch reads would not follow. Set them in the config, or in the ",
          "optimizer before initialize(), which then makes no table row-wise");
}

void update_in_rows(Slice& slice, const std::vector<at::Tensor*>& states, const TableRows& gradients,
                    const std::function<void(const at::Tensor& gradient)>& update) {
  ensure(slice.row_width > 0, "rows are updated where a slice has a row_width");
  if (gradients.rows.numel() == 0) return;
  const at::NoGradGuard no_grad;
  std::deque<RowsInPlace> taken;
  taken.emplace_back(slice.master, gradients.rows, slice.row_width);
  for (at::Tensor* const state : states) taken.emplace_back(*state, gradients.rows, slice.row_width);
  update(gradients.values.reshape({-1}));
  for (const RowsInPlace& rows : taken) rows.write_back();
}

}  // namespace ds::optimizers
