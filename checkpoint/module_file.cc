#include "checkpoint/module_file.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>

#include "core/check.h"
#include "core/files/atomic_file.h"

namespace ds::checkpoint {
namespace {

// A module of the file: its own tensors and the modules in it.
struct Node {
  std::map<std::string, const ModuleTensor*> tensors;
  std::map<std::string, std::unique_ptr<Node>> children;
};

void require_free(const std::string& path, const std::string& name, bool is_free) {
  require(is_free, path, ": \"", name, "\": expected one tensor or module of this name, found a second one");
}

// Returns the module of a dotted name in `root`, made where it is new.
Node& node_of(const std::string& path, Node& root, const std::string& module) {
  Node* node = &root;
  for (size_t begin = 0; begin < module.size();) {
    const size_t end = std::min(module.find('.', begin), module.size());
    const std::string part = module.substr(begin, end - begin);
    require(!part.empty() && end + 1 != module.size(), path, ": the name \"", module,
            "\": expected names of modules between its dots, found an empty one");
    require_free(path, module.substr(0, end), !node->tensors.contains(part));
    std::unique_ptr<Node>& child = node->children[part];
    if (!child) child = std::make_unique<Node>();
    node = child.get();
    begin = end + 1;
  }
  return *node;
}

void add_tensor(const std::string& path, Node& root, const ModuleTensor& tensor) {
  const size_t dot = tensor.name.rfind('.');
  const std::string own = dot == std::string::npos ? tensor.name : tensor.name.substr(dot + 1);
  require(!own.empty() && dot != 0, path, ": the name \"", tensor.name, "\": expected one without empty parts");
  Node& node = dot == std::string::npos ? root : node_of(path, root, tensor.name.substr(0, dot));
  require_free(path, tensor.name, !node.children.contains(own) && node.tensors.emplace(own, &tensor).second);
}

void write_node(const Node& node, torch::serialize::OutputArchive& archive) {
  for (const auto& [name, tensor] : node.tensors) archive.write(name, tensor->values, tensor->is_buffer);
  for (const auto& [name, child] : node.children) {
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    write_node(*child, inner);
    archive.write(name, inner);
  }
}

}  // namespace

std::vector<std::string> modules_without_tensors(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_modules(/*name_prefix=*/{}, /*include_self=*/false)) {
    if (item.value()->parameters().empty() && item.value()->buffers().empty()) names.push_back(item.key());
  }
  return names;
}

void write_module_file(const std::string& path, const std::vector<ModuleTensor>& tensors,
                       const std::vector<std::string>& empty_modules) {
  Node root;
  for (const ModuleTensor& tensor : tensors) add_tensor(path, root, tensor);
  for (const std::string& module : empty_modules) node_of(path, root, module);
  AtomicFile file(path);
  std::exception_ptr failure;
  // LibTorch's writer ends the program where its callback throws or writes less than it was given.
  const auto write = [&](const void* data, size_t bytes) {
    if (failure) return bytes;
    try {
      file.write(data, bytes);
    } catch (...) {
      failure = std::current_exception();
    }
    return bytes;
  };
  try {
    torch::serialize::OutputArchive archive(std::make_shared<torch::jit::CompilationUnit>());
    write_node(root, archive);
    archive.save_to(write);
  } catch (const c10::Error& error) {
    throw UsageError(cat(path, ": LibTorch cannot write these tensors and names: ", error.what_without_backtrace()));
  }
  if (failure) std::rethrow_exception(failure);
  file.commit();
}

}  // namespace ds::checkpoint
