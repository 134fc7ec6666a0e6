// c10's interface to devices, streams and events, for cuda.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "tests/simulated_gpu/memory.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {
namespace {

constexpr c10::StreamId kPool = 32;  // streams of a device, given out in turn, as LibTorch does
constexpr int kAsked = 8;            // times that an event is not reached yet

struct RecordedEvent {
  Point point;
  c10::DeviceIndex device = 0;
  std::atomic<int> asked = 0;
  std::shared_ptr<double> time;  // seconds, when the device has come to it; null: without time
};

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

RecordedEvent* event_of(void* event) { return static_cast<RecordedEvent*>(event); }

class DeviceGuard : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = current_device();
    set_device(device);
    return before;
  }
  c10::Device getDevice() const override { return current_device(); }
  void setDevice(c10::Device device) const override { set_device(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_device(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return visible_devices(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, current_stream(device).device(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<c10::StreamId> next{0};
    return c10::Stream(c10::Stream::UNSAFE, current_stream(device).device(), 1 + next++ % kPool);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return Timeline::instance().reached(Timeline::instance().now(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Timeline::instance().wait(Timeline::instance().now(number_of(stream)), "the end of a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { Timeline::instance().wait_for_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new RecordedEvent;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      const auto time = std::make_shared<double>(0);
      event_of(*event)->time = time;
      Timeline::instance().enqueue(number_of(stream), "the time of an event", {}, [time] { *time = seconds_now(); });
    }
    event_of(*event)->point = Timeline::instance().now(number_of(stream));
    event_of(*event)->asked = 0;
    event_of(*event)->device = stream.device_index();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Timeline::instance().block(number_of(stream), event_of(event)->point);
  }
  // What runs as late as it may is not done when it is asked for; who asks again and again gets it.
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    ask_about({c10::kCUDA, event_of(event)->device});
    if (++event_of(event)->asked > kAsked) Timeline::instance().wait(event_of(event)->point, "questions for an event");
    return Timeline::instance().reached(event_of(event)->point);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    ask_about({c10::kCUDA, event_of(event)->device});
    const bool reached = Timeline::instance().reached(event_of(event)->point);
    Timeline::instance().wait(event_of(event)->point, reached ? "" : "an event");
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    for (void* const event : {from, to}) {
      TORCH_CHECK(event != nullptr && event_of(event)->time, "an event without a time");
      TORCH_CHECK(Timeline::instance().reached(event_of(event)->point), "an event whose time has not come");
    }
    return (*event_of(to)->time - *event_of(from)->time) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete event_of(event); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    use_on(memory, number_of(stream));
  }
};

const c10::impl::DeviceGuardImplRegistrar kRegistered(c10::kCUDA, new DeviceGuard);

}  // namespace
}  // namespace ds::simulated_gpu
