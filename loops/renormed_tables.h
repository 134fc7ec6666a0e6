// Tables of torch::nn::Embedding and EmbeddingBag with max_norm, whose forward shortens in place the rows that it looks
// up: on each rank others, though all ranks hold the same table.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "zero/parameter.h"

namespace ds::loops {

// A table of which rows are shortened.
struct RenormedTable {
  std::string name;
  at::Tensor weight;  // shares its identity with the module's
  double max_norm = 0;
  double norm_type = 2;
};

// The tables with max_norm among `trained`, in module order: the same on all ranks. Tables that are no layers of the
// module, of torch::nn::functional::embedding(), are not known.
std::vector<RenormedTable> renormed_tables(const torch::nn::Module& module,
                                           const std::vector<zero::Parameter>& trained);

// The tables as lines "what<TAB>value", for the comparison of ranks.
std::string text_of(const std::vector<RenormedTable>& tables);

// Shortens the rows that another rank has shortened and this one has not, so that all ranks have the table that one
// process with all lookups would have. The table is full on every rank, and the same but for such rows. Collective.
// Throws UsageError where the ranks' tables differ in another way. `is_current`: false on a rank whose table is not the
// others' any more, which takes part and changes nothing.
void share_shortened_rows(const RenormedTable& table, comm::Communicator& ranks, bool is_current = true);

// Shares the rows while ranks run the same operators: between the one that shortens them and the one that reads them.
// On the thread that runs the operators.
class SharedLookups {
 public:
  // Without tables it does nothing. `ranks` outlives it.
  SharedLookups(std::vector<RenormedTable> tables, comm::Communicator& ranks)
      : tables_(std::move(tables)), shortened_by_(tables_.size(), 0), ranks_(ranks) {}

  // Called in an OpInterceptor's callback when the table at hand is full. What fails is kept, for LibTorch only logs
  // what its callbacks throw.
  void before_operator(const at::Tensor& tensor);
  // Throws what has failed.
  void rethrow();

 private:
  std::vector<RenormedTable> tables_;
  std::vector<uint64_t> shortened_by_;  // the operator that has shortened rows which are not shared yet; 0: none
  comm::Communicator& ranks_;
  std::exception_ptr failure_;
};

}  // namespace ds::loops
