#include "comm/gradient_groups.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <unordered_map>

namespace ds::comm {
namespace {

struct Note {
  c10::weak_intrusive_ptr<c10::TensorImpl> slice;  // an address may be another tensor's later
  std::weak_ptr<Communicator> group;
  std::shared_ptr<Communicator> borrowed;  // a pointer that owns nothing, which a weak one would lose
};

struct Notes {
  std::mutex mutex;
  std::unordered_map<const void*, Note> of_tensor;
};

Notes& notes() {
  static auto* const kNotes = new Notes;  // tensors of static variables may ask at the end
  return *kNotes;
}

}  // namespace

void note_gradient_group(const at::Tensor& slice, const std::shared_ptr<Communicator>& group) {
  Notes& all = notes();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.of_tensor, [](const auto& note) { return note.second.slice.expired(); });
  all.of_tensor.insert_or_assign(slice.unsafeGetTensorImpl(),
                                 Note{c10::weak_intrusive_ptr<c10::TensorImpl>(slice.getIntrusivePtr()),
                                      std::weak_ptr(group), group.use_count() == 0 ? group : nullptr});
}

std::shared_ptr<Communicator> gradient_group_of(const at::Tensor& parameter) {
  Notes& all = notes();
  const std::lock_guard lock(all.mutex);
  const auto found = all.of_tensor.find(parameter.unsafeGetTensorImpl());
  if (found == all.of_tensor.end() || found->second.slice.expired()) return nullptr;
  return found->second.borrowed ? found->second.borrowed : found->second.group.lock();
}

}  // namespace ds::comm
