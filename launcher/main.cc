#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "launcher/launch.h"

namespace {

// Streams that ds-launch was started without would be taken by the next files it opens.
void open_missing_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(2);
  }
}

}  // namespace

int main(int argc, char** argv) {
  open_missing_streams();
  try {
    std::vector<std::string> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
    return ds::launcher::launch({argv + 1, argv + argc}, environment);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ds-launch: %s\n", error.what());
    return 2;
  }
}
