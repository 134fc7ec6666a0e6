// What travels in place of gradients, as DistributedDataParallel::register_comm_hook() names it.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <vector>

#include "comm/bucket_reduction.h"
#include "core/slices/segment.h"
#include "dsengine/comm.h"
#include "dsengine/distributed_data_parallel.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

struct HookedReduction {
  std::unique_ptr<comm::BucketReduction> reduction;  // null: an all-reduce
  at::ScalarType wire = at::ScalarType::Undefined;   // of it; undefined: that of the gradients
  bool prescale = false;                             // divided before it
};

// `infos`: of the parameters, by number. What it returns uses `group` and lives no longer. Throws UsageError for
// numbers out of range, and for buckets that the hook cannot take. Collective.
HookedReduction make_hooked_reduction(const CommHook& hook, const std::shared_ptr<comm::Communicator>& group,
                                      const std::vector<zero::ParameterBucket>& buckets,
                                      const std::vector<ParameterInfo>& infos);

}  // namespace ds::loops
