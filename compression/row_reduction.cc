#include "compression/row_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <span>

#include "compression/bucket_parts.h"
#include "compression/chained_work.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {
namespace {

// int64 on the CPU, ascending.
std::span<const int64_t> numbers(const at::Tensor& rows) {
  return {rows.const_data_ptr<int64_t>(), static_cast<size_t>(rows.numel())};
}

// Places of the rows [begin, end) in ascending numbers.
Part places_of(std::span<const int64_t> rows, int64_t begin, int64_t end) {
  const auto first = std::lower_bound(rows.begin(), rows.end(), begin) - rows.begin();
  const auto last = std::lower_bound(rows.begin(), rows.end(), end) - rows.begin();
  return {first, last - first};
}

// A matrix of a bucket, with the number of its first row.
struct NumberedMatrix {
  int64_t offset = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

std::vector<NumberedMatrix> numbered(const RowBucket& bucket) {
  std::vector<NumberedMatrix> result;
  int64_t row = 0;
  for (const RowBucket::Matrix& matrix : bucket.matrices) {
    result.push_back({matrix.offset, row, matrix.rows});
    row += matrix.rows;
  }
  return result;
}

// One reduction of one bucket, from the count of rows to the sum.
class RowExchange {
 public:
  RowExchange(const ExchangeGroups& groups, const RowBucket& bucket, const at::Tensor& output,
              const at::Tensor& gradient, comm::ReduceOp op, std::string label)
      : groups_(groups),
        width_(bucket.width),
        matrices_(numbered(bucket)),
        output_(output),
        gradient_(gradient),
        all_(takes_all(output, gradient)),
        op_(op),
        label_(std::move(label)) {}

  // How many rows each rank has, for all or for each other one.
  comm::Work send_counts() {
    rows_ = rows_of_gradient();
    for (int part = 0; part < parts(); ++part) to_.push_back(rows_for(part));
    const at::Tensor own = at::empty({parts()}, at::kLong);
    for (int part = 0; part < parts(); ++part) own.mutable_data_ptr<int64_t>()[part] = to_[index(part)].length;
    counts_ = at::empty({int64_t{groups_.size()} * parts()}, at::TensorOptions(at::kLong).device(gradient_.device()));
    counts_own_ = own.to(gradient_.device());
    return groups_.first->all_gather(counts_, counts_own_, label_);
  }

  comm::Work send_rows() {
    const at::Tensor counts = counts_.to(at::kCPU);
    const auto count = [&](int from, int part) { return counts.const_data_ptr<int64_t>()[from * parts() + part]; };
    const auto most = counts.max().item<int64_t>();
    const int64_t ranks = groups_.size();
    const int64_t row_bytes = static_cast<int64_t>(sizeof(int32_t)) + width_ * gradient_.element_size();
    // The bytes that all ranks send together, as CommCounters count it, without the factor that both ways share.
    const auto bytes = static_cast<int64_t>(gradient_.nbytes());
    const int64_t by_rows = row_bytes * (all_ ? ranks * most : counts.sum().item<int64_t>());
    if (by_rows >= bytes * (all_ ? 2 : ranks)) {
      dense_ = true;
      return all_ ? groups_.second->all_reduce(gradient_, op_, label_)
                  : groups_.second->reduce_scatter(output_, gradient_, op_, label_);
    }
    for (int from = 0; from < groups_.size(); ++from) from_.push_back(count(from, all_ ? 0 : groups_.rank()));
    if (most == 0) return {};
    return all_ ? gather_from_all(most) : send_to_owners();
  }

  void add_up() {
    positions_work_.wait();
    if (dense_) return;
    output_.zero_();
    std::vector<at::Tensor> positions;
    std::vector<at::Tensor> values;
    for (size_t from = 0; from < from_.size(); ++from) {
      if (from_[from] == 0) continue;
      positions.push_back(positions_.narrow(0, starts_[from], from_[from]));
      values.push_back(values_.narrow(0, starts_[from], from_[from]));
    }
    if (positions.empty()) return;
    const auto [rows, place, counts] = at::_unique2(at::cat(positions).to(at::kLong), true, true);
    const at::Tensor sum = at::zeros({rows.numel(), width_}, output_.options().dtype(at::kFloat));
    int64_t begin = 0;
    // Rank by rank: within one no row comes twice, so that devices add in the same order on all ranks.
    for (const at::Tensor& of_rank : values) {
      sum.index_add_(0, place.narrow(0, begin, of_rank.size(0)), of_rank.to(at::kFloat));
      begin += of_rank.size(0);
    }
    if (const int divisor = divisor_of(op_, groups_.size()); divisor != 1) sum.div_(divisor);
    put(rows, sum.to(output_.scalar_type()));
  }

 private:
  static size_t index(int part) { return static_cast<size_t>(part); }
  int parts() const { return all_ ? 1 : groups_.size(); }

  at::Tensor in_rows(const NumberedMatrix& matrix) const {
    return gradient_.narrow(0, matrix.offset, matrix.rows * width_).view({matrix.rows, width_});
  }

  at::Tensor rows_of_gradient() const {
    std::vector<at::Tensor> found;
    for (const NumberedMatrix& matrix : matrices_) {
      const at::Tensor largest =
          at::linalg_vector_norm(in_rows(matrix), std::numeric_limits<double>::infinity(), at::IntArrayRef{1});
      found.push_back(largest.ne(0).nonzero().reshape({-1}).add_(matrix.first_row));
    }
    return at::cat(found).to(at::kCPU);
  }

  // Those that part `part` of the bucket has elements of, by place in rows_. A row may lie in two parts.
  Part rows_for(int part) const {
    if (all_) return {0, rows_.numel()};
    const int64_t begin = part * output_.numel();
    const int64_t end = begin + output_.numel();
    Part result;
    for (const NumberedMatrix& matrix : matrices_) {
      const int64_t from = std::max(begin, matrix.offset) - matrix.offset;
      const int64_t to = std::min(end, matrix.offset + matrix.rows * width_) - matrix.offset;
      if (from >= to) continue;
      const Part places =
          places_of(numbers(rows_), matrix.first_row + from / width_, matrix.first_row + (to + width_ - 1) / width_);
      if (result.length == 0) result.begin = places.begin;
      result.length += places.length;
    }
    return result;
  }

  // int32 numbers and [k, width] values of the rows at these places.
  std::pair<at::Tensor, at::Tensor> taken(Part places) const {
    const at::Tensor rows = rows_.narrow(0, places.begin, places.length);
    std::vector<at::Tensor> values = {at::empty({0, width_}, gradient_.options())};
    for (const NumberedMatrix& matrix : matrices_) {
      const Part own = places_of(numbers(rows), matrix.first_row, matrix.first_row + matrix.rows);
      if (own.length == 0) continue;
      const at::Tensor in_matrix = rows.narrow(0, own.begin, own.length).sub(matrix.first_row);
      values.push_back(in_rows(matrix).index_select(0, in_matrix.to(gradient_.device())));
    }
    return {rows.to(gradient_.device(), at::kInt), at::cat(values)};
  }

  void receive(int64_t rows) {
    positions_ = at::zeros({rows}, gradient_.options().dtype(at::kInt));
    values_ = at::zeros({rows, width_}, gradient_.options());
  }

  // Filled up to the rows of the rank that has most.
  comm::Work gather_from_all(int64_t most) {
    receive(groups_.size() * most);
    for (int from = 0; from < groups_.size(); ++from) starts_.push_back(from * most);
    const int64_t begin = groups_.rank() * most;
    const auto [positions, values] = taken(to_[0]);
    positions_.narrow(0, begin, positions.numel()).copy_(positions);
    values_.narrow(0, begin, values.size(0)).copy_(values);
    positions_work_ = groups_.second->all_gather(positions_, positions_.narrow(0, begin, most), label_);
    return groups_.second->all_gather(values_, values_.narrow(0, begin, most), label_);
  }

  comm::Work send_to_owners() {
    std::vector<int64_t> sent;
    std::vector<at::Tensor> positions;
    std::vector<at::Tensor> values;
    for (const Part& places : to_) {
      auto [own_positions, own_values] = taken(places);
      sent.push_back(places.length);
      positions.push_back(std::move(own_positions));
      values.push_back(std::move(own_values));
    }
    starts_.resize(from_.size());
    std::exclusive_scan(from_.begin(), from_.end(), starts_.begin(), int64_t{0});
    receive(std::accumulate(from_.begin(), from_.end(), int64_t{0}));
    positions_work_ = groups_.second->all_to_all(positions_, at::cat(positions), from_, sent, label_);
    return groups_.second->all_to_all(values_, at::cat(values), from_, sent, label_);
  }

  // The rows, ascending and each once, where output has elements of them.
  void put(const at::Tensor& rows, const at::Tensor& sum) const {
    const at::Tensor on_host = rows.to(at::kCPU);
    const int64_t begin = all_ ? 0 : groups_.rank() * output_.numel();
    for (const NumberedMatrix& matrix : matrices_) {
      const int64_t from = std::max(begin, matrix.offset);
      const int64_t to = std::min(begin + output_.numel(), matrix.offset + matrix.rows * width_);
      if (from >= to) continue;
      // Rows that lie in output whole, and those that a border of it cuts.
      const int64_t first = (from - matrix.offset + width_ - 1) / width_;
      const int64_t last = (to - matrix.offset) / width_;
      if (first < last) {
        const Part places = places_of(numbers(on_host), matrix.first_row + first, matrix.first_row + last);
        output_.narrow(0, matrix.offset + first * width_ - begin, (last - first) * width_)
            .view({last - first, width_})
            .index_copy_(0, rows.narrow(0, places.begin, places.length).sub(matrix.first_row + first),
                         sum.narrow(0, places.begin, places.length));
      }
      const auto put_part = [&](int64_t row) {
        const Part place = places_of(numbers(on_host), matrix.first_row + row, matrix.first_row + row + 1);
        if (place.length == 0) return;
        const int64_t row_begin = matrix.offset + row * width_;
        const int64_t part_begin = std::max(from, row_begin);
        const int64_t part_end = std::min(to, row_begin + width_);
        output_.narrow(0, part_begin - begin, part_end - part_begin)
            .copy_(sum[place.begin].narrow(0, part_begin - row_begin, part_end - part_begin));
      };
      if (first * width_ > from - matrix.offset) put_part(first - 1);
      if (last * width_ < to - matrix.offset && last >= first) put_part(last);
    }
  }

  const ExchangeGroups& groups_;
  int64_t width_;
  std::vector<NumberedMatrix> matrices_;
  at::Tensor output_;
  at::Tensor gradient_;
  bool all_;
  comm::ReduceOp op_;
  std::string label_;
  at::Tensor rows_;              // of this rank that are not zero
  std::vector<Part> to_;         // of each part of the bucket: places in rows_
  at::Tensor counts_own_;        // [parts]
  at::Tensor counts_;            // [ranks * parts]
  std::vector<int64_t> from_;    // rows that come from each rank,
  std::vector<int64_t> starts_;  // and where they begin in what is received:
  at::Tensor positions_;         // int32 numbers,
  at::Tensor values_;            // [rows, width]
  comm::Work positions_work_;
  bool dense_ = false;
};

}  // namespace

int64_t RowBucket::rows() const {
  return std::accumulate(matrices.begin(), matrices.end(), int64_t{0},
                         [](int64_t sum, const Matrix& matrix) { return sum + matrix.rows; });
}

RowReduction::RowReduction(ExchangeGroups groups, std::vector<RowBucket> buckets)
    : groups_(std::move(groups)), buckets_(std::move(buckets)) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    require(buckets_[b].rows() <= std::numeric_limits<int32_t>::max(), "sparse_gradients: bucket ", b,
            ": expected less than 2^31 rows, found ", buckets_[b].rows(), "; set sparse_gradients to false");
  }
}

comm::Work RowReduction::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                               std::string label) {
  const at::NoGradGuard no_grad;
  const int ranks = groups_.size();
  require_reduction("sparse gradients", label, output, gradient, op, ranks);
  if (ranks == 1 || gradient.numel() == 0) return keep_alone(output, gradient);
  const auto exchange =
      std::make_shared<RowExchange>(groups_, buckets_.at(bucket), output, gradient, op, std::move(label));
  return chained(exchange->send_counts(), {[exchange] { return exchange->send_rows(); },
                                           [exchange]() -> comm::Work {
                                             exchange->add_up();
                                             return {};
                                           }});
}

}  // namespace ds::compression
