// The shared-memory communicator between threads: the contract of all communicators.
#include "tests/comm/communicator_contract.h"
#include "tests/support/thread_ranks.h"

namespace ds::test {
namespace {

std::vector<ContractCase> cases() {
  std::vector<ContractCase> result;
  for (const int world : {1, 2, 3, 4, 8}) {
    result.push_back({"Threads", world,
                      [](int size, const std::function<void(comm::Communicator&)>& body) { run_ranks(size, body); }});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, CommunicatorContract, ::testing::ValuesIn(cases()), contract_name);

}  // namespace
}  // namespace ds::test
