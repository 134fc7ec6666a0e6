// Weights in files of torch.save, of Python and of LibTorch, and of torch.export.save.
#pragma once

#include <memory>
#include <string>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// Whether a file begins as torch.save writes it since torch 1.6 (a zip file), or has a name as its files have: ".pt",
// ".pt2", ".pth", ".ckpt", or ".bin".
bool is_torch_file(const std::string& path);

// Weights under their dotted names, from torch.save(model.state_dict(), path) in Python, or torch::save(model, path)
// and module archives (torch::serialize::OutputArchive) in C++; or those of an exported model
// (dsengine/exported_model.h). Every tensor is a weight, as in open_weights().
//
// Data only: nothing of the file is run. Throws IoError naming file and entry for what is no tensor: an object of a
// class that only Python can build, a dict of several things.
std::unique_ptr<Source> open_torch_weights(const std::string& path);

}  // namespace ds::checkpoint
