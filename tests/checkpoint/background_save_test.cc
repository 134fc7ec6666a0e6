// The parts of a save on a thread of their own.
#include "checkpoint/background_save.h"

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

namespace ds::checkpoint {
namespace {

using Hurry = std::function<bool()>;

TEST(BackgroundSave, PartsComeInTheirOrder) {
  BackgroundSave save;
  std::string order;
  save.start({.copy = [&](const Hurry&) { order += 'c'; },
              .write = [&] { order += 'w'; },
              .publish = [&] { order += 'p'; },
              .failed = [&] { order += 'f'; }});
  save.wait_copied();
  EXPECT_EQ(save.wait_written(), nullptr);
  EXPECT_EQ(save.wait_published(), nullptr);
  EXPECT_EQ(order, "cwp");
  EXPECT_FALSE(save.runs());
}

TEST(BackgroundSave, AFailureEndsItAndIsToldOnce) {
  BackgroundSave save;
  std::string order;
  save.start({.copy = [](const Hurry&) { throw std::runtime_error("no memory"); },
              .write = [&] { order += 'w'; },
              .publish = [&] { order += 'p'; },
              .failed = [&] { order += 'f'; }});
  save.wait_copied();
  EXPECT_NE(save.wait_written(), nullptr);
  EXPECT_NE(save.wait_published(), nullptr);
  EXPECT_EQ(save.wait_published(), nullptr);
  EXPECT_EQ(order, "f");
}

using Hurry = std::function<bool()>;

// Nothing is known of the time that training leaves it.
TEST(BackgroundSave, TheFirstCopyIsInAHurry) {
  BackgroundSave save;
  bool hurried = false;
  save.start({.copy = [&](const Hurry& hurry) { hurried = hurry(); }, .write = {}, .publish = {}, .failed = {}});
  save.wait_published();
  EXPECT_TRUE(hurried);
}

// How long it may take its time follows from when training asked for the live state after the save before.
TEST(BackgroundSave, TimeToSpareIsHalfOfTheLastOne) {
  BackgroundSave save;
  save.start({.copy = {}, .write = {}, .publish = {}, .failed = {}});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  save.wait_copied();
  save.wait_copied();  // by a later step: no matter
  save.wait_published();
  const auto begin = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point end;
  const auto copy = [&](const Hurry& hurry) {
    while (!hurry()) std::this_thread::yield();
    end = std::chrono::steady_clock::now();
  };
  save.start({.copy = copy, .write = {}, .publish = {}, .failed = {}});
  save.wait_published();  // nobody asked for it before
  EXPECT_GE(end - begin, std::chrono::milliseconds(50));
}

}  // namespace
}  // namespace ds::checkpoint
