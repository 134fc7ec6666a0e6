#include "model/checkpoint/saved_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>

namespace ds::engine {
namespace {

using checkpoint::SaveJob;

at::Tensor on_host(const at::Tensor& values) { return values.is_cpu() ? values : values.to(at::kCPU); }

// Calls `use` with each piece while it is in memory, bucket by bucket.
void for_each_piece(const ModelState& model, const std::vector<StatePiece>& pieces,
                    const std::function<void(size_t index)>& use) {
  for (size_t begin = 0; begin < pieces.size();) {
    size_t end = begin;
    while (end < pieces.size() && pieces[end].bucket == pieces[begin].bucket) ++end;
    use_bucket(model, pieces[begin].bucket, /*changes=*/false, [&] {
      for (size_t i = begin; i < end; ++i) use(i);
    });
    begin = end;
  }
}

void write_own(SaveJob& job, const SavedState& saved) {
  for (size_t i = 0; i < saved.own.size(); ++i) job.write(saved.pieces.size() + i, saved.own[i].second);
}

// Copies on another thread, which on a device has to wait for what this one has queued there.
class DeviceOrder {
 public:
  explicit DeviceOrder(at::Device device) : device_(device) {
    if (device.is_cpu()) return;
    event_ = std::make_shared<c10::Event>(device.type());
    event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  // Runs `action` with a stream of its own as the current one, after what was queued.
  void run_after(const std::function<void()>& action) const {
    if (!event_) return action();
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::StreamGuard on_stream(guard.getStreamFromGlobalPool(device_));
    event_->block(on_stream.current_stream());
    action();
  }

 private:
  at::Device device_;
  std::shared_ptr<c10::Event> event_;
};

void copy_piece(StatePiece& piece) {
  const at::Tensor values = piece.values();
  piece.flat = at::empty(values.sizes(), values.options().device(at::kCPU));
  piece.flat.copy_(values);
  piece.position = 0;
}

// Copies or writes the pieces that were not copied before the save returned.
void copy_or_write(SaveJob& job, SavedState& saved, const std::function<bool()>& hurry) {
  for (size_t i = 0; i < saved.pieces.size(); ++i) {
    StatePiece& piece = saved.pieces[i];
    if (saved.copied[i]) continue;
    if (!piece.flat.is_cpu() || hurry()) {
      copy_piece(piece);
    } else {  // from its place, which saves memory and time of a copy
      job.write(i, piece.values());
      piece.flat.reset();
    }
  }
}

void write_copies(SaveJob& job, SavedState& saved) {
  for (size_t i = 0; i < saved.pieces.size(); ++i) {
    if (!saved.pieces[i].flat.defined()) continue;  // written from its place
    job.write(i, saved.pieces[i].values());
    saved.pieces[i].flat.reset();  // its memory
  }
  write_own(job, saved);
  job.finish();
}

}  // namespace

std::vector<checkpoint::PlannedPiece> SavedState::plan() const {
  std::vector<checkpoint::PlannedPiece> planned;
  for (const StatePiece& piece : pieces) planned.push_back(piece.plan);
  for (const auto& [path, values] : own) {
    checkpoint::PlannedPiece& piece = planned.emplace_back();
    piece.path = path;
    piece.tensor.dtype = values.scalar_type();
    piece.tensor.sizes = values.sizes().vec();
    piece.length = values.numel();
  }
  return planned;
}

void write_live(const ModelState& model, SaveJob& job, const SavedState& saved) {
  job.open(saved.plan());
  for_each_piece(model, saved.pieces, [&](size_t i) { job.write(i, on_host(saved.pieces[i].values())); });
  write_own(job, saved);
  job.finish();
}

// State in files has memory only within for_each_piece(), which is for this thread. Frozen parameters that are not
// divided are the module's own tensors: a program may change them (moving averages).
void copy_what_cannot_wait(const ModelState& model, SavedState& saved) {
  const bool in_files = model.offloaded_bytes().file > 0;
  const size_t trained = model.buckets.size();
  const auto cannot_wait = [&](const StatePiece& piece) {
    return in_files || piece.bucket == StatePiece::kNoBucket ||
           (piece.bucket >= trained && !model.frozen_buckets[piece.bucket - trained].sharded());
  };
  saved.copied.resize(saved.pieces.size());
  for_each_piece(model, saved.pieces, [&](size_t i) {
    saved.copied[i] = cannot_wait(saved.pieces[i]);
    if (saved.copied[i]) copy_piece(saved.pieces[i]);
  });
}

checkpoint::BackgroundSave::Parts background_parts(const std::shared_ptr<SaveJob>& job,
                                                   const std::shared_ptr<SavedState>& saved, at::Device device) {
  checkpoint::BackgroundSave::Parts parts;
  parts.copy = [saved, job, order = std::make_shared<DeviceOrder>(device)](const auto& hurry) {
    const at::NoGradGuard no_grad;
    job->open(saved->plan());
    order->run_after([&] { copy_or_write(*job, *saved, hurry); });
  };
  parts.write = [saved, job] { write_copies(*job, *saved); };
  parts.failed = [job] { job->give_up(); };
  return parts;
}

}  // namespace ds::engine
