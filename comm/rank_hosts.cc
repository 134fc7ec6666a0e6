#include "comm/rank_hosts.h"

#include <functional>
#include <map>
#include <string>

#include "comm/meeting/host_identity.h"
#include "comm/rank_numbers.h"

namespace ds::comm {

std::vector<int> hosts_of(Communicator& ranks, c10::Device device) {
  const auto own = static_cast<int64_t>(std::hash<std::string>()(shared_memory_domain()));
  std::map<int64_t, int> numbers;
  std::vector<int> hosts;
  for (const int64_t host : numbers_of_ranks(ranks, device, {own}, "hosts of ranks")) {
    hosts.push_back(numbers.try_emplace(host, static_cast<int>(numbers.size())).first->second);
  }
  return hosts;
}

}  // namespace ds::comm
