// The position of a curriculum of samples, as a checkpoint keeps it. Numbers are counted over all ranks, so that a
// run may go on with other ones. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace ds::efficiency {

struct CurriculumPosition {
  // Samples that one growth of the difficulties has admitted.
  struct Cluster {
    std::vector<int64_t> difficulties;  // its limits: one for each metric that chooses samples, in the config's order
    int64_t drawn = 0;                  // samples that were drawn of it before the running global batch

    bool operator==(const Cluster&) const = default;
  };

  int64_t batches = 0;     // global batches before the running one: its difficulties are those of step batches + 1
  int64_t batch_size = 0;  // samples of the running global batch; 0: it has not begun
  int64_t taken = 0;       // samples of it that are dealt to ranks
  uint64_t files = 0;      // digest of the metric files
  std::vector<Cluster> clusters;

  bool operator==(const CurriculumPosition&) const = default;
};

}  // namespace ds::efficiency
