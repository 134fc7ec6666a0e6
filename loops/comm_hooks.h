// The hooks of DistributedDataParallel::register_comm_hook(), as reductions of buckets.
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
  at::ScalarType wire = at::ScalarType::Undefined;   // the dtype that is sent; undefined: that of the gradients
  bool prescale = false;                             // gradients are divided before the reduction
};

// Makes the reduction of a hook. `infos`: those of the parameters, by number. The result uses `group` and lives no
// longer. Throws UsageError for numbers out of range, and for buckets that the hook cannot take. Collective.
HookedReduction make_hooked_reduction(const CommHook& hook, const std::shared_ptr<comm::Communicator>& group,
                                      const std::vector<zero::ParameterBucket>& buckets,
                                      const std::vector<ParameterInfo>& infos);

}  // namespace ds::loops
