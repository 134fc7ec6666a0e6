#include "comm/shared_memory/shared_memory_communicator.h"

#include <ATen/ops/full.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <sstream>

#include "comm/local_reduce.h"
#include "comm/meeting/host_identity.h"
#include "comm/operation_name.h"
#include "comm/queued_work.h"
#include "core/check.h"
#include "core/making_process.h"
#include "core/tensor_check.h"
#include "core/text.h"
#include "core/text_hash.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

void require_cpu(const Collective& collective, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  require(tensor.is_cpu(), OperationTitle(collective), ": expected a CPU tensor, found ", describe(tensor),
          "; the shared-memory communicator is for CPU tensors, use a gloo or nccl group for others");
  require_reducible(tensor.scalar_type(), ReduceOp::kMin, OperationTitle(collective));  // that is, a type we carry
}

constexpr const char* kRegionNames = "/dsengine-";  // of regions; the number of the process that makes it follows

std::string new_region_name() {
  SharedRegion::remove_left_over(kRegionNames);
  std::random_device random;
  auto name = classic_stream<std::ostringstream>();
  name << kRegionNames << getpid() << '-' << std::hex << random() << random();
  return std::move(name).str();
}

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(int rank, int size, std::string name, Memory memory,
                                                   std::chrono::milliseconds timeout)
    : Communicator(rank, size, std::move(name)),
      memory_(std::move(memory.region), size),
      directory_(std::move(memory.directory)),
      region_name_(std::move(memory.region_name)),
      peers_(memory_, rank, this->name(), timeout, [this] { return verdict(); }),
      collectives_(memory_, peers_, rank),
      messages_(std::make_unique<SharedMemoryMessages>(memory_, peers_, rank,
                                                       [this](const std::string& text) { fail(text); })),
      queue_(std::make_unique<TaskQueue>()) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() {
  peers_.abandon_at(SharedMemoryPeers::Clock::now() + kGrace);
  queue_.reset();
  messages_.reset();
  peers_.publish_departure();
}

void SharedMemoryCommunicator::fail(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (first_error_.empty()) first_error_ = text;
  }
  peers_.publish_failure(text);
}

void SharedMemoryCommunicator::require_usable(const Collective& collective) const {
  const std::lock_guard lock(mutex_);
  require<CommError>(first_error_.empty(), name(), " rank ", rank(), ": ", OperationTitle(collective),
                     " refused, the communicator has failed before: ", first_error_);
}

Work SharedMemoryCommunicator::launch(Collective collective) {
  require_cpu(collective, collective.input);
  require_cpu(collective, collective.output);
  const bool reduces = collective.kind == CollectiveKind::kAllReduce || collective.kind == CollectiveKind::kReduce ||
                       collective.kind == CollectiveKind::kReduceScatter;
  if (reduces) require_reducible(collective.input.scalar_type(), collective.op, OperationTitle(collective));
  if (collective.kind == CollectiveKind::kSend || collective.kind == CollectiveKind::kRecv) {
    require_usable(collective);
    return Work(messages_->post(collective));
  }
  return enqueue(std::move(collective));
}

Work SharedMemoryCommunicator::enqueue(Collective collective, uint64_t check) {
  require_usable(collective);
  OperationRecord record = record_of(collective, size());
  record.check = check;
  return Work(std::make_shared<QueuedWork>(queue_->push([this, record, collective = std::move(collective)] {
    require_usable(collective);
    try {
      collectives_.run(collective, record);
      tell_end(collective.timers);
    } catch (const CommError& error) {
      fail(error.what());
      throw;
    }
  })));
}

void SharedMemoryCommunicator::meet(const std::string& label, uint64_t check) {
  if (size() > 1) enqueue({.kind = CollectiveKind::kBarrier, .label = label}, check).wait();
}

std::shared_ptr<SharedRegion> SharedMemoryCommunicator::agree_on_region(const std::vector<int>& ranks,
                                                                        const std::string& region_name,
                                                                        const std::string& label) {
  const int creator = ranks.front();
  const int members = static_cast<int>(ranks.size());
  const size_t bytes = GroupMemory::bytes_for(members);
  std::shared_ptr<SharedRegion> region;
  std::exception_ptr error;
  if (rank() == creator) {
    try {
      region = directory_->create(region_name, bytes);
      GroupMemory::initialize(*region, members);
    } catch (const Error&) {
      error = std::current_exception();
    }
  }
  const at::Tensor created = at::full({1}, region ? 1 : 0, at::kLong);
  if (size() > 1) {
    enqueue({.kind = CollectiveKind::kBroadcast, .input = created, .output = created, .peer = creator, .label = label})
        .wait();
  }
  if (error) std::rethrow_exception(error);
  require<CommError>(*created.const_data_ptr<int64_t>() == 1, name(), ": ", label, ": rank ", creator,
                     " could not create the shared memory, ", bytes, " bytes; its own error says why");
  const bool member = std::find(ranks.begin(), ranks.end(), rank()) != ranks.end();
  return region || !member ? region : directory_->attach(region_name, bytes);
}

std::shared_ptr<Communicator> SharedMemoryCommunicator::make_group(const std::vector<int>& ranks,
                                                                   const std::string& name) {
  std::string list;
  for (const int member : ranks) list += cat(list.empty() ? "" : ",", member);
  const std::string label = cat("new_group ", name, " of ranks ", list);
  require(!ranks.empty() && ranks.front() >= 0 && ranks.back() < size() &&
              std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end(),
          label, ": expected ascending ranks of group ", this->name(), " in [0, ", size(), ")");
  meet(label, fnv1a(list));
  const std::string region_name = cat(region_name_, ".", groups_made_++);
  const std::shared_ptr<SharedRegion> region = agree_on_region(ranks, region_name, label);
  std::shared_ptr<Communicator> group;
  if (region) {
    const auto place = std::find(ranks.begin(), ranks.end(), rank());
    group = make_shared_where_made<SharedMemoryCommunicator>(static_cast<int>(place - ranks.begin()),
                                                             static_cast<int>(ranks.size()), name,
                                                             Memory{region, directory_, region_name}, peers_.timeout());
  }
  const auto seal = [&] {
    if (rank() == ranks.front()) directory_->seal(region_name);
  };
  try {
    meet(label);
  } catch (...) {
    seal();
    throw;
  }
  seal();
  return group;
}

namespace {

// "NAME DOMAIN HOST", or "failed: REASON", as rank 0 has put it.
std::string announcement(const SharedMemoryGroup& group, const std::string& key, const std::string& label) {
  try {
    group.store->wait({key}, group.timeout);
    return group.store->get_to_str(key);
  } catch (const std::exception& error) {
    throw CommError(cat(label, " as rank ", group.rank, ": rank 0 did not announce the shared memory within ",
                        group.timeout.count(), " ms: ", without_stack(error.what())));
  }
}

// The region's name, once it is certain that this process can see it.
std::string announced_region(const SharedMemoryGroup& group, const std::string& key, const std::string& label) {
  const std::string text = announcement(group, key, label);
  require<CommError>(!text.starts_with("failed: "), label, " as rank ", group.rank, ": rank 0 ", text);
  auto words = classic_stream<std::istringstream>(text);
  std::string region_name, domain, host;
  words >> region_name >> domain >> host;
  require<CommError>(domain == shared_memory_domain(), label, " as rank ", group.rank, ": rank 0 (on ", host,
                     ") and this rank (on ", lazy(host_name),
                     ") cannot share memory: they run on different hosts, or in containers with a /dev/shm or process "
                     "ids of their own; use \"communication_backend\": \"gloo\"");
  return region_name;
}

}  // namespace

std::shared_ptr<Communicator> make_shared_memory_communicator(const SharedMemoryGroup& group) {
  const std::string key = "dsengine/shared_memory/" + group.name;
  const std::string label = "joining group " + group.name;
  const size_t bytes = GroupMemory::bytes_for(group.size);
  const auto directory = std::make_shared<PosixRegionDirectory>();
  const auto join = [&](std::shared_ptr<SharedRegion> region, const std::string& region_name) {
    auto communicator = make_shared_where_made<SharedMemoryCommunicator>(
        group.rank, group.size, group.name, SharedMemoryCommunicator::Memory{std::move(region), directory, region_name},
        group.timeout);
    communicator->meet(label);
    return communicator;
  };
  if (group.rank != 0) {
    const std::string region_name = announced_region(group, key, label);
    return join(directory->attach(region_name, bytes), region_name);
  }
  const std::string region_name = new_region_name();
  std::shared_ptr<SharedRegion> region;
  try {
    region = directory->create(region_name, bytes);
  } catch (const CommError& error) {
    if (group.size > 1) group.store->set(key, cat("failed: ", without_stack(error.what())));
    throw;
  }
  try {
    GroupMemory::initialize(*region, group.size);
    if (group.size > 1) group.store->set(key, cat(region_name, " ", shared_memory_domain(), " ", host_name()));
    auto communicator = join(std::move(region), region_name);
    directory->seal(region_name);
    return communicator;
  } catch (...) {
    directory->seal(region_name);
    throw;
  }
}

}  // namespace ds::comm
