// Gloo groups between threads: the contract of all communicators.
#include "tests/comm/communicator_contract.h"
#include "tests/support/gloo_threads.h"

namespace ds::test {
namespace {

std::vector<ContractCase> cases() {
  std::vector<ContractCase> result;
  for (const int world : {1, 2, 3, 5}) {
    result.push_back({"Threads", world, [](int size, const std::function<void(comm::Communicator&)>& body) {
                        ds::testing::on_gloo_threads(size, body);
                      }});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Gloo, CommunicatorContract, ::testing::ValuesIn(cases()), contract_name);

}  // namespace
}  // namespace ds::test
