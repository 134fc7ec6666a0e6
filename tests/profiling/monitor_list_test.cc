#include "profiling/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "core/check.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"

namespace ds::profiling {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

class CountedMonitor final : public Monitor {
 public:
  // `fails_from`: the first call that throws, from 1.
  CountedMonitor(int& calls, int fails_from) : calls_(calls), fails_from_(fails_from) {}
  void write_events(const std::vector<Event>& /*events*/) override {
    if (++calls_ >= fails_from_) throw IoError("counted: cannot write /here/events: No space left on device");
  }

 private:
  int& calls_;
  int fails_from_;
};

// What the log says of `action`.
template <class Action>
std::string logged(const Action& action) {
  testing::internal::CaptureStderr();
  action();
  return testing::internal::GetCapturedStderr();
}

TEST(MonitorList, OneThatFailsIsNamedOnceAndDropped) {
  constexpr int kNever = 1000;
  int first = 0, second = 0, third = 0;
  MonitorList monitors;
  monitors.add(std::make_unique<CountedMonitor>(first, kNever));
  monitors.add(std::make_unique<CountedMonitor>(second, 2));
  monitors.add(std::make_unique<CountedMonitor>(third, kNever));
  const std::vector<Event> events = {{"lr", 0.1, 1}};
  EXPECT_THAT(logged([&] { monitors.write_events(events); }), IsEmpty());
  EXPECT_THAT(logged([&] { monitors.write_events(events); }),
              AllOf(HasSubstr("error"), HasSubstr("counted: cannot write /here/events: No space left on device"),
                    HasSubstr("Training goes on without this monitor")));
  EXPECT_THAT(logged([&] { monitors.write_events(events); }), IsEmpty());
  EXPECT_EQ(std::make_pair(first, third), std::make_pair(3, 3));
  EXPECT_EQ(second, 2);
  EXPECT_FALSE(monitors.empty());
}

TEST(MonitorList, AFullDiskLeavesTheOtherMonitorsCurves) {
  const test::ScratchFolder folder;
  MonitorList monitors;
  monitors.add(make_csv_monitor((folder.path() / "full").string(), "job"));
  monitors.add(make_csv_monitor((folder.path() / "good").string(), "job"));
  std::filesystem::create_symlink("/dev/full", folder.path() / "full/job/lr.csv");
  const std::string text = logged([&] {
    for (int64_t step = 1; step <= 3; ++step) monitors.write_events({{"lr", 0.5, step}});
  });
  EXPECT_THAT(text, AllOf(HasSubstr("csv_monitor: cannot write"), HasSubstr("full/job/lr.csv"),
                          HasSubstr("No space left on device")));
  EXPECT_EQ(text.find("cannot write"), text.rfind("cannot write"));
  EXPECT_EQ(test::file_text(folder.path() / "good/job/lr.csv"), "step,lr\n1,0.5\n2,0.5\n3,0.5\n");
}

}  // namespace
}  // namespace ds::profiling
