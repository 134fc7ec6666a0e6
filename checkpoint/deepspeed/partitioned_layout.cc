#include <algorithm>

#include "checkpoint/deepspeed/layout.h"
#include "checkpoint/deepspeed/saved_optimizer.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

using Shape = std::vector<int64_t>;
using NamedShapes = std::vector<std::pair<std::string, Shape>>;

int64_t product_of(const Shape& sizes) { return TensorInfo{.sizes = sizes}.numel(); }

NamedShapes shapes_from(const PickleField& dict) {
  NamedShapes shapes;
  for (const auto& [name, sizes] : dict.entries()) shapes.emplace_back(name, sizes.sizes());
  return shapes;
}

constexpr int64_t kLongestAlignment = 1024;  // elements; DeepSpeed's is 16 bytes

// Masters or moments of a group, over all ranks.
struct FlatTensors {
  std::string path;  // of its tensors without the name: "weights/"
  StoredRun run;
};

class PartitionedLayout {
 public:
  PartitionedLayout(const SavedCheckpoint& saved, SavedLayout& layout)
      : saved_(saved), layout_(layout), ranks_(saved.optims.size()) {
    for (size_t rank = 0; rank < ranks_; ++rank) {
      optimizers_.emplace_back(saved_.torch_optimizer(rank));
      if (optimizers_[rank].state_names() != optimizers_[0].state_names() ||
          optimizers_[rank].all_parameters() != optimizers_[0].all_parameters()) {
        saved_.optim(rank).fail("another optimizer than that of rank 0");
      }
    }
  }

  void lay_out() {
    const PickleField shapes = saved_.model().at("param_shapes");
    if (saved_.stage == 3) {
      NamedShapes all;
      for (size_t g = 0; g < shapes.size(); ++g) {
        const NamedShapes group = shapes_from(shapes.item(g));
        all.insert(all.end(), group.begin(), group.end());
      }
      lay_out_parts(all);
    } else {
      for (size_t g = 0; g < shapes.size(); ++g) lay_out_group(g, shapes_from(shapes.item(g)), shapes.size());
    }
    lay_out_frozen();
    lay_out_aliases();
    lay_out_rest();
  }

 private:
  [[noreturn]] void fail(size_t rank, const std::string& what) const { saved_.optim(rank).fail(what); }

  // Masters of group or sub-group `index` of a rank.
  const TensorReference& masters(size_t rank, size_t index, size_t groups) const {
    const PickleField list =
        saved_.optim(rank).at(saved_.stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
    if (list.size() != groups) list.fail(cat("expected ", groups, " groups, found ", list.size()));
    const TensorReference& tensor = list.item(index).tensor();
    if (tensor.sizes.size() != 1) list.item(index).fail("expected a flat tensor");
    return tensor;
  }

  int64_t add(size_t rank, const TensorReference& tensor) { return layout_.tensors.add(saved_.optims[rank], tensor); }

  // Index of the flat tensor of group or sub-group `index` in torch's optimizer.
  int64_t parameter(size_t index, size_t groups) const {
    const std::vector<int64_t> all = optimizers_[0].all_parameters();
    if (all.size() != groups) fail(0, cat("torch's optimizer has ", all.size(), " flat tensors, expected ", groups));
    return all[index];
  }

  // Whether moments of a flat tensor were saved, by all ranks or by none.
  bool has_moments(int64_t parameter) const {
    const bool first = optimizers_[0].has_state(parameter);
    for (size_t rank = 1; rank < ranks_; ++rank) {
      if (optimizers_[rank].has_state(parameter) != first)
        fail(rank, "moments of other parameters than those of rank 0");
    }
    return first;
  }

  // --- stages 1 and 2 ----------------------------------------------------------------------------------------------
  void lay_out_group(size_t group, const NamedShapes& shapes, size_t groups) {
    const int64_t index = parameter(group, groups);
    std::vector<FlatTensors> all{{.path = weight_path(""), .run = {}}};
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const TensorReference& tensor = masters(rank, group, groups);
      all[0].run.add(add(rank, tensor), tensor.numel());
    }
    if (has_moments(index)) {
      for (const std::string& state : optimizers_[0].state_names()) {
        all.push_back({.path = state_path(state, ""), .run = {}});
        for (size_t rank = 0; rank < ranks_; ++rank) {
          const TensorReference& tensor = optimizers_[rank].state(index, state);
          all.back().run.add(add(rank, tensor), tensor.numel());
        }
      }
    }
    cut_into_parameters(group, shapes, all);
  }

  void cut_into_parameters(size_t group, const NamedShapes& shapes, const std::vector<FlatTensors>& all) {
    const std::vector<int64_t> paddings = paddings_of(group, shapes.size());
    const int64_t available = all[0].run.numel();
    int64_t offset = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto& [name, sizes] = shapes[i];
      const int64_t numel = product_of(sizes);
      if (numel > available - offset) {
        fail(0,
             cat("group ", group, ": the ranks' masters have ", available, " elements, which end in \"", name, "\""));
      }
      for (const FlatTensors& flat : all) {
        if (offset + numel > flat.run.numel()) {
          fail(0, cat("group ", group, ": ", flat.path, " ends in \"", name, "\""));
        }
        std::vector<StoredRange> ranges;
        flat.run.append_ranges(offset, numel, ranges);
        define(flat.path, name, sizes, std::move(ranges));
      }
      offset += numel + paddings[i];
    }
    for (const FlatTensors& flat : all) check_ends(group, all[0].run, flat, offset);
  }

  // Zeros behind each parameter of a group, which some versions write for its alignment.
  std::vector<int64_t> paddings_of(size_t group, size_t count) const {
    const auto field = saved_.optim().find("param_alignment_paddings");
    if (!field) return std::vector<int64_t>(count, 0);
    const PickleField list = field->item(group);
    if (list.size() != count) list.fail(cat("expected ", count, " paddings"));
    std::vector<int64_t> paddings;
    for (size_t i = 0; i < count; ++i) {
      const int64_t padding = list.item(i).integer();
      if (padding < 0 || padding > kLongestAlignment) list.item(i).fail(cat("a padding of ", padding, " elements"));
      paddings.push_back(padding);
    }
    return paddings;
  }

  // Padding is only at the end, less than what the group is aligned to; every rank's part begins where that of the
  // masters does.
  void check_ends(size_t group, const StoredRun& masters, const FlatTensors& flat, int64_t used) const {
    const int64_t left = flat.run.numel() - used;
    if (left < 0 || left >= 2 * static_cast<int64_t>(ranks_)) {
      fail(0, cat("group ", group, ": ", flat.path, " has ", flat.run.numel(), " elements on all ranks, expected ",
                  used, " and a padding below ", 2 * ranks_));
    }
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const int64_t end = std::min(flat.run.ends()[rank], used);
      if (end != std::min(masters.ends()[rank], used)) {
        fail(rank,
             cat("group ", group, ": ", flat.path, " ends at element ", end, ", expected ", masters.ends()[rank]));
      }
    }
  }

  // --- stage 3 -----------------------------------------------------------------------------------------------------
  void lay_out_parts(const NamedShapes& shapes) {
    const size_t groups = saved_.optim().at("fp32_flat_groups").size();
    bool moments = groups > 0;
    for (size_t g = 0; g < groups; ++g) moments = has_moments(parameter(g, groups)) && moments;
    cut_parts(shapes, weight_path(""),
              runs_of_ranks(
                  groups, [ this, groups ](size_t rank, size_t g) -> const auto& { return masters(rank, g, groups); }));
    if (!moments) return;
    for (const std::string& state : optimizers_[0].state_names()) {
      cut_parts(shapes, state_path(state, ""),
                runs_of_ranks(
                    groups, [ this, groups, &state ](size_t rank, size_t g) -> const auto& {
                      const TensorReference& tensor = optimizers_[rank].state(parameter(g, groups), state);
                      if (tensor.numel() != masters(rank, g, groups).numel()) {
                        fail(rank, cat("sub-group ", g, ": ", state, " has ", tensor.numel(), " elements, its masters ",
                                       masters(rank, g, groups).numel()));
                      }
                      return tensor;
                    }));
    }
  }

  template <class TensorOf>
  std::vector<StoredRun> runs_of_ranks(size_t groups, const TensorOf& tensor_of) {
    std::vector<StoredRun> runs(ranks_);
    for (size_t rank = 0; rank < ranks_; ++rank) {
      for (size_t g = 0; g < groups; ++g) {
        const TensorReference& tensor = tensor_of(rank, g);
        runs[rank].add(add(rank, tensor), tensor.numel());
      }
    }
    return runs;
  }

  void cut_parts(const NamedShapes& shapes, const std::string& path, const std::vector<StoredRun>& runs) {
    int64_t offset = 0;
    for (const auto& [name, sizes] : shapes) {
      const int64_t part = part_of(product_of(sizes));
      std::vector<StoredRange> ranges;
      for (size_t rank = 0; rank < ranks_; ++rank) {
        if (part > runs[rank].numel() - offset) {
          fail(rank, cat(path, ": ", runs[rank].numel(), " elements, which end in \"", name, "\""));
        }
        runs[rank].append_ranges(offset, share_of(rank, product_of(sizes)), ranges);
      }
      define(path, name, sizes, std::move(ranges));
      offset += part;
    }
    for (size_t rank = 0; rank < ranks_; ++rank) {
      if (runs[rank].numel() != offset) {
        fail(rank, cat(path, ": ", runs[rank].numel(), " elements, expected ", offset));
      }
    }
  }

  int64_t part_of(int64_t numel) const {
    const auto ranks = static_cast<int64_t>(ranks_);
    return numel / ranks + (numel % ranks == 0 ? 0 : 1);
  }
  // Elements of a rank's part that are no padding.
  int64_t share_of(size_t rank, int64_t numel) const {
    const int64_t part = part_of(numel);
    return std::clamp<int64_t>(numel - static_cast<int64_t>(rank) * part, 0, part);
  }

  // --- what is not trained -----------------------------------------------------------------------------------------
  void lay_out_frozen() {
    const PickleField model = saved_.model();
    const auto shapes = model.find("frozen_param_shapes");
    if (!shapes) return;
    for (const auto& [name, sizes] : shapes_from(*shapes)) {
      const int64_t numel = product_of(sizes);
      std::vector<StoredRange> ranges;
      for (size_t rank = 0; rank < saved_.models.size(); ++rank) {
        const PickleField fragment = saved_.model(rank).at("frozen_param_fragments").at(name);
        const int64_t share = saved_.stage == 3 ? share_of(rank, numel) : numel;
        if (fragment.tensor().numel() < share) {
          fragment.fail(cat("expected ", share, " elements, found ", fragment.tensor().numel()));
        }
        const int64_t stored = layout_.tensors.add(saved_.models[rank], fragment.tensor());
        if (share > 0) ranges.push_back({.stored = stored, .begin = 0, .numel = share});
      }
      const at::ScalarType dtype = model.at("frozen_param_fragments").at(name).tensor().dtype;
      layout_.tensors.define(model.where(), weight_path(name), {.dtype = dtype, .sizes = sizes, .frozen = true},
                             std::move(ranges));
    }
  }

  void lay_out_aliases() {
    const auto shared = saved_.model().find("shared_params");
    if (!shared) return;
    for (const auto& [name, target] : shared->entries()) {
      if (!layout_.tensors.tensors().contains(weight_path(target.text()))) {
        // A frozen parameter of stage 1 comes with the rest.
        if (!saved_.module()) continue;
        define_from_module(target.text(), saved_.module()->at(target.text()));
      }
      layout_.aliases[name] = target.text();
    }
  }

  // Stage 1 writes frozen parameters only in the module.
  void lay_out_rest() {
    const std::optional<PickleField> module = saved_.module();
    if (!module) return;  // the layers of a pipeline have files of their own
    for (const auto& [name, field] : module->entries()) {
      const auto& known = layout_.tensors.tensors();
      if (known.contains(weight_path(name)) || known.contains(buffer_path(name)) || layout_.aliases.contains(name)) {
        continue;
      }
      if (!field.is(PickleKind::kTensor)) {
        field.fail(cat("expected a tensor, found ", field.value().in_words()));
      }
      if (saved_.stage == 3) field.fail("neither trained, frozen nor a buffer");
      define_from_module(name, field);
    }
  }

  void define_from_module(const std::string& name, const PickleField& field) {
    layout_.tensors.define_whole(field.where(), weight_path(name),
                                 layout_.tensors.add(saved_.models[0], field.tensor()), true);
  }

  void define(const std::string& path, const std::string& name, const Shape& sizes, std::vector<StoredRange> ranges) {
    const at::ScalarType dtype = ranges.empty() ? at::kFloat : layout_.tensors.dtype(ranges[0].stored);
    layout_.tensors.define(saved_.files.folder, path + name, {.dtype = dtype, .sizes = sizes}, std::move(ranges));
  }

  const SavedCheckpoint& saved_;
  SavedLayout& layout_;
  size_t ranks_;
  std::vector<SavedOptimizer> optimizers_;  // of the ranks
};

}  // namespace

void lay_out_partitioned(const SavedCheckpoint& saved, SavedLayout& layout) {
  PartitionedLayout(saved, layout).lay_out();
}

}  // namespace ds::checkpoint
