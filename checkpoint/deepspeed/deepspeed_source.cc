#include "checkpoint/deepspeed/deepspeed_source.h"

#include "checkpoint/deepspeed/layout.h"
#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "checkpoint/deepspeed/saved_state.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

class DeepspeedSource : public Source {
 public:
  explicit DeepspeedSource(const std::string& folder) : folder_(folder) {
    SavedCheckpoint saved = open_saved_checkpoint(folder);
    state_ = saved_state(saved);
    layout_ = lay_out(saved);
    for (const auto& archives : {saved.models, saved.optims}) {
      for (const std::shared_ptr<TorchArchive>& archive : archives) archive->forget();
    }
  }

  const std::string& location() const override { return folder_; }
  const TrainingState& state() const override { return state_; }
  const std::map<std::string, TensorInfo>& tensors() const override { return layout_.tensors.tensors(); }
  const std::map<std::string, std::string>& aliases() const override { return layout_.aliases; }

  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    const int64_t numel = info(path).numel();
    require<IoError>(offset >= 0 && destination.numel() <= numel - offset, folder_, ": tensor \"", path,
                     "\": elements from ", offset, " to ", offset + destination.numel(), " asked for, it has ", numel);
    layout_.tensors.read(path, offset, destination);
  }

 private:
  std::string folder_;
  TrainingState state_;
  SavedLayout layout_;
};

}  // namespace

std::unique_ptr<Source> open_deepspeed(const std::string& folder) { return std::make_unique<DeepspeedSource>(folder); }

}  // namespace ds::checkpoint
