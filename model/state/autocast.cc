#include "model/state/autocast.h"

#include <ATen/autocast_mode.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "core/text.h"
#include "model/state/tensor_parts.h"

namespace ds::engine {
namespace {

std::string autocast_name(std::optional<c10::ScalarType> dtype) { return dtype ? cat(*dtype) : "none"; }

}  // namespace

// The Autocasts of one thread. Only that thread changes autocast; another one may end parts.
struct Autocast::Thread {
  struct State {
    bool enabled;
    c10::ScalarType dtype;
  };
  struct Part {
    const Autocast* owner;  // null: has ended on another thread
    c10::DeviceType device;
    std::optional<c10::ScalarType> dtype;
    std::optional<State> before;  // of a part that has changed the state
  };

  std::mutex mutex;         // of what follows
  std::vector<Part> parts;  // in the order in which they were made
  bool over = false;
  bool warned = false;

  static State state_of(c10::DeviceType device) {
    return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
  }

  static void set(c10::DeviceType device, const State& state) {
    at::autocast::set_autocast_dtype(device, state.dtype);
    at::autocast::set_autocast_enabled(device, state.enabled);
  }

  void add(Part part) {
    const auto has_changed = [&](const Part& other) { return other.device == part.device && other.before; };
    const auto first = std::find_if(parts.begin(), parts.end(), has_changed);
    if (part.dtype) {
      part.before = state_of(part.device);
      set(part.device, {true, *part.dtype});
    } else if (first != parts.end()) {
      part.before = state_of(part.device);
      set(part.device, *first->before);
    }
    parts.push_back(part);
    warned = false;
  }

  void remove(size_t index) {
    const Part part = parts[index];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(index));
    at::autocast::clear_cache();
    if (!part.before) return;
    const auto newer = std::find_if(parts.begin() + static_cast<std::ptrdiff_t>(index), parts.end(),
                                    [&](const Part& other) { return other.device == part.device && other.before; });
    if (newer == parts.end()) {
      set(part.device, *part.before);
    } else {
      newer->before = part.before;
    }
  }

  void remove_ended() {
    for (size_t i = parts.size(); i-- > 0;) {
      if (parts[i].owner == nullptr) remove(i);
    }
  }

  void warn_of_differences() {
    if (warned) return;
    for (const Part& part : parts) {
      const Part& newest = parts.back();
      if (part.device != newest.device || part.dtype == newest.dtype) continue;
      warned = true;
      log::warning("torch_autocast: expected the same in all ", parts.size(), " engines of this thread, found ",
                   autocast_name(part.dtype), " and, in the one made last, ", autocast_name(newest.dtype),
                   ". Autocast is a state of the thread: every forward on it runs with ", autocast_name(newest.dtype),
                   ". Give these engines the same torch_autocast section, end those that are not used any more, or "
                   "call at::autocast::set_autocast_enabled() before and after each forward of the other");
      return;
    }
  }
};

namespace {

// The state of this thread; the pointer outlives the owner, so that engines in static variables may end after it.
thread_local void* autocasts_here = nullptr;

}  // namespace

Autocast::Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype) : device_(device), dtype_(dtype) {
  begin();
}

Autocast::~Autocast() { end(); }

void Autocast::use_from_this_thread() {
  end();
  begin();
}

void Autocast::begin() {
  struct Owner {
    std::shared_ptr<Thread> thread = std::make_shared<Thread>();
    Owner() { autocasts_here = thread.get(); }
    ~Owner() {
      autocasts_here = nullptr;
      const std::lock_guard lock(thread->mutex);
      thread->over = true;
    }
  };
  thread_local Owner owner;
  thread_ = owner.thread;
  const std::lock_guard lock(thread_->mutex);
  thread_->remove_ended();
  thread_->add({this, device_, dtype_, std::nullopt});
}

void Autocast::end() {
  const std::lock_guard lock(thread_->mutex);
  const auto own = std::find_if(thread_->parts.begin(), thread_->parts.end(),
                                [this](const Thread::Part& part) { return part.owner == this; });
  if (thread_.get() == autocasts_here) {
    thread_->remove(static_cast<size_t>(own - thread_->parts.begin()));
    thread_->remove_ended();
    return;
  }
  own->owner = nullptr;
  if (thread_->over || !own->before) return;
  log::warning("torch_autocast: expected that an engine ends on the thread that made it, found another one; autocast ",
               "stays as it is on the first thread until an engine is made, ends or trains there");
}

Autocast::Pause::Pause(c10::DeviceType device) : device_(device) {
  if (auto* const thread = static_cast<Thread*>(autocasts_here)) {
    const std::lock_guard lock(thread->mutex);
    thread->remove_ended();
    thread->warn_of_differences();
  }
  enabled_before_ = at::autocast::is_autocast_enabled(device);
  if (enabled_before_) at::autocast::set_autocast_enabled(device_, false);
}

Autocast::Pause::~Pause() {
  at::autocast::clear_cache();
  if (enabled_before_) at::autocast::set_autocast_enabled(device_, true);
}

namespace {

constexpr std::string_view kTorch = "torch::nn::";

// With parameters; a model need not have them.
constexpr std::array<std::string_view, 31> kLayersOfTorch = {"Bilinear",
                                                             "BatchNorm1d",
                                                             "BatchNorm2d",
                                                             "BatchNorm3d",
                                                             "Conv1d",
                                                             "Conv2d",
                                                             "Conv3d",
                                                             "ConvTranspose1d",
                                                             "ConvTranspose2d",
                                                             "ConvTranspose3d",
                                                             "Embedding",
                                                             "EmbeddingBag",
                                                             "GRU",
                                                             "GRUCell",
                                                             "GroupNorm",
                                                             "InstanceNorm1d",
                                                             "InstanceNorm2d",
                                                             "InstanceNorm3d",
                                                             "LSTM",
                                                             "LSTMCell",
                                                             "LayerNorm",
                                                             "Linear",
                                                             "MultiheadAttention",
                                                             "PReLU",
                                                             "RNN",
                                                             "RNNCell",
                                                             "RMSNorm",
                                                             "Transformer",
                                                             "TransformerDecoder",
                                                             "TransformerDecoderLayer",
                                                             "TransformerEncoderLayer"};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

std::string_view last_part(std::string_view name) {
  const size_t colons = name.rfind("::");
  return colons == std::string_view::npos ? name : name.substr(colons + 2);
}

// Returns the name of a class as class_of() spells it.
std::string in_cpp(std::string name) {
  replace_all(name, ".", "::");
  replace_all(name, "(anonymous namespace)::", "");
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  if (name.starts_with("torch::nn::modules::")) name = std::string(kTorch) + std::string(last_part(name));
  return name;
}

bool means(const std::string& name, const std::string& found) {
  return name == found || (name.find("::") == std::string::npos && name == last_part(found));
}

bool is_layer_of_torch(const std::string& name) {
  const bool of_torch = name.starts_with(kTorch) || name.find("::") == std::string::npos;
  return of_torch && std::find(kLayersOfTorch.begin(), kLayersOfTorch.end(), last_part(name)) != kLayersOfTorch.end();
}

}  // namespace

std::string class_of(const torch::nn::Module& module) { return in_cpp(c10::demangle(typeid(module).name())); }

std::unordered_set<const void*> tensors_of_classes(const torch::nn::Module& module,
                                                   const std::vector<std::string>& names, const std::string& key) {
  std::vector<std::string> wanted;
  for (const std::string& name : names) wanted.push_back(in_cpp(name));
  std::set<std::string> found;
  std::unordered_set<const void*> tensors;
  for (const std::shared_ptr<torch::nn::Module>& layer : module.modules()) {
    const std::string own = class_of(*layer);
    found.insert(own);
    if (std::none_of(wanted.begin(), wanted.end(), [&](const auto& name) { return means(name, own); })) continue;
    for (const auto& item : layer->named_parameters(/*recurse=*/false)) {
      tensors.insert(trained_tensor(item.value()).unsafeGetTensorImpl());
    }
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const auto is_it = [&](const std::string& own) { return means(wanted[i], own); };
    if (is_layer_of_torch(wanted[i]) || std::any_of(found.begin(), found.end(), is_it)) continue;
    std::string classes;
    for (const std::string& own : found) classes += cat(classes.empty() ? "" : ", ", own);
    throw ConfigError(cat(key, "/", i, ": expected the class of a module of the model, or a layer of LibTorch as ",
                          "\"torch.nn.Linear\", found \"", names[i], "\". Classes of the model: ", classes));
  }
  return tensors;
}

}  // namespace ds::engine
