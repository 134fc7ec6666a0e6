// The axis of ranks that share a batch, of which each has some positions.
#pragma once

#include <memory>
#include <utility>

#include "dsengine/sequence_attention.h"
#include "parallel/axis/axis.h"

namespace ds::parallel {

class SequenceAxis : public Axis {
 public:
  SequenceAxis(std::shared_ptr<comm::Communicator> communicator, const SequenceAxisOptions& options)
      : Axis(std::move(communicator)), options_(options) {
    cut_sequences(true);  // parameters are summed ones
  }

  const SequenceAxisOptions& options() const { return options_; }

 private:
  SequenceAxisOptions options_;
};

}  // namespace ds::parallel
