// A file system of a test's own, of so many MiB, in a file below `parent`.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/scratch_folder.h"

namespace ds::test {

class SmallDisk {
 public:
  explicit SmallDisk(int mebibytes, const std::filesystem::path& parent = std::filesystem::temp_directory_path())
      : folder_(parent) {
    const std::string image = folder_ / "image";
    std::filesystem::create_directory(path());
    std::ofstream(image).close();
    std::filesystem::resize_file(image, static_cast<uintmax_t>(mebibytes) << 20);
    mounted_ = shell("mkfs.ext4 -q -m 0 " + image + " && mount -o loop " + image + " " + path());
  }
  ~SmallDisk() {
    if (mounted_ && !shell("umount " + path())) ADD_FAILURE() << "cannot unmount " << path();
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  std::string path() const { return folder_ / "disk"; }
  bool mounted() const { return mounted_; }  // false: this user may not
  // Writes until nothing more fits.
  void fill() const {
    std::ofstream out(path() + "/filler", std::ios::binary | std::ios::app);
    const std::string block(4096, 'x');
    while (out.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  // False when it could not be done.
  bool make_read_only(bool read_only) const {
    return shell(std::string("mount -o remount,") + (read_only ? "ro " : "rw ") + path());
  }

 private:
  static bool shell(const std::string& command) {
    return std::system(("{ " + command + "; } > /dev/null 2>&1").c_str()) == 0;
  }

  ScratchFolder folder_;
  bool mounted_ = false;
};

}  // namespace ds::test
