// The environment that ds-launch gives a rank, for ranks that have met in a file.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "comm/meeting/rendezvous.h"
#include "core/text.h"

namespace ds::test {

inline int free_port() {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(descriptor, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(descriptor);
  return ntohs(address.sin_port);
}

// Sets what ds-launch sets, with a port that the ranks agree on through `meeting`.
inline void set_launcher_environment(const comm::Rendezvous& meeting) {
  if (meeting.rank == 0) meeting.store->set("port", cat(free_port()));
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("RANK", cat(meeting.rank));
  set("WORLD_SIZE", cat(meeting.world_size));
  set("LOCAL_RANK", cat(meeting.rank));
  set("LOCAL_WORLD_SIZE", cat(meeting.world_size));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", meeting.store->get_to_str("port"));
}

}  // namespace ds::test
