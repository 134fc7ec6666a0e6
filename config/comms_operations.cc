#include "config/comms_operations.h"

#include <iterator>
#include <string_view>

namespace ds::engine::config {
namespace {

using comm::CollectiveKind;

struct NamedOperation {
  std::string_view name;
  CollectiveKind kind;
};

constexpr NamedOperation kOperations[] = {{"all_reduce", CollectiveKind::kAllReduce},
                                          {"all_reduce_coalesced", CollectiveKind::kAllReduce},
                                          {"inference_all_reduce", CollectiveKind::kAllReduce},
                                          {"all_gather", CollectiveKind::kAllGather},
                                          {"all_gather_into_tensor", CollectiveKind::kAllGather},
                                          {"all_gather_coalesced", CollectiveKind::kAllGather},
                                          {"all_gather_object", CollectiveKind::kAllGather},
                                          {"reduce_scatter", CollectiveKind::kReduceScatter},
                                          {"reduce_scatter_tensor", CollectiveKind::kReduceScatter},
                                          {"all_to_all", CollectiveKind::kAllToAll},
                                          {"all_to_all_single", CollectiveKind::kAllToAll},
                                          {"broadcast", CollectiveKind::kBroadcast},
                                          {"broadcast_object_list", CollectiveKind::kBroadcast},
                                          {"reduce", CollectiveKind::kReduce},
                                          {"gather", CollectiveKind::kGather},
                                          {"scatter", CollectiveKind::kScatter},
                                          {"send", CollectiveKind::kSend},
                                          {"isend", CollectiveKind::kSend},
                                          {"recv", CollectiveKind::kRecv},
                                          {"irecv", CollectiveKind::kRecv},
                                          {"monitored_barrier", CollectiveKind::kBarrier},
                                          {"barrier", CollectiveKind::kBarrier}};

}  // namespace

std::optional<CollectiveKind> find_operation(const std::string& name) {
  for (const NamedOperation& one : kOperations) {
    if (one.name == name) return one.kind;
  }
  return std::nullopt;
}

std::string known_operations() {
  std::string text;
  for (const NamedOperation& one : kOperations) {
    const bool last = &one == std::end(kOperations) - 1;
    if (!text.empty()) text += last ? " or " : ", ";
    text += one.name;
  }
  return text;
}

}  // namespace ds::engine::config
