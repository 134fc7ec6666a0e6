#include "tests/simulated_gpu/timeline.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/text.h"

namespace ds::simulated_gpu {
namespace {

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t at(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

bool overlap(const Access& a, const Access& b) { return a.begin < b.end && b.begin < a.end; }

bool within(const Access& inner, const Access& outer) { return outer.begin <= inner.begin && inner.end <= outer.end; }

}  // namespace

Timeline& Timeline::instance() {
  static auto* const timeline = new Timeline;  // used by destructors of the end
  return *timeline;
}

size_t Timeline::stream(int device, int64_t id) {
  const Lock lock(mutex_);
  const auto [found, fresh] = numbers_.emplace(std::pair(device, id), streams_.size());
  if (fresh) {
    streams_.emplace_back();
    streams_.back().device = device;
    streams_.back().name =
        id == 0 ? cat("the default stream of cuda:", device) : cat("stream ", id, " of cuda:", device);
  }
  return found->second;
}

Point Timeline::enqueue(size_t stream, std::string name, const std::vector<Access>& accesses,
                        std::function<void()> run) {
  const Lock lock(mutex_);
  Stream& to = streams_[stream];
  join(to.clock, host_);
  if (to.clock.size() <= stream) to.clock.resize(stream + 1);
  ++to.clock[stream];
  Task given{.run = std::move(run), .after = {}, .reads = {}, .writes = {}};
  for (const Access& access : accesses) {
    const Memory* const memory = memory_at(access.begin);
    if (memory == nullptr || memory->where == Where::kDevice || access.begin >= access.end) continue;
    if (access.write) {
      given.writes.push_back(access);
    } else {
      given.reads.push_back({access.begin, access.end, stream, to.clock[stream], name});
    }
  }
  to.tasks.push_back(std::move(given));
  ++to.given;
  changed_.notify_all();
  const Point task{stream, to.given, to.clock};
  for (const Access& access : accesses) check(task, name, access);
  return task;
}

void Timeline::add_access(const Point& task, const std::string& name, Access access) {
  const Lock lock(mutex_);
  check(task, name, access);
}

Point Timeline::now(size_t stream) {
  const Lock lock(mutex_);
  Stream& of = streams_[stream];
  return {stream, of.given, of.clock};
}

void Timeline::block(size_t stream, const Point& point) {
  const Lock lock(mutex_);
  Stream& of = streams_[stream];
  join(of.clock, point.clock);
  if (point.stream == stream || streams_[point.stream].done >= point.position) return;
  of.tasks.push_back({.run = nullptr, .after = {point}, .reads = {}, .writes = {}});
  ++of.given;
  changed_.notify_all();
}

void Timeline::run_until(Lock& lock, size_t stream, uint64_t position) {
  Stream& of = streams_[stream];
  std::exception_ptr error;  // the first; what comes after still keeps its order
  while (of.done < position) {
    if (of.running) {
      changed_.wait(lock);
      continue;
    }
    Task task = std::move(of.tasks.front());
    of.tasks.pop_front();
    of.running = true;
    try {
      for (const Point& point : task.after) run_until(lock, point.stream, point.position);
      for (const Access& write : task.writes) {
        end_reads([&](const auto& read) { return read.begin < write.end && write.begin < read.end; });
      }
      lock.unlock();
      if (task.run) task.run();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
    if (lock.owns_lock()) lock.unlock();
    std::vector<PinnedReads::Read> reads = std::move(task.reads);
    task = {};  // before others may take its memory to be free
    lock.lock();
    for (PinnedReads::Read& read : reads) {
      if (memory_at(read.begin) != nullptr) reads_.add(std::move(read));  // not of what was freed before the task ran
    }
    of.running = false;
    ++of.done;
    changed_.notify_all();
  }
  if (error) std::rethrow_exception(error);
}

void Timeline::run_until(const Point& point) {
  Lock lock(mutex_);
  run_until(lock, point.stream, point.position);
  release_freed(lock);
}

void Timeline::wait(const Point& point, const std::string& what) {
  Lock lock(mutex_);
  if (!what.empty()) ++waits_[cat(what, streams_[point.stream].given == point.position ? " (nothing behind it)" : "")];
  run_until(lock, point.stream, point.position);
  join(host_, point.clock);
  end_reads([this](const auto& read) { return at(host_, read.stream) >= read.time; });
  release_freed(lock);
}

bool Timeline::reached(const Point& point) {
  const Lock lock(mutex_);
  const bool reached = streams_[point.stream].done >= point.position;
  if (reached) join(host_, point.clock);  // who asks knows it now
  return reached;
}

void Timeline::wait_for_all() {
  size_t count = 0;
  {
    const Lock lock(mutex_);
    count = streams_.size();
  }
  for (size_t i = 0; i < count; ++i) wait(now(i), "all streams");
}

void Timeline::wait_for_device(int device) {
  std::vector<size_t> found;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i].device == device) found.push_back(i);
    }
  }
  for (const size_t stream : found) wait(now(stream), "a device");
}

void Timeline::run_all_on(uintptr_t begin, size_t bytes) {
  const Access place{begin, begin + bytes, false};
  Lock lock(mutex_);
  for (size_t i = 0; i < streams_.size(); ++i) {
    const std::deque<Task>& tasks = streams_[i].tasks;
    size_t last = 0;  // counted from 1
    for (size_t t = 0; t < tasks.size(); ++t) {
      const bool reads = std::any_of(tasks[t].reads.begin(), tasks[t].reads.end(), [&](const auto& read) {
        return overlap({read.begin, read.end, false}, place);
      });
      const bool writes = std::any_of(tasks[t].writes.begin(), tasks[t].writes.end(),
                                      [&](const Access& write) { return overlap(write, place); });
      if (reads || writes) last = t + 1;
    }
    if (last > 0) run_until(lock, i, streams_[i].given - tasks.size() + last);
  }
}

void Timeline::add_memory(uintptr_t begin, size_t bytes, Where where, size_t stream) {
  const Lock lock(mutex_);
  Memory memory{.bytes = bytes, .where = where, .stream = stream, .users = {}, .past = {}};
  if (where == Where::kDevice) {
    // It may be memory that this stream has used before: others come after what the stream does now.
    memory.past.push_back({{begin, begin + bytes, true}, stream, at(streams_[stream].clock, stream), "allocation"});
  }
  memory_[begin] = std::move(memory);
}

Timeline::Memory* Timeline::memory_at(uintptr_t address, uintptr_t* begin) {
  auto found = memory_.upper_bound(address);
  if (found == memory_.begin()) return nullptr;
  --found;
  if (address >= found->first + found->second.bytes) return nullptr;
  if (begin != nullptr) *begin = found->first;
  return &found->second;
}

void Timeline::add_user(uintptr_t address, size_t stream) {
  const Lock lock(mutex_);
  if (Memory* const memory = memory_at(address)) memory->users.push_back(stream);
}

void Timeline::check(const Point& task, const std::string& name, Access access) {
  if (access.begin >= access.end) return;
  uintptr_t begin = 0;
  Memory* const memory = memory_at(access.begin, &begin);
  if (memory == nullptr) return;
  const Past now{access, task.stream, at(task.clock, task.stream), name};
  for (const Past& past : memory->past) {
    if (past.stream == task.stream || !overlap(past.access, access) || !(past.access.write || access.write)) continue;
    if (at(task.clock, past.stream) < past.time) {
      report(cat(text_of(now, begin), " is not ordered after ", text_of(past, begin)));
    }
  }
  std::erase_if(memory->past, [&](const Past& past) {
    return within(past.access, access) && (access.write || (!past.access.write && past.stream == task.stream));
  });
  memory->past.push_back(now);
}

std::string Timeline::text_of(const Past& past, uintptr_t begin) const {
  return cat(past.name, past.access.write ? ", which writes" : ", which reads", " bytes ", past.access.begin - begin,
             " to ", past.access.end - begin, " on ", streams_[past.stream].name);
}

void Timeline::end_reads(const std::function<bool(const PinnedReads::Read&)>& over) {
  for (const PinnedReads::Read& read : reads_.end(over)) {
    report(cat("the host changed pinned memory, ", read.end - read.begin, " bytes, before it had waited for ",
               read.name, ", which reads it on ", streams_[read.stream].name));
  }
}

void Timeline::report(std::string text) {
  constexpr size_t kMost = 100;
  if (reports_.size() < kMost) reports_.push_back(std::move(text));
}

std::map<std::string, int64_t> Timeline::take_waits() {
  const Lock lock(mutex_);
  return std::exchange(waits_, {});
}

void Timeline::add_report(std::string text) {
  const Lock lock(mutex_);
  report(std::move(text));
}

size_t Timeline::free_memory(uintptr_t begin, std::function<void()> release) {
  Lock lock(mutex_);
  const auto found = memory_.find(begin);
  if (found == memory_.end()) return 0;
  const Memory memory = std::move(found->second);
  memory_.erase(found);
  end_reads([&](const auto& read) { return read.begin >= begin && read.end <= begin + memory.bytes; });
  // On the device the next one to get it is an operation of its own stream; on the host it is the host.
  Clock next = host_;
  if (memory.where == Where::kDevice) join(next, streams_[memory.stream].clock);
  for (const size_t user : memory.users) join(next, streams_[user].clock);
  for (const Past& past : memory.past) {
    if (at(next, past.stream) >= past.time || memory.where == Where::kAllocatedHost) continue;
    report(cat(memory.where == Where::kDevice ? "device" : "pinned", " memory of ", memory.bytes,
               " bytes is freed, not ordered after ", text_of(past, begin)));
  }
  Freed freed{.after = {}, .release = std::move(release)};
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].done < streams_[i].given) freed.after.emplace_back(i, streams_[i].given);
  }
  freed_.push_back(std::move(freed));
  release_freed(lock);
  return memory.bytes;
}

void Timeline::release_freed(Lock& lock) {
  std::vector<std::function<void()>> released;
  std::erase_if(freed_, [&](Freed& freed) {
    const bool free = std::all_of(freed.after.begin(), freed.after.end(),
                                  [&](const auto& after) { return streams_[after.first].done >= after.second; });
    if (free) released.push_back(std::move(freed.release));
    return free;
  });
  if (released.empty()) return;
  lock.unlock();
  for (const auto& release : released) release();
  lock.lock();
}

bool Timeline::is_pinned(uintptr_t address) {
  const Lock lock(mutex_);
  const Memory* const memory = memory_at(address);
  return memory != nullptr && memory->where != Where::kDevice;
}

std::vector<std::string> Timeline::take_reports() {
  const Lock lock(mutex_);
  end_reads([](const auto&) { return true; });
  return std::exchange(reports_, {});
}

}  // namespace ds::simulated_gpu
