// Memory that all ranks of a group on one host can read and write, and how they find it.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace ds::comm {

// Bytes mapped into this process, zero at first, page aligned; unmapped with the object.
class SharedRegion {
 public:
  // Shared between the threads of this process. Throws CommError when there is no memory.
  static std::shared_ptr<SharedRegion> anonymous(size_t bytes);

  // POSIX shared memory ("/name", mode 0600), every byte of it reserved: a full /dev/shm is a CommError that names the
  // size and the free bytes, never a SIGBUS later. Throws CommError when the name exists.
  static std::shared_ptr<SharedRegion> create(const std::string& name, size_t bytes);
  // Maps what another process created. Throws CommError when it is not there or has another size.
  static std::shared_ptr<SharedRegion> attach(const std::string& name, size_t bytes);
  // Takes away names, beginning with `prefix` and the number of the process that made them, of processes that are gone:
  // killed before they could do it. Only names of this user that are older than an hour: a name lives no longer than
  // ranks need to meet, and the number of a process says nothing of one in another container.
  static void remove_left_over(const std::string& prefix) noexcept;
  // Takes the name away; mappings stay. What has no name vanishes with the last process, also after kill -9.
  static void remove_name(const std::string& name) noexcept;

  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool between_processes() const { return between_processes_; }

 private:
  SharedRegion(std::byte* data, size_t bytes, bool between_processes)
      : data_(data), bytes_(bytes), between_processes_(between_processes) {}
  static std::shared_ptr<SharedRegion> map(int descriptor, size_t bytes, const std::string& name);

  std::byte* data_;
  size_t bytes_;
  bool between_processes_;
};

// A directory in which the ranks of a group find regions by name: one rank creates, the others attach afterwards, and
// once all have attached one of them seals. Thread safe.
class RegionDirectory {
 public:
  virtual ~RegionDirectory() = default;
  virtual std::shared_ptr<SharedRegion> create(const std::string& name, size_t bytes) = 0;
  virtual std::shared_ptr<SharedRegion> attach(const std::string& name, size_t bytes) = 0;
  virtual void seal(const std::string& name) noexcept = 0;
};

// The directory for ranks that are processes of one host.
class PosixRegionDirectory final : public RegionDirectory {
 public:
  std::shared_ptr<SharedRegion> create(const std::string& name, size_t bytes) override;
  std::shared_ptr<SharedRegion> attach(const std::string& name, size_t bytes) override;
  void seal(const std::string& name) noexcept override;
};

// The directory for ranks that are threads: all of them share one object of this class.
class ThreadRegionDirectory final : public RegionDirectory {
 public:
  std::shared_ptr<SharedRegion> create(const std::string& name, size_t bytes) override;
  std::shared_ptr<SharedRegion> attach(const std::string& name, size_t bytes) override;
  void seal(const std::string& name) noexcept override;

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<SharedRegion>> regions_;
};

}  // namespace ds::comm
