// The batches of a run as its engine has seen them, tensor by tensor in files: the first run of `ds-launch parity`
// writes them down, the others read them in place of their own. What a program gives its module directly is not seen.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

#include "dsengine/pipeline.h"

namespace ds::engine {

// One micro-batch of the first run: a data-parallel rank, and its number on it, counted over all steps.
struct TapePlace {
  int64_t data_rank = 0;
  int64_t micro_batch = 0;
};

class BatchTape {
 public:
  // Whether this rank writes down the inputs and the labels that it is given, or reads those of `folder` in their
  // place. Several ranks take the same batches; each file has one that writes it.
  struct Use {
    bool writes_inputs = false;
    bool writes_labels = false;
    bool reads = false;
  };
  BatchTape(std::string folder, Use use) : folder_(std::move(folder)), use_(use) {}

  bool writes() const { return use_.writes_inputs || use_.writes_labels; }
  // The tensors that were written down or read so far.
  int64_t count() const { return count_; }

  // Takes tensor number `index` of those that a program gives to forward() in a micro-batch, and returns the one that
  // it goes on with. Throws UsageError for one that was not written down, or with a dtype that no file holds.
  at::Tensor take(const at::Tensor& tensor, const TapePlace& place, int64_t index);
  // Takes a micro-batch of train_batch(): `next` gives the program's own.
  pipeline::MicroBatch take(const pipeline::BatchSource& next, const TapePlace& place);

 private:
  std::string path(const TapePlace& place, const char* what, int64_t index) const;
  at::Tensor read(const std::string& path);
  pipeline::MicroBatch read_batch(const TapePlace& place);
  void write(const at::Tensor& tensor, const std::string& path);

  std::string folder_;
  Use use_;
  int64_t count_ = 0;
};

}  // namespace ds::engine
