// Activation checkpointing of unmodified modules: torch's apply_activation_checkpointing, also selective by operator.
//
//   ds::apply_activation_checkpointing(*model, ds::modules_named({"h\\.\\d+"}));  // keep the inputs of blocks
//   ds::apply_activation_checkpointing(*model, blocks, {.recompute = ds::Recompute::kPointwise});  // and products
//
// Forward stays as it is written: nothing is called again. Modules of LibTorch have no hooks and typed members cannot
// be exchanged, so it is operators that are intercepted. While a chosen module runs, each operator is recorded with
// what it read; a tensor that autograd saves for backward is dropped when it can be made again, by the recorded
// operators alone, from what is kept anyway. In backward those operators run again, with their generators' states and
// below autocast. So losses and gradients are those without it, bit for bit, also with dropout, in-place operators,
// views, autocast, several uses and several backward passes of a graph (retain_graph, create_graph).
//
// A chosen module is known by its parameters. Its region begins with the first operator that reads one of them, and
// ends with backward or with the first operator that reads a parameter of another module and none of its own. (A leaf
// that was read beside one of its own, such as an input that requires a gradient, does not count as another's.) What
// runs between (a residual sum, an activation function) belongs to it. Where a region ends decides what is kept, never
// what is computed.
//
// A tensor is dropped only where that saves memory: where making it again keeps fewer bytes that would else be free
// than it has (parameters and tensors that are saved in any case cost nothing). Some outputs are always kept: those of
// factories, of batch normalization (a batch counts once), and of recurrent layers' fused operators. So are those of
// operators that are not LibTorch's (custom ones, ds::ops), of FP8 and compressed layers, and of operators inside
// autograd functions. So are those of operators that draw from a generator of the program's own, that copy without
// waiting (non_blocking), or that read split, nested, sparse, quantized or complex-conjugate tensors. Code that writes
// by a pointer to memory that an operator made has to stand in an autograd function; on an accelerator nothing finds
// out if it does not.
//
// It costs a look at each operator that the thread calls. Threads: it holds for the thread that calls it, as
// interception by an engine does; forward passes of other threads keep all. Backward may run anywhere.
//
// Throws UsageError in backward, naming the memory, when memory from which a dropped tensor is made again was changed
// in place after the region (by an optimizer's step in between, say). On the CPU it also throws when samples of a
// tensor that was made again differ from the dropped one: code that is no operator has written to memory by its
// pointer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ds {

// The operators that are run again in backward.
enum class Recompute : uint8_t {
  kEverything,  // every operator that can be: a module keeps its inputs
  kPointwise,   // those that are cheap beside what they read: element by element, along rows, copies, dropout
};

// Options of apply_activation_checkpointing().
struct ModuleCheckpointOptions {
  Recompute recompute = Recompute::kEverything;
  // Operators by name, as "aten::mm", whose outputs are kept beside those that `recompute` keeps; none: no others.
  // Called at least once for an operator: for each of its overloads, in each chosen module.
  std::function<bool(std::string_view name)> keep = nullptr;
};

// Whether a module, by its name in the tree and itself, is chosen.
using ModulePredicate = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

// Modules whose whole name matches one of these regular expressions (ECMAScript). Throws UsageError for one that is
// none.
ModulePredicate modules_named(const std::vector<std::string>& patterns);

// Chooses modules of `module`, itself under the name "" included, on this thread; returns their names, in its order. A
// module inside a chosen one belongs to it. Choosing again replaces the options. The modules must be held by
// shared_ptrs (any ModuleHolder does); they may be moved, trained by an engine at any stage, wrapped and sharded
// afterwards. Throws UsageError, before any change: for a chosen module without parameters, which cannot be known;
// where nothing is chosen; inside a backward pass; where the process has another autograd engine than LibTorch's
// (Python's).
std::vector<std::string> apply_activation_checkpointing(torch::nn::Module& module, const ModulePredicate& predicate,
                                                        const ModuleCheckpointOptions& options = {});

// From now on no module of `module` is chosen on this thread; graphs that live stay as they are.
void remove_activation_checkpointing(torch::nn::Module& module);

// Counts over the chosen modules of this thread.
struct ModuleCheckpointStatistics {
  int64_t regions = 0;
  int64_t kept_tensors = 0;     // saved tensors that were kept
  int64_t dropped_tensors = 0;  // saved tensors that were dropped
  int64_t dropped_bytes = 0;    // bytes of dropped tensors: each storage once for each time that it was saved
};
// Returns the counts since the last call, and begins anew.
ModuleCheckpointStatistics take_module_checkpoint_statistics();

}  // namespace ds
