// Readers of checkpoints and weights, as those of tests/fuzz/readers.h; they need LibTorch.
#pragma once

#include <array>
#include <string_view>

#include "tests/fuzz/readers.h"

namespace ds::fuzz {

void read_safetensors(std::string_view bytes);    // a file of safetensors, and its tensors
void read_pickle(std::string_view bytes);         // values of torch.save, without their zip
void read_archive(std::string_view bytes);        // a file of torch.save, and its tensors
void read_exported(std::string_view bytes);       // a file of torch.export.save: its program, and its tensors
void read_index(std::string_view bytes);          // a checkpoint's index.json; its checksum is set right
void read_weights_index(std::string_view bytes);  // Hugging Face's index, beside a file of weights

inline constexpr std::array<Reader, 6> kCheckpointReaders = {{{"safetensors", read_safetensors},
                                                              {"pickle", read_pickle},
                                                              {"archive", read_archive},
                                                              {"exported", read_exported},
                                                              {"index", read_index},
                                                              {"weights_index", read_weights_index}}};

}  // namespace ds::fuzz
